"""Models of the true shape with random weights: for measuring latency, never for answers.

A release is built without its checkpoint: the base's configuration is part of this repository (``shapes``), the
weights are filled on the device, and a tokenizer of one token a byte stands in where there is none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.memory import MemoryNeed, check_memory, workspace
from jevany_backend.checkpoint.plan import build_model
from jevany_backend.encoding import (
    DELIMITER_ALPHABETS,
    MAX_LABELS,
    Delimiters,
    build_labels,
    find_delimiters,
    label_ids,
)
from jevany_backend.readout import DirectTokenReadout, PointerReadout, Readout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SEED = 0
_POINTER_DIM = 256

# The releases by their adapter: the shape of the base and whether the vocabulary head is the readout.
_RELEASES = {
    "SimpleJev/JevAny-Qwen3.8-27B-LoRA": ("qwen3.8-27b", False),
    "SimpleJev/JevAny-Muse-Glimmer-30B-LoRA": ("muse-glimmer-30b", False),
    "SimpleJev/JevAny-Qwen3.5-4B-LoRA": ("qwen3.5-4b", False),
    "SimpleJev/JevAny-Qwen3.5-4B-Direct-Token-LoRA": ("qwen3.5-4b", True),
    "SimpleJev/JevAny-Gemma-4B-LoRA": ("gemma-4-e4b-it", False),
}


@dataclass(frozen=True)
class RandomRelease:
    """A release of which only the shape is real.

    Attributes:
        config: The text decoder's configuration.
        tokenizer: The base's tokenizer, or a stand-in of as many tokens.
        delimiters: Its five structure tokens.
        labels: The verbalizer table of a direct-token release, else None.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    delimiters: Delimiters
    labels: list[str] | None


def open_random(adapter: str, base: str | None = None, relative_to: Path | None = None) -> RandomRelease:
    """Find the shape of a release; nothing is downloaded.

    Args:
        adapter: The release, by its adapter's name on the Hub, with or without ``@revision``.
        base: A directory with another ``config.json``, and possibly a tokenizer; anything else is not looked at.
        relative_to: The directory that a relative path starts from.

    Raises:
        CheckpointError: It is no release, or the directory's files cannot be read.
    """
    name = adapter.partition("@")[0]
    if name not in _RELEASES:
        raise CheckpointError(f"weights random: {name!r} is no release; there are {', '.join(_RELEASES)}")
    shape, direct_token = _RELEASES[name]
    directory = (relative_to or Path()) / Path(base or "").expanduser()
    own = bool(base) and (directory / "config.json").is_file()
    source = directory / "config.json" if own else _shape_file(shape)
    try:
        config = _read_config(source)
        if own and (directory / "tokenizer.json").is_file():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        else:
            tokenizer = stand_in_tokenizer(config.vocab_size)
        delimiters = find_delimiters(tokenizer)
        labels = build_labels(tokenizer) if direct_token else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: {first_line(error)}") from None
    return RandomRelease(config, tokenizer, delimiters, labels)


def released_config(shape: str) -> PretrainedConfig:
    """Return the configuration of a released base's text decoder.

    Args:
        shape: The base, by its file's name in ``shapes`` without the ending.
    """
    return _read_config(_shape_file(shape))


def _shape_file(shape: str) -> Traversable:
    return resources.files("jevany_backend") / "shapes" / f"{shape}.json"


def _read_config(source: Traversable) -> PretrainedConfig:
    content: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return CONFIG_MAPPING[content["model_type"]].from_dict(content).get_text_config(decoder=True)


def stand_in_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, so of more tokens for the same text than a trained one.

    Args:
        vocabulary: How many tokens it shall know. All but the bytes, the labels of direct-token rows and the
            delimiters occur in no text.

    Raises:
        ValueError: So few tokens do not suffice.
    """
    tokens = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for point in range(0x00A1, 0x00A1 + MAX_LABELS):
        [(word, _)] = byte_level.pre_tokenize_str(chr(point))
        merges.append((word[0], word[1]))
        tokens[word] = len(tokens)
    delimiters = DELIMITER_ALPHABETS[0]
    fillers = vocabulary - len(tokens) - len(delimiters) - 1
    if fillers < 0:
        raise ValueError(f"vocab_size is {vocabulary}; the stand-in tokenizer needs {vocabulary - fillers}")
    tokens |= {f"<filler {number}>": len(tokens) + number for number in range(fillers)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    fast.add_special_tokens({"extra_special_tokens": list(delimiters)})
    return fast


def random_memory_need(release: RandomRelease, dtype: torch.dtype, row_tokens: int) -> MemoryNeed:
    """Return the memory that a release takes on its device, with random weights or its own.

    Args:
        release: The release.
        dtype: What it is served in.
        row_tokens: The longest row it shall answer.
    """
    model = build_model(release.config, torch.device("meta"), dtype)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if release.labels is not None:
        head = len(release.labels) * release.config.hidden_size * dtype.itemsize
    else:
        head = 2 * _POINTER_DIM * (release.config.hidden_size + 1) * torch.float32.itemsize
    return MemoryNeed(weights, head, workspace(release.config, dtype, row_tokens), dtype)


def random_text_model(
    release: RandomRelease, device: torch.device, dtype: torch.dtype, row_tokens: int
) -> PreTrainedModel:
    """Build the text decoder and fill its weights on the device: the same numbers at every start.

    Each matrix has the variance of its inverse width, so that activations stay where a trained model's are, and so do
    the scores of attention: where large ones leave each query a single key, a rounding can change any answer.

    Args:
        release: What to build.
        device: Where.
        dtype: What it is served in.
        row_tokens: The longest row that the device must have room for.

    Raises:
        CheckpointError: The device is too small.
    """
    check_memory(random_memory_need(release, dtype, row_tokens), device)
    model = build_model(release.config, device, dtype)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
            elif name.endswith("A_log"):
                parameter.uniform_(1, 16, generator=generator).log_()
            elif release.config.model_type == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight")):
                # Gemma does not scale its scores: in a trained model these norms do.
                parameter.fill_(len(parameter) ** -0.25)
            # The others, norms and time-step biases, have been set where they were built.
    return model


def random_readout(release: RandomRelease, model: PreTrainedModel, dtype: torch.dtype) -> Readout:
    """Return a random pointer head, or for direct token the labels' rows of the embedding matrix.

    Args:
        release: What it is for.
        model: Its text decoder.
        dtype: The dtype of a vocabulary head; a pointer head is float32.
    """
    embedding: torch.Tensor = model.get_parameter("embed_tokens.weight")
    if release.labels is not None:
        return DirectTokenReadout(embedding[label_ids(release.tokenizer, release.labels)].to(dtype))
    generator = torch.Generator(embedding.device).manual_seed(SEED)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=embedding.device) * shape[-1] ** -0.5

    width = release.config.hidden_size
    return PointerReadout(
        {
            "q.weight": values(_POINTER_DIM, width),
            "q.bias": values(_POINTER_DIM),
            "k.weight": values(_POINTER_DIM, width),
            "k.bias": values(_POINTER_DIM),
        }
    )

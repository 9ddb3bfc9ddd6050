"""The base model's files: its text decoder's configuration and tensors, out of whatever wraps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.shards import StoredTensor, read_header
from jevany_backend.checkpoint.stream import read_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A base is often a multimodal checkpoint; its text decoder stands under one of these.
_DECODER_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


class BaseFiles:
    """A base model on disk, of which only the headers have been read.

    Args:
        directory: Holds ``config.json`` and ``model.safetensors`` or its shards with their index.

    Attributes:
        config: The text decoder's configuration.
        tensors: The text decoder's tensors by their names in it (``layers.0.mlp.up_proj.weight``).
        quantised_block: Rows and columns that share a scale in a base released as fp8, else None.

    Raises:
        CheckpointError: A file is missing or broken, or there is no text decoder in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_text_config(directory)
        self.quantised_block = _read_quantised_block(directory / "config.json")
        self._stored = _read_headers(directory)
        prefix = self._find_prefix()
        self.tensors = {
            name.removeprefix(prefix): stored for name, stored in self._stored.items() if name.startswith(prefix)
        }

    def _find_prefix(self) -> str:
        for prefix in _DECODER_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._stored:
                return prefix
        raise CheckpointError(f"{self.directory}: no text decoder: there is no embed_tokens.weight in its tensors")

    def head_rows(self, rows: list[int]) -> torch.Tensor:
        """Read some rows of the vocabulary head.

        Args:
            rows: Token ids, R of them.

        Returns:
            (R, hidden), as stored, in host memory.

        Raises:
            CheckpointError: There is no head, or it cannot be read.
        """
        return read_rows(self.head(), rows)

    def head(self) -> StoredTensor:
        """Return the vocabulary head, (vocabulary, hidden), which is the embedding matrix where the two are tied.

        Raises:
            CheckpointError: The base has no head of its own and its embeddings are not tied, or its head does not fit.
        """
        head = next((self._stored[name] for name in _HEAD_NAMES if name in self._stored), None)
        if self.config.tie_word_embeddings:
            head = self.tensors["embed_tokens.weight"]
        if head is None:
            raise CheckpointError(f"{self.directory}: no lm_head.weight, and the embeddings are not tied to it")
        if head.shape[1:] != (self.config.hidden_size,):
            raise CheckpointError(
                f"{head.path}: {head.name} has shape {head.shape}, but the hidden size is {self.config.hidden_size}"
            )
        return head


def read_text_config(directory: Path) -> PretrainedConfig:
    """Read the configuration of a base's text decoder.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; {directory} is not a base model")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config(decoder=True)
    except Exception as error:
        # Its fields are checked by transformers and by the Hub's library, each with exceptions of its own.
        raise CheckpointError(f"{path}: {first_line(error)}") from None


def _read_quantised_block(path: Path) -> tuple[int, int] | None:
    quantisation: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    if not quantisation:
        return None
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)):
        raise CheckpointError(
            f"{path}: quantization_config is {method!r} with weight_block_size {block!r}; "
            "only bases in full precision and fp8 ones with a scale for each block are served"
        )
    return block[0], block[1]


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{directory}: neither model.safetensors nor model.safetensors.index.json")
        return read_header(single)
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: not an index of safetensors shards") from None
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).name != file or not (directory / file).is_file():
            raise CheckpointError(f"{directory / file}: missing, but {index.name} names it")
        stored |= read_header(directory / file)
    for name, file in file_of.items():
        if name not in stored or stored[name].path.name != file:
            raise CheckpointError(f"{directory / file}: {name} is not in it, but {index.name} says so")
    return stored

"""From the files of a checkpoint and its base to merged weights on a device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.initialization import no_init_weights

from jevany_backend.checkpoint.adapter import Adapter, read_adapter
from jevany_backend.checkpoint.base import BaseFiles
from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.head_file import HeadFile, read_head_file
from jevany_backend.checkpoint.source import resolve_directory
from jevany_backend.encoding import Delimiters, build_labels, find_delimiters, label_ids
from jevany_backend.readout import DirectTokenReadout, PointerReadout, Readout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint on disk, read but for its weights.

    Attributes:
        directory: The adapter's directory.
        head: What ``head.pt`` says.
        base: The base model's files.
        tokenizer: The tokenizer the checkpoint was trained with.
        delimiters: The tokenizer's five structure tokens.
        labels: The verbalizer table of a direct-token checkpoint, else None.
    """

    directory: Path
    head: HeadFile
    base: BaseFiles
    tokenizer: PreTrainedTokenizerBase
    delimiters: Delimiters
    labels: list[str] | None


def open_checkpoint(adapter: str, base: str | None = None, relative_to: Path | None = None) -> CheckpointFiles:
    """Find and check the files of a checkpoint and of its base.

    Args:
        adapter: The checkpoint: a directory, or ``owner/repository[@revision]``.
        base: The base, likewise; None for the one that the checkpoint names.
        relative_to: The directory that relative paths start from.

    Raises:
        CheckpointError: Names the file that is missing, broken or does not fit.
    """
    directory = resolve_directory(adapter, "adapter", relative_to)
    head = read_head_file(directory)
    base_directory = resolve_directory(base or head.base_reference, "base", relative_to)
    tokenizer_directory = directory if head.tokenizer_saved else base_directory
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory, trust_remote_code=False)
        delimiters = find_delimiters(tokenizer)
        labels = None
        if head.decision_mode == "lm_token":
            labels = list(head.verbalizers) or build_labels(tokenizer)
            label_ids(tokenizer, labels)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tokenizer_directory}: {first_line(error)}") from None
    return CheckpointFiles(directory, head, BaseFiles(base_directory), tokenizer, delimiters, labels)


def load_text_model(files: CheckpointFiles, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the base's text decoder with the adapter merged into it.

    Each tensor is read, merged in float32, rounded once to ``dtype`` and copied to its place; no second copy of the
    weights exists at any time.

    Args:
        files: The checkpoint.
        device: Where the weights go.
        dtype: What they are served in.

    Returns:
        transformers' text model, in evaluation mode.

    Raises:
        CheckpointError: Base and adapter do not fit each other, or a tensor is missing.
    """
    adapter = read_adapter(files.directory)
    model = _allocate(files, device, dtype)
    # Persistent buffers are part of the checkpoint as parameters are.
    targets = dict(model.state_dict(keep_vars=True))
    missing = set(targets)
    with torch.no_grad():
        for name, tensor in files.base.decoder_tensors(device):
            if name not in targets:
                continue
            _copy(name, adapter.merge(name, tensor, dtype), targets[name], files)
            missing.discard(name)
        if missing:
            raise CheckpointError(f"{files.base.directory}: {len(missing)} tensors are missing, as {min(missing)}")
        adapter.check_all_merged()
        _set_added_tokens(model, files, adapter)
    return model.eval().requires_grad_(False)


def _allocate(files: CheckpointFiles, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    # Building on the device itself computes the rotary tables there; only the weights stay unset.
    with no_init_weights(), device:
        model = AutoModel.from_config(files.base.config, dtype=dtype, trust_remote_code=False)
    rows = max(files.tokenizer.get_vocab().values()) + 1
    embedding = model.get_input_embeddings()
    if rows > embedding.num_embeddings:
        if not files.delimiters.added:
            raise CheckpointError(
                f"{files.directory}: its tokenizer has {rows} tokens, but the base embeds only "
                f"{embedding.num_embeddings}; tokenizer and base do not belong together"
            )
        with device:
            model.set_input_embeddings(torch.nn.Embedding(rows, embedding.embedding_dim, dtype=dtype))
    return model


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor, files: CheckpointFiles) -> None:
    if name == "embed_tokens.weight" and tensor.shape[0] < target.shape[0]:
        target = target[: tensor.shape[0]]  # The rows of added tokens are set at the end.
    if tensor.shape != target.shape:
        raise CheckpointError(
            f"{files.base.directory}: {name} has shape {tuple(tensor.shape)}, but config.json makes it "
            f"{tuple(target.shape)}"
        )
    target.copy_(tensor)


def _set_added_tokens(model: PreTrainedModel, files: CheckpointFiles, adapter: Adapter) -> None:
    embedding: torch.Tensor = model.get_parameter("embed_tokens.weight")
    if files.delimiters.added:
        base_rows = min(files.base.config.vocab_size, embedding.shape[0])
        embedding[list(files.delimiters.ids)] = embedding[:base_rows].mean(dim=0)
    adapter.replace_token_rows(embedding)


def load_readout(files: CheckpointFiles, device: torch.device, dtype: torch.dtype) -> Readout:
    """Load the readout of a checkpoint.

    Args:
        files: The checkpoint.
        device: Where the readout runs.
        dtype: The dtype the vocabulary head is served in; a pointer head is always float32.

    Raises:
        CheckpointError: The base has no vocabulary head, or the head was trained for another width.
    """
    hidden = files.base.config.hidden_size
    if files.labels is not None:
        rows = files.base.head_rows(label_ids(files.tokenizer, files.labels), device)
        return DirectTokenReadout(rows.to(dtype), files.head.temperature)
    assert files.head.head is not None  # read_head_file requires it of a pointer checkpoint
    width = files.head.head["q.weight"].shape[1]
    if width != hidden:
        raise CheckpointError(
            f"{files.directory / 'head.pt'}: the head reads {width} values, but the base's hidden size is {hidden}"
        )
    return PointerReadout({name: t.to(device) for name, t in files.head.head.items()}, files.head.temperature)

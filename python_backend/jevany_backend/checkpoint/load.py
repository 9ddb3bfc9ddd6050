"""From the files of a checkpoint and its base to merged weights on a device."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from jevany_backend.checkpoint.base import BaseFiles, read_text_config
from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.head_file import HeadFile, read_head_file
from jevany_backend.checkpoint.memory import MemoryNeed, check_memory, workspace
from jevany_backend.checkpoint.plan import TOKEN_TABLES, WeightPlan, build_model, plan_weights
from jevany_backend.checkpoint.source import resolve_directory
from jevany_backend.checkpoint.stream import WeightStream, rate_text
from jevany_backend.encoding import Delimiters, Limits, build_labels, find_delimiters, label_ids
from jevany_backend.readout import DirectTokenReadout, PointerReadout, Readout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the base's text decoder."""
        return self.base.config


def open_checkpoint(
    adapter: str,
    base: str | None = None,
    relative_to: Path | None = None,
    check_shape: Callable[[PretrainedConfig], None] | None = None,
) -> CheckpointFiles:
    """Find and check the files of a checkpoint and of its base.

    Args:
        adapter: The checkpoint: a directory, or ``owner/repository[@revision]``.
        base: The base, likewise; None for the one that the checkpoint names.
        relative_to: The directory that relative paths start from.
        check_shape: Called with the configuration of the base's text decoder before a base on the Hub is downloaded;
            what it raises ends the download there.

    Raises:
        CheckpointError: Names the file that is missing, broken or does not fit.
    """
    directory = resolve_directory(adapter, "adapter", relative_to)
    head = read_head_file(directory)
    base_directory = resolve_directory(
        base or head.base_reference,
        "base",
        relative_to,
        None if check_shape is None else lambda place: check_shape(read_text_config(place)),
    )
    tokenizer_directory = directory if head.tokenizer_saved else base_directory
    tokenizer = _open_tokenizer(tokenizer_directory)
    try:
        delimiters = find_delimiters(tokenizer)
        labels = None
        if head.decision_mode == "lm_token":
            labels = list(head.verbalizers) or build_labels(tokenizer)
            label_ids(tokenizer, labels)
    except ValueError as error:
        raise CheckpointError(f"{tokenizer_directory}: {first_line(error)}") from None
    return CheckpointFiles(directory, head, BaseFiles(base_directory), tokenizer, delimiters, labels)


def _open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # The library names no file, and for a damaged one raises whatever it stumbles over.
        reason = first_line(error)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    for part in (directory / "tokenizer_config.json", path):
        try:
            if part.is_file() and not isinstance(json.loads(part.read_text(encoding="utf-8")), dict):
                raise CheckpointError(f"{part}: not a JSON object")
        except ValueError as error:
            raise CheckpointError(f"{part}: not JSON, or cut off: {first_line(error)}") from None
    raise CheckpointError(f"{path}: no tokenizer can be made of it: {reason}")


def plan(files: CheckpointFiles, dtype: torch.dtype) -> WeightPlan:
    """Check that the weights of a checkpoint and of its base fit each other and the readout, by their headers.

    Raises:
        CheckpointError: They do not, or a tensor is missing.
    """
    added = files.delimiters.ids if files.delimiters.added else ()
    weights = plan_weights(files.directory, files.base, files.tokenizer, added, dtype)
    if files.head.lora and weights.adapter.rank != files.head.lora:
        raise CheckpointError(
            f"{files.directory / 'head.pt'}: made with an adapter of rank {files.head.lora}, but adapter_config.json "
            f"has r = {weights.adapter.rank}; the two are not of one checkpoint"
        )
    _check_readout(files)
    return weights


def _check_readout(files: CheckpointFiles) -> None:
    """Check that the base has what the readout reads, before anything large is read for nothing.

    Raises:
        CheckpointError: The base has no vocabulary head, or the pointer head was trained for another width.
    """
    if files.labels is not None:
        rows, last = files.base.head().rows, max(label_ids(files.tokenizer, files.labels))
        if last >= rows:
            raise CheckpointError(
                f"{files.directory}: its labels reach to token {last}, but the base's vocabulary head has {rows} rows"
            )
        return
    assert files.head.head is not None  # read_head_file requires it of a pointer checkpoint
    width, hidden = files.head.head["q.weight"].shape[1], files.config.hidden_size
    if width != hidden:
        raise CheckpointError(
            f"{files.directory / 'head.pt'}: the head reads {width} values, but the base's hidden size is {hidden}"
        )


def memory_need(files: CheckpointFiles, weights: WeightPlan, row_tokens: int) -> MemoryNeed:
    """Return the memory that a checkpoint takes on its device.

    Args:
        files: The checkpoint.
        weights: Its weights.
        row_tokens: The longest row it shall answer.
    """
    head = len(files.labels or ()) * weights.config.hidden_size * weights.dtype.itemsize
    head += sum(tensor.nbytes for tensor in (files.head.head or {}).values())
    beside = workspace(weights.config, weights.dtype, row_tokens, weights.adapter.nbytes)
    return MemoryNeed(weights.nbytes, head, beside, weights.dtype)


def check_shape_fits(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, row_tokens: int) -> None:
    """Check that a device has room for a model of which only the configuration is there.

    Args:
        config: The configuration of its text decoder.
        device: Where it shall be.
        dtype: What it is served in.
        row_tokens: The longest row that the device must have room for.

    Raises:
        CheckpointError: It has not, or the configuration makes no model.
    """
    try:
        model = build_model(config, torch.device("meta"), dtype)
    except Exception as error:
        raise CheckpointError(f"config.json of the base: {first_line(error)}") from None
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    check_memory(MemoryNeed(weights, 0, workspace(config, dtype, row_tokens), dtype), device)


def load_text_model(
    files: CheckpointFiles, device: torch.device, dtype: torch.dtype, row_tokens: int = Limits.row_tokens
) -> PreTrainedModel:
    """Load the base's text decoder with the adapter merged into it.

    Each block of a tensor is read, merged in float32, rounded once to ``dtype`` and put in its place; no second copy
    of the weights exists at any time.

    Args:
        files: The checkpoint.
        device: Where the weights go.
        dtype: What they are served in.
        row_tokens: The longest row that the device must have room for.

    Returns:
        transformers' text model, in evaluation mode.

    Raises:
        CheckpointError: Base and adapter do not fit each other, the device is too small, or a tensor cannot be read.
            Whatever had been loaded is gone from the device.
        torch.cuda.OutOfMemoryError: The device turned out too small after all; likewise.
    """
    weights = plan(files, dtype)
    check_memory(memory_need(files, weights, row_tokens), device)
    try:
        return _load(weights, device)
    except (CheckpointError, torch.cuda.OutOfMemoryError) as error:
        # The frames of a traceback hold the half-loaded weights, so the error goes on without them.
        failure = error.with_traceback(None)
        failure.__context__ = None
    gc.collect()  # The error of a reader's thread and the frame that it was raised in hold each other.
    _release(device)
    raise failure


def _load(weights: WeightPlan, device: torch.device) -> PreTrainedModel:
    with ThreadPoolExecutor(1) as beside:
        beside.submit(_first_product, device)
        model = build_model(weights.config, device, weights.dtype)
    # Persistent buffers are part of the checkpoint as parameters are.
    targets = dict(model.state_dict(keep_vars=True))
    started = time.perf_counter()
    with WeightStream(device) as stream:
        total = stream.read([weights.weight(name, targets[name]) for name in weights.stored])
    with torch.no_grad():
        _set_added_rows(weights, targets)
    _check_finite(weights, targets)
    _release(device)
    log.info("all %d shards: %s", len(weights.by_shard()), rate_text(total, time.perf_counter() - started))
    return model


def _first_product(device: torch.device) -> None:
    """Have the device's matrix library set itself up, which takes cuBLAS about a tenth of a second.

    What it sets up belongs to a thread; PyTorch hands it on to the next one when that thread ends.
    """
    rows = torch.zeros(64, 16, device=device)
    rows @ rows.T


def _set_added_rows(weights: WeightPlan, targets: dict[str, torch.Tensor]) -> None:
    """Set the rows of added tokens, and over them the rows that the adapter has trained."""
    for table in TOKEN_TABLES:
        name = f"{table}.weight"
        if name not in targets:
            continue
        target = targets[name]
        if weights.added_ids:
            target[list(weights.added_ids)] = target[: weights.stored[name].rows].mean(dim=0)
        for token, row in weights.adapter.token_rows.get(table, {}).items():
            target[token] = row.to(target.device, target.dtype)


def _check_finite(weights: WeightPlan, targets: dict[str, torch.Tensor]) -> None:
    """Check that no weight holds NaN or infinity, with which every decision would be NaN.

    Raises:
        CheckpointError: Names the first one and its file; adapter and head have been checked when they were read.
    """
    # Both bounds are NaN where one value is, and unlike a mask of the values they take no memory. The device is asked
    # once, for all weights.
    bounds = {name: torch.stack(torch.aminmax(target)) for name, target in targets.items() if target.numel()}
    finite = torch.isfinite(torch.stack([bound.float() for bound in bounds.values()])).all(dim=1).tolist()
    for name, good in zip(bounds, finite, strict=True):
        if not good:
            stored = weights.stored[name]
            raise CheckpointError(f"{stored.path}: {stored.name} holds NaN or infinite values")


def _release(device: torch.device) -> None:
    """Give back what the device no longer needs."""
    if device.type == "cuda":
        # cuBLAS keeps a workspace for each stream that it was called on, and those of the loading are gone.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def load_readout(files: CheckpointFiles, device: torch.device, dtype: torch.dtype) -> Readout:
    """Load the readout of a checkpoint.

    Args:
        files: The checkpoint.
        device: Where the readout runs.
        dtype: The dtype the vocabulary head is served in; a pointer head is always float32.

    Raises:
        CheckpointError: The vocabulary head cannot be read.
    """
    if files.labels is not None:
        rows = files.base.head_rows(label_ids(files.tokenizer, files.labels))
        return DirectTokenReadout(rows.to(device, dtype), files.head.temperature)
    assert files.head.head is not None  # read_head_file requires it of a pointer checkpoint
    return PointerReadout({name: t.to(device) for name, t in files.head.head.items()}, files.head.temperature)

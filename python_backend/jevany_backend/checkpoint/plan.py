"""What a checkpoint needs of its base, weight by weight: found and checked before the first of them is read."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModel
from transformers.initialization import no_init_weights

from jevany_backend.checkpoint.adapter import Adapter, read_adapter
from jevany_backend.checkpoint.base import BaseFiles
from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.shards import StoredTensor
from jevany_backend.checkpoint.stream import read_tensor
from jevany_backend.checkpoint.weights import BlockScales, Weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# The tables with a row for each token: they grow where a checkpoint added tokens. Gemma has a second one, whose rows
# feed every layer.
TOKEN_TABLES = ("embed_tokens", "embed_tokens_per_layer")


@dataclass(frozen=True)
class WeightPlan:
    """The weights of a text decoder and where each comes from.

    Attributes:
        config: The decoder's configuration, with rows for added tokens.
        dtype: What it is served in.
        base: The base's files.
        adapter: The adapter.
        stored: Each weight's stored tensor by its name in the decoder.
        scales: The stored scales of those that are stored as fp8, likewise.
        added_ids: The ids of the delimiters that the checkpoint added to the tokenizer; else none.
        nbytes: The size of all weights in ``dtype``.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    base: BaseFiles
    adapter: Adapter
    stored: dict[str, StoredTensor]
    scales: dict[str, StoredTensor]
    added_ids: tuple[int, ...]
    nbytes: int

    def by_shard(self) -> dict[Path, list[str]]:
        """Return the names of the weights of each file, both in order."""
        shards: dict[Path, list[str]] = {}
        for name, stored in self.stored.items():
            shards.setdefault(stored.path, []).append(name)
        return dict(sorted(shards.items()))

    def weight(self, name: str, target: torch.Tensor) -> Weight:
        """Return one weight's way to its place, with what it needs beside its stored rows on the device already.

        That is little beside the weights, and moved here it costs no thread of the loading a wait or a processor.

        Args:
            name: Its name in the decoder.
            target: The parameter or buffer of that name; rows of added tokens are left alone.
        """
        stored, scales = self.stored[name], None
        pair = self.adapter.pairs.get(name.removesuffix(".weight"))
        if name in self.scales:
            assert self.base.quantised_block is not None  # plan_weights has seen to it.
            rows, columns = self.base.quantised_block
            values = read_tensor(self.scales[name]).to(target.device, torch.float32)
            scales = BlockScales(values, rows, columns)
        if name.removesuffix(".weight") in TOKEN_TABLES:
            target = target[: stored.rows]
        return Weight(stored, target.detach(), pair.to(target.device) if pair else None, scales)


def plan_weights(
    directory: Path,
    base: BaseFiles,
    tokenizer: PreTrainedTokenizerBase,
    added_ids: tuple[int, ...],
    dtype: torch.dtype,
) -> WeightPlan:
    """Match the weights of a text decoder with the tensors of its base and of the adapter, by their headers.

    Args:
        directory: The checkpoint.
        base: The base's files.
        tokenizer: The checkpoint's tokenizer.
        added_ids: The ids of the tokens that the checkpoint added to it.
        dtype: What to serve in.

    Raises:
        CheckpointError: Base, adapter and tokenizer do not fit each other, or a tensor is missing.
    """
    config = _grown_config(directory, base.config, tokenizer, bool(added_ids))
    try:
        model = build_model(config, torch.device("meta"), dtype)
    except Exception as error:
        # Of fields that do not go together, transformers says so in many ways, and where it happens to meet them.
        raise CheckpointError(f"{base.directory / 'config.json'}: {first_line(error)}") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = set(shapes) - set(base.tensors)
    if missing:
        raise CheckpointError(f"{base.directory}: {len(missing)} tensors are missing, as {min(missing)}")
    adapter = read_adapter(directory)
    adapter.check_fits(shapes)
    stored = {name: base.tensors[name] for name in shapes}
    for name, tensor in stored.items():
        _check_shape(base, name, tensor.shape, shapes[name])
    scales = {name: _scales_of(base, name) for name in stored if stored[name].dtype == torch.float8_e4m3fn}
    nbytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    return WeightPlan(config, dtype, base, adapter, stored, scales, added_ids, nbytes)


def build_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build a text decoder whose weights are not set yet; its rotary tables and constants are."""
    # Building on the device itself computes what is no weight there. A model keeps the configuration that it is given
    # and writes its dtype into it.
    with no_init_weights(), device:
        model = AutoModel.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def _grown_config(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, tokens_added: bool
) -> PretrainedConfig:
    rows = max(tokenizer.get_vocab().values()) + 1
    if rows <= config.vocab_size:
        return config
    if not tokens_added:
        raise CheckpointError(
            f"{directory}: its tokenizer has {rows} tokens, but the base embeds only {config.vocab_size}; "
            "tokenizer and base do not belong together"
        )
    grown = copy.deepcopy(config)
    grown.vocab_size = rows
    if hasattr(grown, "vocab_size_per_layer_input"):
        grown.vocab_size_per_layer_input = rows
    return grown


def _check_shape(base: BaseFiles, name: str, stored: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if name.removesuffix(".weight") in TOKEN_TABLES and stored[:1] <= needed[:1]:
        needed = (*stored[:1], *needed[1:])  # The rows of added tokens come from elsewhere.
    if stored != needed:
        raise CheckpointError(f"{base.directory}: {name} has shape {stored}, but config.json makes it {needed}")


def _scales_of(base: BaseFiles, name: str) -> StoredTensor:
    scales = base.tensors.get(f"{name}_scale_inv")
    if base.quantised_block is None or scales is None:
        raise CheckpointError(
            f"{base.directory}: {name} is stored as fp8, but has no {name}_scale_inv or config.json no block size"
        )
    shape = base.tensors[name].shape
    needed = tuple(-(-size // block) for size, block in zip(shape, base.quantised_block, strict=True))
    if scales.shape != needed:
        raise CheckpointError(f"{base.directory}: {name}_scale_inv has shape {scales.shape}; needs {needed}")
    return scales

"""Whether a model fits, said before the first of its bytes is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jevany_backend.checkpoint.errors import CheckpointError
from jevany_backend.checkpoint.stream import BLOCK_BYTES, STREAMS
from jevany_backend.engine.measured import ROW_LENGTHS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GB = 1e9
# A block on its way to the device stands there as stored, as float32, as its adapter's product and as its scales: all
# but the first are four times as large where it is stored as fp8.
_COPIES_OF_A_BLOCK = 16
# CUDA's context, workspaces and plans of cuBLAS and cuDNN, kernels loaded when they are first used or timed.
_GPU_LIBRARIES = 1_600_000_000
_GRAPHS_OF_A_LAYER = 10_000_000  # What the graphs of all lengths know of a layer's kernels.
# While a layer's projections are packed, and in what that leaves the allocator in pieces.
_COPIES_OF_A_PROJECTION = 3
_WIDEST_FUSED_HEAD = 256


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a model takes on its device, in bytes.

    Attributes:
        weights: The text decoder's weights.
        head: The readout's.
        workspace: An estimate of what loading and the longest row take beside them.
        dtype: What the weights are served in.
    """

    weights: int
    head: int
    workspace: int
    dtype: torch.dtype

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.head + self.workspace

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.total / GB:.1f} GB ({self.weights / GB:.1f} of weights in {dtype}, {self.head / GB:.2f} of head, "
            f"{self.workspace / GB:.1f} to load and to run)"
        )


def workspace(config: PretrainedConfig, dtype: torch.dtype, row_tokens: int, adapter: int = 0) -> int:
    """Estimate what a model needs beside its weights, in the engine that serves it unless another is named, in bytes.

    That is the larger of loading and of running: the longest row, which has no graph, and beside it the graphs' pool
    and the graphs themselves.

    Args:
        config: The text decoder's configuration.
        dtype: What it is served in.
        row_tokens: The longest row.
        adapter: The size of what is merged into the weights, which is on the device while they are loaded.
    """
    load = STREAMS * BLOCK_BYTES * _COPIES_OF_A_BLOCK + adapter
    # At the widest place of a layer stand the residual, its norm in float32, and the two halves of the MLP.
    token = (8 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    run = (row_tokens + min(row_tokens, ROW_LENGTHS[-1])) * token
    if _widest_head(config) > _WIDEST_FUSED_HEAD and dtype != torch.bfloat16:
        # transformers runs it, and PyTorch fuses no attention of such heads: the scores stand in memory.
        run += config.num_attention_heads * row_tokens**2 * (dtype.itemsize + 4)
    run += _COPIES_OF_A_PROJECTION * 2 * config.intermediate_size * config.hidden_size * dtype.itemsize
    return max(load, run) + config.num_hidden_layers * _GRAPHS_OF_A_LAYER + _GPU_LIBRARIES


def _widest_head(config: PretrainedConfig) -> int:
    # Gemma's full layers have wider heads than its windowed ones.
    return max(config.per_layer_config[layer].head_dim for layer in range(config.num_hidden_layers))


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the whole memory of a device, in bytes; for the CPU, what this process may have of it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = _control_group()
    if limit is not None and limit < total:
        return min(free, limit - used), limit
    return free, total


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    # Of what a container uses, files in the page cache go when memory is needed.
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return None, 0
    return (None if limit == "max" else int(limit)), used - int(statistics.get("inactive_file", 0))


def check_memory(need: MemoryNeed, device: torch.device, free: tuple[int, int] | None = None) -> None:
    """Check that a model fits its device.

    Args:
        need: What it takes.
        device: Where it shall be.
        free: The device's free and whole memory, in bytes; asked for if None.

    Raises:
        CheckpointError: It does not; the message says how much is missing and what can be changed.
    """
    available, total = free or free_memory(device)
    if need.total <= available:
        return
    place = f"GPU {device.index or 0}" if device.type == "cuda" else "this machine"
    changes = ["a smaller variant (jevany-4b)", "a lower max_row_tokens"]
    if need.dtype == torch.float32:
        changes.insert(0, "dtype bfloat16")
    if device.type == "cuda":
        changes.append("another GPU (gpus in instance_group)")
        if need.total <= total:
            changes.append("ending what else uses this one")
    raise CheckpointError(
        f"not enough memory: the model needs {need}, but {place} has {max(available, 0) / GB:.1f} GB free of "
        f"{total / GB:.1f}; what helps: {', '.join(changes)}"
    )

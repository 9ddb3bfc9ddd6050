"""Which kernel of PyTorch's computes causal attention over a row of which length, by measurement."""

from __future__ import annotations

import bisect
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured, agree, counted, fastest, lengths_up_to

# cuDNN makes a plan at first sight of a length. Up to the longest that is timed every length has a graph and is warmed
# before it is captured; beyond it no request may wait for a plan, so this one runs.
_PLAIN = "flash"
# Without a mask each of them takes grouped heads as they are.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


class CausalAttention:
    """Causal attention by whichever kernel is the fastest for the row's length.

    Args:
        measured: What times, and remembers; on a CPU nothing is measured.
        shape: The layers' shape.
        dtype: What the model is served in.
        longest: The longest row.
    """

    def __init__(self, measured: Measured, shape: AttentionShape, dtype: torch.dtype, longest: int) -> None:
        self.rows: list[int] = []
        self.names: list[str] = []
        if measured.device.type != "cuda":
            return
        self.rows = lengths_up_to(longest)
        for rows in self.rows:
            parts = _example(rows, shape, dtype, measured.device)
            name = f"attention over {rows} rows, {shape}, {str(dtype).removeprefix('torch.')}"
            candidates = {key: (lambda _, key=key, parts=parts: _attend(key, *parts)) for key in _BACKENDS}
            times = measured.compare(name, candidates)
            self.names.append(fastest(times, partial(_is_right, parts)) or _PLAIN)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            query: (n, H, w); it sees the keys up to its own.
            key: (n, K, w), where K divides H; so many query heads in a row share one.
            value: (n, K, w).

        Returns:
            (n, H, w), a view whose last dimension is contiguous.
        """
        return _attend(self.name(len(query)), query, key, value)

    def name(self, rows: int) -> str:
        """Return which kernel runs rows of a length."""
        at = bisect.bisect_left(self.rows, rows)
        return self.names[at] if at < len(self.names) else _PLAIN

    def __str__(self) -> str:
        return counted(self.names)


def _attend(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))  # (1, heads, n, w)
    with sdpa_kernel(_BACKENDS[name], set_priority=True):
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _is_right(parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], name: str) -> bool:
    return agree(_attend(name, *parts), _attend(_PLAIN, *parts))


def _example(
    rows: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.queries, shape.keys, shape.keys)
    query, key, value = (
        torch.randn((rows, heads, shape.width), generator=generator, device=device).to(dtype) for heads in sizes
    )
    return query, key, value

"""Which kernel computes a layer's attention over a row of which length, by measurement."""

from __future__ import annotations

import bisect
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jevany_backend.engine.kernels.flash_attention import (
    FlashPlan,
    flash_attention,
    flash_attention_twin,
    flash_plans,
)
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured, Times, agree, counted, fastest, lengths_up_to

# PyTorch's; without a mask each of them takes grouped heads as they are.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}
_WIDEST_HEAD = 256  # That they take.
# cuDNN makes a plan at first sight of a length. Up to the longest that is timed every length has a graph and is warmed
# before it is captured; beyond it no request may wait for a plan.
_NOT_BEYOND = "cudnn"
_CHECKED_ROWS = 64  # At either end of a row.

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention:
    """Attention of one kind of layer, over a whole row or for some rows alone, by whichever kernel is the fastest.

    Args:
        measured: What times, and remembers; on a CPU nothing is measured.
        shape: The layers' shape.
        dtype: What the model is served in.
        longest: The longest row.
        reads: How many rows are queries where not all are.
        window: How many keys a query sees, its own the last of them; None for all up to its own.
        scale: Of the scores; None for one over the root of a head's width.
    """

    def __init__(
        self,
        measured: Measured,
        shape: AttentionShape,
        dtype: torch.dtype,
        longest: int,
        *,
        reads: int = 64,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.shape = shape
        self.window = window
        self.scale = shape.width**-0.5 if scale is None else scale
        self.rows: list[int] = []
        self.names: list[str] = []
        self.beyond = "flash"
        self.read_names: list[str] = []
        self._plans: dict[str, FlashPlan] = {}
        if measured.device.type != "cuda":
            return
        self._plans = {str(plan): plan for plan in flash_plans(shape.width, dtype.itemsize)}
        self.rows = lengths_up_to(longest)
        kind = f"{shape}, window {window}, {str(dtype).removeprefix('torch.')}"
        for rows in self.rows:
            parts = _example(rows, shape, dtype, measured.device)
            calls = {name: partial(self._all_rows, name, parts) for name in self._candidates(rows)}
            times = measured.compare(f"attention over {rows} rows, {kind}", calls)
            self.names.append(self._best(times, parts))
            read_parts = _example(rows, shape, dtype, measured.device, queries=min(reads, rows))
            calls = {name: partial(self._last_rows, name, read_parts) for name in self._plans}
            read_times = measured.compare(f"attention of {min(reads, rows)} rows to {rows}, {kind}", calls)
            self.read_names.append(self._best(read_times, read_parts))
        allowed = [name for name in self._candidates(longest) if name != _NOT_BEYOND]
        self.beyond = self._best({name: times[name] for name in allowed}, parts)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend from every row.

        Args:
            query: (n, H, w).
            key: (n, K, w), where K divides H; so many query heads in a row share one.
            value: (n, K, w).

        Returns:
            (n, H, w), a view whose last dimension is contiguous.
        """
        return self._attend(self.name(len(query)), query, key, value)

    def of_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Attend from some rows.

        Args:
            query: (R, H, w).
            key: (n, K, w).
            value: (n, K, w).
            positions: (R,) where among the keys each query stands, int32 or int64.

        Returns:
            (R, H, w), contiguous.
        """
        if not self.read_names:
            return flash_attention_twin(query, key, value, positions, self.window, self.scale)
        name = self.read_names[min(bisect.bisect_left(self.rows, len(key)), len(self.rows) - 1)]
        return flash_attention(query, key, value, positions, self.window, self.scale, self._plans[name])

    def name(self, rows: int) -> str:
        """Return which kernel runs rows of a length."""
        at = bisect.bisect_left(self.rows, rows)
        return self.names[at] if at < len(self.names) else self.beyond

    def __str__(self) -> str:
        return counted(self.names)

    def _candidates(self, rows: int) -> list[str]:
        backends = _BACKENDS if self.shape.width <= _WIDEST_HEAD and not self._windowed(rows) else ()
        return [*backends, *self._plans]

    def _windowed(self, rows: int) -> bool:
        return self.window is not None and rows > self.window

    def _attend(self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if name in self._plans:
            return flash_attention(query, key, value, None, self.window, self.scale, self._plans[name])
        if self._windowed(len(query)):
            return flash_attention_twin(query, key, value, None, self.window, self.scale)
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))  # (1, heads, n, w)
        with sdpa_kernel(_BACKENDS[name], set_priority=True):
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True, scale=self.scale
            )
        return attended[0].transpose(0, 1)

    def _all_rows(self, name: str, parts: Parts, _: int = 0) -> torch.Tensor:
        return self._attend(name, *parts)

    def _last_rows(self, name: str, parts: Parts, _: int = 0) -> torch.Tensor:
        query, key, value = parts
        positions = torch.arange(len(key) - len(query), len(key), device=key.device)
        return flash_attention(query, key, value, positions, self.window, self.scale, self._plans[name])

    def _best(self, times: Times, parts: Parts) -> str:
        return fastest(times, partial(self._is_right, parts)) or next(iter(times))

    def _is_right(self, parts: Parts, name: str) -> bool:
        query, key, value = parts
        whole = len(query) == len(key)
        attended = (self._all_rows if whole else self._last_rows)(name, parts)
        checked = torch.arange(len(query), device=key.device)
        checked = torch.cat((checked[:_CHECKED_ROWS], checked[-_CHECKED_ROWS:]))
        positions = checked + len(key) - len(query)
        twin = flash_attention_twin(query[checked], key, value, positions, self.window, self.scale)
        return agree(attended[checked], twin)


def _example(
    rows: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device, queries: int | None = None
) -> Parts:
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((queries or rows, shape.queries), (rows, shape.keys), (rows, shape.keys))
    query, key, value = (
        torch.randn((*size, shape.width), generator=generator, device=device).to(dtype) for size in sizes
    )
    return query, key, value

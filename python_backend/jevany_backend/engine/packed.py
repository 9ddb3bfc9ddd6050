"""Packed weights: projections that share an input, as one product whose layout and library are chosen by measurement.

A weight lies in memory either as it is stored, output by output, or transposed; cuBLAS picks its algorithm by one of
two interfaces; and for few rows there is a kernel of our own. None is best at every number of rows, so each shape of a
model is timed at load at the numbers that occur. A layout holds for all of them, since a weight is there once; the way
to multiply is chosen for each. Where the libraries have only bad tiles for a number of rows, multiplying more rows is
faster: on an H200, 192 rows with a transposed weight of 34816 x 5120 take 224 us, 256 rows 132.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from jevany_backend.engine.kernels.add_rms_norm import Norm, add_rms_norm
from jevany_backend.engine.kernels.skinny_product import MAX_ROWS, SkinnyPlan, skinny_plans, skinny_product
from jevany_backend.engine.measured import Measured, agree, fastest, lengths_up_to

LAYOUTS = ("stored", "transposed")
LIBRARIES = ("cublas", "cublaslt")
# Numbers of rows that are timed: where the tiles of a product end, and far enough between. With each, how many of the
# 231 rows of the JevBench-shape panel come to it: a layout is for all lengths, so their share decides (1 for none).
TIMED_ROWS = {
    32: 1,
    64: 40,
    96: 61,
    128: 19,
    160: 1,
    192: 6,
    224: 7,
    256: 4,
    320: 15,
    384: 7,
    448: 4,
    512: 6,
    640: 9,
    768: 3,
    1024: 8,
    1536: 4,
    2048: 1,
    2560: 15,
    3072: 13,
    4096: 8,
}
# Reading a weight again that is still in the cache would be faster than the model ever is.
_BYTES_TO_LEAVE_THE_CACHE = 256 << 20
# Up to this many rows are worth being padded, by up to a third: beyond, whole tiles are a small part of the work.
_MOST_PADDED = 1024


@dataclass(frozen=True)
class Padded:
    """Multiplies more rows than there are.

    Attributes:
        rows: How many.
        library: One of `LIBRARIES`.
    """

    rows: int
    library: str

    def __str__(self) -> str:
        return f"{self.library} of {self.rows} rows"


Way: TypeAlias = str | Padded | SkinnyPlan  # One of `LIBRARIES` as it is, or our kernel by a plan.


@dataclass(frozen=True)
class ProductPlan:
    """How one shape of weight is stored and multiplied.

    Attributes:
        transposed: Whether it lies in memory as (in, out).
        rows: Numbers of rows, ascending.
        ways: How to multiply up to each of them; the last also beyond.
    """

    transposed: bool = False
    rows: tuple[int, ...] = (1,)
    ways: tuple[Way, ...] = ("cublas",)

    def way(self, rows: int) -> Way:
        """Return how to multiply a number of rows."""
        return self.ways[min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)]


class Product:
    """Multiplies rows by a packed weight: ``x W^T``.

    Args:
        linears: The layers whose outputs stand side by side in the result, in order. Their weights are taken away from
            them, so that none is there twice.
        plan: How to store the packed weight and multiply by it.
    """

    def __init__(self, linears: Sequence[nn.Linear], plan: ProductPlan) -> None:
        self.plan = plan
        first = linears[0].weight
        ends = list(itertools.accumulate(linear.weight.shape[0] for linear in linears))
        shape = (first.shape[1], ends[-1]) if plan.transposed else (ends[-1], first.shape[1])
        if len(linears) == 1 and not plan.transposed:
            self.weight = first.detach()
        else:
            self.weight = torch.empty(shape, dtype=first.dtype, device=first.device)
            for end, linear in zip(ends, linears, strict=True):
                part = linear.weight.detach()
                into = slice(end - len(part), end)
                if plan.transposed:
                    self.weight[:, into] = part.T
                else:
                    self.weight[into] = part
        for linear in linears:
            if linear.bias is not None:
                raise ValueError("a projection with a bias cannot be packed")
            linear.weight = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (n, out) for (n, in), or parts that add up to it where the plan was made for a sum."""
        return multiply(rows, self.weight, self.plan.transposed, self.plan.way(len(rows)))


def multiply(rows: torch.Tensor, weight: torch.Tensor, transposed: bool, way: Way) -> torch.Tensor:
    """Multiply rows by a weight.

    Args:
        rows: (n, in).
        weight: (out, in), or (in, out) if transposed.
        transposed: Which.
        way: How; on a CPU, a library's name is without meaning.

    Returns:
        (n, out) in the same dtype; or parts of it, as `skinny_product` says.
    """
    if isinstance(way, Padded):
        padded = rows.new_empty(way.rows, rows.shape[1])
        padded[: len(rows)] = rows  # What stands behind them changes none of their products.
        return multiply(padded, weight, transposed, way.library)[: len(rows)]
    if not rows.is_cuda:
        return functional.linear(rows, weight.T if transposed else weight)
    if isinstance(way, SkinnyPlan):
        return skinny_product(rows, weight, way)
    # A setting of the process; nothing else multiplies while a row is under way.
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(way)
    try:
        return rows @ weight if transposed else functional.linear(rows, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def plan_product(
    measured: Measured, shape: tuple[int, int], dtype: torch.dtype, longest: int, *, summed: bool
) -> ProductPlan:
    """Choose how to store and multiply weights of one shape, by timing.

    Args:
        measured: What times, and remembers.
        shape: (out, in).
        dtype: The weights' dtype.
        longest: The most rows that occur.
        summed: Whether `add_rms_norm` takes the product, which adds up parts. Then it belongs to what is timed.

    Returns:
        The plan; the plain one on a CPU.
    """
    if measured.device.type != "cuda":
        return ProductPlan()
    counts = lengths_up_to(longest, TIMED_ROWS)
    copies = max(2, -(-_BYTES_TO_LEAVE_THE_CACHE // (shape[0] * shape[1] * dtype.itemsize)))
    # One block serves both layouts; the numbers in it do not matter to the time.
    memory = torch.randn((copies, *shape), dtype=dtype, device=measured.device).mul_(shape[1] ** -0.5)
    best: dict[str, list[tuple[float, Way]]] = {layout: [] for layout in LAYOUTS}
    for count in counts:
        trial = _Trial(memory, count, summed)
        times = measured.compare(trial.name, trial.candidates())
        for layout, ways in trial.ways.items():
            of_layout = {key: times[f"{layout} {key}"] for key in ways}
            key = fastest(of_layout, partial(trial.is_right, layout)) or "cublas"
            best[layout].append((of_layout[key] or float("inf"), ways[key]))
    # What each layout costs over the better one: every row counts alike, however long it takes.
    cost = dict.fromkeys(LAYOUTS, 0.0)
    for at, count in enumerate(counts):
        least = min(best[layout][at][0] for layout in LAYOUTS)
        for layout in LAYOUTS:
            cost[layout] += TIMED_ROWS[count] * best[layout][at][0] / least
    layout = min(LAYOUTS, key=cost.__getitem__)
    return ProductPlan(layout == "transposed", tuple(counts), tuple(way for _, way in best[layout]))


def _padded_rows(count: int) -> list[int]:
    return [more for more in TIMED_ROWS if count < more <= min(count * 4 // 3, _MOST_PADDED)]


class _Trial:
    """One number of rows with weights of one shape, in every way there is."""

    def __init__(self, memory: torch.Tensor, count: int, summed: bool) -> None:
        copies, outputs, inputs = memory.shape
        self.weights = {"stored": memory, "transposed": memory.view(copies, inputs, outputs)}
        self.rows = torch.randn(count, inputs, dtype=memory.dtype, device=memory.device)
        self.stream = torch.randn(count, outputs, dtype=memory.dtype, device=memory.device)
        self.summed = summed
        ways: list[Way] = [*LIBRARIES]
        ways += [Padded(more, name) for more in _padded_rows(count) for name in LIBRARIES]
        self.ways: dict[str, dict[str, Way]] = {layout: {str(way): way for way in ways} for layout in LAYOUTS}
        if count <= MAX_ROWS and memory.element_size() == 2:
            self.ways["stored"] |= {str(plan): plan for plan in skinny_plans((outputs, inputs), summed=summed)}
        dtype = str(memory.dtype).removeprefix("torch.")
        self.name = f"product of {count} rows with {outputs} x {inputs}, {dtype}"
        self.name += ", added up and normed" if summed else ""

    def candidates(self) -> dict[str, Callable[[int], torch.Tensor]]:
        return {
            f"{layout} {key}": partial(self._run, layout, way)
            for layout, ways in self.ways.items()
            for key, way in ways.items()
        }

    def is_right(self, layout: str, key: str) -> bool:
        way = self.ways[layout][key]
        if not isinstance(way, SkinnyPlan):
            return True
        product = self._multiply(layout, way, 0)
        return agree(product if way.parts == 1 else product.sum(0), self._multiply(layout, "cublas", 0))

    def _run(self, layout: str, way: Way, index: int) -> torch.Tensor:
        product = self._multiply(layout, way, index)
        return add_rms_norm(self.stream, product, Norm(self.stream[0], 1e-6)) if self.summed else product

    def _multiply(self, layout: str, way: Way, index: int) -> torch.Tensor:
        weights = self.weights[layout]
        return multiply(self.rows, weights[index % len(weights)], layout == "transposed", way)

"""The product of few rows with a large weight, whose time is that of reading the weight.

A weight with few outputs has too few tiles to keep a GPU's memory busy, so its inputs can be divided among several
programs. What they add up to is left to the kernel that reads it (`add_rms_norm`): no program waits for another, the
order of the sum is fixed, and no launch is spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

MAX_ROWS = 128


@dataclass(frozen=True)
class SkinnyPlan:
    """How the work is divided.

    Attributes:
        outputs: Outputs of a program.
        inputs: Inputs that it takes at a time; the weight's are a multiple of it.
        parts: Programs that the inputs are divided among.
        stages: Blocks of the weight that are under way from memory at once.
        warps: Warps of a program.
    """

    outputs: int
    inputs: int
    parts: int
    stages: int
    warps: int


# Outputs, inputs, stages, warps: with 128 rows, 96 to 192 KB of an SM's shared memory, so one program or two at once.
_TILES = ((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 5, 8), (128, 64, 3, 4), (256, 64, 4, 8))
# Their number decides whether the last programs to start are many or a few that everything waits for.
_PARTS = (2, 3, 4, 6, 8)


def skinny_plans(shape: tuple[int, int], *, summed: bool) -> list[SkinnyPlan]:
    """Return what is worth measuring for a weight.

    Args:
        shape: (out, in).
        summed: Whether the reader adds up parts.
    """
    outputs, inputs = shape
    return [
        SkinnyPlan(tile, block, parts, stages, warps)
        for tile, block, stages, warps in _TILES
        for parts in ((1, *_PARTS) if summed else (1,))
        if inputs % block == 0
        and inputs // block >= parts * stages
        # Fewer programs than about the SMs of a large GPU leave its memory idle, thousands of them are all overhead.
        and 64 <= triton.cdiv(outputs, tile) * parts <= 2048
    ]


def skinny_product_twin(rows: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Multiply rows by a weight, ``x W^T``.

    Args:
        rows: (n, in), at most `MAX_ROWS` of them.
        weight: (out, in) in the same dtype.
        parts: Programs that the inputs are divided among; 1 for a finished product.

    Returns:
        (n, out) in the same dtype for one part; else (parts, n, out), float32, to be added up in that order.
    """
    if parts == 1:
        return functional.linear(rows, weight)
    step = -(-rows.shape[1] // parts)
    pieces = zip(rows.float().split(step, 1), weight.float().split(step, 1), strict=True)
    return torch.stack([functional.linear(*piece) for piece in pieces])


def skinny_product(rows: torch.Tensor, weight: torch.Tensor, plan: SkinnyPlan) -> torch.Tensor:
    """Do as `skinny_product_twin` in one kernel; both are contiguous."""
    count, inputs = rows.shape
    outputs = len(weight)
    if plan.parts == 1:
        out = rows.new_empty(count, outputs)
    else:
        out = rows.new_empty(plan.parts, count, outputs, dtype=torch.float32)
    _skinny_product[(triton.cdiv(outputs, plan.outputs), plan.parts)](
        rows,
        weight,
        out,
        count,
        inputs,
        outputs,
        triton.cdiv(inputs // plan.inputs, plan.parts),
        ROWS=64 if count <= 64 else MAX_ROWS,
        OUTPUTS=plan.outputs,
        INPUTS=plan.inputs,
        PRECISION="ieee",
        num_stages=plan.stages,
        num_warps=plan.warps,
    )
    return out


@triton.jit
def _skinny_product(
    rows,
    weight,
    out,
    count,
    inputs,
    outputs,
    blocks,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Columns beyond the last read the last again and are not stored: a mask would break up the loads.
    source = tl.minimum(output, outputs - 1).to(tl.int64)
    begin = part * blocks * INPUTS
    end = tl.minimum(begin + blocks * INPUTS, inputs)
    column = begin + tl.arange(0, INPUTS)
    x = rows + row[:, None] * inputs + column[None, :]
    w = weight + source[:, None] * inputs + column[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for _ in range(begin, end, INPUTS):
        # Every program reads the rows again, and nothing reads the weight again.
        left = tl.load(x, mask=(row < count)[:, None], other=0.0, eviction_policy="evict_last")
        right = tl.load(w, eviction_policy="evict_first")
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
        x += INPUTS
        w += INPUTS
    place = (part * count + row[:, None]) * outputs + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < count)[:, None] & (output < outputs)[None, :])

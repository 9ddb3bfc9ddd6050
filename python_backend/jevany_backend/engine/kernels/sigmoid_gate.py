"""The output gate of full attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape

_BLOCK = 1024


def sigmoid_gate_twin(attended: torch.Tensor, packed: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Return ``attended * sigmoid(gate)``, computed in float32 and rounded once.

    Args:
        attended: (n, heads, width), what each head has read.
        packed: (n, columns), the rows that the queries came from, with their gates.
        shape: How the columns are divided.

    Returns:
        (n, heads * width) in the same dtype.
    """
    rows, heads, width = attended.shape
    if shape.gates == "beside":
        gate = packed[:, : 2 * heads * width].reshape(rows, heads, 2, width)[:, :, 1]
    else:
        gate = packed[:, heads * width : 2 * heads * width].reshape(rows, heads, width)
    return (attended.float() * torch.sigmoid(gate.float())).to(attended.dtype).reshape(rows, heads * width)


def sigmoid_gate(
    attended: torch.Tensor, packed: torch.Tensor, shape: AttentionShape, *, early: bool = False
) -> torch.Tensor:
    """Do as `sigmoid_gate_twin` in one kernel; a row of either may have any stride, its columns are contiguous."""
    rows, heads, width = attended.shape
    out = attended.new_empty(rows, heads * width)
    _sigmoid_gate[(rows, triton.cdiv(heads * width, _BLOCK))](
        attended,
        packed,
        out,
        attended.stride(0),
        attended.stride(1),
        packed.stride(0),
        COLUMNS=heads * width,
        WIDTH=width,
        GATES=width if shape.gates == "beside" else heads * width,
        GATE_STRIDE=shape.query_stride,
        BLOCK=_BLOCK,
        **launch_options(early),
        num_warps=4,
    )
    return out


@triton.jit
def _sigmoid_gate(
    attended,
    packed,
    out,
    attended_stride,
    head_stride,
    packed_stride,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    head, within = column // WIDTH, column % WIDTH
    gate = tl.load(packed + row * packed_stride + GATES + head * GATE_STRIDE + within, mask=inside, other=0.0)
    source = attended + row * attended_stride + head * head_stride + within
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    result = values * tl.sigmoid(gate.to(tl.float32))
    tl.store(out + row * COLUMNS + column, result.to(out.dtype.element_ty), mask=inside)

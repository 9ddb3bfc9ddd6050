"""SwiGLU over the output of one product for gate and up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_BLOCK = 1024


def swiglu_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate_up: (n, 2 width), the gate's half first.

    Returns:
        (n, width) in the same dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def swiglu(gate_up: torch.Tensor, *, early: bool = False) -> torch.Tensor:
    """Do as `swiglu_twin` in one kernel; the input is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, **launch_options(early), num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)

"""Gated linear units: an activation of one half of a row times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_BLOCK = 1024
# By the names of transformers' configurations.
_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda values: functional.gelu(values, approximate="tanh"),
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def glu_twin(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, computed in float32 and rounded once.

    With silu that is SwiGLU, with gelu GeGLU (Shazeer, arXiv 2002.05202).

    Args:
        gate: (n, width); of both the stride of a row may be larger, as in halves of one product.
        up: (n, width) in the same dtype.
        activation: One of `ACTIVATIONS`.

    Returns:
        (n, width) in the same dtype, contiguous.
    """
    return (_ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype)


def glu(gate: torch.Tensor, up: torch.Tensor, activation: str, *, early: bool = False) -> torch.Tensor:
    """Do as `glu_twin` in one kernel."""
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    _glu[(rows, triton.cdiv(width, _BLOCK))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        width,
        SILU=activation == "silu",
        BLOCK=_BLOCK,
        **launch_options(early),
        num_warps=4,
    )
    return out


@triton.jit
def _glu(gate, up, out, gate_stride, up_stride, width, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    inner = values
    if not SILU:
        # gelu's tanh form is a sigmoid in disguise: 0.5 (1 + tanh(y)) = sigmoid(2 y) with y = sqrt(2/pi) (x +
        # 0.044715 x^3).
        inner = 1.5957691216057308 * (values + 0.044715 * values * values * values)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (values * tl.sigmoid(inner) * factor).to(out.dtype.element_ty), mask=inside)

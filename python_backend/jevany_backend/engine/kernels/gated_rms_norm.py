"""The gated RMSNorm behind the delta rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_HEADS_A_PROGRAM = 8


def gated_rms_norm_twin(heads: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head and gate it: ``x / sqrt(mean(x^2) + eps) * weight * silu(gate)``.

    float32 inside, rounded once (transformers' ``Qwen3_5RMSNormGated`` rounds before the gate as well; its weights are
    not stored less one).

    Args:
        heads: (n, heads, width).
        gate: (n, heads * width); a row may have any stride.
        weight: (width,).
        eps: Added to the mean square.

    Returns:
        (n, heads * width) in the dtype of `heads`.
    """
    values = heads.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (values.flatten(1) * functional.silu(gate.float())).to(heads.dtype)


def gated_rms_norm(
    heads: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, early: bool = False
) -> torch.Tensor:
    """Do as `gated_rms_norm_twin` in one kernel, a program for a few heads of a row; `heads` is contiguous."""
    rows, count, width = heads.shape
    out = heads.new_empty(rows, count * width)
    _gated_rms_norm[(rows, triton.cdiv(count, _HEADS_A_PROGRAM))](
        heads,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        COUNT=count,
        WIDTH=width,
        HEADS=_HEADS_A_PROGRAM,
        BLOCK=triton.next_power_of_2(width),
        **launch_options(early),
        num_warps=4,
    )
    return out


@triton.jit
def _gated_rms_norm(
    heads,
    gate,
    weight,
    out,
    gate_stride,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < COUNT) & (column < WIDTH)
    place = head * WIDTH + column
    values = tl.load(heads + row * COUNT * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    result = values * scale * factor * opened * tl.sigmoid(opened)
    tl.store(out + row * COUNT * WIDTH + place, result.to(out.dtype.element_ty), mask=inside)

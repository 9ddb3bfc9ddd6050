"""Residual add and RMSNorm in one pass over the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor


def add_rms_norm_twin(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add a layer's output to the residual stream and normalise the sum.

    With x = residual + delta, rounded once to the stream's dtype: ``x / sqrt(mean(x^2) + eps) * (1 + weight)``,
    computed in float32 and rounded once (transformers' ``Qwen3_5RMSNorm``, whose weights are stored less one).

    Args:
        residual: (n, width), overwritten with the sum.
        delta: (n, width) in the same dtype, or (parts, n, width) in float32 to be added up first, as `skinny_product`
            leaves them, or None where there is nothing to add.
        weight: (width,).
        eps: Added to the mean square.

    Returns:
        (n, width) in the residual's dtype.
    """
    if delta is not None:
        residual += delta if delta.ndim == 2 else delta.sum(0)
    values = residual.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * (1 + weight.float())).to(residual.dtype)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, *, early: bool = False
) -> torch.Tensor:
    """Do as `add_rms_norm_twin` in one kernel, a program a row; all tensors contiguous."""
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        residual,
        residual if delta is None else delta,
        weight,
        normed,
        width,
        eps,
        PARTS=0 if delta is None else delta.numel() // residual.numel(),
        BLOCK=block,
        # 16 values a thread: a row of 5,120 in four loads of 16 bytes.
        **launch_options(early),
        num_warps=min(max(block // 512, 1), 16),
    )
    return normed


@triton.jit
def _add_rms_norm(
    residual, delta, weight, normed, width, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_predecessor(EARLY)
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        part_size = tl.num_programs(0).to(tl.int64) * width
        update = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            update += tl.load(delta + part * part_size + start + column, mask=inside, other=0.0).to(tl.float32)
        values += update
        # The stream keeps the rounded sum, and that is what is normalised.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    factor = 1 + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + column, (values * scale * factor).to(normed.dtype.element_ty), mask=inside)

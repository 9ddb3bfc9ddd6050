"""Residual add and RMSNorm in one pass over the row, with a norm of what is added where a family has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, arXiv 1910.07467), in float32.

    Attributes:
        weight: (width,); where a family stores it less one, the one is added already.
        eps: Added to the mean square.
    """

    weight: torch.Tensor
    eps: float


def add_rms_norm_twin(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm: Norm | None,
    *,
    delta_norm: Norm | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        residual: (n, width), overwritten with ``(residual + delta) * scale``, rounded once.
        delta: (n, width) in the same dtype, or (parts, n, width) in float32 to be added up first, as `skinny_product`
            leaves them, or None where there is nothing to add.
        norm: Of the rounded sum; None where the sum is all that is wanted.
        delta_norm: Of `delta` before it is added, or None.
        scale: (1,), or None for one.

    Returns:
        (n, width) in the residual's dtype, rounded once: the normalised sum, or without a norm the residual itself.
    """
    if delta is not None:
        update = delta.float() if delta.ndim == 2 else delta.sum(0)
        if delta_norm is not None:
            update = _normed(update, delta_norm)
        total = residual.float() + update
        residual.copy_(total if scale is None else total * scale.float())
    return residual if norm is None else _normed(residual.float(), norm).to(residual.dtype)


def _normed(values: torch.Tensor, norm: Norm) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight.float()


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm: Norm | None,
    *,
    delta_norm: Norm | None = None,
    scale: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Do as `add_rms_norm_twin` in one kernel, a program a row; all tensors contiguous."""
    rows, width = residual.shape
    normed = residual if norm is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        residual,
        residual if delta is None else delta,
        residual if norm is None else norm.weight,
        residual if delta_norm is None else delta_norm.weight,
        residual if scale is None else scale,
        normed,
        width,
        0.0 if norm is None else norm.eps,
        0.0 if delta_norm is None else delta_norm.eps,
        PARTS=0 if delta is None else delta.numel() // residual.numel(),
        NORMED=norm is not None,
        DELTA_NORMED=delta_norm is not None,
        SCALED=scale is not None,
        BLOCK=block,
        # 16 values a thread: a row of 5,120 in four loads of 16 bytes.
        **launch_options(early),
        num_warps=min(max(block // 512, 1), 16),
    )
    return normed


@triton.jit
def _add_rms_norm(
    residual,
    delta,
    weight,
    delta_weight,
    scale,
    normed,
    width,
    eps,
    delta_eps,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    DELTA_NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
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
        if DELTA_NORMED:
            update *= tl.rsqrt(tl.sum(update * update, axis=0) / width + delta_eps)
            update *= tl.load(delta_weight + column, mask=inside, other=0.0).to(tl.float32)
        values += update
        if SCALED:
            values *= tl.load(scale).to(tl.float32)
        # The stream keeps the rounded sum, and that is what is normalised.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if NORMED:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + start + column, values.to(normed.dtype.element_ty), mask=inside)

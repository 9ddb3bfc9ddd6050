"""What each layer of Gemma gets of a token besides the stream: its per-layer embedding, mixed with its ordinary one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_LAYERS_A_PROGRAM = 8


def per_layer_inputs_twin(
    projected: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, norm: Norm, projected_scale: float
) -> torch.Tensor:
    """Return ``(norm(scale * projected) + sqrt(p) * table[ids]) / sqrt(2)``, with a norm over each layer's p columns.

    As transformers' ``Gemma4TextModel.project_per_layer_inputs``; float32 inside, rounded once.

    Args:
        projected: (n, layers * p), a product of the tokens' embeddings.
        ids: (n,) token ids, int32 or int64.
        table: (vocabulary, layers * p) in the same dtype.
        norm: Weight (p,).
        projected_scale: Of `projected`, before its norm.

    Returns:
        (n, layers, p) in the same dtype.
    """
    width = len(norm.weight)
    values = projected.float().unflatten(1, (-1, width)) * projected_scale
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight.float()
    own = table[ids].float().unflatten(1, (-1, width)) * width**0.5
    return ((values + own) * 2**-0.5).to(projected.dtype)


def per_layer_inputs(
    projected: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    norm: Norm,
    projected_scale: float,
    *,
    early: bool = False,
) -> torch.Tensor:
    """Do as `per_layer_inputs_twin` in one kernel, a program for a few layers of a row; all tensors contiguous."""
    width = len(norm.weight)
    rows, layers = len(projected), projected.shape[1] // width
    out = projected.new_empty(rows, layers, width)
    _per_layer_inputs[(rows, triton.cdiv(layers, _LAYERS_A_PROGRAM))](
        projected,
        ids,
        table,
        norm.weight,
        out,
        norm.eps,
        projected_scale,
        width**0.5,
        ALL_LAYERS=layers,
        WIDTH=width,
        LAYERS=_LAYERS_A_PROGRAM,
        BLOCK=triton.next_power_of_2(width),
        **launch_options(early),
        num_warps=4,
    )
    return out


@triton.jit
def _per_layer_inputs(
    projected,
    ids,
    table,
    weight,
    out,
    eps,
    projected_scale,
    table_scale,
    ALL_LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)
    column = tl.arange(0, BLOCK)
    inside = (layer < ALL_LAYERS)[:, None] & (column < WIDTH)[None, :]
    place = layer[:, None] * WIDTH + column[None, :]
    values = tl.load(projected + row * ALL_LAYERS * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    values *= projected_scale
    values *= tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    values *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    token = tl.load(ids + row).to(tl.int64)
    own = tl.load(table + token * ALL_LAYERS * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    result = (values + own * table_scale) * 0.7071067811865476
    tl.store(out + row * ALL_LAYERS * WIDTH + place, result.to(out.dtype.element_ty), mask=inside)

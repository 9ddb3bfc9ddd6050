"""What transformers' Qwen3.5 trains with: two operations that suit short rows better than its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_TOLERANCE = 1e-3


def install(device: torch.device) -> float:
    """Puts both operations into transformers' model module.

    Call it before anything imports transformers' models.

    Args:
        device: Where training will run.

    Returns:
        The largest relative difference between the delta rule here and transformers' reference, over the output and
        all gradients, on the device.

    Raises:
        ArithmeticError: The difference is not rounding.
    """
    # transformers imports scikit-learn wherever it is installed, even where that import fails; nothing here needs it.
    if "sklearn" not in sys.modules:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    worst = _difference(short_row_delta_rule, inspect.unwrap(modeling.torch_chunk_gated_delta_rule), device)
    if not worst < _TOLERANCE:
        raise ArithmeticError(f"the delta rule differs from its reference by {worst:.2g} on {device}")
    modeling.torch_chunk_gated_delta_rule = short_row_delta_rule
    modeling.causal_conv1d_fn = shifted_convolution
    return worst


def short_row_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """The gated delta rule over a whole row as one chunk: a tenth of the kernels of the chunked form.

    With c the running sum of g, G_ij = exp(c_i - c_j) for j <= i, and unit keys, the new values solve the unit
    triangular system (I + tril(beta k k^T G, -1)) u = beta v, and the output is tril(q k^T G) u / sqrt(d). (Gated
    DeltaNet, arXiv 2412.06464, with one chunk and no initial state.) Memory grows with the square of the length.

    Args:
        query: (B, L, heads, d), not normalised; so is `key`.
        key: (B, L, heads, d).
        value: (B, L, heads, e).
        g: (B, L, heads), log decay, at most 0.
        beta: (B, L, heads).
        **_: What other implementations take.

    Returns:
        (B, L, heads, e) in the dtype of `query`, and no final state.
    """
    dtype, length = query.dtype, query.shape[1]
    # Autocast would multiply in bf16, which the inverse does not survive.
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, g, beta = (part.transpose(1, 2).float() for part in (query, key, value, g, beta))
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        decay = g.cumsum(-1)
        future = torch.ones(length, length, dtype=torch.bool, device=g.device).triu(1)
        decay = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
        system = (key * beta[..., None]) @ key.transpose(-1, -2) * decay
        new_values = unit_triangular_inverse(system) @ (value * beta[..., None])
        attention = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) * decay
        return (attention @ new_values).transpose(1, 2).to(dtype), None


def unit_triangular_inverse(system: torch.Tensor) -> torch.Tensor:
    """Inverts unit lower triangular matrices by halves: many small products, no substitution row by row.

    inv([[P, 0], [R, Q]]) = [[inv(P), 0], [-inv(Q) R inv(P), inv(Q)]], from blocks of one row upwards. A GPU's batched
    triangular solver takes several times as long for matrices of this size.

    Args:
        system: (..., L, L); only what is below the diagonal counts.

    Returns:
        (..., L, L), differentiable.
    """
    return _UnitTriangularInverse.apply(system)


class _UnitTriangularInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: torch.Tensor) -> torch.Tensor:
        length = system.shape[-1]
        padded = 1 << (length - 1).bit_length()
        system = functional.pad(system, (0, padded - length, 0, padded - length))
        lead = system.shape[:-2]
        inverse = system.new_ones(*lead, padded, 1, 1)
        size = 1
        while size < padded:
            count = padded // (2 * size)
            blocks = system.view(*lead, count, 2 * size, count, 2 * size).diagonal(dim1=-4, dim2=-2)
            below = blocks[..., size:, :size, :].movedim(-1, -3)
            upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            inverse = system.new_zeros(*lead, count, 2 * size, 2 * size)
            inverse[..., :size, :size] = upper
            inverse[..., size:, size:] = lower
            inverse[..., size:, :size] = -_product(_product(lower, below), upper)
            size *= 2
        inverse = inverse[..., 0, :length, :length].contiguous()
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradient @ transposed).tril(-1)


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # A library's batched product spends a whole thread block on each matrix, however small.
    if one.shape[-1] <= 8:
        return (one[..., :, :, None] * other[..., None, :, :]).sum(-2)
    return one @ other


def shifted_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """The causal depthwise convolution as a sum of shifted products, several times faster than a grouped `conv1d`.

    Args:
        hidden_states: (B, C, L).
        weight: (C, width).
        bias: (C,), or None.
        activation: `silu`, or None.
        **_: What other implementations take.
    """
    width, length = weight.shape[-1], hidden_states.shape[-1]
    weight = weight.to(hidden_states.dtype)
    padded = functional.pad(hidden_states, (width - 1, 0))
    out = sum(padded[..., shift : shift + length] * weight[:, shift, None] for shift in range(width))
    if bias is not None:
        out = out + bias[:, None].to(hidden_states.dtype)
    return functional.silu(out) if activation is not None else out  # type: ignore[arg-type, return-value]


def _difference(one: Callable[..., Any], other: Callable[..., Any], device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, width = 4, 96, 4, 32

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = (batch, length, heads, width)
    start = [noise(*sizes), noise(*sizes), noise(*sizes), -functional.softplus(noise(*sizes[:3])), noise(*sizes[:3])]
    upstream = noise(*sizes).to(device)

    def run(rule: Callable[..., Any]) -> list[torch.Tensor]:
        inputs = [tensor.to(device).requires_grad_() for tensor in start]
        query, key, value, decay, beta = inputs
        out, _ = rule(query, key, value, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return [out, *torch.autograd.grad((out * upstream).sum(), inputs)]

    pairs = zip(run(one), run(other), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

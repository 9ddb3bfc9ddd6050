"""What transformers' Qwen3.5 trains with on a GPU: two operations that suit short rows better than its own."""

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

    Call it before anything imports transformers' models, and where training runs on a GPU only.

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

    from jevany_tiny.delta_rule import short_row_delta_rule

    worst = _difference(short_row_delta_rule, inspect.unwrap(modeling.torch_chunk_gated_delta_rule), device)
    if not worst < _TOLERANCE:
        raise ArithmeticError(f"the delta rule differs from its reference by {worst:.2g} on {device}")
    modeling.torch_chunk_gated_delta_rule = short_row_delta_rule
    modeling.causal_conv1d_fn = shifted_convolution
    return worst


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

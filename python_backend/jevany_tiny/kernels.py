"""Which kernels transformers' Qwen3.5 trains with, and whether they can be trusted."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_TOLERANCE = 0.03


def choose(kernels: str) -> None:
    """Decides, before transformers' model module is imported, what that module will find.

    Args:
        kernels: `auto` takes flash-linear-attention and causal-conv1d where they are installed; `torch` hides them.
    """
    # transformers imports scikit-learn wherever it is installed, even where that import fails; nothing here needs it.
    if "sklearn" not in sys.modules:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    if kernels == "torch":
        sys.modules["fla"] = None  # type: ignore[assignment]
        sys.modules["causal_conv1d"] = None  # type: ignore[assignment]


def prepare(device: torch.device) -> str:
    """Replaces the convolution where it would be slow, and checks the delta rule.

    Returns:
        What is in use, in words.

    Raises:
        ArithmeticError: The delta rule's kernel differs from its reference.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    if not _has_causal_conv1d():
        modeling.causal_conv1d_fn = shifted_convolution
    delta_rule = implementation(modeling.torch_chunk_gated_delta_rule)
    convolution = implementation(modeling.causal_conv1d_fn)
    words = f"delta rule from {delta_rule.__module__}, convolution from {convolution.__module__}"
    if not delta_rule.__module__.startswith("transformers"):
        worst = _delta_rule_error(modeling.torch_chunk_gated_delta_rule, device)
        words += f", largest relative difference from the reference {worst:.4f}"
        if not worst < _TOLERANCE:
            raise ArithmeticError(f"the delta rule differs from its reference: {words}")
    return words


def implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what really runs behind one of transformers' exchangeable functions."""
    return inspect.getclosurevars(function).nonlocals.get("implementation", function)


def _has_causal_conv1d() -> bool:
    try:
        return importlib.util.find_spec("causal_conv1d") is not None
    except (ImportError, ValueError):
        return False


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


def _delta_rule_error(function: Callable[..., Any], device: torch.device) -> float:
    """Returns the largest relative difference between a kernel and its reference, over output and gradients."""
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, width = 4, 96, 4, 32

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = (batch, length, heads, width)
    start = [noise(*sizes), noise(*sizes), noise(*sizes), -functional.softplus(noise(*sizes[:3])), noise(*sizes[:3])]
    upstream = noise(*sizes).to(device)

    def run(rule: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [
            tensor.to(device, torch.float32 if index == 3 else dtype).requires_grad_()
            for index, tensor in enumerate(start)
        ]
        query, key, value, decay, beta = inputs
        out, _ = rule(query, key, value, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return [out, *torch.autograd.grad((out.float() * upstream).sum(), inputs)]

    fast = run(function, torch.bfloat16)
    reference = run(inspect.unwrap(function), torch.float32)
    return max(
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(fast, reference, strict=True)
    )

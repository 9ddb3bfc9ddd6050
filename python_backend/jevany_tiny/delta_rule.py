"""The gated delta rule for training on short rows: one Triton kernel a direction, one program a row and head.

A program walks along its row with the state in registers. The chunked form that libraries train with spends its time on
launches and on matrices of a few rows; this one is bound by nothing but the length of the row.

For each position, with the state S of shape (d, d), a = exp(g) and unit key k (Gated DeltaNet, arXiv 2412.06464):

    D = a S_before,  u = beta (v - D^T k),  S = D + k u^T,  out = S^T q
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward_kernel(query, key, value, g, beta, out, states, length, heads, size: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    place = tl.arange(0, size)
    square = place[:, None] * size + place[None, :]
    state = tl.zeros((size, size), tl.float32)
    for position in range(length):
        at = (row * length + position) * heads + head
        q = tl.load(query + at * size + place)
        k = tl.load(key + at * size + place)
        v = tl.load(value + at * size + place)
        state = state * tl.exp(tl.load(g + at))
        update = tl.load(beta + at) * (v - tl.sum(state * k[:, None], 0))
        state = state + k[:, None] * update[None, :]
        tl.store(out + at * size + place, tl.sum(state * q[:, None], 0))
        tl.store(states + at * size * size + square, state)


@triton.jit
def _backward_kernel(
    query, key, value, g, beta, states, d_out, d_query, d_key, d_value, d_g, d_beta, length, heads, size: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    place = tl.arange(0, size)
    square = place[:, None] * size + place[None, :]
    d_state = tl.zeros((size, size), tl.float32)
    last = (row * length + length - 1) * heads + head
    state = tl.load(states + last * size * size + square)
    for step in range(length):
        position = length - 1 - step
        at = (row * length + position) * heads + head
        q = tl.load(query + at * size + place)
        k = tl.load(key + at * size + place)
        v = tl.load(value + at * size + place)
        d_o = tl.load(d_out + at * size + place)
        decay = tl.exp(tl.load(g + at))
        strength = tl.load(beta + at)
        before = tl.load(states + (at - heads) * size * size + square, mask=square < position * size * size, other=0.0)
        decayed = before * decay
        error = v - tl.sum(decayed * k[:, None], 0)

        tl.store(d_query + at * size + place, tl.sum(state * d_o[None, :], 1))
        d_state = d_state + q[:, None] * d_o[None, :]
        d_update = tl.sum(d_state * k[:, None], 0)
        tl.store(d_beta + at, tl.sum(d_update * error, 0))
        d_error = strength * d_update
        tl.store(d_value + at * size + place, d_error)
        d_k = tl.sum(d_state * (strength * error)[None, :], 1) - tl.sum(decayed * d_error[None, :], 1)
        tl.store(d_key + at * size + place, d_k)
        d_state = d_state - k[:, None] * d_error[None, :]
        tl.store(d_g + at, tl.sum(tl.sum(d_state * decayed, 1), 0))
        d_state = d_state * decay
        state = before


@torch.library.custom_op("jevany_tiny::delta_rule", mutates_args=())
def _delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length, heads, size = query.shape
    out = torch.empty_like(value)
    states = value.new_empty(rows, length, heads, size, size)
    _forward_kernel[(rows * heads,)](query, key, value, g, beta, out, states, length, heads, size, num_warps=1)
    return out, states


@_delta_rule.register_fake
def _(query: Any, key: Any, value: Any, g: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(value), value.new_empty(*value.shape, value.shape[-1])


@torch.library.custom_op("jevany_tiny::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    d_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, length, heads, size = query.shape
    gradients = tuple(torch.empty_like(part) for part in (query, key, value, g, beta))
    _backward_kernel[(rows * heads,)](
        query, key, value, g, beta, states, d_out, *gradients, length, heads, size, num_warps=1
    )
    return gradients  # type: ignore[return-value]


@_delta_rule_backward.register_fake
def _(query: Any, key: Any, value: Any, g: Any, beta: Any, states: Any, d_out: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(part) for part in (query, key, value, g, beta))


def _remember(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return _delta_rule_backward(*ctx.saved_tensors, d_out.contiguous())


_delta_rule.register_autograd(_differentiate, setup_context=_remember)


def short_row_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """The gated delta rule over whole rows, differentiable; every state is kept for the backward pass.

    Args:
        query: (B, L, heads, d), d a power of two; not normalised, and so is `key`.
        key: (B, L, heads, d).
        value: (B, L, heads, d).
        g: (B, L, heads), log decay, at most 0.
        beta: (B, L, heads).
        **_: What other implementations take.

    Returns:
        (B, L, heads, d) in the dtype of `query`, and no final state.
    """
    dtype = query.dtype
    query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
    query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    out, _states = _delta_rule(*(part.contiguous() for part in (query, key, value, g, beta)))
    return out.to(dtype), None

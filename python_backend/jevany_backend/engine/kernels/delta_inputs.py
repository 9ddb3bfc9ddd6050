"""What the delta rule takes in, out of one product: convolution, SiLU, unit length, decay and step size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_TOKENS_A_PROGRAM = 16
_UNIT_EPS = 1e-6


@dataclass(frozen=True)
class DeltaShape:
    """How the columns of a packed row are divided: queries, keys, values, output gates, step sizes, decays.

    Attributes:
        keys: Number of query heads and of key heads.
        key_width: Width of each.
        values: Number of value heads, a multiple of the key heads; also of step sizes and decays.
        value_width: Width of each.
    """

    keys: int
    key_width: int
    values: int
    value_width: int

    @property
    def convolved(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.keys * self.key_width + self.values * self.value_width

    @property
    def gate(self) -> slice:
        """Columns of the output gates."""
        return slice(self.convolved, self.convolved + self.values * self.value_width)

    @property
    def columns(self) -> int:
        """All columns."""
        return self.gate.stop + 2 * self.values


@dataclass(frozen=True)
class DeltaInputs:
    """What the delta rule takes in, all contiguous.

    Attributes:
        queries: (n, keys, key_width), of unit length.
        keys: (n, keys, key_width), of unit length.
        values: (n, values, value_width).
        decay: (n, values), float32, logarithm of the decay, at most 0.
        step: (n, values), float32, between 0 and 1.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor


def delta_inputs_twin(
    packed: torch.Tensor,
    shape: DeltaShape,
    filters: torch.Tensor,
    a_log: torch.Tensor,
    time_bias: torch.Tensor,
) -> DeltaInputs:
    """Prepare the inputs of the delta rule (Gated DeltaNet, arXiv 2412.06464, section 3.4).

    Queries, keys and values: a causal convolution of each column over the last taps, then SiLU; queries and keys are
    then divided by ``sqrt(sum(x^2) + 1e-6)``. Decay: ``-exp(a_log) * softplus(a + time_bias)``. Step: ``sigmoid(b)``.
    float32 inside, rounded once.

    Args:
        packed: (n, columns), rows as `DeltaShape` says, contiguous.
        shape: How the columns are divided.
        filters: (convolved, taps), the last tap for the token itself.
        a_log: (values,).
        time_bias: (values,).

    Returns:
        The inputs; queries, keys and values in the input's dtype.
    """
    rows, dtype, taps = len(packed), packed.dtype, filters.shape[1]
    padded = functional.pad(packed[:, : shape.convolved].float(), (0, 0, taps - 1, 0))
    mixed = sum(padded[tap : tap + rows] * filters[:, tap].float() for tap in range(taps))
    mixed = functional.silu(mixed)  # type: ignore[arg-type]
    split = shape.keys * shape.key_width
    queries = mixed[:, :split].reshape(rows, shape.keys, shape.key_width)
    keys = mixed[:, split : 2 * split].reshape(rows, shape.keys, shape.key_width)
    queries, keys = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _UNIT_EPS)).to(dtype) for part in (queries, keys)
    )
    values = mixed[:, 2 * split :].reshape(rows, shape.values, shape.value_width).to(dtype).contiguous()
    step, time = packed[:, shape.gate.stop :].float().chunk(2, dim=-1)
    decay = -a_log.float().exp() * functional.softplus(time + time_bias.float())
    return DeltaInputs(queries, keys, values, decay, step.sigmoid())


def delta_inputs(
    packed: torch.Tensor,
    shape: DeltaShape,
    filters: torch.Tensor,
    a_log: torch.Tensor,
    time_bias: torch.Tensor,
    *,
    early: bool = False,
) -> DeltaInputs:
    """Do as `delta_inputs_twin` in one kernel, a program for one head of a few tokens, and one more for their gates."""
    rows = len(packed)
    queries = packed.new_empty(rows, shape.keys, shape.key_width)
    keys = torch.empty_like(queries)
    values = packed.new_empty(rows, shape.values, shape.value_width)
    decay = packed.new_empty(rows, shape.values, dtype=torch.float32)
    step = torch.empty_like(decay)
    _delta_inputs[(2 * shape.keys + shape.values + 1, triton.cdiv(rows, _TOKENS_A_PROGRAM))](
        packed,
        filters,
        a_log,
        time_bias,
        queries,
        keys,
        values,
        decay,
        step,
        rows,
        packed.stride(0),
        KEYS=shape.keys,
        KEY_WIDTH=shape.key_width,
        VALUES=shape.values,
        VALUE_WIDTH=shape.value_width,
        TAPS=filters.shape[1],
        EPS=_UNIT_EPS,
        TOKENS=_TOKENS_A_PROGRAM,
        BLOCK=triton.next_power_of_2(max(shape.key_width, shape.value_width)),
        GATES=triton.next_power_of_2(shape.values),
        **launch_options(early),
        num_warps=4,
    )
    return DeltaInputs(queries, keys, values, decay, step)


@triton.jit
def _delta_inputs(
    packed,
    filters,
    a_log,
    time_bias,
    queries,
    keys,
    values,
    decay,
    step,
    rows,
    stride,
    KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at = row.to(tl.int64)[:, None] * stride
    convolved = 2 * KEYS * KEY_WIDTH + VALUES * VALUE_WIDTH
    # The compiler wants a name to have one shape in both branches.
    if head == 2 * KEYS + VALUES:
        gate = tl.arange(0, GATES)
        gate_inside = (row < rows)[:, None] & (gate < VALUES)[None, :]
        gates = packed + at + convolved + VALUES * VALUE_WIDTH + gate[None, :]
        size = tl.load(gates, mask=gate_inside, other=0.0).to(tl.float32)
        time = tl.load(gates + VALUES, mask=gate_inside, other=0.0).to(tl.float32)
        time += tl.load(time_bias + gate, mask=gate < VALUES, other=0.0).to(tl.float32)[None, :]
        # softplus, without overflow.
        time = tl.maximum(time, 0.0) + tl.log(1 + tl.exp(-tl.abs(time)))
        rate = tl.exp(tl.load(a_log + gate, mask=gate < VALUES, other=0.0).to(tl.float32))
        gate_place = row[:, None] * VALUES + gate[None, :]
        tl.store(decay + gate_place, -rate[None, :] * time, mask=gate_inside)
        tl.store(step + gate_place, tl.sigmoid(size), mask=gate_inside)
    else:
        is_value = head >= 2 * KEYS
        width = tl.where(is_value, VALUE_WIDTH, KEY_WIDTH)
        start = tl.where(is_value, 2 * KEYS * KEY_WIDTH + (head - 2 * KEYS) * VALUE_WIDTH, head * KEY_WIDTH)
        column = tl.arange(0, BLOCK)
        in_width = column < width
        inside = (row < rows)[:, None] & in_width[None, :]
        mixed = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            weight = tl.load(filters + (start + column) * TAPS + tap, mask=in_width, other=0.0).to(tl.float32)
            source = packed + at - back * stride + start + column[None, :]
            values_there = tl.load(source, mask=inside & (row >= back)[:, None], other=0.0).to(tl.float32)
            mixed += values_there * weight[None, :]
        mixed = mixed * tl.sigmoid(mixed)
        if is_value:
            place = (row[:, None] * VALUES + head - 2 * KEYS) * VALUE_WIDTH + column[None, :]
            tl.store(values + place, mixed.to(values.dtype.element_ty), mask=inside)
        else:
            unit = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=1) + EPS)[:, None]
            if head < KEYS:
                place = (row[:, None] * KEYS + head) * KEY_WIDTH + column[None, :]
                tl.store(queries + place, unit.to(queries.dtype.element_ty), mask=inside)
            else:
                place = (row[:, None] * KEYS + head - KEYS) * KEY_WIDTH + column[None, :]
                tl.store(keys + place, unit.to(keys.dtype.element_ty), mask=inside)

"""The gated delta rule over a row that starts from nothing.

Per value head, with state S (key width x value width), decay a_t = exp(decay_t) and step b_t:
``S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t k_t S_{t-1}))`` and ``o_t = q_t S_t / sqrt(key width)`` (Gated DeltaNet, arXiv
2412.06464, equation 10). Over a chunk that enters with state S, with c the running sum of the chunk's decays and
G_ij = exp(c_i - c_j) for j <= i, the new values u solve a unit triangular system (section 3.3 there):

    (I + tril(b k k^T G, -1)) u = b (v - exp(c) k S)
    o = (exp(c) q S + tril(q k^T G) u) / sqrt(key width)
    S' = exp(c_last) S + (exp(c_last - c) k)^T u

Value head h reads key head h // (value heads / key heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.delta_inputs import DeltaInputs
from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_TWIN_CHUNK = 64


def delta_rule_twin(inputs: DeltaInputs) -> torch.Tensor:
    """Run the rule chunk by chunk in float32.

    Args:
        inputs: The row's inputs.

    Returns:
        (n, values, value_width) in the dtype of the values.
    """
    queries, keys, values = (part.float().transpose(0, 1) for part in (inputs.queries, inputs.keys, inputs.values))
    group = len(values) // len(keys)
    queries, keys = queries.repeat_interleave(group, 0), keys.repeat_interleave(group, 0)
    decay, step = inputs.decay.T, inputs.step.T[..., None]
    state = values.new_zeros(len(values), keys.shape[-1], values.shape[-1])
    outputs = []
    for start in range(0, values.shape[1], _TWIN_CHUNK):
        here = slice(start, start + _TWIN_CHUNK)
        q, k, v, b = queries[:, here], keys[:, here], values[:, here], step[:, here]
        total = decay[:, here].cumsum(-1)
        fade = (total[:, :, None] - total[:, None, :]).exp().tril()
        since, until = total.exp()[..., None], (total[:, -1:] - total).exp()[..., None]
        system = (b * (k @ k.transpose(1, 2)) * fade).tril(-1)
        new = torch.linalg.solve_triangular(system, b * (v - since * (k @ state)), upper=False, unitriangular=True)
        outputs.append(since * (q @ state) + (q @ k.transpose(1, 2) * fade) @ new)
        state = since[:, -1:] * state + (until * k).transpose(1, 2) @ new
    out = torch.cat(outputs, 1) * keys.shape[-1] ** -0.5
    return out.transpose(0, 1).to(inputs.values.dtype).contiguous()


@dataclass(frozen=True)
class DeltaPlan:
    """How our kernels go about it; which is fastest depends on the row's length and the GPU.

    Attributes:
        chunk: Tokens in a chunk: 16, 32 or 64.
        columns: Columns of a value head that one program carries the state of, 16 or more.
        prepared: Whether a kernel of its own inverts the systems of all chunks at once; if not, each program does it
            for the chunk it is at, which saves a launch and a passage through memory, and repeats work.
        base: Rows that are inverted by substitution before products of blocks take over: 1 or 16.
        warps: Warps of a program.
    """

    chunk: int
    columns: int
    prepared: bool
    base: int
    warps: int = 4


# What is measured; the first is taken where nothing can be. Chunks of 64 take the tensor cores' large tiles, and the
# states of 32 columns fit into registers beside them; to invert systems of 64 rows in between, nothing is left.
PLANS = (
    DeltaPlan(chunk=64, columns=32, prepared=True, base=16),
    DeltaPlan(chunk=64, columns=32, prepared=True, base=1),
    DeltaPlan(chunk=64, columns=16, prepared=True, base=1),
    DeltaPlan(chunk=64, columns=64, prepared=True, base=1, warps=8),
    DeltaPlan(chunk=32, columns=32, prepared=True, base=1),
    DeltaPlan(chunk=32, columns=32, prepared=False, base=1),
    DeltaPlan(chunk=16, columns=32, prepared=False, base=1),
    DeltaPlan(chunk=16, columns=64, prepared=False, base=16),
)


def delta_rule(inputs: DeltaInputs, plan: DeltaPlan = PLANS[0], *, early: bool = False) -> torch.Tensor:
    """Do as `delta_rule_twin` in one kernel or two.

    Products take the dtype of the values and add up in float32; the state stays float32.

    Args:
        inputs: The row's inputs, contiguous; both widths powers of two and at least 16.
        plan: How.
        early: Whether to launch early.
    """
    rows, heads, width = inputs.values.shape
    key_heads, key_width = inputs.keys.shape[1:]
    columns = min(plan.columns, width)
    out = torch.empty_like(inputs.values)
    precision = "ieee" if inputs.values.dtype == torch.float32 else "tf32"
    inverses = scores = inputs.values
    if plan.prepared:
        chunks = triton.cdiv(rows, plan.chunk)
        inverses = inputs.values.new_empty(chunks, heads, plan.chunk, plan.chunk)
        scores = torch.empty_like(inverses)
        _prepare[(heads, chunks)](
            inputs.queries,
            inputs.keys,
            inputs.decay,
            inputs.step,
            inverses,
            scores,
            rows,
            key_heads,
            heads,
            KEY_WIDTH=key_width,
            CHUNK=plan.chunk,
            BASE=plan.base,
            DOUBLINGS=(plan.chunk // plan.base).bit_length() - 1,
            PRECISION=precision,
            **launch_options(early),
            num_warps=4,
        )
    _scan[(triton.cdiv(width, columns), heads)](
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.decay,
        inputs.step,
        inverses,
        scores,
        out,
        rows,
        key_heads,
        heads,
        key_width**-0.5,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=width,
        CHUNK=plan.chunk,
        COLUMNS=columns,
        PREPARED=plan.prepared,
        BASE=plan.base,
        DOUBLINGS=(plan.chunk // plan.base).bit_length() - 1,
        PRECISION=precision,
        **launch_options(early),
        num_warps=plan.warps,
        num_stages=2,
    )
    return out


@triton.jit
def _unit_lower_inverse(system, CHUNK: tl.constexpr, BASE: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION):
    """Invert I + system, which is 0 on and above its diagonal: blocks of BASE rows, then twice as many, and so on."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    if BASE > 1:
        # Row i of every block at once: e_i less its coefficients times the rows above it.
        same_block = row // BASE == column // BASE
        for i in range(1, BASE):
            here = (row % BASE == i) & same_block
            coefficients = tl.sum(tl.where(here, system, 0.0), axis=0)
            above = tl.sum(coefficients[:, None] * inverse, axis=0)
            inverse = tl.where(here, inverse - above[None, :], inverse)
    for doubling in tl.static_range(DOUBLINGS):
        # [[P, 0], [R, Q]] has the inverse [[P', 0], [-Q' R P', Q']].
        size = BASE * (1 << doubling)
        corner = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        below = tl.where(corner, system, 0.0)
        if size == 1:
            inverse -= below
        else:
            below = tl.dot(below, inverse, input_precision=PRECISION)
            inverse -= tl.dot(inverse, below, input_precision=PRECISION)
    return inverse


@triton.jit
def _chunk(
    q,
    k,
    total,
    step,
    CHUNK: tl.constexpr,
    BASE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the inverse of a chunk's system and tril(q k^T G), both (CHUNK, CHUNK) float32."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    # Above the diagonal the exponent would be positive, without a bound.
    fade = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
    overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fade
    system = tl.where(row > column, overlap * step[:, None], 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fade
    return _unit_lower_inverse(system, CHUNK, BASE, DOUBLINGS, PRECISION), scores


@triton.jit
def _prepare(
    queries,
    keys,
    decay,
    step,
    inverses,
    scores,
    rows,
    key_heads,
    heads,
    KEY_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BASE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < rows
    place = (token[:, None] * key_heads + head // (heads // key_heads)) * KEY_WIDTH + tl.arange(0, KEY_WIDTH)[None, :]
    q = tl.load(queries + place, mask=inside[:, None], other=0.0)
    k = tl.load(keys + place, mask=inside[:, None], other=0.0)
    total = tl.cumsum(tl.load(decay + token * heads + head, mask=inside, other=0.0), axis=0)
    b = tl.load(step + token * heads + head, mask=inside, other=0.0)
    inverse, score = _chunk(q, k, total, b, CHUNK, BASE, DOUBLINGS, PRECISION)
    square = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    square += (chunk * heads + head) * CHUNK * CHUNK
    tl.store(inverses + square, inverse.to(inverses.dtype.element_ty))
    tl.store(scores + square, score.to(scores.dtype.element_ty))


@triton.jit
def _scan(
    queries,
    keys,
    values,
    decay,
    step,
    inverses,
    scores,
    out,
    rows,
    key_heads,
    heads,
    scale,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREPARED: tl.constexpr,
    BASE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head = tl.program_id(1)
    key_head = head // (heads // key_heads)
    dtype: tl.constexpr = values.dtype.element_ty
    state = tl.zeros([KEY_WIDTH, COLUMNS], tl.float32)
    for start in range(0, rows, CHUNK):
        token = start + tl.arange(0, CHUNK)
        inside = token < rows
        place = (token[:, None] * key_heads + key_head) * KEY_WIDTH + tl.arange(0, KEY_WIDTH)[None, :]
        q = tl.load(queries + place, mask=inside[:, None], other=0.0)
        k = tl.load(keys + place, mask=inside[:, None], other=0.0)
        own = (token[:, None] * heads + head) * VALUE_WIDTH + column
        v = tl.load(values + own, mask=inside[:, None], other=0.0).to(tl.float32)
        log_decay = tl.load(decay + token * heads + head, mask=inside, other=0.0)
        total = tl.cumsum(log_decay, axis=0)
        last = tl.sum(log_decay, axis=0)
        b = tl.load(step + token * heads + head, mask=inside, other=0.0)
        if PREPARED:
            square = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            square += ((start // CHUNK) * heads + head) * CHUNK * CHUNK
            inverse = tl.load(inverses + square)
            score = tl.load(scores + square)
        else:
            inverse, score = _chunk(q, k, total, b, CHUNK, BASE, DOUBLINGS, PRECISION)
            inverse = inverse.to(dtype)
            score = score.to(dtype)
        since = tl.exp(total)[:, None]
        before = state.to(dtype)
        new = b[:, None] * (v - since * tl.dot(k, before, input_precision=PRECISION))
        new = tl.dot(inverse, new.to(dtype), input_precision=PRECISION).to(dtype)
        read = since * tl.dot(q, before, input_precision=PRECISION) + tl.dot(score, new, input_precision=PRECISION)
        tl.store(out + own, (scale * read).to(dtype), mask=inside[:, None])
        kept = (k.to(tl.float32) * tl.exp(last - total)[:, None]).to(dtype)
        state = tl.exp(last) * state + tl.dot(tl.trans(kept), new, input_precision=PRECISION)

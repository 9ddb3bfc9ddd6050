"""Causal attention, with a window if a layer has one, for heads of any width and for some rows alone.

PyTorch's flash kernel knows no window and no head wider than 256, and needs a mask where not every row is a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class FlashPlan:
    """How the work is divided.

    Attributes:
        queries: Rows of a program, all of one head.
        keys: Keys that it takes at a time.
        stages: Blocks of keys that are under way from memory at once.
        warps: Warps of a program.
    """

    queries: int
    keys: int
    stages: int
    warps: int

    def __str__(self) -> str:
        return f"ours {self.queries} x {self.keys}, {self.stages} stages, {self.warps} warps"


_PLANS = (
    FlashPlan(16, 16, 1, 4),
    FlashPlan(16, 32, 2, 4),
    FlashPlan(16, 64, 2, 4),
    FlashPlan(32, 32, 2, 4),
    FlashPlan(32, 64, 2, 4),
    FlashPlan(64, 16, 2, 8),
    FlashPlan(64, 32, 2, 8),
    FlashPlan(64, 64, 2, 4),
    FlashPlan(64, 64, 3, 8),
    FlashPlan(128, 64, 2, 8),
    FlashPlan(128, 64, 3, 8),
    FlashPlan(128, 128, 2, 8),
)
_SUMS_A_WARP = 32 * 128  # Of the 255 registers that a thread can have.
_SHARED_BYTES = 227 << 10


def flash_plans(width: int, itemsize: int = 2) -> list[FlashPlan]:
    """Return what is worth measuring for heads of a width.

    Args:
        width: Columns of a head.
        itemsize: Bytes of a number.
    """
    return [
        plan
        for plan in _PLANS
        # The sums of all rows stay in registers, of which they may take half; queries and blocks lie in shared memory.
        # A GPU with less of it leaves out what does not fit when it is measured.
        if plan.queries * width <= plan.warps * _SUMS_A_WARP
        and (plan.queries + 2 * plan.stages * plan.keys) * width * itemsize <= _SHARED_BYTES
    ]


def flash_attention_twin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attend: ``softmax(scale q k^T) v`` over the keys that a query sees.

    Args:
        query: (m, H, w).
        key: (n, K, w), where K divides H; so many query heads in a row share one.
        value: (n, K, w); of all three a row's stride may be larger.
        positions: (m,) each query's position among the keys, int32 or int64; None for query i at position i.
        window: How many keys a query sees, its own the last of them; None for all up to its own.
        scale: Of the scores.

    Returns:
        (m, H, w) in the same dtype; float32 inside.
    """
    group = query.shape[1] // key.shape[1]
    at = torch.arange(len(query), device=query.device) if positions is None else positions
    behind = at[:, None] - torch.arange(len(key), device=query.device)  # (m, n)
    sees = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("mhw,nhw->hmn", query.float(), keys) * scale
    weights = scores.masked_fill(~sees, float("-inf")).softmax(dim=-1)
    return torch.einsum("hmn,nhw->mhw", weights, values).to(query.dtype)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None,
    window: int | None,
    scale: float,
    plan: FlashPlan,
) -> torch.Tensor:
    """Do as `flash_attention_twin` in one kernel (Dao, arXiv 2307.08691); heads lie side by side in a row."""
    rows, heads, width = query.shape
    out = query.new_empty(rows, heads, width)
    _flash_attention[(triton.cdiv(rows, plan.queries), heads)](
        query,
        key,
        value,
        query if positions is None else positions,
        out,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        rows,
        len(key),
        len(key) if window is None else window,
        scale * 1.4426950408889634,  # exp(x) = 2^(x log2 e)
        HEADS=heads,
        GROUP=heads // key.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        POSITIONS=positions is not None,
        QUERIES=plan.queries,
        KEYS=plan.keys,
        PRECISION="ieee",
        num_stages=plan.stages,
        num_warps=plan.warps,
    )
    return out


@triton.jit(do_not_specialize=["rows", "count", "window"])
def _flash_attention(
    query,
    key,
    value,
    positions,
    out,
    query_stride,
    key_stride,
    value_stride,
    rows,
    count,
    window,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The rows that see the most come first, so that none of them is begun when all others have ended.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    in_rows, in_width = row < rows, column < WIDTH
    position = row
    if POSITIONS:
        position = tl.load(positions + row, mask=in_rows, other=0)
    # Rows beyond the last are not stored, and must not make others see more blocks than they do.
    first = tl.min(tl.where(in_rows, position, count), axis=0)
    last = tl.max(tl.where(in_rows, position, 0), axis=0)
    inside = in_rows[:, None] & in_width[None, :]
    x = tl.load(query + row.to(tl.int64)[:, None] * query_stride + head * WIDTH + column[None, :], mask=inside, other=0)
    keys = key + (head // GROUP) * WIDTH
    values = value + (head // GROUP) * WIDTH
    total = tl.zeros([QUERIES, BLOCK], tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], -1e30, tl.float32)

    # Blocks that some row sees in part, at the window's edge; blocks that every row sees whole; blocks at the diagonal.
    begin = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    whole = tl.cdiv(tl.maximum(last - window + 1, 0), KEYS) * KEYS
    diagonal = tl.maximum((first + 1) // KEYS * KEYS, begin)
    whole = tl.minimum(whole, diagonal)
    end = last + 1
    for block in range(begin, whole, KEYS):
        total, weight, highest = _block(
            x, keys, values, block, position, total, weight, highest, key_stride, value_stride, count, window, scale,
            True, in_width, column, KEYS, PRECISION,
        )  # fmt: skip
    for block in range(whole, diagonal, KEYS):
        total, weight, highest = _block(
            x, keys, values, block, position, total, weight, highest, key_stride, value_stride, count, window, scale,
            False, in_width, column, KEYS, PRECISION,
        )  # fmt: skip
    for block in range(diagonal, end, KEYS):
        total, weight, highest = _block(
            x, keys, values, block, position, total, weight, highest, key_stride, value_stride, count, window, scale,
            True, in_width, column, KEYS, PRECISION,
        )  # fmt: skip
    total = total / weight[:, None]
    place = out + (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _block(
    x,
    keys,
    values,
    block,
    position,
    total,
    weight,
    highest,
    key_stride,
    value_stride,
    count,
    window,
    scale,
    MASKED: tl.constexpr,
    in_width,
    column,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one block of keys into the running sums of all rows."""
    at = block + tl.arange(0, KEYS)
    row = at.to(tl.int64)
    inside = in_width[None, :]
    if MASKED:
        inside = inside & (at < count)[:, None]
    k = tl.load(keys + row[:, None] * key_stride + column[None, :], mask=inside, other=0)
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        behind = position[:, None] - at[None, :]
        # A finite number: a row that sees nothing of its first blocks forgets them at the first key that it sees.
        scores = tl.where((behind >= 0) & (behind < window), scores, -1e30)
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    fading = tl.exp2(highest - higher)
    share = tl.exp2(scores - higher[:, None])
    v = tl.load(values + row[:, None] * value_stride + column[None, :], mask=inside, other=0)
    total = tl.dot(share.to(v.dtype), v, total * fading[:, None], input_precision=PRECISION)
    return total, weight * fading + tl.sum(share, axis=1), higher

"""Normalised and rotated queries and keys out of one product for queries, gates, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_HEADS_A_PROGRAM = 4


@dataclass(frozen=True)
class AttentionShape:
    """How the columns of a packed row are divided.

    A row holds, for each query head, its query and then its gate; after them may follow the keys of all key heads, and
    after those the values.

    Attributes:
        queries: Number of query heads in the row; 0 where it holds keys and values alone.
        keys: Number of key heads; 0 where it holds queries and gates alone.
        width: Width of a head.
    """

    queries: int
    keys: int
    width: int


def qk_norm_rotary_twin(
    packed: torch.Tensor,
    shape: AttentionShape,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each query and key head and rotate its first columns by its position.

    Each head x becomes ``x / sqrt(mean(x^2) + eps) * (1 + weight)``, and of that the first 2 h columns (a, b) become
    ``(a cos - b sin, b cos + a sin)``, with h the width of the tables (Su et al., arXiv 2104.09864, in transformers'
    split into halves). float32 inside, rounded once.

    Args:
        packed: (n, columns), rows as `AttentionShape` says; the row's stride may be larger.
        shape: How the columns are divided.
        query_weight: (width,), stored less one.
        key_weight: (width,), likewise.
        cosine: (positions, h), float32.
        sine: (positions, h), float32.
        positions: (n,) the position of each row, int32 or int64; None for row i at position i.
        eps: Added to the mean square.

    Returns:
        Queries (n, queries, width) and keys (n, keys, width), contiguous, in the input's dtype.
    """
    rows, heads_end = len(packed), 2 * shape.queries * shape.width
    queries = packed[:, :heads_end].reshape(rows, shape.queries, 2, shape.width)[:, :, 0]
    keys = packed[:, heads_end : heads_end + shape.keys * shape.width].reshape(rows, shape.keys, shape.width)
    at = slice(rows) if positions is None else positions.long()
    cosine, sine = cosine[at, None], sine[at, None]

    def turned(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values = heads.float()
        values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps) * (1 + weight.float())
        half = cosine.shape[-1]
        first, second, rest = values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]
        parts = (first * cosine - second * sine, second * cosine + first * sine, rest)
        return torch.cat(parts, dim=-1).to(packed.dtype)

    return turned(queries, query_weight), turned(keys, key_weight)


def qk_norm_rotary(
    packed: torch.Tensor,
    shape: AttentionShape,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor | None,
    eps: float,
    *,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `qk_norm_rotary_twin` in one kernel, a program for a few heads of a row."""
    rows = len(packed)
    queries = packed.new_empty(rows, shape.queries, shape.width)
    keys = packed.new_empty(rows, shape.keys, shape.width)
    _qk_norm_rotary[(rows, triton.cdiv(shape.queries + shape.keys, _HEADS_A_PROGRAM))](
        packed,
        query_weight,
        key_weight,
        cosine,
        sine,
        cosine if positions is None else positions,
        queries,
        keys,
        packed.stride(0),
        eps,
        QUERIES=shape.queries,
        KEYS=shape.keys,
        WIDTH=shape.width,
        HALF=cosine.shape[1],
        POSITIONS=positions is not None,
        HEADS=_HEADS_A_PROGRAM,
        BLOCK=triton.next_power_of_2(shape.width),
        **launch_options(early),
        num_warps=4,
    )
    return queries, keys


@triton.jit
def _qk_norm_rotary(
    packed,
    query_weight,
    key_weight,
    cosine,
    sine,
    positions,
    queries,
    keys,
    stride,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    is_query = head < QUERIES
    # A query's head takes two widths, the second of which is its gate.
    start = tl.where(is_query, 2 * head * WIDTH, (QUERIES + head) * WIDTH)
    inside = (head < QUERIES + KEYS)[:, None] & (column < WIDTH)[None, :]
    source = packed + row * stride + start[:, None]
    values = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    # The column that a rotated one is mixed with; the others are mixed with nothing, by a sine of 0.
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    rotated = column < 2 * HALF
    partner = tl.where(rotated, partner, column)
    other = tl.load(source + partner[None, :], mask=inside & rotated[None, :], other=0.0).to(tl.float32)

    in_width = column < WIDTH
    of_query = 1 + tl.load(query_weight + column, mask=in_width, other=0.0).to(tl.float32)
    of_key = 1 + tl.load(key_weight + column, mask=in_width, other=0.0).to(tl.float32)
    of_query_partner = 1 + tl.load(query_weight + partner, mask=in_width, other=0.0).to(tl.float32)
    of_key_partner = 1 + tl.load(key_weight + partner, mask=in_width, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    partner_weight = tl.where(is_query[:, None], of_query_partner[None, :], of_key_partner[None, :])

    position = row
    if POSITIONS:
        position = tl.load(positions + row).to(tl.int64)
    pair = position * HALF + column % HALF
    cos = tl.load(cosine + pair, mask=rotated, other=1.0)
    sin = tl.load(sine + pair, mask=rotated, other=0.0)
    sin = tl.where(column < HALF, -sin, sin)
    turned = values * scale * weight * cos[None, :] + other * scale * partner_weight * sin[None, :]

    to_query = queries + (row * QUERIES + head[:, None]) * WIDTH + column[None, :]
    tl.store(to_query, turned.to(queries.dtype.element_ty), mask=inside & is_query[:, None])
    to_key = keys + (row * KEYS + head[:, None] - QUERIES) * WIDTH + column[None, :]
    tl.store(to_key, turned.to(keys.dtype.element_ty), mask=inside & (head >= QUERIES)[:, None])

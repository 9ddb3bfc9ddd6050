"""Normalised and rotated queries and keys out of one product for queries, gates, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.early_launch import launch_options, wait_for_predecessor

_HEADS_A_PROGRAM = 4


@dataclass(frozen=True)
class AttentionShape:
    """How the columns of a packed row are divided.

    A row holds the queries of all query heads, with their gates if there are any; after them may follow the keys of all
    key heads, and after those the values.

    Attributes:
        queries: Number of query heads in the row; 0 where it holds keys and values alone.
        keys: Number of key heads; 0 where it holds queries and gates alone.
        width: Width of a head.
        gates: Where the gates are: each beside its query, or all behind all queries.
        values_normed: Whether values are normalised too, by their mean square alone.
    """

    queries: int
    keys: int
    width: int
    gates: Literal["beside", "behind", "none"] = "beside"
    values_normed: bool = False

    @property
    def query_stride(self) -> int:
        """Columns from one query to the next."""
        return self.width * (2 if self.gates == "beside" else 1)

    @property
    def keys_begin(self) -> int:
        """Columns before the keys."""
        return self.queries * self.width * (1 if self.gates == "none" else 2)


@dataclass(frozen=True)
class Rotary:
    """The angles of rotary position embedding.

    Attributes:
        cosine: (positions, h), float32.
        sine: (positions, h), float32.
    """

    cosine: torch.Tensor
    sine: torch.Tensor


def qk_norm_rotary_twin(
    packed: torch.Tensor,
    shape: AttentionShape,
    query_norm: Norm,
    key_norm: Norm,
    rotary: Rotary | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise each query and key head and rotate its first columns by its position.

    Of each normalised head the first 2 h columns (a, b) become ``(a cos - b sin, b cos + a sin)``, with h the width of
    the tables (Su et al., arXiv 2104.09864, in transformers' split into halves). float32 inside, rounded once.

    Args:
        packed: (n, columns), rows as `shape` says; the row's stride may be larger.
        shape: How the columns are divided.
        query_norm: Of each query, weight (width,).
        key_norm: Of each key, weight (width,); its eps is that of values that are normalised.
        rotary: The tables, or None for a layer without positions.
        positions: (n,) the position of each row, int32 or int64; None for row i at position i.

    Returns:
        Queries (n, queries, width) and keys (n, keys, width), contiguous, in the input's dtype; and values
        (n, keys, width): contiguous if they are normalised, else a view of the input.
    """
    rows, width = len(packed), shape.width
    queries = packed[:, : shape.queries * shape.query_stride].reshape(rows, shape.queries, shape.query_stride)
    queries = queries[..., :width]
    keys = packed[:, shape.keys_begin : shape.keys_begin + shape.keys * width].reshape(rows, shape.keys, width)
    values = _values(packed, shape)
    at = slice(rows) if positions is None else positions.long()

    def normed(heads: torch.Tensor, norm: Norm) -> torch.Tensor:
        scale = torch.rsqrt(heads.float().square().mean(dim=-1, keepdim=True) + norm.eps)
        return heads.float() * scale * norm.weight.float()

    def turned(heads: torch.Tensor) -> torch.Tensor:
        if rotary is None:
            return heads.to(packed.dtype)
        cosine, sine = rotary.cosine[at, None], rotary.sine[at, None]
        half = cosine.shape[-1]
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        parts = (first * cosine - second * sine, second * cosine + first * sine, rest)
        return torch.cat(parts, dim=-1).to(packed.dtype)

    if shape.values_normed:
        plain = Norm(torch.ones(width, device=packed.device), key_norm.eps)
        values = normed(values, plain).to(packed.dtype)
    return turned(normed(queries, query_norm)), turned(normed(keys, key_norm)), values


def _values(packed: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    if not shape.keys:
        return packed.new_empty(len(packed), 0, shape.width)
    begin = shape.keys_begin + shape.keys * shape.width
    return packed[:, begin : begin + shape.keys * shape.width].unflatten(1, (shape.keys, shape.width))


def qk_norm_rotary(
    packed: torch.Tensor,
    shape: AttentionShape,
    query_norm: Norm,
    key_norm: Norm,
    rotary: Rotary | None,
    positions: torch.Tensor | None,
    *,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as `qk_norm_rotary_twin` in one kernel, a program for a few heads of a row."""
    rows = len(packed)
    queries = packed.new_empty(rows, shape.queries, shape.width)
    keys = packed.new_empty(rows, shape.keys, shape.width)
    values = torch.empty_like(keys) if shape.values_normed else _values(packed, shape)
    heads = shape.queries + shape.keys * (2 if shape.values_normed else 1)
    _qk_norm_rotary[(rows, triton.cdiv(heads, _HEADS_A_PROGRAM))](
        packed,
        query_norm.weight,
        key_norm.weight,
        packed if rotary is None else rotary.cosine,
        packed if rotary is None else rotary.sine,
        packed if positions is None else positions,
        queries,
        keys,
        values,
        packed.stride(0),
        query_norm.eps,
        key_norm.eps,
        QUERIES=shape.queries,
        KEYS=shape.keys,
        QUERY_STRIDE=shape.query_stride,
        KEYS_BEGIN=shape.keys_begin,
        WIDTH=shape.width,
        HALF=0 if rotary is None else rotary.cosine.shape[1],
        POSITIONS=positions is not None,
        VALUES=shape.values_normed,
        HEADS=_HEADS_A_PROGRAM,
        BLOCK=triton.next_power_of_2(shape.width),
        **launch_options(early),
        num_warps=4,
    )
    return queries, keys, values


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
    values,
    stride,
    query_eps,
    key_eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEYS_BEGIN: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    POSITIONS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    is_query = head < QUERIES
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    # Values stand behind the keys, head by head, so that a key's or a value's place goes by one formula.
    start = tl.where(is_query, head * QUERY_STRIDE, KEYS_BEGIN + (head - QUERIES) * WIDTH)
    in_width = column < WIDTH
    inside = (head < QUERIES + KEYS + (KEYS if VALUES else 0))[:, None] & in_width[None, :]
    source = packed + row * stride + start[:, None]
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + tl.where(is_query, query_eps, key_eps))[:, None]
    of_query = tl.load(query_weight + column, mask=in_width, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, mask=in_width, other=0.0).to(tl.float32)
    result = x * scale * _weight(is_query, is_key, of_query, of_key)
    if HALF > 0:
        # The column that a rotated one is mixed with.
        rotated = column < 2 * HALF
        partner = tl.where(rotated, tl.where(column < HALF, column + HALF, column - HALF), column)
        other = tl.load(source + partner[None, :], mask=inside & rotated[None, :], other=0.0).to(tl.float32)
        of_query = tl.load(query_weight + partner, mask=in_width, other=0.0).to(tl.float32)
        of_key = tl.load(key_weight + partner, mask=in_width, other=0.0).to(tl.float32)
        other = other * scale * _weight(is_query, is_key, of_query, of_key)
        position = row
        if POSITIONS:
            position = tl.load(positions + row).to(tl.int64)
        pair = position * HALF + column % HALF
        cos = tl.load(cosine + pair, mask=rotated, other=1.0)
        sin = tl.load(sine + pair, mask=rotated, other=0.0)
        sin = tl.where(column < HALF, -sin, sin)
        turns = (is_query | is_key)[:, None]
        result = tl.where(turns, result * cos[None, :] + other * sin[None, :], result)

    to_query = queries + (row * QUERIES + head[:, None]) * WIDTH + column[None, :]
    tl.store(to_query, result.to(queries.dtype.element_ty), mask=inside & is_query[:, None])
    to_key = keys + (row * KEYS + head[:, None] - QUERIES) * WIDTH + column[None, :]
    tl.store(to_key, result.to(keys.dtype.element_ty), mask=inside & is_key[:, None])
    if VALUES:
        to_value = values + (row * KEYS + head[:, None] - QUERIES - KEYS) * WIDTH + column[None, :]
        tl.store(to_value, result.to(values.dtype.element_ty), mask=inside & (head >= QUERIES + KEYS)[:, None])


@triton.jit
def _weight(is_query, is_key, of_query, of_key):
    of_key = tl.where(is_key[:, None], of_key[None, :], 1.0)
    return tl.where(is_query[:, None], of_query[None, :], of_key)

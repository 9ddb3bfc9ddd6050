"""What the families' forward passes share: packed weights, norms, and attention over all rows or for some alone.

Sizes in the comments: d the hidden size, f the MLP's, H and K the query and key heads of attention, w their width; n
the tokens of the row, R the rows that are read.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from jevany_backend.engine.attention_choice import Attention
from jevany_backend.engine.kernels import TWINS, Kernels
from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape, Rotary
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product, ProductPlan, plan_product

# Rows of a product where only those that are read are multiplied: the grid's number of them, or several times that for
# a question of very many options.
_READ_ROWS = 256


@dataclass(frozen=True)
class Mlp:
    """A layer's second half.

    Attributes:
        norm: In front of it, (d,).
        gate_up: d -> 2 f.
        down: f -> d.
    """

    norm: Norm
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class AttentionPart:
    """The attention of a layer.

    Attributes:
        shape: How the columns of its products are divided, as if they were one.
        inputs: d -> queries, their gates if there are any, keys and values; in a layer where only some rows are
            queries, d -> keys and values; None where another layer's keys and values serve.
        queries: In a layer where only some rows are queries d -> queries and their gates, else None.
        query_norm: (w,).
        key_norm: (w,).
        rotary: None for a layer without positions.
        attention: Of all layers of its kind.
        output: H w -> d.
    """

    shape: AttentionShape
    inputs: Product | None
    queries: Product | None
    query_norm: Norm
    key_norm: Norm
    rotary: Rotary | None
    attention: Attention
    output: Product


class Choice(Protocol):
    """What was chosen by measurement for rows of which length."""

    rows: list[int]
    names: list[str]


class Decoder(abc.ABC):
    """A text decoder: token ids in, final hidden states of the rows that are read out.

    Args:
        model: transformers' text model. Its weights are taken out of it layer by layer; it cannot run afterwards.
        measured: Times what can be done in several ways.
        longest: The longest row, padding included.
        fused: Whether the fused kernels run, or their twins.

    Attributes:
        kernels: What runs between products.
        choices: What was chosen by length, by its name.

    Raises:
        ValueError: A variant of the family that is not computed here.
    """

    def __init__(self, model: Any, measured: Measured, longest: int, *, fused: bool) -> None:
        self.measured = measured
        self.longest = longest
        self.fused = fused
        self.kernels: Kernels = TWINS
        self.choices: dict[str, Choice] = {}
        self.embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        # By outputs, inputs, whether the reader adds up parts, and rows: a plan in parts is of no use to any other.
        self.plans: dict[tuple[int, int, bool, int], ProductPlan] = {}

    @abc.abstractmethod
    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Run one row.

        Args:
            ids: (n,) token ids, int32 or int64, on the model's device; token i stands at position i.
            reads: (R,) the positions whose states are wanted, int32 or int64; they may repeat.

        Returns:
            (R, d), the final hidden states there, in the model's dtype.
        """

    @property
    def early(self) -> bool:
        """Whether the fused kernels are launched early."""
        return isinstance(self.kernels.glu, partial)

    @property
    def width(self) -> int:
        """The hidden size."""
        return self.embedding.shape[1]

    def rotary(self, model: Any, positions: torch.Tensor, *layer_type: str) -> Rotary:
        """Return the angles of all positions, float32, from transformers' own."""
        like = torch.empty(0, dtype=torch.float32, device=self.embedding.device)
        tables = model.rotary_emb(like, positions, *layer_type)
        return Rotary(*(table[0, :, : table.shape[-1] // 2].contiguous() for table in tables))

    def positions(self) -> torch.Tensor:
        """Return (1, longest), the positions of the longest row."""
        return torch.arange(self.longest, device=self.embedding.device)[None]

    def release(self) -> None:
        """Give back what timing took, and the parts of what has been packed.

        The parts are too small for the next packed weight: kept by the allocator, they would in the end be a second
        copy of the model.
        """
        if self.embedding.is_cuda:
            torch.cuda.empty_cache()

    def product(self, *linears: Any, summed: bool = False, of_reads: bool = False) -> Product:
        """Pack projections that share an input; weights of one shape share a plan, if their readers are alike.

        Args:
            linears: Whose outputs stand side by side.
            summed: Whether `add_rms_norm` takes the product.
            of_reads: Whether only rows that are read are multiplied.
        """
        shape = (sum(linear.weight.shape[0] for linear in linears), linears[0].weight.shape[1])
        rows = _READ_ROWS if of_reads else self.longest
        key = (*shape, summed, rows)
        if key not in self.plans:
            self.plans[key] = plan_product(self.measured, shape, linears[0].weight.dtype, rows, summed=summed)
            self.measured.keep()  # A start that is cut short shall not measure all this again.
            self.release()
        return Product(linears, self.plans[key])

    def mlp(self, source: Any, norm: Norm, *, of_reads: bool = False) -> Mlp:
        """Pack a layer's second half."""
        return Mlp(
            norm,
            self.product(source.gate_proj, source.up_proj, of_reads=of_reads),
            self.product(source.down_proj, summed=True, of_reads=of_reads),
        )

    def run_mlp(self, mlp: Mlp, normed: torch.Tensor, activation: str) -> torch.Tensor:
        """Return what the second half adds, for its normed input (n, d): (n, d), or parts of it."""
        gate, up = mlp.gate_up(normed).chunk(2, dim=1)
        return mlp.down(self.kernels.glu(gate, up, activation))

    def attention_part(
        self,
        queries: Sequence[Any],
        keys_values: Sequence[Any],
        output: Any,
        norms: tuple[Norm, Norm],
        rotary: Rotary | None,
        attention: Attention,
        *,
        of_reads: bool,
    ) -> AttentionPart:
        """Pack a layer's attention.

        Args:
            queries: The projections to queries and gates.
            keys_values: Those to keys and values; empty where another layer's serve.
            output: The projection behind.
            norms: Of queries and of keys.
            rotary: None for a layer without positions.
            attention: Of its kind.
            of_reads: Whether only rows that are read are queries.
        """
        inputs = keys_values if of_reads else [*queries, *keys_values]
        return AttentionPart(
            attention.shape,
            self.product(*inputs) if inputs else None,
            self.product(*queries, of_reads=True) if of_reads else None,
            *norms,
            rotary,
            attention,
            self.product(output, summed=True, of_reads=of_reads),
        )

    def attend(
        self,
        part: AttentionPart,
        normed: torch.Tensor,
        reads: torch.Tensor | None,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Run a layer's attention.

        Args:
            part: The layer's.
            normed: (n, d); where keys and values are `shared`, (R, d), those of the rows that are read.
            reads: (R,) where only these rows are queries, else None.
            shared: Another layer's keys and values.

        Returns:
            What it adds, (n, d) or (R, d) or parts of it; and keys and values, (n, K, w) each.
        """
        shape, norms = part.shape, (part.query_norm, part.key_norm)
        if reads is None:
            assert part.inputs is not None
            packed = part.inputs(normed)
            query, key, value = self.kernels.qk_norm_rotary(packed, shape, *norms, part.rotary, None)
            return self._leave(part, part.attention(query, key, value), packed), (key, value)
        if shared is None:
            assert part.inputs is not None
            only_keys = replace(shape, queries=0)
            _, key, value = self.kernels.qk_norm_rotary(part.inputs(normed), only_keys, *norms, part.rotary, None)
            normed = normed.index_select(0, reads)
        else:
            key, value = shared
        assert part.queries is not None
        packed = part.queries(normed)
        only_queries = replace(shape, keys=0, values_normed=False)
        query, _, _ = self.kernels.qk_norm_rotary(packed, only_queries, *norms, part.rotary, reads)
        return self._leave(part, part.attention.of_rows(query, key, value, reads), packed), (key, value)

    def _leave(self, part: AttentionPart, attended: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        if part.shape.gates == "none":
            return part.output(attended.flatten(1))
        return part.output(self.kernels.sigmoid_gate(attended, packed, part.shape))


def require(config: Any, layer_types: Collection[str], **settings: object) -> None:
    """Check that a model is of the variant that is computed here.

    Args:
        config: The text decoder's configuration.
        layer_types: What its layers may be.
        settings: Other settings, by name, that must have these values.

    Raises:
        ValueError: It is another; the message names the setting.
    """
    if other := set(config.layer_types) - set(layer_types):
        raise ValueError(f"layers of {', '.join(sorted(other))}")
    for name, value in settings.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} {getattr(config, name)!r}")


def centred(norm: Any, eps: float) -> Norm:
    """Return a norm whose weight is stored less one."""
    return Norm(1 + norm.weight.detach().float(), eps)


def plain(norm: Any, eps: float) -> Norm:
    """Return a norm whose weight is stored as it is."""
    return Norm(norm.weight.detach(), eps)

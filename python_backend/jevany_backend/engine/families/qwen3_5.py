"""The Qwen3.5 family: three layers of gated delta rule, then one of full attention, and so on.

What stands here is the whole text decoder for one row of n tokens. Every layer is causal, so tokens behind the row
change nothing in it and need no mask. Only some rows of the last layer are read: there, everything that concerns a row
alone is computed for those. Sizes in the comments: d the hidden size, f the MLP's, H and K the query and key heads of
full attention, w their width; R the rows that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jevany_backend.engine.attention_choice import CausalAttention
from jevany_backend.engine.delta_choice import DeltaRule
from jevany_backend.engine.early_choice import choose_launch
from jevany_backend.engine.kernels import TWINS
from jevany_backend.engine.kernels.delta_inputs import DeltaShape
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product, ProductPlan, plan_product

_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Mlp:
    """A layer's second half.

    Attributes:
        norm: (d,).
        gate_up: d -> 2 f.
        down: f -> d.
    """

    norm: torch.Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class DeltaLayer:
    """A layer of the gated delta rule.

    Attributes:
        norm: (d,).
        inputs: d -> the columns of `DeltaShape`.
        filters: (convolved columns, taps).
        a_log: (value heads,).
        time_bias: (value heads,).
        head_norm: (value width,).
        output: value heads * value width -> d.
        mlp: The second half.
    """

    norm: torch.Tensor
    inputs: Product
    filters: torch.Tensor
    a_log: torch.Tensor
    time_bias: torch.Tensor
    head_norm: torch.Tensor
    output: Product
    mlp: Mlp


@dataclass(frozen=True)
class AttentionLayer:
    """A layer of full attention.

    Attributes:
        norm: (d,).
        inputs: d -> 2 H w + 2 K w: each head's query and gate, then keys, then values; in the last layer, where only
            some rows are queries, d -> 2 K w.
        queries: In the last layer d -> 2 H w, else None.
        query_norm: (w,).
        key_norm: (w,).
        output: H w -> d.
        mlp: The second half.
    """

    norm: torch.Tensor
    inputs: Product
    queries: Product | None
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    output: Product
    mlp: Mlp


class Qwen35:
    """The text decoder: token ids in, final hidden states of the rows that are read out.

    Args:
        model: transformers' text model. Its weights are taken out of it layer by layer; it cannot run afterwards.
        measured: Times what can be done in several ways.
        longest: The longest row, padding included.
        fused: Whether the fused kernels run, or their twins.

    Raises:
        ValueError: A variant of the family that is not computed here.
    """

    def __init__(self, model: Any, measured: Measured, longest: int, *, fused: bool) -> None:
        config: Any = model.config
        if config.hidden_act != "silu" or config.attention_bias:
            raise ValueError(f"hidden_act {config.hidden_act!r} with attention_bias {config.attention_bias}")
        self.measured = measured
        self.eps: float = config.rms_norm_eps
        self.delta = DeltaShape(
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            config.linear_num_value_heads,
            config.linear_value_head_dim,
        )
        self.attention = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        dtype = model.get_input_embeddings().weight.dtype
        self.causal_attention = CausalAttention(measured, self.attention, dtype, longest)
        self.kernels = TWINS
        self.delta_rule: DeltaRule | None = None
        if fused:
            kernels = choose_launch(measured, self.delta, dtype)
            self.delta_rule = DeltaRule(measured, self.delta, dtype, longest, kernels.delta_rule)
            self.kernels = replace(kernels, delta_rule=self.delta_rule)
        self.cosine, self.sine = _rotary_tables(model, longest)
        packer = _Packer(measured, longest)
        self.embedding = model.get_input_embeddings().weight.detach()
        self.layers: list[DeltaLayer | AttentionLayer] = []
        for index in range(config.num_hidden_layers):
            self.layers.append(packer.layer(model, index))
            # The parts of a packed weight are too small for the next one: kept by the allocator, they would in the end
            # be a second copy of the model.
            if self.embedding.is_cuda:
                torch.cuda.empty_cache()
        self.norm = model.norm.weight.detach()
        self.plans = packer.plans
        measured.keep()

    @property
    def early(self) -> bool:
        """Whether the fused kernels are launched early."""
        return isinstance(self.kernels.swiglu, partial)

    @property
    def width(self) -> int:
        """The hidden size."""
        return self.embedding.shape[1]

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Run one row.

        Args:
            ids: (n,) token ids, int32 or int64, on the model's device; token i stands at position i.
            reads: (R,) the positions whose states are wanted, int32 or int64; they may repeat.

        Returns:
            (R, d), the final hidden states there, in the model's dtype.
        """
        kernels = self.kernels
        residual = functional.embedding(ids, self.embedding)  # (n, d)
        update = None  # What the half layer before has yet to add to the residual stream.
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            normed = kernels.add_rms_norm(residual, update, layer.norm, self.eps)
            if isinstance(layer, DeltaLayer):
                update = self._delta(layer, normed, reads if last else None)
            else:
                update = self._attend(layer, normed, reads if last else None)
            if last:
                residual = residual.index_select(0, reads)  # From here on (R, d).
            normed = kernels.add_rms_norm(residual, update, layer.mlp.norm, self.eps)
            update = layer.mlp.down(kernels.swiglu(layer.mlp.gate_up(normed)))
        return kernels.add_rms_norm(residual, update, self.norm, self.eps)

    def _delta(self, layer: DeltaLayer, normed: torch.Tensor, reads: torch.Tensor | None) -> torch.Tensor:
        packed = layer.inputs(normed)
        inputs = self.kernels.delta_inputs(packed, self.delta, layer.filters, layer.a_log, layer.time_bias)
        heads = self.kernels.delta_rule(inputs)
        gate = packed[:, self.delta.gate]
        if reads is not None:
            heads, gate = heads.index_select(0, reads), gate.index_select(0, reads)
        return layer.output(self.kernels.gated_rms_norm(heads, gate, layer.head_norm, self.eps))

    def _attend(self, layer: AttentionLayer, normed: torch.Tensor, reads: torch.Tensor | None) -> torch.Tensor:
        packed = layer.inputs(normed)
        if layer.queries is None or reads is None:
            query, key = self._turn(layer, packed, self.attention, None)
            attended = self.causal_attention(query, key, self._values(packed))  # (n, H, w)
            return layer.output(self.kernels.sigmoid_gate(attended, packed))
        _, key = self._turn(layer, packed, replace(self.attention, queries=0), None)
        packed_queries = layer.queries(normed.index_select(0, reads))
        query, _ = self._turn(layer, packed_queries, replace(self.attention, keys=0), reads)
        attended = self._read_attention(query, key, self._values(packed), reads)  # (R, H, w)
        return layer.output(self.kernels.sigmoid_gate(attended, packed_queries))

    def _turn(
        self, layer: AttentionLayer, packed: torch.Tensor, shape: AttentionShape, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms = (layer.query_norm, layer.key_norm)
        return self.kernels.qk_norm_rotary(packed, shape, *norms, self.cosine, self.sine, positions, self.eps)

    def _values(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the values of a packed row, its last columns, as a view (n, K, w)."""
        return packed[:, -self.attention.keys * self.attention.width :].unflatten(1, (self.attention.keys, -1))

    def _read_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reads: torch.Tensor
    ) -> torch.Tensor:
        # The R queries of the heads that share a key head stand below each other: one plain attention a key head.
        count, group = len(query), self.attention.queries // self.attention.keys
        query = query.unflatten(1, (self.attention.keys, group)).permute(1, 2, 0, 3).flatten(1, 2)  # (K, g R, w)
        sees = torch.arange(len(key), device=key.device) <= reads[:, None]  # (R, n)
        with sdpa_kernel(_MASKED, set_priority=True):
            attended = functional.scaled_dot_product_attention(
                query[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=sees.repeat(group, 1).expand(1, self.attention.keys, -1, -1),
            )[0]
        return attended.unflatten(1, (group, count)).permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _rotary_tables(model: Any, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of all positions, (longest, half the rotated columns), float32."""
    device = model.get_input_embeddings().weight.device
    # In text the three planes of a position, meant for time, height and width in pictures, are equal.
    positions = torch.arange(longest, device=device).expand(3, 1, -1)
    tables = model.rotary_emb(torch.empty(0, dtype=torch.float32, device=device), positions)
    cosine, sine = (table[0, :, : table.shape[-1] // 2].contiguous() for table in tables)
    return cosine, sine


class _Packer:
    """Takes the layers out of a model, one by one; weights of one shape share a plan, if their readers are alike."""

    def __init__(self, measured: Measured, longest: int) -> None:
        self.measured = measured
        self.longest = longest
        # By outputs, inputs and whether the reader adds up parts: a plan in parts is of no use to any other reader.
        self.plans: dict[tuple[int, int, bool], ProductPlan] = {}

    def layer(self, model: Any, index: int) -> DeltaLayer | AttentionLayer:
        source = model.layers[index]
        last = index == len(model.layers) - 1
        mlp = Mlp(
            source.post_attention_layernorm.weight.detach(),
            self.product(source.mlp.gate_proj, source.mlp.up_proj),
            self.product(source.mlp.down_proj, summed=True),
        )
        norm = source.input_layernorm.weight.detach()
        if source.block_type == "linear_attention":
            mixer = source.linear_attn
            return DeltaLayer(
                norm,
                self.product(mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a),
                mixer.conv1d.weight.detach().squeeze(1).contiguous(),
                mixer.A_log.detach(),
                mixer.dt_bias.detach(),
                mixer.norm.weight.detach(),
                self.product(mixer.out_proj, summed=True),
                mlp,
            )
        mixer = source.self_attn
        keys_values = (mixer.k_proj, mixer.v_proj)
        return AttentionLayer(
            norm,
            self.product(*keys_values) if last else self.product(mixer.q_proj, *keys_values),
            self.product(mixer.q_proj) if last else None,
            mixer.q_norm.weight.detach(),
            mixer.k_norm.weight.detach(),
            self.product(mixer.o_proj, summed=True),
            mlp,
        )

    def product(self, *linears: Any, summed: bool = False) -> Product:
        shape = (sum(linear.weight.shape[0] for linear in linears), linears[0].weight.shape[1])
        key = (*shape, summed)
        if key not in self.plans:
            dtype = linears[0].weight.dtype
            self.plans[key] = plan_product(self.measured, shape, dtype, self.longest, summed=summed)
        return Product(linears, self.plans[key])

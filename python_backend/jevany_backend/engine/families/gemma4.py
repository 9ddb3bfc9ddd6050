"""The Gemma 4 family: five layers of attention in a window, then one of full attention, and so on.

What stands here is the whole text decoder for one row of n tokens. Every layer is causal, so tokens behind the row
change nothing in it. What either half of a layer adds is normalised before it is added, and a third part adds what the
layer makes of the token's per-layer embedding. The last layers take keys and values from the last layers of their kind
that make some. From the last such layer on, only the rows that are read are computed. Sizes are named as in `decoder`;
p is the width of a per-layer embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from jevany_backend.engine.attention_choice import Attention
from jevany_backend.engine.families.decoder import AttentionPart, Decoder, Mlp, plain, require
from jevany_backend.engine.kernels import FUSED
from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape, Rotary
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        kind: Of its attention, as transformers names it.
        norm: In front of attention, (d,).
        attention: The first half.
        attention_norm: Of what attention adds, (d,).
        mlp: The second half.
        mlp_norm: Of what the MLP adds, (d,).
        gate: d -> p, what the stream lets through of the per-layer embedding.
        projection: p -> d, behind it.
        projection_norm: Of what that adds, (d,).
        scale: (1,), of the stream behind the layer.
    """

    kind: str
    norm: Norm
    attention: AttentionPart
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm
    gate: Product
    projection: Product
    projection_norm: Norm
    scale: torch.Tensor


class Gemma4(Decoder):
    """The text decoder; see `Decoder`."""

    def __init__(self, model: Any, measured: Measured, longest: int, *, fused: bool) -> None:
        super().__init__(model, measured, longest, fused=fused)
        config: Any = model.config
        require(
            config,
            ("sliding_attention", "full_attention"),
            hidden_activation="gelu_pytorch_tanh",
            attention_bias=False,
            attention_k_eq_v=False,
            enable_moe_block=False,
        )
        if config.use_bidirectional_attention == "all":
            raise ValueError("use_bidirectional_attention 'all'")
        if not config.hidden_size_per_layer_input:
            raise ValueError("no per-layer embeddings")
        self.eps: float = config.rms_norm_eps
        self.activation: str = config.hidden_activation
        self.embedding_scale = float(model.embed_tokens.embed_scale.to(self.embedding.dtype))
        self.layer_table: torch.Tensor = model.embed_tokens_per_layer.weight.detach()  # (vocabulary, layers p)
        self.layer_projection = self.product(model.per_layer_model_projection)  # d -> layers p
        self.layer_projection_norm = plain(model.per_layer_projection_norm, self.eps)
        if fused:
            self.kernels = FUSED
        # Layers before this one make keys and values; from the last of them on, only rows that are read are computed.
        shared_from = config.num_hidden_layers - config.num_kv_shared_layers
        self.reads_from = shared_from - 1
        self.kinds = {kind: self._kind(model, kind) for kind in sorted(set(config.layer_types))}
        self.layers: list[Layer] = []
        for index in range(config.num_hidden_layers):
            self.layers.append(self._layer(model, index, shared_from))
            self.release()
        self.norm = plain(model.norm, self.eps)
        measured.keep()

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Run one row; see `Decoder`."""
        add_rms_norm, glu = self.kernels.add_rms_norm, self.kernels.glu
        residual = functional.embedding(ids, self.embedding) * self.embedding_scale  # (n, d)
        projected = self.layer_projection(residual)
        of_layers = self.kernels.per_layer_inputs(
            projected, ids, self.layer_table, self.layer_projection_norm, self.width**-0.5
        )  # (n, layers, p)
        made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # Keys and values, by the kind of attention.
        update, update_norm, scale = None, None, None  # What the part before has yet to add to the residual stream.
        for index, layer in enumerate(self.layers):
            normed = add_rms_norm(residual, update, layer.norm, delta_norm=update_norm, scale=scale)
            shared = made.get(layer.kind) if layer.attention.inputs is None else None
            only = reads if index >= self.reads_from else None
            update, made[layer.kind] = self.attend(layer.attention, normed, only, shared)
            if index == self.reads_from:  # From here on (R, d) and (R, layers, p).
                residual, of_layers = residual.index_select(0, reads), of_layers.index_select(0, reads)
            normed = add_rms_norm(residual, update, layer.mlp.norm, delta_norm=layer.attention_norm)
            update = self.run_mlp(layer.mlp, normed, self.activation)
            residual = add_rms_norm(residual, update, None, delta_norm=layer.mlp_norm)
            update = layer.projection(glu(layer.gate(residual), of_layers[:, index], self.activation))
            update_norm, scale = layer.projection_norm, layer.scale
        return add_rms_norm(residual, update, self.norm, delta_norm=update_norm, scale=scale)

    def _kind(self, model: Any, kind: str) -> tuple[Attention, Rotary]:
        """Make what the layers of one kind share: their attention and their angles."""
        config = model.config
        of_kind = config.per_layer_config[kind]
        shape = AttentionShape(
            config.num_attention_heads, of_kind.num_key_value_heads, of_kind.head_dim, "none", values_normed=True
        )
        attention = Attention(
            self.measured,
            shape,
            self.embedding.dtype,
            self.longest,
            window=config.sliding_window if kind == "sliding_attention" else None,
            scale=1.0,
        )
        if self.fused:
            self.choices["windowed_attention" if attention.window else "attention"] = attention
        return attention, self.rotary(model, self.positions(), kind)

    def _layer(self, model: Any, index: int, shared_from: int) -> Layer:
        source, kind = model.layers[index], model.config.layer_types[index]
        mixer, (attention, rotary) = source.self_attn, self.kinds[kind]
        of_reads = index >= self.reads_from
        makes_keys = index < shared_from
        query_norm = plain(mixer.q_norm, self.eps)
        part = self.attention_part(
            [mixer.q_proj],
            [mixer.k_proj, mixer.v_proj] if makes_keys else [],
            mixer.o_proj,
            (query_norm, plain(mixer.k_norm, self.eps) if makes_keys else query_norm),
            rotary,
            attention,
            of_reads=of_reads,
        )
        return Layer(
            kind,
            plain(source.input_layernorm, self.eps),
            part,
            plain(source.post_attention_layernorm, self.eps),
            self.mlp(source.mlp, plain(source.pre_feedforward_layernorm, self.eps), of_reads=of_reads),
            plain(source.post_feedforward_layernorm, self.eps),
            self.product(source.per_layer_input_gate, of_reads=of_reads),
            self.product(source.per_layer_projection, summed=True, of_reads=of_reads),
            plain(source.post_per_layer_input_norm, self.eps),
            source.layer_scalar.detach(),
        )

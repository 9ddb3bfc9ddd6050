"""The Qwen3.5 family: three layers of gated delta rule, then one of full attention, and so on.

What stands here is the whole text decoder for one row of n tokens. Every layer is causal, so tokens behind the row
change nothing in it and need no mask. Only some rows of the last layer are read: there, everything that concerns a row
alone is computed for those. Sizes are named as in `decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from jevany_backend.engine.attention_choice import Attention
from jevany_backend.engine.delta_choice import DeltaRule
from jevany_backend.engine.early_choice import choose_launch
from jevany_backend.engine.families.decoder import AttentionPart, Decoder, Mlp, centred, require
from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.delta_inputs import DeltaShape
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product


@dataclass(frozen=True)
class DeltaPart:
    """The gated delta rule of a layer.

    Attributes:
        inputs: d -> the columns of `DeltaShape`.
        filters: (convolved columns, taps).
        a_log: (value heads,).
        time_bias: (value heads,).
        head_norm: (value width,).
        output: value heads * value width -> d.
    """

    inputs: Product
    filters: torch.Tensor
    a_log: torch.Tensor
    time_bias: torch.Tensor
    head_norm: torch.Tensor
    output: Product


@dataclass(frozen=True)
class Layer:
    """A layer: what mixes tokens, then the MLP.

    Attributes:
        norm: In front of the mixer, (d,).
        mixer: What mixes tokens.
        mlp: The second half.
    """

    norm: Norm
    mixer: DeltaPart | AttentionPart
    mlp: Mlp


def delta_shape(config: Any) -> DeltaShape:
    """Return the sizes of the delta rule in a text decoder's configuration."""
    return DeltaShape(
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )


class Qwen35(Decoder):
    """The text decoder; see `Decoder`."""

    def __init__(self, model: Any, measured: Measured, longest: int, *, fused: bool) -> None:
        super().__init__(model, measured, longest, fused=fused)
        config: Any = model.config
        require(config, ("linear_attention", "full_attention"), hidden_act="silu", attention_bias=False)
        self.eps: float = config.rms_norm_eps
        self.delta = delta_shape(config)
        dtype = self.embedding.dtype
        shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.attention = Attention(measured, shape, dtype, longest)
        if fused:
            kernels = choose_launch(measured, self.delta, dtype)
            delta_rule = DeltaRule(measured, self.delta, dtype, longest, kernels.delta_rule)
            self.kernels = replace(kernels, delta_rule=delta_rule)
            self.choices = {"delta_rule": delta_rule, "attention": self.attention}
        # In text the three planes of a position, meant for time, height and width in pictures, are equal.
        self.angles = self.rotary(model, self.positions().expand(3, 1, -1))
        self.layers: list[Layer] = []
        for index, source in enumerate(model.layers):
            self.layers.append(self._layer(source, last=index == config.num_hidden_layers - 1))
            self.release()
        self.norm = centred(model.norm, self.eps)
        measured.keep()

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Run one row; see `Decoder`."""
        kernels = self.kernels
        residual = functional.embedding(ids, self.embedding)  # (n, d)
        update = None  # What the half layer before has yet to add to the residual stream.
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            normed = kernels.add_rms_norm(residual, update, layer.norm)
            if isinstance(layer.mixer, DeltaPart):
                update = self._delta(layer.mixer, normed, reads if last else None)
            else:
                update, _ = self.attend(layer.mixer, normed, reads if last else None)
            if last:
                residual = residual.index_select(0, reads)  # From here on (R, d).
            normed = kernels.add_rms_norm(residual, update, layer.mlp.norm)
            update = self.run_mlp(layer.mlp, normed, "silu")
        return kernels.add_rms_norm(residual, update, self.norm)

    def _delta(self, part: DeltaPart, normed: torch.Tensor, reads: torch.Tensor | None) -> torch.Tensor:
        packed = part.inputs(normed)
        inputs = self.kernels.delta_inputs(packed, self.delta, part.filters, part.a_log, part.time_bias)
        heads = self.kernels.delta_rule(inputs)
        gate = packed[:, self.delta.gate]
        if reads is not None:
            heads, gate = heads.index_select(0, reads), gate.index_select(0, reads)
        return part.output(self.kernels.gated_rms_norm(heads, gate, part.head_norm, self.eps))

    def _layer(self, source: Any, *, last: bool) -> Layer:
        mlp = self.mlp(source.mlp, centred(source.post_attention_layernorm, self.eps))
        norm = centred(source.input_layernorm, self.eps)
        if source.block_type != "linear_attention":
            mixer = source.self_attn
            part = self.attention_part(
                [mixer.q_proj],  # Each head's query, then its gate.
                [mixer.k_proj, mixer.v_proj],
                mixer.o_proj,
                (centred(mixer.q_norm, self.eps), centred(mixer.k_norm, self.eps)),
                self.angles,
                self.attention,
                of_reads=last,
            )
            return Layer(norm, part, mlp)
        mixer = source.linear_attn
        delta = DeltaPart(
            self.product(mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a),
            mixer.conv1d.weight.detach().squeeze(1).contiguous(),
            mixer.A_log.detach(),
            mixer.dt_bias.detach(),
            mixer.norm.weight.detach(),
            self.product(mixer.out_proj, summed=True),
        )
        return Layer(norm, delta, mlp)

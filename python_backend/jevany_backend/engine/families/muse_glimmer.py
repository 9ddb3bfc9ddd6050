"""The Muse Glimmer family: three layers of attention in a window, with positions, then one of full attention, without.

What stands here is the whole text decoder for one row of n tokens. Every layer is causal, so tokens behind the row
change nothing in it. What either half of a layer adds is normalised before it is added. Only some rows of the last
layer are read: there, all but keys and values is computed for those. Sizes are named as in `decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from jevany_backend.engine.attention_choice import Attention
from jevany_backend.engine.families.decoder import AttentionPart, Decoder, Mlp, centred, plain, require
from jevany_backend.engine.kernels import FUSED
from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        norm: In front of attention, (d,).
        attention: The first half.
        attention_norm: Of what attention adds, (d,).
        mlp: The second half.
        mlp_norm: Of what the MLP adds, (d,).
    """

    norm: Norm
    attention: AttentionPart
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm


class MuseGlimmer(Decoder):
    """The text decoder; see `Decoder`."""

    def __init__(self, model: Any, measured: Measured, longest: int, *, fused: bool) -> None:
        super().__init__(model, measured, longest, fused=fused)
        config: Any = model.config
        require(config, ("sliding_attention", "full_attention"), hidden_activation="silu", attention_bias=False)
        eps: float = config.rms_norm_eps
        shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, "behind")
        dtype, device = self.embedding.dtype, self.embedding.device
        self.full = Attention(measured, shape, dtype, longest)
        self.windowed = Attention(measured, shape, dtype, longest, window=config.sliding_window)
        if fused:
            self.kernels = FUSED
            self.choices = {"attention": self.full, "windowed_attention": self.windowed}
        # Embeddings, queries and keys are normalised by their mean square alone; a query is then scaled.
        self.embedding_norm = Norm(torch.ones(self.width, device=device), eps)
        ones = torch.ones(shape.width, device=device)
        self.head_norms = Norm(ones * config.qk_scale_factor, eps), Norm(ones, eps)
        self.angles = self.rotary(model, self.positions())
        self.layers: list[Layer] = []
        for index in range(config.num_hidden_layers):
            self.layers.append(self._layer(model, index))
            self.release()
        self.norm = plain(model.norm, eps)
        measured.keep()

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Run one row; see `Decoder`."""
        add_rms_norm = self.kernels.add_rms_norm
        residual = add_rms_norm(functional.embedding(ids, self.embedding), None, self.embedding_norm)  # (n, d)
        update, update_norm = None, None  # What the half layer before has yet to add to the residual stream.
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            normed = add_rms_norm(residual, update, layer.norm, delta_norm=update_norm)
            update, _ = self.attend(layer.attention, normed, reads if last else None)
            if last:
                residual = residual.index_select(0, reads)  # From here on (R, d).
            normed = add_rms_norm(residual, update, layer.mlp.norm, delta_norm=layer.attention_norm)
            update, update_norm = self.run_mlp(layer.mlp, normed, "silu"), layer.mlp_norm
        return add_rms_norm(residual, update, self.norm, delta_norm=update_norm)

    def _layer(self, model: Any, index: int) -> Layer:
        config, source = model.config, model.layers[index]
        mixer = source.self_attn
        part = self.attention_part(
            [mixer.q_proj, mixer.gate_proj],
            [mixer.k_proj, mixer.v_proj],
            mixer.o_proj,
            self.head_norms,
            self.angles if config.layer_rope_theta[index] else None,
            self.windowed if config.layer_types[index] == "sliding_attention" else self.full,
            of_reads=index == config.num_hidden_layers - 1,
        )
        eps, post_eps = config.rms_norm_eps, config.post_norm_eps
        return Layer(
            centred(source.input_layernorm, eps),
            part,
            centred(source.post_attention_layernorm, post_eps),
            self.mlp(source.mlp, centred(source.pre_feedforward_layernorm, eps)),
            centred(source.post_feedforward_layernorm, post_eps),
        )

"""The shape of the shared base: the layers of Qwen3.5, small."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
LORA_RANK = 8
HEAD_DIM = 64
HEAD_RESIDUAL_DIM = 32

# Every second layer has full attention; in the released bases it is every fourth. Finding the record that a question
# names takes one look back, matching its value with an option takes another, and eight layers have to do for both.
_LAYERS = ("linear", "full") * 4


def text_config(vocabulary: int, pad_token_id: int) -> Qwen3_5TextConfig:
    """Returns the configuration of the base."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=len(_LAYERS),
        layer_types=[f"{kind}_attention" for kind in _LAYERS],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        eos_token_id=pad_token_id,
        dtype="bfloat16",
    )


def new_base(vocabulary: int, pad_token_id: int) -> Qwen3_5TextModel:
    """Builds the base with fresh float32 weights.

    Embeddings start larger, and what is added to the residual stream smaller, than in transformers' own
    initialisation: in so narrow a model the layers' noise would else drown the tokens.
    """
    import torch
    from transformers import Qwen3_5TextModel

    config = text_config(vocabulary, pad_token_id)
    config.dtype = torch.float32
    base = Qwen3_5TextModel(config).float()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name == "embed_tokens.weight":
                parameter.normal_(std=0.1)
            elif parameter.ndim == 2:
                adds = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(std=(0.5 if adds else 1.0) * parameter.shape[1] ** -0.5)
    return base

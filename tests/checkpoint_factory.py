"""Small random checkpoints in the files of a released one, for tests of everything that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4TextConfig,
    MuseGlimmerConfig,
    MuseGlimmerTextConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5TextConfig,
)

from jevany_backend.encoding import build_labels, find_delimiters

QWEN_DELIMITERS = ("<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>")
LORA_TARGETS = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
]


def byte_tokenizer(special: tuple[str, ...] = QWEN_DELIMITERS, characters: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, then ``characters`` as one token each, pad and the special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in characters:
        [(pieces, _)] = byte_level.pre_tokenize_str(character)
        word = pieces[0]
        for piece in pieces[1:]:
            if word + piece not in vocabulary:
                merges.append((word, piece))
                vocabulary[word + piece] = len(vocabulary)
            word += piece
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    if special:
        fast.add_special_tokens({"extra_special_tokens": list(special)})
    return fast


# Heads as wide as the released models', for kernels that have no narrow ones.
TRUE_WIDTHS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "muse_glimmer": {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128},
    "gemma4": {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 256, "global_head_dim": 512},
}


def qwen_config(vocabulary: int, **changes: Any) -> Qwen3_5TextConfig:
    """Return a small ``qwen3_5`` decoder: DeltaNet and full attention, grouped heads in both."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }
    return Qwen3_5TextConfig(**(settings | changes))


def muse_config(vocabulary: int, **changes: Any) -> MuseGlimmerTextConfig:
    """Return a small ``muse_glimmer`` decoder: three windowed layers with rope, then a full one without, twice."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        "layer_rope_theta": [500_000.0, 500_000.0, 500_000.0, 0] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "max_position_embeddings": 4096,
        "pad_token_id": None,
    }
    return MuseGlimmerTextConfig(**(settings | changes))


def gemma_config(vocabulary: int, **changes: Any) -> Gemma4TextConfig:
    """Return a small ``gemma4`` decoder: two windowed layers and a full one, twice; the second three share k and v."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
    }
    return Gemma4TextConfig(**(settings | changes))


def multimodal_config(family: str, vocabulary: int, **changes: Any) -> PretrainedConfig:
    """Return the small configuration of a released base: the text decoder's and, where it has one, a vision tower's."""
    if family == "qwen3_5":
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        text = qwen_config(vocabulary, **changes).to_dict()
        return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    if family == "muse_glimmer":
        vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        text = muse_config(vocabulary, **changes).to_dict()
        return MuseGlimmerConfig(text_config=text, vision_config=vision, out_hidden_size=128, projector_hidden_size=32)
    return Gemma4Config(text_config=gemma_config(vocabulary, **changes).to_dict())


@dataclass(frozen=True)
class MadeCheckpoint:
    """A checkpoint on disk and the PEFT model it was written from."""

    adapter: Path
    base: Path
    peft_model: Any


def make_checkpoint(
    directory: Path,
    *,
    family: str = "",
    decision_mode: str = "pointer",
    added_tokens: bool = False,
    residual: int = 0,
    base_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    head_changes: dict[str, Any] | None = None,
    config_changes: dict[str, Any] | None = None,
) -> MadeCheckpoint:
    """Write a base, an adapter, a head and a tokenizer of random weights under ``directory``.

    The base is a bare ``qwen3_5`` text decoder; with ``family``, a multimodal checkpoint as that family is released.
    """
    torch.manual_seed(seed)
    labels = "".join(chr(point) for point in range(0x00A1, 0x01C0))
    tokenizer = byte_tokenizer(() if added_tokens else QWEN_DELIMITERS, labels)
    base_rows = len(tokenizer)
    whole: Any
    if family:
        whole = AutoModelForImageTextToText.from_config(
            multimodal_config(family, base_rows, **(config_changes or {})), dtype=torch.float32
        )
    else:
        whole = AutoModelForCausalLM.from_config(qwen_config(base_rows, **(config_changes or {})), dtype=torch.float32)
    config = whole.config.get_text_config()
    randomise(whole)
    whole = whole.to(base_dtype)
    base = directory / "base"
    whole.save_pretrained(base)
    if family == "gemma4":
        _add_unused_keys_and_values(base / "model.safetensors", config)
    if not added_tokens:
        tokenizer.save_pretrained(base)
    delimiters = find_delimiters(tokenizer)
    if delimiters.added:
        tokenizer.init_kwargs |= {"jevany_token_schema": "v1", "jevany_added_tokens": list(delimiters.strings)}
    model = text_decoder(base, base_dtype)
    trained: dict[str, Any] = {}
    if added_tokens:
        weight = model.get_input_embeddings().weight.data
        mean = weight.mean(dim=0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.get_input_embeddings().weight.data[list(delimiters.ids)] = mean
        if family == "gemma4":
            per_layer = model.embed_tokens_per_layer.weight.data
            per_layer[list(delimiters.ids)] = per_layer[:base_rows].mean(dim=0)
        trained = {"trainable_token_indices": {"embed_tokens": list(delimiters.ids)}}
    lora = LoraConfig(
        task_type="FEATURE_EXTRACTION", r=4, lora_alpha=8, target_modules=LORA_TARGETS, lora_dropout=0.0, **trained
    )
    peft_model = get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapter = directory / "adapter"
    peft_model.save_pretrained(str(adapter))
    tokenizer.save_pretrained(adapter)
    dim, hidden = 16, config.hidden_size
    head = {"q.weight": (dim, hidden), "q.bias": (dim,), "k.weight": (dim, hidden), "k.bias": (dim,)}
    if residual:
        head |= {"residual.0.weight": (residual, dim), "residual.0.bias": (residual,)}
        head |= {"residual.2.weight": (1, residual), "residual.2.bias": (1,)}
    pointer = decision_mode == "pointer"
    content = {
        "base": "example/base",
        "base_revision": None,
        "lora": 4,
        "head": {name: torch.randn(shape) for name, shape in head.items()} if pointer else None,
        "head_dim": dim,
        "head_residual_dim": residual,
        "head_type": "linear",
        "option_isolation": False,
        "special_embeddings": added_tokens,
        "multimodal": False,
        "backbone_adapter": "text",
        "branch_mode": "rows",
        "tokenizer_saved": True,
        "weights_dtype": "fp32" if base_dtype == torch.float32 else "bf16",
        "decision_mode": decision_mode,
        "verbalizers": [] if pointer else build_labels(tokenizer),
        "temperature": 1.25,
    }
    torch.save(content | (head_changes or {}), adapter / "head.pt")
    return MadeCheckpoint(adapter, base, peft_model)


def text_decoder(base: Path, dtype: torch.dtype) -> Any:
    """Return a base's text decoder as transformers itself loads it, out of the multimodal model if it is one."""
    model = AutoModel.from_pretrained(base, dtype=dtype)
    return getattr(model, "language_model", model)


def _add_unused_keys_and_values(path: Path, config: Gemma4TextConfig) -> None:
    # A released Gemma holds these of the layers that read others' keys and values, too.
    tensors = load_file(path)
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        prefix = f"model.language_model.layers.{layer}.self_attn"
        for name, shape in (("k_proj", (32, 64)), ("v_proj", (32, 64)), ("k_norm", (16,))):
            tensors[f"{prefix}.{name}.weight"] = torch.full(shape, torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})


def randomise(model: torch.nn.Module) -> None:
    """Fill a model with random weights; the library's own initialisation is too small for errors to show."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "A_log", "dt_bias")):
                parameter.copy_(torch.rand_like(parameter) * 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)

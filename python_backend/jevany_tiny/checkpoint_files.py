"""Writes what training made in the files of a released checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from jevany_tiny.shape import HEAD_DIM, HEAD_RESIDUAL_DIM, LORA_RANK, text_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import PeftModel
    from transformers import Qwen3_5TextModel

    from jevany_tiny.batches import Readout


def save_base(model: Qwen3_5TextModel, folder: Path) -> None:
    """Writes `config.json` and the weights, rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    pad = model.config.pad_token_id
    assert pad is not None  # text_config sets it
    config = text_config(model.config.vocab_size, pad)
    (folder / "config.json").write_text(config.to_json_string(use_diff=True), "utf-8")
    tensors = {
        f"model.{name}": tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    _write_tensors(tensors, folder / "model.safetensors")


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)


def load_base(model: Qwen3_5TextModel, folder: Path) -> None:
    """Reads the rounded weights into a float32 model."""
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Writes `adapter_config.json` and the LoRA pairs, rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_model.safetensors"
    _write_tensors({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}, path)
    # PEFT writes the target modules as a set; sorted, the file is the same every time.
    config_path = folder / "adapter_config.json"
    config = json.loads(config_path.read_text("utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def save_head(
    folder: Path,
    *,
    base: str,
    readout: Readout,
    head: dict[str, torch.Tensor] | None,
    labels: Sequence[str],
    temperature: float,
    provenance: dict[str, Any],
) -> None:
    """Writes `head.pt`, with plain values and tensors only.

    Args:
        folder: The checkpoint.
        base: The name of the base.
        readout: What the adapter was trained for.
        head: The pointer head's tensors; None for direct token.
        labels: The verbalizer table of direct token.
        temperature: What logits are divided by.
        provenance: How it was trained.
    """
    pointer = readout == "pointer"
    content = {
        "base": base,
        "base_revision": None,
        "lora": LORA_RANK,
        "head": {name: tensor.float().cpu() for name, tensor in head.items()} if pointer and head else None,
        "head_dim": HEAD_DIM,
        "head_residual_dim": HEAD_RESIDUAL_DIM if pointer else 0,
        "head_type": "linear",
        "option_isolation": False,
        "special_embeddings": False,
        "multimodal": False,
        "backbone_adapter": None,
        "branch_mode": None,
        "tokenizer_saved": True,
        "weights_dtype": "bf16",
        "decision_mode": "pointer" if pointer else "lm_token",
        "verbalizers": [] if pointer else list(labels),
        "temperature": temperature,
        "provenance": provenance,
    }
    torch.save(content, folder / "head.pt")

"""The LoRA adapter: read from PEFT's files and folded into the base weights, one tensor at a time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from jevany_backend.checkpoint.errors import CheckpointError

# PEFT writes the wrapped module's own names behind this; what was wrapped was the text decoder, or a model around it.
_PEFT_PREFIX = "base_model.model."
_DECODER_PREFIXES = ("model.language_model.", "language_model.", "model.")

# Settings that change what the adapter computes. Each must have its neutral value or be one we compute.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
}


@dataclass
class Adapter:
    """A LoRA adapter, ready to be merged.

    Attributes:
        path: The file it came from, for messages.
        pairs: Module name in the text decoder (``layers.0.mlp.up_proj``) -> A (r, in), B (out, r), scale.
        token_rows: Token id -> its trained embedding, (hidden,).
        merged: The modules that have been merged so far.
    """

    path: Path
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor, float]]
    token_rows: dict[int, torch.Tensor]
    merged: set[str] = field(default_factory=set)

    def merge(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Fold the adapter into one weight: W' = dtype(float32(W) + scale B A), rounded once.

        Args:
            name: The tensor's name in the text decoder, ``layers.0.mlp.up_proj.weight``.
            weight: The base's weight, (out, in), any dtype, on the device of the result.
            dtype: The dtype to serve in.

        Returns:
            The weight to serve, in ``dtype``; the same values as ``weight`` where the adapter has nothing for it.

        Raises:
            CheckpointError: The adapter was trained on a base of another shape.
        """
        module = name.removesuffix(".weight")
        if module not in self.pairs or module == name:
            return weight.to(dtype)
        down, up, scale = self.pairs[module]
        if weight.shape != (up.shape[0], down.shape[1]):
            raise CheckpointError(
                f"{self.path}: {module} is trained for a weight of {(up.shape[0], down.shape[1])}, but the base's is "
                f"{tuple(weight.shape)}; this adapter belongs to another base"
            )
        self.merged.add(module)
        product = up.to(weight.device, torch.float32) @ down.to(weight.device, torch.float32)
        return weight.float().add_(product, alpha=scale).to(dtype)

    def replace_token_rows(self, embedding: torch.Tensor) -> None:
        """Write the trained token embeddings over the base's, in place.

        Args:
            embedding: The embedding matrix, (vocabulary, hidden), already grown where tokens were added.

        Raises:
            CheckpointError: A trained token lies outside the matrix, or has another width.
        """
        for token, row in self.token_rows.items():
            if token >= embedding.shape[0] or row.shape[0] != embedding.shape[1]:
                raise CheckpointError(
                    f"{self.path}: trains token {token} with {row.shape[0]} values, but the base's embedding is "
                    f"{tuple(embedding.shape)}; this adapter belongs to another base"
                )
            embedding[token] = row.to(embedding.device, embedding.dtype)

    def check_all_merged(self) -> None:
        """Check that no part of the adapter was left over.

        Raises:
            CheckpointError: Names a module that the base does not have.
        """
        left = sorted(set(self.pairs) - self.merged)
        if left:
            raise CheckpointError(
                f"{self.path}: {len(left)} of {len(self.pairs)} adapted modules do not exist in the base, "
                f"the first is {left[0]}; this adapter belongs to another base"
            )


def read_adapter(directory: Path) -> Adapter:
    """Read ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        directory: The checkpoint directory.

    Raises:
        CheckpointError: A file is missing or broken, or the adapter is of a kind that this server does not merge.
    """
    config = _read_config(directory / "adapter_config.json")
    path = directory / "adapter_model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None

    halves: dict[str, dict[str, torch.Tensor]] = {}
    token_rows: dict[int, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = _decoder_name(key)
        if match := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif match := re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", name):
            token_rows = _token_rows(config, match[1], tensor, path)
        elif name.endswith(".token_adapter.base_layer.weight"):
            continue  # PEFT saves a grown embedding whole; the base and the trained rows give the same one.
        else:
            raise CheckpointError(f"{path}: the tensor {key} belongs to no LoRA pair and no trained token")
    pairs = {}
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise CheckpointError(f"{path}: {module} has only half of its LoRA pair")
        if pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(f"{path}: {module} has ranks {pair['A'].shape[0]} and {pair['B'].shape[1]}")
        pairs[module] = (pair["A"], pair["B"], _scale(config, module, pair["A"].shape[0]))
    return Adapter(path, pairs, token_rows)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds a {type(config).__name__}, not an object")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are served")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise CheckpointError(f"{path}: {key} = {config[key]!r} is not supported")
    return config


def _decoder_name(key: str) -> str:
    name = key.removeprefix(_PEFT_PREFIX)
    for prefix in _DECODER_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _token_rows(config: dict[str, Any], module: str, rows: torch.Tensor, path: Path) -> dict[int, torch.Tensor]:
    indices = config.get("trainable_token_indices")
    if isinstance(indices, dict):
        indices = next((value for name, value in indices.items() if _decoder_name(name) == module), None)
    if not isinstance(indices, list) or len(indices) != rows.shape[0] or not all(isinstance(i, int) for i in indices):
        raise CheckpointError(
            f"{path}: holds {rows.shape[0]} token rows of {module}, but trainable_token_indices is {indices!r}"
        )
    return dict(zip(indices, rows, strict=True))


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    alpha = _pattern_value(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_value(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    # PEFT matches each key as the tail of the module's path.
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default

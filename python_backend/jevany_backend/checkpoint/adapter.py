"""The LoRA adapter: read from PEFT's files, and what it adds to the base's weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from jevany_backend.checkpoint.errors import CheckpointError
from jevany_backend.checkpoint.finite import problem_of

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


@dataclass(frozen=True)
class LoraPair:
    """What the adapter adds to one weight: scale B A.

    Attributes:
        down: A, (r, in).
        up: B, (out, r), on the same device.
        scale: alpha / r.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight that it belongs to, (out, in)."""
        return self.up.shape[0], self.down.shape[1]

    def to(self, device: torch.device) -> LoraPair:
        """Return the pair on a device."""
        return LoraPair(self.down.to(device), self.up.to(device), self.scale)

    def add_to(self, weight: torch.Tensor, first_row: int) -> None:
        """Add the adapter's part to some rows of its weight, in place.

        Args:
            weight: (rows, in), float32, where the pair is.
            first_row: The number of its first row in the whole weight.
        """
        up = self.up[first_row : first_row + len(weight)].float()
        weight.add_(up @ self.down.float(), alpha=self.scale)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, in host memory.

    Attributes:
        path: The file it came from, for messages.
        rank: The rank that its configuration gives.
        pairs: What it adds to each module of the text decoder (``layers.0.mlp.up_proj``).
        token_rows: Embedding module (``embed_tokens``) -> token id -> its trained row, (width,).
    """

    path: Path
    rank: Any
    pairs: dict[str, LoraPair]
    token_rows: dict[str, dict[int, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """The size of all pairs."""
        return sum(half.nbytes for pair in self.pairs.values() for half in (pair.down, pair.up))

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every part of the adapter has its place in the text decoder.

        Args:
            shapes: The shapes of the decoder's weights by name, rows of added tokens included.

        Raises:
            CheckpointError: Names a module that the base does not have, or has in another shape.
        """
        left = sorted(module for module in self.pairs if f"{module}.weight" not in shapes)
        if left:
            raise CheckpointError(
                f"{self.path}: {len(left)} of {len(self.pairs)} adapted modules do not exist in the base, "
                f"the first is {left[0]}; this adapter belongs to another base"
            )
        for module, pair in self.pairs.items():
            if pair.shape != shapes[f"{module}.weight"]:
                raise CheckpointError(
                    f"{self.path}: {module} is trained for a weight of {pair.shape}, but the base's is "
                    f"{shapes[f'{module}.weight']}; this adapter belongs to another base"
                )
        for module, rows in self.token_rows.items():
            shape = shapes.get(f"{module}.weight", (0, 0))
            for token, row in rows.items():
                if not 0 <= token < shape[0] or tuple(row.shape) != shape[1:]:
                    raise CheckpointError(
                        f"{self.path}: trains token {token} with {tuple(row.shape)} values, but the base's {module} is "
                        f"{shape}; this adapter belongs to another base"
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
    token_rows: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if problem := problem_of(tensor):
            raise CheckpointError(f"{path}: {key} holds {problem}")
        name = _decoder_name(key)
        if match := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif match := re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", name):
            token_rows[match[1]] = _token_rows(config, match[1], tensor, path)
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
        pairs[module] = LoraPair(
            pair["A"], pair["B"], _scale(config, module, pair["A"].shape[0], directory / "adapter_config.json")
        )
    return Adapter(path, config.get("r"), pairs, token_rows)


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


def _scale(config: dict[str, Any], module: str, rank: int, path: Path) -> float:
    alpha = _pattern_value(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise CheckpointError(f"{path}: lora_alpha of {module} is {alpha!r}, not a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_value(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    # PEFT matches each key as the tail of the module's path.
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default

"""``head.pt``: the readout's weights and the facts a checkpoint records about itself."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jevany_backend.checkpoint.errors import CheckpointError
from jevany_backend.checkpoint.finite import problem_of

# Further from 1, logits that are divided by it would be all alike, or leave the numbers that there are.
_LEAST_TEMPERATURE = 1e-3


@dataclass(frozen=True)
class HeadFile:
    """The part of ``head.pt`` that serving needs; defaults are those of files that leave a field out.

    Attributes:
        base: The base model the adapter was trained on, a Hub name or a path.
        base_revision: Its revision, or None.
        decision_mode: ``pointer`` or ``lm_token`` (direct token).
        head: The pointer head's tensors, float32: ``q.weight`` and ``k.weight`` (dim, hidden), ``q.bias`` and
            ``k.bias`` (dim), and where there is a residual MLP ``residual.0.weight`` (residual, dim),
            ``residual.0.bias``, ``residual.2.weight`` (1, residual), ``residual.2.bias``. None for direct token.
        head_dim: The pointer dimension.
        head_residual_dim: Width of the residual MLP; 0 when there is none.
        lora: Rank of the LoRA adapter; 0 when there is none.
        weights_dtype: ``fp32`` or ``bf16``, the dtype of the base in training.
        tokenizer_saved: Whether the checkpoint directory holds the tokenizer.
        verbalizers: The labels of a direct-token model, in option order.
        temperature: What logits are divided by.
    """

    base: str
    base_revision: str | None = None
    decision_mode: str = "pointer"
    head: dict[str, torch.Tensor] | None = None
    head_dim: int = 256
    head_residual_dim: int = 0
    lora: int = 0
    weights_dtype: str = "fp32"
    tokenizer_saved: bool = False
    verbalizers: tuple[str, ...] = ()
    temperature: float = 1.0

    @property
    def base_reference(self) -> str:
        """The base as ``name`` or ``name@revision``."""
        return f"{self.base}@{self.base_revision}" if self.base_revision else self.base


def read_head_file(directory: Path) -> HeadFile:
    """Read and check ``head.pt``.

    Only tensors and plain values are unpickled; a file with anything else in it is refused unread.

    Args:
        directory: The checkpoint directory.

    Raises:
        CheckpointError: The file is missing, is not such a file, or asks for what this server does not do.
    """
    path = directory / "head.pt"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; a JevAny checkpoint holds head.pt beside its adapter")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: refused: it holds objects other than tensors and plain values") from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError):
        # What PyTorch says of such a file, [Errno 22] or an error in its ZIP library, points to nothing.
        raise CheckpointError(f"{path}: not a torch.save file, or cut off or damaged; fetch or copy it again") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of fields")
    try:
        return _checked(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _checked(content: dict[str, Any]) -> HeadFile:
    base = content.get("base")
    if not isinstance(base, str) or not base:
        raise ValueError(f"base: needs the name of a base model, not {base!r}")
    if content.get("head_type", "linear") != "linear":
        raise ValueError(f"head_type: {content['head_type']!r} is not supported; only 'linear'")
    if content.get("option_isolation"):
        raise ValueError("option_isolation: such checkpoints need packed rows, which this server does not have")
    mode = content.get("decision_mode") or "pointer"
    if mode not in ("pointer", "lm_token"):
        raise ValueError(f"decision_mode: {mode!r} is neither 'pointer' nor 'lm_token'")
    dtype = content.get("weights_dtype", "fp32")
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"weights_dtype: {dtype!r} is neither 'fp32' nor 'bf16'")
    temperature = content.get("temperature", 1.0)
    if isinstance(temperature, torch.Tensor) and temperature.ndim == 0 and not problem_of(temperature):
        temperature = temperature.item()
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise ValueError(f"temperature: needs a number, not {temperature!r:.60}")
    if not _LEAST_TEMPERATURE <= temperature <= 1 / _LEAST_TEMPERATURE:
        bounds = f"{_LEAST_TEMPERATURE:g} to {1 / _LEAST_TEMPERATURE:g}"
        raise ValueError(f"temperature: {temperature} is not a number from {bounds}")
    verbalizers = tuple(str(label) for label in content.get("verbalizers") or ())
    head_dim = int(content.get("head_dim", 256))
    residual = int(content.get("head_residual_dim", 0))
    head = _checked_head(content.get("head"), head_dim, residual) if mode == "pointer" else None
    return HeadFile(
        base=base,
        base_revision=content.get("base_revision"),
        decision_mode=mode,
        head=head,
        head_dim=head_dim,
        head_residual_dim=residual,
        lora=int(content.get("lora", 0)),
        weights_dtype=dtype,
        tokenizer_saved=bool(content.get("tokenizer_saved", False)),
        verbalizers=verbalizers,
        temperature=float(temperature),
    )


def _checked_head(head: Any, dim: int, residual: int) -> dict[str, torch.Tensor]:
    if not isinstance(head, dict):
        raise ValueError("head: missing; a pointer checkpoint holds its head's tensors")
    hidden = head["q.weight"].shape[-1] if isinstance(head.get("q.weight"), torch.Tensor) else 0
    shapes: dict[str, tuple[int, ...]] = {
        "q.weight": (dim, hidden),
        "q.bias": (dim,),
        "k.weight": (dim, hidden),
        "k.bias": (dim,),
    }
    if residual:
        shapes |= {
            "residual.0.weight": (residual, dim),
            "residual.0.bias": (residual,),
            "residual.2.weight": (1, residual),
            "residual.2.bias": (1,),
        }
    if set(head) != set(shapes):
        raise ValueError(f"head: holds {sorted(head)}; needs {sorted(shapes)}")
    for name, shape in shapes.items():
        if not isinstance(head[name], torch.Tensor) or tuple(head[name].shape) != shape:
            raise ValueError(f"head: {name} has shape {tuple(getattr(head[name], 'shape', ()))}; needs {shape}")
        if problem := problem_of(head[name]):
            raise ValueError(f"head: {name} holds {problem}")
    return {name: tensor.float() for name, tensor in head.items()}

"""Safetensors files, read from their headers alone: which tensor lies where."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jevany_backend.checkpoint.errors import CheckpointError, first_line

# Those that weights are stored in. Files may hold others; only a tensor that is needed must have one of these.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_MAX_HEADER_BYTES = 100_000_000  # The format's own limit.


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: The file.
        name: Its name there.
        dtype_name: Its dtype as the format writes it, ``BF16``.
        shape: Its shape; values lie in row-major order.
        offset: Its first byte, from the start of the file.
        nbytes: How many bytes it has.
    """

    path: Path
    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype.

        Raises:
            CheckpointError: Weights cannot be served from it.
        """
        if self.dtype_name not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.name} is stored as {self.dtype_name}; needs one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype_name]

    @property
    def rows(self) -> int:
        """The size of its first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read what a safetensors file holds, without its values.

    Args:
        path: The file.

    Returns:
        Its tensors by name.

    Raises:
        CheckpointError: It is no such file, or it is cut off.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError(f"its header is a {type(header).__name__}")
            header.pop("__metadata__", None)
            return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {first_line(error)}") from None


def _stored(path: Path, name: str, entry: dict[str, Any], start: int, size: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    if not 0 <= begin <= end or (
        tensor.dtype_name in _DTYPES and tensor.nbytes != math.prod(tensor.shape) * tensor.dtype.itemsize
    ):
        raise ValueError(f"{name} has offsets that do not fit its shape")
    if start + end > size:
        raise ValueError(f"it is cut off: {name} should end at byte {start + end}, but the file has {size}")
    return tensor

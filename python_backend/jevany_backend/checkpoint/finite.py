"""Whether a small tensor of a checkpoint can be computed with."""

from __future__ import annotations

import torch


def problem_of(tensor: torch.Tensor) -> str | None:
    """Return what a tensor holds in the place of finite floating-point numbers; None where it holds those."""
    if tensor.is_meta:
        return "a shape without numbers (a meta tensor)"
    if tensor.layout != torch.strided:
        return "a sparse tensor"
    if not tensor.is_floating_point():
        return f"{str(tensor.dtype).removeprefix('torch.')}, not floating-point numbers"
    return None if torch.isfinite(tensor.float()).all() else "NaN or infinite values"

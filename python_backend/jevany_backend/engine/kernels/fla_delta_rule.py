"""The gated delta rule by flash-linear-attention, and by FlashQLA, which it hands over to where that is installed."""

from __future__ import annotations

import importlib.util
import os

import torch

from jevany_backend.engine.kernels.delta_inputs import DeltaInputs

# FLA asks at every call whether it may hand over (fla/ops/gated_delta_rule/backends/flash_qla.py, 0.5.2).
_HAND_OVER = "FLA_FLASH_QLA"


def installed() -> dict[str, bool]:
    """Return what can be measured: name -> the argument `flash_qla` of `fla_delta_rule`."""
    if importlib.util.find_spec("fla") is None:
        return {}
    own = {"flash-linear-attention": False}
    return own if importlib.util.find_spec("flash_qla") is None else own | {"flash-qla": True}


def fla_delta_rule(inputs: DeltaInputs, *, flash_qla: bool) -> torch.Tensor:
    """Do as `delta_rule.delta_rule_twin` by FLA's chunk kernels.

    Args:
        inputs: The row's inputs, on a GPU.
        flash_qla: Whether FLA may hand over to FlashQLA, which it does on Hopper and for heads 128 wide.
    """
    # Importing FLA looks for a GPU; it must not happen where it is not used.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    parts = (inputs.queries, inputs.keys, inputs.values)
    # The step in the values' dtype, as transformers hands it over.
    step = inputs.step.to(inputs.values.dtype)
    before = os.environ.get(_HAND_OVER)
    os.environ[_HAND_OVER] = "1" if flash_qla else "0"
    try:
        out, _ = chunk_gated_delta_rule(*(part[None] for part in parts), g=inputs.decay[None], beta=step[None])
    finally:
        del os.environ[_HAND_OVER]
        if before is not None:
            os.environ[_HAND_OVER] = before
    return out[0]

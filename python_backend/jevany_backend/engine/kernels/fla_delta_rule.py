"""The gated delta rule by flash-linear-attention, where that is installed."""

from __future__ import annotations

import importlib.util

import torch

from jevany_backend.engine.kernels.delta_inputs import DeltaInputs


def fla_is_installed() -> bool:
    """Return whether flash-linear-attention can be imported."""
    return importlib.util.find_spec("fla") is not None


def fla_delta_rule(inputs: DeltaInputs) -> torch.Tensor:
    """Do as `delta_rule.delta_rule_twin` by FLA's chunk kernels; which those are is FLA's choice.

    Args:
        inputs: The row's inputs, on a GPU.
    """
    # Importing FLA looks for a GPU and compiles nothing yet; it must not happen where it is not used.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    parts = (inputs.queries, inputs.keys, inputs.values)
    # The step in the values' dtype, as transformers hands it over.
    step = inputs.step.to(inputs.values.dtype)
    out, _ = chunk_gated_delta_rule(*(part[None] for part in parts), g=inputs.decay[None], beta=step[None])
    return out[0]

"""Fused kernels in Triton, each in a file beside its plain PyTorch twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from jevany_backend.engine.kernels.add_rms_norm import add_rms_norm, add_rms_norm_twin
from jevany_backend.engine.kernels.delta_inputs import DeltaInputs, delta_inputs, delta_inputs_twin
from jevany_backend.engine.kernels.delta_rule import delta_rule, delta_rule_twin
from jevany_backend.engine.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_twin
from jevany_backend.engine.kernels.glu import glu, glu_twin
from jevany_backend.engine.kernels.per_layer_inputs import per_layer_inputs, per_layer_inputs_twin
from jevany_backend.engine.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_twin
from jevany_backend.engine.kernels.sigmoid_gate import sigmoid_gate, sigmoid_gate_twin


@dataclass(frozen=True)
class Kernels:
    """What a forward pass calls between its products, each as the file of its name says."""

    add_rms_norm: Callable[..., torch.Tensor]
    glu: Callable[..., torch.Tensor]
    qk_norm_rotary: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    sigmoid_gate: Callable[..., torch.Tensor]
    delta_inputs: Callable[..., DeltaInputs]
    gated_rms_norm: Callable[..., torch.Tensor]
    delta_rule: Callable[[DeltaInputs], torch.Tensor]
    per_layer_inputs: Callable[..., torch.Tensor]


TWINS = Kernels(
    add_rms_norm_twin,
    glu_twin,
    qk_norm_rotary_twin,
    sigmoid_gate_twin,
    delta_inputs_twin,
    gated_rms_norm_twin,
    delta_rule_twin,
    per_layer_inputs_twin,
)

FUSED = Kernels(
    add_rms_norm,
    glu,
    qk_norm_rotary,
    sigmoid_gate,
    delta_inputs,
    gated_rms_norm,
    delta_rule,
    per_layer_inputs,
)


def launched_early(kernels: Kernels) -> Kernels:
    """Return the same fused kernels, each launched early; see `early_launch`."""
    return Kernels(**{name: partial(kernel, early=True) for name, kernel in vars(kernels).items()})

"""Whether kernels are launched early on this GPU, by measurement."""

from __future__ import annotations

from functools import partial

import torch

from jevany_backend.engine.kernels import FUSED, Kernels, launched_early
from jevany_backend.engine.kernels.delta_inputs import DeltaShape
from jevany_backend.engine.kernels.early_launch import LEAST_CAPABILITY
from jevany_backend.engine.measured import Measured, agree, fastest

_ROWS = 96  # Where a launch weighs most: half the rows of a decision panel are about as long.


def choose_launch(measured: Measured, shape: DeltaShape, dtype: torch.dtype) -> Kernels:
    """Return the fused kernels, launched early where a chain of them is faster so and computes the same.

    Args:
        measured: What times, and remembers; on a CPU nothing is launched early.
        shape: The shape of the delta rule's layers, whose kernels follow each other without a product in between.
        dtype: What the model is served in.
    """
    device = measured.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return FUSED
    chain = _Chain(shape, dtype, device)
    kernels = {"ordinary": FUSED, "early": launched_early(FUSED)}
    name = f"launches of a chain of kernels, {_ROWS} rows, {shape}, {str(dtype).removeprefix('torch.')}"
    times = measured.compare(name, {key: partial(chain.run, kernels[key]) for key in kernels})
    expected = chain.run(FUSED)
    best = fastest(times, lambda key: agree(chain.run(kernels[key]), expected))
    return kernels[best or "ordinary"]


class _Chain:
    """What lies between two products of a layer, on random numbers."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def noise(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device).to(dtype)

        self.shape = shape
        self.packed = noise(_ROWS, shape.columns)
        self.filters = noise(shape.convolved, 4)
        self.a_log, self.bias = noise(shape.values), noise(shape.values)
        self.norm = noise(shape.value_width)

    def run(self, kernels: Kernels, _: int = 0) -> torch.Tensor:
        inputs = kernels.delta_inputs(self.packed, self.shape, self.filters, self.a_log, self.bias)
        heads = kernels.delta_rule(inputs)
        return kernels.gated_rms_norm(heads, self.packed[:, self.shape.gate], self.norm, 1e-6)

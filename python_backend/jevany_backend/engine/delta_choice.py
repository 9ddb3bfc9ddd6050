"""Which implementation of the delta rule runs a row of which length, by measurement."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial

import torch

from jevany_backend.engine.kernels.delta_inputs import DeltaInputs, DeltaShape
from jevany_backend.engine.kernels.delta_rule import PLANS, delta_rule, delta_rule_twin
from jevany_backend.engine.kernels.fla_delta_rule import fla_delta_rule, installed
from jevany_backend.engine.measured import Measured, agree, counted, fastest, lengths_up_to


class DeltaRule:
    """The delta rule by whichever implementation is the fastest for the row's length.

    Args:
        measured: What times, and remembers; on a CPU our kernels' first plan is taken.
        shape: The layers' shape.
        dtype: What the model is served in.
        longest: The longest row.
        ours: Our kernels' way in, `kernels.delta_rule.delta_rule` as it is or launched early.
    """

    def __init__(
        self,
        measured: Measured,
        shape: DeltaShape,
        dtype: torch.dtype,
        longest: int,
        ours: Callable[..., torch.Tensor] = delta_rule,
    ) -> None:
        self.candidates: dict[str, Callable[[DeltaInputs], torch.Tensor]] = {
            str(plan): partial(ours, plan=plan) for plan in PLANS
        }
        self.rows: list[int] = [1]
        self.names: list[str] = [str(PLANS[0])]
        if measured.device.type != "cuda":
            return
        for name, flash_qla in installed().items():
            self.candidates[name] = partial(fla_delta_rule, flash_qla=flash_qla)
        self.rows = lengths_up_to(longest)
        self.names = []
        for rows in self.rows:
            inputs = example(rows, shape, dtype, measured.device)
            early = ", launched early" if ours is not delta_rule else ""
            name = f"delta rule{early} of {rows} rows, {shape}, {str(dtype).removeprefix('torch.')}"
            candidates = {
                key: (lambda _, function=function, inputs=inputs: function(inputs))
                for key, function in self.candidates.items()
            }
            best = fastest(measured.compare(name, candidates), partial(self._is_right, inputs))
            if best is None:
                raise RuntimeError("no implementation of the delta rule runs on this GPU")
            self.names.append(best)

    def _is_right(self, inputs: DeltaInputs, name: str) -> bool:
        return agree(self.candidates[name](inputs), delta_rule_twin(inputs))

    def __call__(self, inputs: DeltaInputs) -> torch.Tensor:
        """Run the rule; see `kernels.delta_rule.delta_rule_twin`."""
        return self.candidates[self.name(len(inputs.values))](inputs)

    def name(self, rows: int) -> str:
        """Return which implementation runs rows of a length."""
        return self.names[min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)]

    def __str__(self) -> str:
        return counted(self.names)


def example(rows: int, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> DeltaInputs:
    """Return random inputs of so many tokens, of the sizes that a layer's have."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    def unit() -> torch.Tensor:
        return torch.nn.functional.normalize(noise(rows, shape.keys, shape.key_width), dim=-1).to(dtype)

    values = noise(rows, shape.values, shape.value_width).to(dtype)
    decay = -torch.nn.functional.softplus(noise(rows, shape.values))
    return DeltaInputs(unit(), unit(), values, decay, noise(rows, shape.values).sigmoid())

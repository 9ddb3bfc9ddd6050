"""The reference engine: transformers' own forward pass, the oracle of every other engine."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jevany_backend.encoding import Row


class ReferenceEngine:
    """Runs rows through transformers' text model, one row a call.

    Args:
        model: The text decoder with the adapter merged, in evaluation mode, on its device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def hidden_states(self, row: Row) -> torch.Tensor:
        """Return the final hidden states at the row's readout positions.

        Args:
            row: n token ids and K options.

        Returns:
            (1 + K, hidden) on the engine's device: the decide token's, then each end-option token's.
        """
        ids = torch.tensor([row.ids], device=self.device)
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden[[row.decide, *row.option_ends]]


def hide_gpu_kernels() -> None:
    """Keep transformers from taking kernels that run on a GPU alone, for a process that serves on the CPU.

    transformers takes them wherever they can be imported, once, when a family's module is first imported: call this
    before anything imports one.
    """
    for package in ("fla", "causal_conv1d"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


# transformers takes these from other packages where they are installed, and silently its own slow ones where not.
_REPLACEABLE = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")


def live_kernels(model: PreTrainedModel) -> dict[str, str]:
    """Return where the kernels of a model's DeltaNet layers come from.

    Args:
        model: A text decoder.

    Returns:
        Kernel -> the module it is from, which begins with ``transformers`` for the slow ones; empty for a family
        without such layers.
    """
    family = sys.modules[type(model).__module__]
    found = {}
    for name in _REPLACEABLE:
        if (function := getattr(family, name, None)) is not None:
            variables = inspect.getclosurevars(function).nonlocals
            found[variables.get("func_name", name)] = variables.get("implementation", function).__module__
    return found

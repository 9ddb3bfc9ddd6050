"""The reference engine: transformers' own forward pass, the oracle of every other engine."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from jevany_backend.encoding import Row
    from jevany_backend.readout import Readout


class ReferenceEngine:
    """Runs rows through transformers' text model, one row a call.

    Args:
        model: The text decoder with the adapter merged, in evaluation mode, on its device.
        readout: Reads the options' probabilities off its states.
        gpu_kernels: Whether its DeltaNet layers run the kernels that transformers has found, or its slow ones.
        fused_attention: Whether PyTorch may fuse attention, or writes out its scores.
    """

    def __init__(
        self, model: PreTrainedModel, readout: Readout, *, gpu_kernels: bool = True, fused_attention: bool = True
    ) -> None:
        self.model = model
        self.readout = readout
        self.gpu_kernels = gpu_kernels
        self.fused_attention = fused_attention
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
        with contextlib.ExitStack() as stack:
            if not self.gpu_kernels:
                stack.enter_context(own_kernels(self.model))
            if not self.fused_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden[[row.decide, *row.option_ends]]

    @torch.inference_mode()
    def probabilities(self, row: Row) -> NDArray[np.float32]:
        """Return the options' probabilities, (K,) float32, in option order: forward pass, readout, copy to the CPU."""
        return self.readout(self.hidden_states(row)).cpu().numpy()


class CapturableTransformers:
    """transformers' forward pass for a captured graph, as `graphs.Forward`: nothing in it waits for the host.

    While a stream captures, transformers would build explicit masks for all layers, which rule out the flash kernel. A
    mask of None for a type of layer leaves the causal flag instead. Only layers with a window get one, and only for a
    row that is longer than the window.

    Args:
        model: A text decoder of layers with full attention, with a window, or with a delta rule.

    Raises:
        ValueError: It has other layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._types = set(config.layer_types)
        if unknown := self._types - {"full_attention", "linear_attention", "sliding_attention"}:
            raise ValueError(f"{config.model_type} has layers of {', '.join(sorted(unknown))}")
        self.model = model
        self._window: int | None = config.sliding_window if "sliding_attention" in self._types else None
        # Qwen's positions have three planes, as for pictures: for the four planes that it makes itself, transformers
        # looks for rows packed together.
        self._planes = 3 if "linear_attention" in self._types else None

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Return (R, hidden), the final states at positions (R,) of the row with token ids (n,)."""
        positions = torch.arange(len(ids), device=ids.device)[None]
        masks = dict.fromkeys(self._types)
        if self._window is not None:
            masks["sliding_attention"] = self._window_mask(positions)
        output = self.model(
            input_ids=ids[None],
            position_ids=positions if self._planes is None else positions.expand(self._planes, 1, -1),
            attention_mask=masks,
            use_cache=False,
        )
        return output.last_hidden_state[0].index_select(0, reads)

    def _window_mask(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the scores (1, 1, n, n) of a layer with a window; None where the window has all."""
        assert self._window is not None
        if positions.shape[1] <= self._window:
            return None
        back = positions.T - positions  # How far behind the query a key stands.
        hidden = (back < 0) | (back >= self._window)
        # Numbers, as a mask of booleans would be made into them in every layer anew.
        zeros = torch.zeros(back.shape, dtype=self.model.dtype, device=back.device)
        return zeros.masked_fill_(hidden, float("-inf"))[None, None]


def hide_gpu_kernels() -> None:
    """Keep transformers from taking kernels that run on a GPU alone, for a process that serves on the CPU.

    transformers takes them wherever they can be imported, once, when a family's module is first imported: call this
    before anything imports one.
    """
    for package in ("fla", "causal_conv1d"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


# transformers takes these from other packages where they are installed, and silently its own slow ones where not.
_REPLACEABLE = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")


@contextlib.contextmanager
def own_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's family run transformers' own kernels, whatever it has found: slow, and in float32 exact.

    Args:
        model: A text decoder.
    """
    family = sys.modules[type(model).__module__]
    found = {name: getattr(family, name) for name in _REPLACEABLE if hasattr(family, name)}
    try:
        for name, function in found.items():
            setattr(family, name, inspect.unwrap(function))
        yield
    finally:
        for name, function in found.items():
            setattr(family, name, function)


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

"""The reference engine: transformers' own forward pass, the oracle of every other engine."""

from __future__ import annotations

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

"""From the hidden states that are read to the probability of each option."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch.nn import functional


class PointerReadout:
    """The decide token points at the options.

    With q = Wq h[decide] + bq and k_i = Wk h[end-option_i] + bk, the logit of option i is (k_i . q) / sqrt(dim), plus
    MLP(k_i * q) where the head has a residual MLP (Linear, GELU, Linear). Divided by the temperature, then softmax.

    Args:
        head: The tensors of ``HeadFile.head``, float32, on the device that runs the readout.
        temperature: What logits are divided by.
    """

    def __init__(self, head: dict[str, torch.Tensor], temperature: float = 1.0) -> None:
        self.head = head
        self.temperature = temperature

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of K options, (K,) float32, for the states that `logits` takes."""
        return torch.softmax(self.logits(hidden), dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of K options, divided by the temperature.

        Args:
            hidden: (1 + K, hidden), the decide token's state first, then each end-option token's; any float dtype.

        Returns:
            (K,), float32.
        """
        head, hidden = self.head, hidden.float()
        query = functional.linear(hidden[0], head["q.weight"], head["q.bias"])
        keys = functional.linear(hidden[1:], head["k.weight"], head["k.bias"])
        logits = (keys @ query) / math.sqrt(query.shape[0])
        if "residual.0.weight" in head:
            inner = functional.linear(keys * query, head["residual.0.weight"], head["residual.0.bias"])
            outer = functional.linear(functional.gelu(inner), head["residual.2.weight"], head["residual.2.bias"])
            logits = logits + outer[:, 0]
        return logits / self.temperature


class DirectTokenReadout:
    """The vocabulary head, asked only for the labels of the options, reads the decide token.

    Args:
        label_rows: (labels, hidden), the head's rows of the verbalizer table, in the head's dtype.
        temperature: What logits are divided by.
    """

    def __init__(self, label_rows: torch.Tensor, temperature: float = 1.0) -> None:
        self.label_rows = label_rows
        self.temperature = temperature

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of K options, (K,) float32, for the states that `logits` takes."""
        return torch.softmax(self.logits(hidden), dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of K options, divided by the temperature.

        Args:
            hidden: (1 + K, hidden), the decide token's state first; of the others only the number counts.

        Returns:
            (K,), float32; fewer where there are fewer labels.
        """
        rows = self.label_rows[: hidden.shape[0] - 1]
        logits = functional.linear(hidden[0].to(rows.dtype), rows).float()
        return logits / self.temperature


Readout: TypeAlias = "PointerReadout | DirectTokenReadout"

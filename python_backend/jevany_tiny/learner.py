"""A base, a readout and their loss: what training differentiates."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from jevany_tiny.batches import NO_DECISION, Batch, Readout
from jevany_tiny.shape import HEAD_DIM, HEAD_RESIDUAL_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

# Every layer is causal and rows are padded on the right, so no position that counts sees the padding.
NO_MASKS: dict[str, None] = {"full_attention": None, "linear_attention": None}


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A `Batch` on the device.

    `option_ends` is 0 and `absent` true where a row has no such option; `told` is 0, and `next_ids` `NO_DECISION`,
    where it has no such position.
    """

    readout: Readout
    ids: torch.Tensor
    decide: torch.Tensor
    option_ends: torch.Tensor
    absent: torch.Tensor
    labels: torch.Tensor
    told: torch.Tensor
    next_ids: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """Copies a batch to the device."""

        def moved(array: Any) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            if device.type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True).long()
            return tensor.long()

        ids, decide, option_ends, told = map(moved, (batch.ids, batch.decide, batch.option_ends, batch.told))
        absent, untold = option_ends < 0, told < 0
        option_ends, told = option_ends.clamp(min=0), told.clamp(min=0)
        next_ids = ids.gather(1, told + 1).masked_fill(untold, NO_DECISION)
        return cls(batch.readout, ids, decide, option_ends, absent, moved(batch.labels), told, next_ids)

    def copy_(self, other: DeviceBatch) -> None:
        """Overwrites this batch with another of the same shape."""
        for field in fields(self):
            if field.name != "readout":
                getattr(self, field.name).copy_(getattr(other, field.name))


class PointerHead(nn.Module):
    """The pointer readout with trainable weights; its state dict is the `head` of a checkpoint."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, HEAD_DIM)
        self.k = nn.Linear(hidden, HEAD_DIM)
        self.residual = nn.Sequential(
            nn.Linear(HEAD_DIM, HEAD_RESIDUAL_DIM), nn.GELU(), nn.Linear(HEAD_RESIDUAL_DIM, 1)
        )

    def forward(self, decide: torch.Tensor, options: torch.Tensor) -> torch.Tensor:
        """Returns logits (B, K) of the states at the decide token (B, H) and at the option ends (B, K, H)."""
        query, keys = self.q(decide)[:, None], self.k(options)
        product = keys * query
        return product.sum(-1) / math.sqrt(HEAD_DIM) + self.residual(product)[..., 0]


class Learner(nn.Module):
    """Computes the logits of options.

    Args:
        base: The text model, with or without an adapter around it.
        head: The pointer head, or None where only the vocabulary head is read.
        embedding: The embedding, which is the vocabulary head too.
        label_ids: Token ids of the verbalizer table.
    """

    def __init__(self, base: nn.Module, head: PointerHead | None, embedding: nn.Embedding, label_ids: Sequence[int]):
        super().__init__()
        self.base = base
        self.head = head
        self._embedding = (embedding,)  # In a tuple, so that its weight is registered once, under the base.
        self.label_ids: torch.Tensor
        self.register_buffer("label_ids", torch.tensor(label_ids), persistent=False)

    def layers(self) -> nn.ModuleList:
        """Returns the decoder layers, adapted or not."""
        return next(module for name, module in self.base.named_modules() if name.endswith("layers"))

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the states after the final norm, (B, L, H)."""
        return self.base(input_ids=ids, attention_mask=NO_MASKS, use_cache=False).last_hidden_state

    def logits(self, hidden: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """Returns float32 logits (B, K), minus infinity where a row has no such option."""
        rows = torch.arange(len(batch.decide), device=hidden.device)
        decide = hidden[rows, batch.decide]
        with torch.autocast(hidden.device.type, enabled=False):
            if batch.readout == "pointer":
                assert self.head is not None
                logits = self.head(decide.float(), hidden[rows[:, None], batch.option_ends].float())
            else:
                labels = self._embedding[0].weight[self.label_ids[: batch.option_ends.shape[1]]]
                logits = decide.float() @ labels.float().T
        return logits.masked_fill(batch.absent, float("-inf"))

    def told_logits(self, hidden: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """Returns logits (B, T, vocabulary) of the token after each told position."""
        rows = torch.arange(len(batch.told), device=hidden.device)
        return functional.linear(hidden[rows[:, None], batch.told], self._embedding[0].weight)

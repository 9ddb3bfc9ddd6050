"""A base, a readout and their loss: what training differentiates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from jevany_tiny.batches import Batch, Readout
from jevany_tiny.shape import HEAD_DIM, HEAD_RESIDUAL_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

# Every layer is causal and rows are padded on the right, so no position that counts sees the padding.
NO_MASKS: dict[str, None] = {"full_attention": None, "linear_attention": None}


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A `Batch` on the device; `option_ends` is 0 and `absent` true where a row has no such option."""

    readout: Readout
    ids: torch.Tensor
    decide: torch.Tensor
    option_ends: torch.Tensor
    absent: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """Copies a batch to the device."""

        def moved(array: Any) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            if device.type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True).long()
            return tensor.long()

        option_ends = moved(batch.option_ends)
        absent = option_ends < 0
        return cls(
            batch.readout, moved(batch.ids), moved(batch.decide), option_ends.clamp(min=0), absent, moved(batch.labels)
        )

    def copy_(self, other: DeviceBatch) -> None:
        """Overwrites this batch with another of the same shape."""
        for name in ("ids", "decide", "option_ends", "absent", "labels"):
            getattr(self, name).copy_(getattr(other, name))


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

    def language_loss(self, hidden: torch.Tensor, batch: DeviceBatch, positions: int) -> torch.Tensor:
        """Returns the next-token loss at some random positions of the rows."""
        device = hidden.device
        row = torch.randint(len(batch.decide), (positions,), device=device)
        position = (torch.rand(positions, device=device) * batch.decide[row]).long()
        logits = functional.linear(hidden[row, position], self._embedding[0].weight)
        return functional.cross_entropy(logits.float(), batch.ids[row, position + 1])

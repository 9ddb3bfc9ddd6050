"""The way of one weight from its stored bytes to the device: dequantised, merged with the adapter, rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jevany_backend.checkpoint.adapter import LoraPair
from jevany_backend.checkpoint.shards import StoredTensor


@dataclass(frozen=True)
class BlockScales:
    """The scales of a weight that is stored as fp8: value = stored number times the scale of its block.

    Attributes:
        scales: (ceil(out / rows), ceil(in / columns)), float32, on the weight's device.
        rows: How many rows share a scale.
        columns: How many columns.
    """

    scales: torch.Tensor
    rows: int
    columns: int

    def dequantise(self, stored: torch.Tensor, first_row: int) -> torch.Tensor:
        """Return the values of some rows.

        Args:
            stored: (rows, in), e4m3, on the scales' device.
            first_row: The number of its first row in the whole weight.

        Returns:
            (rows, in), float32.
        """
        of_row = torch.arange(first_row, first_row + len(stored), device=stored.device) // self.rows
        scales = self.scales[of_row].repeat_interleave(self.columns, dim=1)[:, : stored.shape[1]]
        return stored.float().mul_(scales)


@dataclass(frozen=True)
class Weight:
    """A weight of the model and where its values come from.

    Attributes:
        stored: The base's tensor.
        target: The weight, (out, in) or another shape, contiguous, on the device.
        pair: What the adapter adds, on the device, or None.
        scales: The scales where the base stores it as fp8, or None.
    """

    stored: StoredTensor
    target: torch.Tensor
    pair: LoraPair | None = None
    scales: BlockScales | None = None

    def write(self, raw: torch.Tensor, first_row: int, rows: int) -> None:
        """Write some rows: W' = dtype(float32(W) + scale B A), rounded once.

        Where nothing changes, the bytes are copied to their place; else the rows pass through a small block on the
        device: no more than these rows are ever there in float32.

        Args:
            raw: The rows' bytes as stored, uint8, in host memory; the copy may go on after the return.
            first_row: The first row's number.
            rows: How many there are.
        """
        source = raw.view(self.stored.dtype).view(rows, *self.stored.shape[1:])
        target = self.target.view(-1, *self.stored.shape[1:])[first_row : first_row + rows]
        if self.pair is None and self.scales is None and source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
            return
        block = source.to(target.device, non_blocking=True)
        if self.scales is not None:
            block = self.scales.dequantise(block, first_row)
        if self.pair is not None:
            block = block.float()
            self.pair.add_to(block, first_row)
        target.copy_(block)

"""One optimiser step: forward, backward, clipping and update; on a GPU, one CUDA graph for each shape of batch.

A step of so small a model is thousands of tiny kernels. Launched one by one they keep the CPU busy and the GPU idle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jevany_tiny.batches import NO_DECISION, Batch
from jevany_tiny.learner import DeviceBatch, Learner

MAX_OPTIONS = 24


class Muon:
    """Muon (Jordan et al., 2024) over stacks of matrices of one shape, with the learning rate on the device.

    The momentum's singular values are driven to 1 by five Newton-Schulz steps; the update is scaled so that its root
    mean square is 0.2, AdamW's usual one. torch.optim.Muon does the same matrix by matrix, and its rate is a Python
    number, which a graph would freeze.

    Args:
        matrices: The parameters.
        rate: (), float32, on the device; read at every step.
    """

    MOMENTUM = 0.95
    DECAY = 0.01
    STEPS = 5

    def __init__(self, matrices: Sequence[nn.Parameter], rate: torch.Tensor) -> None:
        self.rate = rate
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        self.stacks = [(stack, torch.zeros_like(torch.stack([*stack]))) for stack in by_shape.values()]

    @torch.no_grad()
    def step(self) -> None:
        """Updates every matrix from its gradient."""
        for stack, momentum in self.stacks:
            gradient = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradient, 1 - self.MOMENTUM)
            update = self._orthogonal(gradient.lerp(momentum, self.MOMENTUM))
            update = update * (self.rate * 0.2 * max(update.shape[1:]) ** 0.5)
            for matrix, change in zip(stack, update.unbind(), strict=True):
                matrix.mul_(1 - self.rate * self.DECAY).sub_(change)

    def _orthogonal(self, update: torch.Tensor) -> torch.Tensor:
        x = update.bfloat16()
        tall = x.shape[1] > x.shape[2]
        if tall:
            x = x.transpose(1, 2)
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(self.STEPS):
            square = x @ x.transpose(1, 2)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return (x.transpose(1, 2) if tall else x).float()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Means over some steps: of the decisions, and of the tokens of recitals, which are NaN where there were none.

    Attributes:
        loss: Cross-entropy of a decision, in nats.
        accuracy: Share of decisions whose likeliest option was right.
        recital_loss: Cross-entropy of a recited token, in nats.
        recital_accuracy: Share of recited tokens that were the likeliest.
    """

    loss: float
    accuracy: float
    recital_loss: float
    recital_accuracy: float

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  accuracy {self.accuracy:.3f}"
        if not math.isnan(self.recital_loss):
            text += f"  recital loss {self.recital_loss:.3f}  accuracy {self.recital_accuracy:.3f}"
        return text


class TrainingStep:
    """Trains a learner, one batch a call.

    Args:
        learner: What is trained, on its device.
        rate: Peak learning rate.
        from_scratch: Whether a base is trained, not an adapter: then told positions are learnt too, and the matrices
            inside the layers are trained by Muon; the rest, or else all, is trained by AdamW, at half the rate beside
            Muon.
    """

    def __init__(self, learner: Learner, rate: float, *, from_scratch: bool) -> None:
        self.learner = learner
        self.device = next(learner.parameters()).device
        if self.device.type == "cuda" and from_scratch:
            # Unfused, a layer is a hundred passes over its activations; compiled, it is a dozen. With adapters around
            # every projection, compiling takes longer than the training that it would speed up. Padded matrix products
            # are off: a gradient's stride would be fixed to the length of the first batch.
            for layer in learner.layers():
                layer.compile(dynamic=True, options={"shape_padding": False})
        self.from_scratch = from_scratch
        self.peak = rate
        self.parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
        matrices = [
            parameter
            for name, parameter in learner.named_parameters()
            if from_scratch and name.startswith("base.layers") and parameter.ndim == 2 and min(parameter.shape) >= 16
        ]
        inside = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in self.parameters if id(parameter) not in inside]
        self.share = 0.5 if from_scratch else 1.0
        self.muon_rate, self.adam_rate, self.language_weight = (torch.zeros((), device=self.device) for _ in range(3))
        self.muon = Muon(matrices, self.muon_rate)
        self.adam = torch.optim.AdamW(
            others, lr=self.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, capturable=self.device.type == "cuda"
        )
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate  # The tensor itself, whatever the constructor made of it.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        # Since the last report: loss, right ones and count of the decisions, then of the recited tokens.
        self.sums = torch.zeros(6, device=self.device, dtype=torch.float64)
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, DeviceBatch]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def __call__(self, batch: Batch, factor: float, language_weight: float) -> None:
        """Trains on one batch.

        Args:
            batch: The rows; on a GPU, every batch has the same number of them.
            factor: What the peak rate is multiplied by.
            language_weight: What the next-token loss of decisions is multiplied by; that of recitals has weight 1.
        """
        self.muon_rate.fill_(self.peak * factor)
        self.adam_rate.fill_(self.peak * self.share * factor)
        self.language_weight.fill_(language_weight)
        rows = DeviceBatch.of(_with_all_options(batch), self.device)
        if self.device.type != "cuda":
            self._run(rows)
            return
        key = (batch.readout, batch.ids.shape[1])
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows)
        graph, fixed = self._graphs[key]
        fixed.copy_(rows)
        graph.replay()

    def report(self) -> Report:
        """Returns the means since the last report.

        Raises:
            FloatingPointError: A loss was not finite.
        """
        if not self.sums.isfinite().all():
            raise FloatingPointError("a loss is not finite; try a lower rate")
        decisions, tokens = self.sums.clone().split(3)
        self.sums.zero_()
        return Report(*(decisions[:2] / decisions[2]).tolist(), *(tokens[:2] / tokens[2]).tolist())

    def _capture(self, rows: DeviceBatch) -> tuple[torch.cuda.CUDAGraph, DeviceBatch]:
        # Two ordinary steps first, on another stream: libraries and the optimiser's state set themselves up in them.
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                self._run(rows)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._run(rows)
        return graph, rows

    def _run(self, rows: DeviceBatch) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            hidden = self.learner.hidden_states(rows.ids)
            told = self.learner.told_logits(hidden, rows) if self.from_scratch else None
        logits = self.learner.logits(hidden, rows)
        loss = functional.cross_entropy(logits, rows.labels, reduction="sum", ignore_index=NO_DECISION)
        decided = rows.labels != NO_DECISION
        right = (logits.argmax(-1) == rows.labels).sum()
        sums = [loss.detach(), right, decided.sum()]
        total = loss / decided.sum().clamp(min=1)
        if told is not None:
            losses = functional.cross_entropy(
                told.float().flatten(0, 1), rows.next_ids.flatten(), reduction="none", ignore_index=NO_DECISION
            ).view_as(rows.next_ids)
            present = rows.next_ids != NO_DECISION
            recited = present & ~decided[:, None]
            running = present & decided[:, None]
            recital = (losses * recited).sum() / recited.sum().clamp(min=1)
            text = (losses * running).sum() / running.sum().clamp(min=1)
            total = total + recital + self.language_weight * text
            right_tokens = ((told.argmax(-1) == rows.next_ids) & recited).sum()
            sums += [(losses.detach() * recited).sum(), right_tokens, recited.sum()]
        total.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.muon.step()
        self.sums[: len(sums)] += torch.stack([value.double() for value in sums])


def _with_all_options(batch: Batch) -> Batch:
    """Widens a batch to `MAX_OPTIONS` options, so that its shape depends on its length only."""
    missing = MAX_OPTIONS - batch.option_ends.shape[1]
    ends = np.pad(batch.option_ends, ((0, 0), (0, missing)), constant_values=-1)
    return dataclasses.replace(batch, option_ends=ends)

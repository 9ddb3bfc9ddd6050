"""The measurement: serial, one row at a time, each repeat in a shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from jevany_backend.decision_model import Engine
    from jevany_backend.encoding import Row

WARM_UP = 16
REPEATS = 3
SEED = 0


@dataclass
class Samples:
    """What one mode took.

    Attributes:
        rows: Which row each sample is of.
        milliseconds: Forward time of each: ids to the device, forward, readout, probabilities on the CPU.
        probabilities: The last answer to each row that was reached.
        complete: Whether every repeat reached every row.
    """

    rows: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    probabilities: dict[int, list[float]] = field(default_factory=dict)
    complete: bool = False

    def summary(self) -> dict[str, Any]:
        """Return median, mean, 90th and 95th percentile, in milliseconds, and the number of samples."""
        if not self.milliseconds:
            return {"samples": 0}
        times = np.array(self.milliseconds)
        return {
            "samples": len(times),
            "complete": self.complete,
            "median": float(np.median(times)),
            "mean": float(times.mean()),
            "p90": float(np.quantile(times, 0.90)),
            "p95": float(np.quantile(times, 0.95)),
        }


def orders(rows: int, repeats: int) -> list[int]:
    """Return which row is asked when: each repeat visits all, in an order shuffled by one generator."""
    shuffle = random.Random(SEED)
    asked: list[int] = []
    for _ in range(repeats):
        order = list(range(rows))
        shuffle.shuffle(order)
        asked += order
    return asked


def measure(
    engine: Engine,
    rows: Sequence[Row],
    device: torch.device,
    *,
    repeats: int = REPEATS,
    warm_up: int = WARM_UP,
    warm_lengths: bool = False,
    samples: Samples | None = None,
    deadline: float = float("inf"),
    progress: Callable[[int], None] | None = None,
) -> Samples:
    """Time an engine on rows.

    Args:
        engine: Ready to answer.
        rows: The panel's, in order.
        device: What to wait for before a clock is read.
        repeats: How often each row is visited, in orders shuffled by one generator.
        warm_up: Rows that are answered first, cycling through the panel from the start.
        warm_lengths: Whether a row of a length that has not been seen is answered once before it is timed: the kernels
            of transformers' own path are compiled and tuned then, for seconds.
        samples: Where they go, for a caller that wants those of a run that is cut short by an exception.
        deadline: When to stop, on `time.monotonic`'s clock; what has been measured by then counts.
        progress: Called with the number of samples after each.
    """
    for index in range(warm_up):
        if time.monotonic() > deadline:
            break
        engine.probabilities(rows[index % len(rows)])
    _wait(device)
    samples = Samples() if samples is None else samples
    cold = {len(row.ids) for row in rows} if warm_lengths else set()
    for index in orders(len(rows), repeats):
        if time.monotonic() > deadline:
            return samples
        if len(rows[index].ids) in cold:
            engine.probabilities(rows[index])
            cold.discard(len(rows[index].ids))
        _wait(device)
        begin = time.perf_counter()
        probabilities = engine.probabilities(rows[index])
        _wait(device)
        samples.milliseconds.append((time.perf_counter() - begin) * 1e3)
        samples.rows.append(index)
        samples.probabilities[index] = [float(value) for value in probabilities]
        if progress:
            progress(len(samples.rows))
    samples.complete = True
    return samples


def changes(samples: Samples, baseline: Samples) -> dict[str, Any]:
    """Compare answers row by row, over the rows that both have reached.

    Returns:
        How many rows were compared, how many have another most probable option, and the mean and the largest change of
        a probability.
    """
    both = sorted(samples.probabilities.keys() & baseline.probabilities.keys())
    pairs = [(np.array(samples.probabilities[row]), np.array(baseline.probabilities[row])) for row in both]
    moved = np.concatenate([abs(ours - theirs) for ours, theirs in pairs]) if pairs else None
    return {
        "rows": len(both),
        "argmax_changes": sum(int(ours.argmax() != theirs.argmax()) for ours, theirs in pairs),
        "mean_probability_change": None if moved is None else float(moved.mean()),
        "largest_probability_change": None if moved is None else float(moved.max()),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

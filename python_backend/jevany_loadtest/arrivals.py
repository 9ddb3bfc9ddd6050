"""When requests are due: Poisson arrivals over stages of given rates, drawn in advance from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SHAPES = ("warm-up", "steps", "spike", "soak")
WARM_UP = "warm-up"
PROBE = "probe"
AFTER_SPIKE = "after spike"

_STEPS = 4
_SPIKE = 3.0


@dataclass(frozen=True)
class Stage:
    """A time of constant load.

    Attributes:
        name: What the result calls it; samples of ``warm-up`` are recorded and count for nothing.
        rate: Requests a second, over all workers.
        seconds: How long.
    """

    name: str
    rate: float
    seconds: float


def stages(shapes: Sequence[str], rate: float, seconds: float) -> list[Stage]:
    """Return the stages of a run.

    Args:
        shapes: Of `SHAPES`, in order: ``warm-up`` is a tenth of the time, ``steps`` climbs to the rate in four,
            ``spike`` is three times the rate for a tenth of the time and as long at the rate after it, ``soak`` is the
            rate for the whole time.
        rate: Requests a second.
        seconds: The time.
    """
    made: list[Stage] = []
    for shape in shapes:
        if shape == WARM_UP:
            made.append(Stage(WARM_UP, rate, seconds / 10))
        elif shape == "steps":
            for step in range(1, _STEPS + 1):
                made.append(Stage(f"step {step}", rate * step / _STEPS, seconds / _STEPS))
        elif shape == "spike":
            made += [Stage("spike", rate * _SPIKE, seconds / 10), Stage(AFTER_SPIKE, rate, seconds / 10)]
        else:
            made.append(Stage("soak", rate, seconds))
    return made


@dataclass(frozen=True)
class Arrival:
    """One request that is due.

    Attributes:
        seconds: When, since the start of the run.
        stage: The number of its stage.
        row: Which request of the panel.
    """

    seconds: float
    stage: int
    row: int


def poisson(plan: Sequence[Stage], rows: int, seed: int, worker: int = 0, workers: int = 1) -> list[Arrival]:
    """Draw the arrivals of one worker: a Poisson process of its share of the rate, a random row for each.

    Processes that are added up make one of the summed rate, so the workers together keep the stages' rates.

    Args:
        plan: The stages, one after the other.
        rows: How many requests the panel has.
        seed: What is drawn by.
        worker: The number of this worker, from 0.
        workers: How many there are.
    """
    draw = random.Random(f"{seed} {worker} of {workers}")
    arrivals, begin = [], 0.0
    for number, stage in enumerate(plan):
        end, now = begin + stage.seconds, begin
        while stage.rate > 0 and (now := now + draw.expovariate(stage.rate / workers)) < end:
            arrivals.append(Arrival(now, number, draw.randrange(rows)))
        begin = end
    return arrivals

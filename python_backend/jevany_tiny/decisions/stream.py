"""Endless, seeded streams of labelled decisions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

from jevany_tiny.decisions import facts, routing, screening, thresholds, tools, urgency
from jevany_tiny.decisions.dice import Dice
from jevany_tiny.decisions.example import Example, Recital
from jevany_tiny.decisions.phrases import Split

Maker = Callable[[random.Random, Split], Example]

# How often each kind of decision occurs.
MAKERS: tuple[tuple[Maker, float], ...] = (
    (routing.department_choice, 10),
    (routing.desk_choice, 4),
    (routing.issue_noul, 8),
    (routing.department_noul, 4),
    (urgency.level_score, 15),
    (urgency.level_choice, 4),
    (urgency.level_noul, 3),
    (facts.value_choice, 7),
    (facts.subject_choice, 4),
    (facts.value_noul, 7),
    (facts.event_noul, 6),
    (facts.catalogue_choice, 1),
    (facts.mention_choice, 3),
    (facts.mention_noul, 2),
    (thresholds.limit_noul, 5),
    (thresholds.rule_noul, 3),
    (thresholds.band_choice, 3),
    (thresholds.band_score, 7),
    (thresholds.extreme_choice, 3),
    (thresholds.date_noul, 4),
    (thresholds.date_choice, 2),
    (tools.tool_choice, 8),
    (tools.listed_tool_choice, 4),
    (tools.tool_noul, 4),
    (screening.kind_choice, 6),
    (screening.kind_noul, 4),
    (screening.risk_score, 6),
)

# What the recitals are about.
RECITERS: tuple[tuple[Callable[[random.Random, Split], Recital], float], ...] = (
    (facts.told_values, 5),
    (facts.told_pairs, 2.5),
    (facts.told_events, 1.5),
    (facts.told_mentions, 0.5),
    (routing.told_messages, 2),
    (thresholds.told_numbers, 2),
    (thresholds.told_dates, 2),
)

DOMAINS = ("routing", "urgency", "facts", "thresholds", "tools", "screening")


# These ask to find and match only, or can be answered from the words alone at hardness 0: what a model learns first.
_FIRST = (
    *(routing.department_choice, routing.issue_noul, routing.department_noul, urgency.level_score),
    *(urgency.level_choice, tools.tool_choice, tools.tool_noul, screening.kind_choice, screening.kind_noul),
    *(screening.risk_score, facts.value_choice, facts.mention_choice, facts.mention_noul),
)
_PRIMERS: dict[Maker, float] = {facts.mention_choice: 30, facts.mention_noul: 10}
_BLOCK = 64


def decisions(split: Split, seed: int | str, makers: tuple[tuple[Maker, float], ...] = MAKERS) -> Iterator[Example]:
    """Yields labelled decisions without end; the same ones for the same split and seed.

    Args:
        split: `train`, or `heldout` for sentence frames, names and option sets that training never shows.
        seed: Where the stream starts; different seeds give unrelated streams.
        makers: The kinds of decisions and their weights.
    """
    rng = Dice(f"{split}/{seed}")
    while True:
        yield from _block(rng, split, makers)


def recitals(seed: int | str) -> Iterator[Recital]:
    """Yields training recitals without end."""
    rng = random.Random(f"recitals/{seed}")
    cumulative = list(itertools.accumulate(weight for _, weight in RECITERS))
    while True:
        for reciter, _ in rng.choices(RECITERS, cum_weights=cumulative, k=_BLOCK):
            yield reciter(rng, "train")


def lessons(seed: int | str, ramp: float) -> Iterator[Example]:
    """Yields training decisions without end, from easy to hard.

    Args:
        seed: Where the stream starts.
        ramp: After how many rows the full hardness is reached, infinity for never; a fifth of the rows stays easier for
            ever.
    """
    rng = Dice(f"train/{seed}")
    for row in itertools.count(step=_BLOCK):
        reached = min(1.0, row / ramp) if ramp else 1.0
        if reached < 1 or rng.random() < 0.2:
            rng.hardness = reached * math.sqrt(rng.random())
        else:
            rng.hardness = 1.0
        yield from _block(rng, "train", _makers_at(rng.hardness))


def _makers_at(hardness: float) -> tuple[tuple[Maker, float], ...]:
    later = min(1.0, max(0.0, (hardness - 0.1) / 0.3))
    return tuple(
        (maker, weight + _PRIMERS.get(maker, 0) * (1 - hardness) if maker in _FIRST else weight * later)
        for maker, weight in MAKERS
    )


def _block(rng: Dice, split: Split, makers: tuple[tuple[Maker, float], ...]) -> Iterator[Example]:
    cumulative = list(itertools.accumulate(weight for _, weight in makers))
    for maker, _ in rng.choices(makers, cum_weights=cumulative, k=_BLOCK):
        yield maker(rng, split)


def take(split: Split, seed: int | str, count: int) -> list[Example]:
    """Returns the first decisions of a stream."""
    return list(itertools.islice(decisions(split, seed), count))

"""Endless, seeded streams of labelled decisions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from jevany_tiny.decisions import facts, routing, screening, thresholds, tools, urgency
from jevany_tiny.decisions.example import Example
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

DOMAINS = ("routing", "urgency", "facts", "thresholds", "tools", "screening")


def decisions(split: Split, seed: int | str, makers: tuple[tuple[Maker, float], ...] = MAKERS) -> Iterator[Example]:
    """Yields labelled decisions without end; the same ones for the same split and seed.

    Args:
        split: `train`, or `heldout` for sentence frames, names and option sets that training never shows.
        seed: Where the stream starts; different seeds give unrelated streams.
        makers: The kinds of decisions and their weights.
    """
    rng = random.Random(f"{split}/{seed}")
    functions = [maker for maker, _ in makers]
    cumulative = list(itertools.accumulate(weight for _, weight in makers))
    while True:
        for maker in rng.choices(functions, cum_weights=cumulative, k=256):
            yield maker(rng, split)


def take(split: Split, seed: int | str, count: int) -> list[Example]:
    """Returns the first decisions of a stream."""
    return list(itertools.islice(decisions(split, seed), count))

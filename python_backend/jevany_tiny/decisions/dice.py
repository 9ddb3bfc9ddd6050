"""The source of chance, which also says how hard the rows shall be."""

from __future__ import annotations

import random


class Dice(random.Random):
    """A random source with a hardness from 0 to 1.

    At 0, no message stands beside the one that is asked about, so that the words alone give the answer; at 1, rows are
    as the held-out ones. A model that sees only hard rows from the start finds no first step: nothing that it can learn
    at once lowers the loss.
    """

    hardness = 1.0


def hardness(rng: random.Random) -> float:
    """Returns the hardness of a random source, 1 where it has none."""
    return rng.hardness if isinstance(rng, Dice) else 1.0


def if_hard(rng: random.Random, value: int) -> int:
    """Returns a count in the hard part of the rows, 0 in the easy part."""
    return value if rng.random() < hardness(rng) else 0

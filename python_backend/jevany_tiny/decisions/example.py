"""One labelled decision, and the small choices every domain makes the same way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.phrases import Split, belongs_to, phrases, pick


@dataclass(frozen=True, slots=True)
class Example:
    """A single-question request with its answer.

    Attributes:
        state: What the decision is about: text or any JSON value.
        question: `type`, `instructions` and `criteria`, as in a request.
        question_id: The key of the question in the request.
        label: Index of the right option, in the order in which the model sees the options (no before yes).
        domain: The family of tasks it comes from.
        split: `train` or `heldout`.
    """

    state: Any
    question: dict[str, Any]
    question_id: str
    label: int
    domain: str
    split: Split

    def request(self) -> dict[str, Any]:
        """Returns the body of a request for this decision."""
        return {"state": self.state, "questions": {self.question_id: self.question}}

    @property
    def option_count(self) -> int:
        """How many options the model chooses from."""
        return 2 if self.question["type"] == "noul" else len(self.question["criteria"])


@dataclass(frozen=True, slots=True)
class Recital:
    """A state with several short questions and the text that answers each.

    It is what the base learns to look things up from: every word of every answer is a lesson, where a decision gives
    one bit.

    Attributes:
        state: As in `Example`.
        told: Questions with their answers, which follow from the state.
    """

    state: Any
    told: tuple[tuple[str, str], ...]


def yes_or_no(answer: bool) -> str:
    """Returns the answer to a yes/no question in a recital."""
    return "yes" if answer else "no"


_YES_NO = phrases(
    "the answer is yes|the answer is no",
    "this is the case|this is not the case",
    "the record says so|the record does not say so",
    "true for the named record|not true for the named record",
    "it holds|it does not hold",
    held_out=("the record says this is the case|the record says this is not the case", "it is true|it is not true"),
)


def noul(
    rng: random.Random,
    split: Split,
    domain: str,
    state: Any,
    instructions: Any,
    answer: bool,
    descriptions: tuple[str, str] | None = None,
) -> Example:
    """Builds a yes/no decision; one in four describes its options."""
    question: dict[str, Any] = {"type": "noul", "instructions": instructions}
    if rng.random() < 0.25:
        true, false = descriptions or _YES_NO.draw(rng, split).split("|")
        question["criteria"] = {"false": false, "true": true}
        if rng.random() < 0.2:
            del question["criteria"][pick(rng, ("false", "true"))]
    return Example(state, question, pick(rng, ("answer", "check", "flag", "q")), int(answer), domain, split)


def choice(
    rng: random.Random,
    split: Split,
    domain: str,
    state: Any,
    instructions: Any,
    options: Sequence[tuple[str, str | None]],
    target: int,
) -> Example:
    """Builds a choice among options given as name and description, in shuffled order."""
    if len({name for name, _ in options}) < len(options):
        raise ValueError(f"two options have one name: {options}")
    order = list(range(len(options)))
    rng.shuffle(order)
    criteria = {options[index][0]: options[index][1] for index in order}
    question = {"type": "choice", "instructions": instructions, "criteria": criteria}
    return Example(state, question, pick(rng, ("choice", "decision", "pick", "q")), order.index(target), domain, split)


def score(
    rng: random.Random,
    split: Split,
    domain: str,
    state: Any,
    instructions: Any,
    levels: Sequence[str],
    target: int,
) -> Example:
    """Builds a score over ordered levels."""
    question = {"type": "score", "instructions": instructions, "criteria": list(levels)}
    return Example(state, question, pick(rng, ("score", "level", "rating", "q")), target, domain, split)


def option_set(rng: random.Random, split: Split, keys: Sequence[str], smallest: int, largest: int) -> list[str]:
    """Draws a combination of keys that belongs to the split: no set of options is in both."""
    while True:
        size = rng.randint(smallest, min(largest, len(keys)))
        drawn = rng.sample(keys, size)
        if belongs_to(split, "|".join(sorted(drawn))):
            return drawn

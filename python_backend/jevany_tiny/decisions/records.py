"""Records of several people, orders or sites, as text or as JSON: what the facts and thresholds domains ask about."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.phrases import (
    Phrases,
    Split,
    code,
    coined_name,
    company,
    distinct,
    fill,
    person,
    phrases,
    pick,
    place,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of thing that records are about, with a maker of names for it."""

    noun: str
    name: Callable[[random.Random, Split], str]


def _code(rng: random.Random, split: Split) -> str:
    del split
    return code(rng)


SUBJECTS = (
    Subject("customer", person),
    Subject("employee", person),
    Subject("patient", person),
    Subject("student", person),
    Subject("company", company),
    Subject("site", place),
    Subject("project", coined_name),
    Subject("server", coined_name),
    Subject("order", _code),
    Subject("ticket", _code),
)

_SENTENCES = phrases(
    "The {key} of {who} is {value}.",
    "{who}'s {key} is {value}.",
    "{who} has {value} as {key}.",
    "For {who}, the {key} is {value}.",
    "{who}: {key} {value}.",
    "{who} ({key}: {value}).",
    "We noted {value} as the {key} of {who}.",
    "{value} is the {key} of {who}.",
    "On the line for {who} we read {key} {value}.",
    "As for {who}, {key} = {value}.",
    held_out=(
        "We noted for {who}: {key} is {value}.",
        "{who} has the {key} {value}.",
        "The {key} for {who} is {value}.",
        "As {key}, {who} has {value}.",
    ),
)
_LINES = phrases(
    "{who} | {fields}",
    "{who}: {fields}",
    "- {who} - {fields}",
    "{who} ({fields})",
    "Record {who}: {fields}.",
    held_out=("{who} - {fields}", "Record of {who} ({fields})"),
)
_ASIDES = (
    "The list was checked on {day}.",
    "Please keep it up to date.",
    "{n} lines were removed.",
    "This was typed by hand.",
    "See also file {code}.",
    "Printed in {month}.",
)


def names(rng: random.Random, split: Split, subject: Subject, count: int) -> list[str]:
    """Draws different names for the subjects of a record."""
    return distinct(rng, split, count, subject.name)


def render_table(
    rng: random.Random, split: Split, subject: Subject, table: dict[str, dict[str, Any]], sentences: dict[str, Phrases]
) -> Any:
    """Writes a table of records as text or JSON.

    Args:
        rng: Source of randomness.
        split: Which sentence frames may be used.
        subject: What the records are about.
        table: Fields by name of the subject, in the order of the subjects.
        sentences: Frames of their own for some of the fields, with the slots `who` and `value`.

    Returns:
        A state.
    """
    kind = rng.random()
    if kind < 0.4:
        return _prose(rng, split, table, sentences)
    if kind < 0.52:
        frame = _LINES.draw(rng, split)
        gap, equals = pick(rng, (", ", "; ", " | ")), pick(rng, (": ", " ", " = "))
        return "\n".join(
            frame.format(who=who, fields=gap.join(f"{key}{equals}{value}" for key, value in fields.items()))
            for who, fields in table.items()
        )
    if kind < 0.7:
        state: Any = dict(table)
    else:
        key = pick(rng, ("name", "id", subject.noun))
        state = [{key: who, **fields} for who, fields in table.items()]
        if rng.random() < 0.3:
            state = [{key: who, "details": fields} for who, fields in table.items()]
    if rng.random() < 0.4:
        state = {f"{subject.noun}s": state}
        if rng.random() < 0.4:
            state["checked"] = pick(rng, ("yes", "no", "today", "by hand"))
    return state


def _prose(rng: random.Random, split: Split, table: dict[str, dict[str, Any]], sentences: dict[str, Phrases]) -> str:
    parts = []
    for who, fields in table.items():
        for key, value in fields.items():
            own = sentences.get(key)
            if own is not None and rng.random() < 0.6:
                parts.append(own.draw(rng, split).format(who=who, value=value))
            else:
                parts.append(_SENTENCES.draw(rng, split).format(who=who, key=key, value=value))
    if rng.random() < 0.5:
        rng.shuffle(parts)
    if rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), fill(rng, split, pick(rng, _ASIDES)))
    return pick(rng, (" ", " ", "\n")).join(parts)

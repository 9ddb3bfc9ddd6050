"""Numbers and dates against limits that stand in the question, in the options or in the state."""

from __future__ import annotations

import datetime
import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.dice import if_hard
from jevany_tiny.decisions.example import Example, Recital, choice, noul, score, yes_or_no
from jevany_tiny.decisions.phrases import Phrases, Split, phrases, pick, split_words
from jevany_tiny.decisions.records import SUBJECTS, Subject, names, render_table


@dataclass(frozen=True, slots=True)
class Quantity:
    """A field with numbers as values."""

    key: str
    low: int
    high: int
    unit: str = ""
    sentences: Phrases | None = None


QUANTITIES = (
    Quantity(
        "seats",
        2,
        400,
        "",
        phrases(
            "{who} has {value} seats.",
            "{value} seats belong to {who}.",
            held_out=("There are {value} seats for {who}.",),
        ),
    ),
    Quantity(
        "amount",
        5,
        9000,
        "$",
        phrases("{who} owes {value}.", "{who} paid {value}.", held_out=("{who} has to pay {value}.",)),
    ),
    Quantity("age", 2, 95),
    Quantity(
        "attempts",
        1,
        30,
        "",
        phrases(
            "{who} tried {value} times.",
            "{who} made {value} attempts.",
            held_out=("There were {value} attempts by {who}.",),
        ),
    ),
    Quantity("weight", 1, 900, " kg"),
    Quantity("score", 1, 100),
    Quantity("errors", 1, 500),
    Quantity("distance", 1, 2000, " km"),
    Quantity("temperature", 1, 120, " degrees"),
    Quantity("stock", 1, 5000),
    Quantity("orders", 1, 300),
    Quantity("days late", 1, 90),
)

_ABOVE = phrases(
    "Is the {key} of {who} above {limit}?",
    "Is {who}'s {key} more than {limit}?",
    "Is the {key} of {who} greater than {limit}?",
    "Does the {key} of {who} exceed {limit}?",
    "Is the {key} for {who} over {limit}?",
    "Is {who} above a {key} of {limit}?",
    held_out=("For {who}, is the {key} more than {limit}?", "Does {who}'s {key} exceed {limit}?"),
)
_BELOW = phrases(
    "Is the {key} of {who} below {limit}?",
    "Is {who}'s {key} less than {limit}?",
    "Is the {key} of {who} smaller than {limit}?",
    "Is the {key} for {who} under {limit}?",
    "Does {who} have a {key} below {limit}?",
    held_out=("For {who}, is the {key} less than {limit}?", "Is {who}'s {key} under {limit}?"),
)
_HOW_MUCH = phrases(
    "What is the {key} of {who}?",
    "What is {who}'s {key}?",
    "Which {key} does {who} have?",
    "{who}: which {key}?",
    held_out=("Which is the {key} of {who}?",),
)
_RULE = phrases(
    "The {key} limit is {limit}.",
    "Allowed {key}: up to {limit}.",
    "Nobody may go over a {key} of {limit}.",
    "Maximum {key}: {limit}.",
    held_out=("The maximum {key} is {limit}.", "Limit for {key}: {limit}."),
)
_BREAKS = phrases(
    "Is {who} over the limit?",
    "Does {who} break the limit?",
    "Is {who} above what is allowed?",
    "Does {who} exceed the maximum?",
    held_out=("Is {who} above the limit?", "Does {who} go over what is allowed?"),
)
_KEEPS = phrases(
    "Is {who} within the limit?",
    "Does {who} keep to the limit?",
    "Is the {key} of {who} allowed?",
    held_out=("Is {who} still within what is allowed?", "Does {who} keep within the limit?"),
)
_BAND = phrases(
    "Which range is the {key} of {who} in?",
    "How large is {who}'s {key}?",
    "Pick the range for the {key} of {who}.",
    "Classify {who} by {key}.",
    held_out=("Which range fits the {key} of {who}?", "Pick the range of {who}'s {key}."),
)
_MOST = phrases(
    "Which {noun} has the highest {key}?",
    "Who has the largest {key}?",
    "Which {noun} has the greatest {key}?",
    held_out=("Find the {noun} with the highest {key}.", "For which {noun} is the {key} largest?"),
)
_LEAST = phrases(
    "Which {noun} has the lowest {key}?",
    "Who has the smallest {key}?",
    "Which {noun} has the least {key}?",
    held_out=("Find the {noun} with the lowest {key}.", "For which {noun} is the {key} smallest?"),
)
_DATE_KEYS = ("due date", "start date", "delivery date", "renewal date", "invoice date", "birthday")
_BEFORE = phrases(
    "Is the {key} of {who} before {limit}?",
    "Is {who}'s {key} earlier than {limit}?",
    "Does the {key} of {who} come before {limit}?",
    held_out=("For {who}, is the {key} earlier than {limit}?", "Does {who}'s {key} come before {limit}?"),
)
_AFTER = phrases(
    "Is the {key} of {who} after {limit}?",
    "Is {who}'s {key} later than {limit}?",
    "Does the {key} of {who} come after {limit}?",
    held_out=("For {who}, is the {key} later than {limit}?", "Does {who}'s {key} come after {limit}?"),
)
_PAST = phrases(
    "Has the {key} of {who} passed?",
    "Is the {key} of {who} in the past?",
    "Is {who}'s {key} already over?",
    held_out=("Has {who}'s {key} already passed?", "Is {who}'s {key} in the past?"),
)
_FUTURE = phrases(
    "Is the {key} of {who} still to come?",
    "Is the {key} of {who} in the future?",
    held_out=("Is {who}'s {key} in the future?", "Is {who}'s {key} still to come?"),
)
_EARLIEST = phrases(
    "Which {noun} has the earliest {key}?",
    "Whose {key} comes first?",
    held_out=("Find the {noun} with the earliest {key}.", "For which {noun} does the {key} come first?"),
)
_LATEST = phrases(
    "Which {noun} has the latest {key}?",
    "Whose {key} comes last?",
    held_out=("Find the {noun} with the latest {key}.", "For which {noun} does the {key} come last?"),
)
_MONTHS = split_words("January February March April May June July August September October November December")
_BAND_NAMES = {2: (("low", "high"), ("small", "large")), 3: (("low", "medium", "high"), ("small", "medium", "large"))}


def _with_unit(value: int, unit: str) -> str:
    return f"{unit}{value}" if unit == "$" else f"{value}{unit}"


def _middle(rng: random.Random, quantity: Quantity) -> int:
    """Draws a limit that leaves room on both sides."""
    low, high = math.log(quantity.low + 2), math.log(quantity.high)
    return max(quantity.low + 2, round(math.exp(low + (0.15 + 0.7 * rng.random()) * (high - low))))


def _beside(rng: random.Random, limit: int, above: bool) -> int:
    """Draws a number on one side of a limit, as near on the one side as on the other."""
    factor = math.exp(0.25 + 1.2 * rng.random())
    if above:
        return max(limit + 1, round(limit * factor))
    return max(0, min(limit - 1, round(limit / factor)))


def _quantity_state(
    rng: random.Random, split: Split, quantity: Quantity, values: list[int]
) -> tuple[Any, list[str], Subject]:
    """Writes one value for each of several subjects, sometimes with a second quantity that does not matter."""
    subject = pick(rng, SUBJECTS)
    who = names(rng, split, subject, len(values))
    sentences = {quantity.key: quantity.sentences} if quantity.sentences is not None else {}
    other = pick(rng, QUANTITIES)
    second = other.key != quantity.key and rng.random() < 0.4
    table: dict[str, dict[str, Any]] = {}
    bare = rng.random() < 0.5
    first = rng.random() < 0.5
    for name, value in zip(who, values, strict=True):
        field = {quantity.key: value if bare else _with_unit(value, quantity.unit)}
        extra = {other.key: rng.randint(other.low, other.high)} if second else {}
        table[name] = {**field, **extra} if first else {**extra, **field}
    order = list(table)
    rng.shuffle(order)
    state = render_table(rng, split, subject, {name: table[name] for name in order}, sentences)
    return state, who, subject


def limit_noul(rng: random.Random, split: Split) -> Example:
    """Whether a number is above or below a limit in the question; another record is on the other side."""
    quantity = pick(rng, QUANTITIES)
    limit = _middle(rng, quantity)
    above = rng.random() < 0.5
    values = [_beside(rng, limit, above)]
    for index in range(if_hard(rng, pick(rng, (0, 1, 1, 1, 2)))):
        values.append(_beside(rng, limit, not above if index == 0 else rng.random() < 0.5))
    state, who, _ = _quantity_state(rng, split, quantity, values)
    asks_above = rng.random() < 0.5
    frame = (_ABOVE if asks_above else _BELOW).draw(rng, split)
    unit = quantity.unit if rng.random() < 0.5 else ""
    instructions = frame.format(key=quantity.key, who=who[0], limit=_with_unit(limit, unit))
    return noul(rng, split, "thresholds", state, instructions, above == asks_above)


def told_numbers(rng: random.Random, split: Split) -> Recital:
    """What number each record has, which is the largest, and whether it is above or below some other number."""
    quantity = pick(rng, QUANTITIES)
    middle = _middle(rng, quantity)
    values = [_beside(rng, middle, rng.random() < 0.5) for _ in range(pick(rng, (1, 2, 2, 3)))]
    state, who, subject = _quantity_state(rng, split, quantity, values)
    told = []
    for name, value in zip(who, values, strict=True):
        told.append((_HOW_MUCH.draw(rng, split).format(key=quantity.key, who=name), str(value)))
        for _ in range(2):
            above, asks_above = rng.random() < 0.5, rng.random() < 0.5
            limit = _beside(rng, max(1, value), not above)
            frame = (_ABOVE if asks_above else _BELOW).draw(rng, split)
            asked = frame.format(key=quantity.key, who=name, limit=limit)
            told.append((asked, yes_or_no(above == asks_above)))
    told = rng.sample(told, min(5, len(told)))
    if 1 < len(values) == len(set(values)):
        high = rng.random() < 0.5
        best = who[values.index(max(values) if high else min(values))]
        told.append(((_MOST if high else _LEAST).draw(rng, split).format(key=quantity.key, noun=subject.noun), best))
    return Recital(state, tuple(told))


def told_dates(rng: random.Random, split: Split) -> Recital:
    """What date each record has, which is the first, and whether it is before or after some other date."""
    key, style = pick(rng, _DATE_KEYS), pick(rng, (0, 0, 1, 2))
    middle = _some_day(rng)
    days = [_day_beside(rng, middle, rng.random() < 0.5) for _ in range(pick(rng, (1, 1, 2, 3)))]
    state, who, subject = _date_state(rng, split, key, days, style)
    told = []
    for name, day in zip(who, days, strict=True):
        told.append((_HOW_MUCH.draw(rng, split).format(key=key, who=name), _spelled(day, style)))
        for _ in range(3):
            after, asks_after = rng.random() < 0.5, rng.random() < 0.5
            limit = _spelled(_day_beside(rng, day, not after), style)
            frame = (_AFTER if asks_after else _BEFORE).draw(rng, split)
            told.append((frame.format(key=key, who=name, limit=limit), yes_or_no(after == asks_after)))
    told = rng.sample(told, min(4, len(told)))
    if 1 < len(days) == len(set(days)):
        last = rng.random() < 0.5
        best = who[days.index(max(days) if last else min(days))]
        told.append(((_LATEST if last else _EARLIEST).draw(rng, split).format(key=key, noun=subject.noun), best))
    return Recital(state, tuple(told))


def rule_noul(rng: random.Random, split: Split) -> Example:
    """Whether a number keeps to a limit that the state gives."""
    quantity = pick(rng, QUANTITIES)
    limit = _middle(rng, quantity)
    above = rng.random() < 0.5
    values = [_beside(rng, limit, above)]
    if rng.random() < 0.6:
        values.append(_beside(rng, limit, not above))
    state, who, _ = _quantity_state(rng, split, quantity, values)
    rule = _RULE.draw(rng, split).format(key=quantity.key, limit=_with_unit(limit, quantity.unit))
    if isinstance(state, str):
        state = f"{rule}\n{state}" if rng.random() < 0.5 else f"{state}\n{rule}"
    else:
        state = {"rule": rule, "records": state} if rng.random() < 0.5 else {"records": state, "rule": rule}
    breaks = rng.random() < 0.5
    frame = (_BREAKS if breaks else _KEEPS).draw(rng, split)
    return noul(rng, split, "thresholds", state, frame.format(key=quantity.key, who=who[0]), above == breaks)


def _bands(rng: random.Random, quantity: Quantity) -> tuple[list[str], int, int]:
    """Cuts a quantity into two to four ranges; returns their descriptions, one of them, and a value in it."""
    cuts = [_middle(rng, quantity)]
    for _ in range(rng.randint(0, 2)):
        cuts.append(round(cuts[-1] * (1.6 + 2 * rng.random())) + 1)
    target = pick(rng, range(len(cuts) + 1))
    if target == 0:
        value = _beside(rng, cuts[0], False)
    elif target == len(cuts):
        value = _beside(rng, cuts[-1], True)
    else:
        value = rng.randint(cuts[target - 1], cuts[target] - 1)
    style = pick(rng, (("below {}", "{} to {}", "{} or more"), ("less than {}", "from {} to {}", "at least {}")))
    texts = [style[0].format(cuts[0])]
    texts += [style[1].format(low, high - 1) for low, high in itertools.pairwise(cuts)]
    texts.append(style[2].format(cuts[-1]))
    return texts, target, value


def _band_state(rng: random.Random, split: Split, quantity: Quantity, value: int) -> tuple[Any, str]:
    values = [value]
    for _ in range(if_hard(rng, pick(rng, (0, 1, 1)))):
        values.append(_beside(rng, value + 1, rng.random() < 0.5))
    state, who, _ = _quantity_state(rng, split, quantity, values)
    return state, _BAND.draw(rng, split).format(key=quantity.key, who=who[0])


def band_choice(rng: random.Random, split: Split) -> Example:
    """Which range, among the options, a number is in."""
    quantity = pick(rng, QUANTITIES)
    texts, target, value = _bands(rng, quantity)
    state, instructions = _band_state(rng, split, quantity, value)
    named = _BAND_NAMES.get(len(texts))
    if named and rng.random() < 0.5:
        options: list[tuple[str, str | None]] = list(zip(pick(rng, named), texts, strict=True))
    else:
        options = [(text, None) for text in texts]
    return choice(rng, split, "thresholds", state, instructions, options, target)


def band_score(rng: random.Random, split: Split) -> Example:
    """Which of several rising ranges a number is in."""
    quantity = pick(rng, QUANTITIES)
    texts, target, value = _bands(rng, quantity)
    state, instructions = _band_state(rng, split, quantity, value)
    return score(rng, split, "thresholds", state, instructions, texts, target)


def extreme_choice(rng: random.Random, split: Split) -> Example:
    """Which record has the highest or lowest number."""
    quantity = pick(rng, QUANTITIES)
    count = pick(rng, (2, 2, 3))
    high = rng.random() < 0.5
    best = _middle(rng, quantity)
    values = [best]
    while len(values) < count:
        values.append(_beside(rng, best, not high))
    state, who, subject = _quantity_state(rng, split, quantity, values)
    instructions = (_MOST if high else _LEAST).draw(rng, split).format(key=quantity.key, noun=subject.noun)
    return choice(rng, split, "thresholds", state, instructions, [(name, None) for name in who], 0)


def _spelled(day: datetime.date, style: int) -> str:
    if style == 0:
        return day.isoformat()
    if style == 1:
        return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"
    return f"{_MONTHS[day.month - 1]} {day.day}, {day.year}"


def _some_day(rng: random.Random) -> datetime.date:
    return datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randint(150, 1000))


def _day_beside(rng: random.Random, day: datetime.date, after: bool) -> datetime.date:
    days = round(math.exp(1 + 4 * rng.random()))
    return day + datetime.timedelta(days=days if after else -days)


def _date_state(
    rng: random.Random, split: Split, key: str, days: list[datetime.date], style: int
) -> tuple[Any, list[str], Subject]:
    subject = pick(rng, SUBJECTS)
    who = names(rng, split, subject, len(days))
    table: dict[str, dict[str, Any]] = {name: {key: _spelled(day, style)} for name, day in zip(who, days, strict=True)}
    order = list(table)
    rng.shuffle(order)
    return render_table(rng, split, subject, {name: table[name] for name in order}, {}), who, subject


def date_noul(rng: random.Random, split: Split) -> Example:
    """Whether a date is before or after another one in the question, or before or after today."""
    key, style = pick(rng, _DATE_KEYS), pick(rng, (0, 0, 1, 2))
    limit = _some_day(rng)
    after = rng.random() < 0.5
    days = [_day_beside(rng, limit, after)]
    if rng.random() < 0.6:
        days.append(_day_beside(rng, limit, not after))
    state, who, _ = _date_state(rng, split, key, days, style)
    asks_after = rng.random() < 0.5
    text = _spelled(limit, style)
    if rng.random() < 0.6:
        frame = (_AFTER if asks_after else _BEFORE).draw(rng, split)
    else:
        frame = (_FUTURE if asks_after else _PAST).draw(rng, split)
        if isinstance(state, str):
            state = f"Today is {text}.\n{state}" if rng.random() < 0.5 else f"{state}\nToday is {text}."
        else:
            state = {"today": text, "records": state} if rng.random() < 0.5 else {"records": state, "today": text}
    instructions = frame.format(key=key, who=who[0], limit=text)
    return noul(rng, split, "thresholds", state, instructions, after == asks_after)


def date_choice(rng: random.Random, split: Split) -> Example:
    """Which record has the earliest or latest date."""
    key, style = pick(rng, _DATE_KEYS), pick(rng, (0, 0, 1, 2))
    last = rng.random() < 0.5
    best = _some_day(rng)
    days = [best]
    for _ in range(pick(rng, (1, 1, 2))):
        days.append(_day_beside(rng, best, not last))
    state, who, subject = _date_state(rng, split, key, days, style)
    instructions = (_LATEST if last else _EARLIEST).draw(rng, split).format(key=key, noun=subject.noun)
    return choice(rng, split, "thresholds", state, instructions, [(name, None) for name in who], 0)

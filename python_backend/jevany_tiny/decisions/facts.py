"""Facts that a record states: whose field has which value, and whether something was done or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.dice import if_hard
from jevany_tiny.decisions.example import Example, Recital, choice, noul, yes_or_no
from jevany_tiny.decisions.phrases import (
    Phrases,
    Split,
    coined_name,
    company,
    distinct,
    person,
    phrases,
    pick,
    place,
    thing,
)
from jevany_tiny.decisions.records import SUBJECTS, names, render_table


@dataclass(frozen=True, slots=True)
class Field:
    """A field with words as values: a closed list of them, or a maker of names."""

    key: str
    values: tuple[str, ...] | Callable[[random.Random, Split], str]
    sentences: Phrases | None = None

    def draw(self, rng: random.Random, split: Split, count: int) -> list[str]:
        """Draws different values."""
        if callable(self.values):
            return distinct(rng, split, count, self.values)
        return rng.sample(self.values, count)


FIELDS = (
    Field(
        "plan",
        ("free", "basic", "pro", "team", "business", "enterprise", "starter", "premium", "trial"),
        phrases(
            "{who} is on the {value} plan.",
            "{who} pays for the {value} plan.",
            "The {value} plan is what {who} has.",
            held_out=("{who} has the {value} plan.",),
        ),
    ),
    Field(
        "city",
        place,
        phrases(
            "{who} is in {value}.",
            "{who} is based in {value}.",
            "You find {who} in {value}.",
            held_out=("In {value} you find {who}.",),
        ),
    ),
    Field(
        "manager",
        person,
        phrases(
            "{value} looks after {who}.",
            "{who} is managed by {value}.",
            "{value} manages {who}.",
            held_out=("{value} is the one who manages {who}.",),
        ),
    ),
    Field("contact", person),
    Field(
        "supplier",
        company,
        phrases("{value} supplies {who}.", "{who} buys from {value}.", held_out=("{value} is who supplies {who}.",)),
    ),
    Field(
        "product",
        coined_name,
        phrases("{who} uses {value}.", "{who} works with {value}.", held_out=("{value} is what {who} uses.",)),
    ),
    Field("colour", ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "grey")),
    Field("status", ("open", "closed", "pending", "active", "blocked", "paused", "archived", "new")),
    Field("language", ("English", "French", "German", "Spanish", "Italian", "Dutch", "Polish", "Turkish")),
    Field("team", ("sales", "support", "finance", "design", "research", "legal", "marketing", "operations")),
    Field("carrier", ("ship", "train", "truck", "plane", "bike", "van")),
    Field("day", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")),
    Field("codename", coined_name),
    Field("payment", ("card", "cash", "bank transfer", "voucher", "invoice", "direct debit")),
    Field("role", ("admin", "editor", "viewer", "owner", "guest", "auditor")),
)

_WHAT = phrases(
    "What is the {key} of {who}?",
    "What is {who}'s {key}?",
    "Which {key} does {who} have?",
    "{who}: which {key}?",
    "Find the {key} of {who}.",
    "State the {key} for {who}.",
    held_out=("Which is the {key} of {who}?", "Find {who}'s {key}.", "What {key} does {who} have?"),
)
_WHO = phrases(
    "Which {noun} has the {key} {value}?",
    "Whose {key} is {value}?",
    "For which {noun} is the {key} {value}?",
    "Find the {noun} with {key} {value}.",
    held_out=("Which {noun} is the one with {key} {value}?", "Find the {noun} whose {key} is {value}."),
)
_IS_VALUE = phrases(
    "Is the {key} of {who} {value}?",
    "Is {who}'s {key} {value}?",
    "Does {who} have {value} as {key}?",
    "Does {who} have the {key} {value}?",
    "Is {value} the {key} of {who}?",
    "Does the record give {value} as the {key} of {who}?",
    held_out=("Is it true that {who}'s {key} is {value}?", "Does the record say that {value} is the {key} of {who}?"),
)

_MENTIONED = phrases(
    "Which of these does the text mention?",
    "Which one is named in the text?",
    "Find the one that occurs in the list.",
    "Which of these is in the record?",
    held_out=("Which one does the record mention?", "Find the one that is named in the list."),
)
_IS_MENTIONED = phrases(
    "Does the text mention {item}?",
    "Is {item} in the list?",
    "Does {item} occur in the record?",
    held_out=("Is {item} named in the text?", "Does the list mention {item}?"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done or not: sentences for both, and questions for it and for its opposite."""

    key: str
    done: Phrases
    not_done: Phrases
    asks_done: Phrases
    asks_not_done: Phrases


EVENTS = (
    Event(
        "paid",
        phrases(
            "{who} has paid.",
            "{who} paid the bill.",
            "The bill of {who} is paid.",
            "We got the money from {who}.",
            held_out=("We got {who}'s money, the bill is paid.",),
        ),
        phrases(
            "{who} has not paid.",
            "{who} still owes us the money.",
            "The bill of {who} is not paid.",
            "We never got the money from {who}.",
            held_out=("{who}'s bill is still not paid.",),
        ),
        phrases(
            "Has {who} paid?",
            "Is the bill of {who} paid?",
            "Did {who} pay the bill?",
            held_out=("Is it true that {who} has paid the bill?",),
        ),
        phrases(
            "Is the bill of {who} still unpaid?",
            "Does {who} still owe money?",
            held_out=("Is {who}'s bill still unpaid?",),
        ),
    ),
    Event(
        "signed",
        phrases(
            "{who} has signed the contract.",
            "{who} signed.",
            "The contract has the signature of {who}.",
            held_out=("The signature of {who} is on the contract.",),
        ),
        phrases(
            "{who} has not signed the contract.",
            "{who} refused to sign.",
            "The signature of {who} is missing.",
            held_out=("{who} has not signed, the signature is missing.",),
        ),
        phrases(
            "Did {who} sign the contract?",
            "Has {who} signed?",
            "Do we have the signature of {who}?",
            held_out=("Is it true that {who} has signed the contract?",),
        ),
        phrases(
            "Is the signature of {who} missing?",
            "Do we still wait for {who} to sign?",
            held_out=("Is {who}'s signature still missing?",),
        ),
    ),
    Event(
        "replied",
        phrases(
            "{who} replied.",
            "{who} has answered.",
            "We got an answer from {who}.",
            held_out=("An answer from {who} has come.",),
        ),
        phrases(
            "{who} did not reply.",
            "{who} has not answered.",
            "There is no answer from {who}.",
            "We never heard back from {who}.",
            held_out=("{who} has not replied, there is no answer.",),
        ),
        phrases(
            "Did {who} reply?",
            "Has {who} answered?",
            "Is there an answer from {who}?",
            held_out=("Is it true that {who} has answered?",),
        ),
        phrases(
            "Is the answer of {who} still missing?",
            "Do we still wait for an answer from {who}?",
            held_out=("Is {who}'s answer still missing?",),
        ),
    ),
    Event(
        "verified",
        phrases(
            "{who} is verified.",
            "We checked {who} and all is fine.",
            "{who} passed the check.",
            held_out=("{who} passed, the check is fine.",),
        ),
        phrases(
            "{who} is not verified.",
            "{who} failed the check.",
            "We could not verify {who}.",
            held_out=("{who} is not verified and failed.",),
        ),
        phrases("Is {who} verified?", "Did {who} pass the check?", held_out=("Is it true that {who} is verified?",)),
        phrases(
            "Did {who} fail the check?",
            "Is {who} still unverified?",
            held_out=("Is it true that {who} failed the check?",),
        ),
    ),
    Event(
        "delivered",
        phrases(
            "The parcel for {who} was delivered.",
            "{who} has received the parcel.",
            "The parcel has reached {who}.",
            held_out=("The parcel was delivered and {who} has it.",),
        ),
        phrases(
            "The parcel for {who} was not delivered.",
            "{who} is still waiting for the parcel.",
            "{who} never got the parcel.",
            held_out=("The parcel never reached {who}.",),
        ),
        phrases(
            "Has {who} received the parcel?",
            "Was the parcel for {who} delivered?",
            held_out=("Is it true that {who} has the parcel?",),
        ),
        phrases(
            "Is {who} still waiting for the parcel?",
            "Is the parcel for {who} missing?",
            held_out=("Is {who}'s parcel still missing?",),
        ),
    ),
    Event(
        "attended",
        phrases(
            "{who} came to the meeting.",
            "{who} was at the meeting.",
            "{who} took part.",
            held_out=("{who} came and took part.",),
        ),
        phrases(
            "{who} did not come to the meeting.",
            "{who} was absent.",
            "{who} missed the meeting.",
            held_out=("{who} was not at the meeting.",),
        ),
        phrases(
            "Was {who} at the meeting?",
            "Did {who} come to the meeting?",
            "Did {who} take part?",
            held_out=("Is it true that {who} came to the meeting?",),
        ),
        phrases("Was {who} absent?", "Did {who} miss the meeting?", held_out=("Is it true that {who} was absent?",)),
    ),
    Event(
        "approved",
        phrases(
            "{who} was approved.",
            "The request of {who} was accepted.",
            "We said yes to {who}.",
            held_out=("{who}'s request was accepted.",),
        ),
        phrases(
            "{who} was not approved.",
            "The request of {who} was rejected.",
            "We said no to {who}.",
            held_out=("{who}'s request was rejected.",),
        ),
        phrases(
            "Was {who} approved?",
            "Was the request of {who} accepted?",
            held_out=("Is it true that {who} was approved?",),
        ),
        phrases(
            "Was {who} rejected?",
            "Was the request of {who} rejected?",
            held_out=("Is it true that {who} was rejected?",),
        ),
    ),
)
_REPORTED = phrases(
    "{name} asked whether {who} did it.",
    "{name} hopes that {who} is next.",
    "{name} sent a note about {who}.",
    "{who} and {name} share an office.",
    held_out=("{name} wrote a note and asked about {who}.",),
)


def _table(rng: random.Random, split: Split) -> tuple[Any, list[str], Field, list[str], str]:
    """Makes a state with one field of interest; returns it with the subjects, the field and the values."""
    subject = pick(rng, SUBJECTS)
    count = 1 + if_hard(rng, pick(rng, (1, 1, 1, 1, 2, 2)))
    who = names(rng, split, subject, count)
    fields = rng.sample(FIELDS, pick(rng, (1, 1, 2)))
    field = fields[0]
    values = {item.key: item.draw(rng, split, count) for item in fields}
    order = list(values)
    rng.shuffle(order)
    table = {name: {key: values[key][index] for key in order} for index, name in enumerate(who)}
    sentences = {item.key: item.sentences for item in fields if item.sentences is not None}
    state = render_table(rng, split, subject, table, sentences)
    return state, who, field, values[field.key], subject.noun


def value_choice(rng: random.Random, split: Split) -> Example:
    """Which value a field of one of the records has; the options are values in the state, and a few that are not."""
    state, who, field, values, _ = _table(rng, split)
    target = pick(rng, range(len(who)))
    options = list(values)
    if len(who) == 1 or rng.random() < 0.3:
        options += [value for value in field.draw(rng, split, 3) if value not in values][:2]
    elif len(options) > 2 and rng.random() < 0.3:
        options = [value for value in values if value == values[target] or rng.random() < 0.6]
        if len(options) < 2:
            options = list(values)
    instructions = _WHAT.draw(rng, split).format(key=field.key, who=who[target])
    pairs = [(option, None) for option in options]
    return choice(rng, split, "facts", state, instructions, pairs, options.index(values[target]))


def subject_choice(rng: random.Random, split: Split) -> Example:
    """Which record has a certain value in a field."""
    state, who, field, values, noun = _table(rng, split)
    target = pick(rng, range(len(who)))
    options = who if len(who) > 1 else list(dict.fromkeys([*who, *names(rng, split, pick(rng, SUBJECTS), 2)]))
    instructions = _WHO.draw(rng, split).format(key=field.key, value=values[target], noun=noun)
    return choice(rng, split, "facts", state, instructions, [(name, None) for name in options], target)


def value_noul(rng: random.Random, split: Split) -> Example:
    """Whether a field of one record has a value; where not, another record has it."""
    state, who, field, values, _ = _table(rng, split)
    target = pick(rng, range(len(who)))
    answer = rng.random() < 0.5
    others = values[:target] + values[target + 1 :] or [v for v in field.draw(rng, split, 3) if v not in values]
    value = values[target] if answer else pick(rng, others)
    instructions = _IS_VALUE.draw(rng, split).format(key=field.key, who=who[target], value=value)
    return noul(rng, split, "facts", state, instructions, answer)


def told_values(rng: random.Random, split: Split) -> Recital:
    """What a field is for each record, and whose it is."""
    state, who, field, values, noun = _table(rng, split)
    told = []
    for name, value in zip(who, values, strict=True):
        other = value if rng.random() < 0.3 else pick(rng, values)
        told += [
            (_WHAT.draw(rng, split).format(key=field.key, who=name), value),
            (_WHO.draw(rng, split).format(key=field.key, value=value, noun=noun), name),
            (_IS_VALUE.draw(rng, split).format(key=field.key, who=name, value=other), yes_or_no(value == other)),
        ]
    # Few of them: an answer to one question narrows down the next ones, and guessing well is not what is to be learnt.
    return Recital(state, tuple(rng.sample(told, 3)))


def told_pairs(rng: random.Random, split: Split) -> Recital:
    """What stands beside a name in a plain list, and which name stands beside it."""
    count = rng.randint(3, 7)
    who = names(rng, split, pick(rng, SUBJECTS), count)
    values: list[str] = []
    while not values or set(values) & set(who):
        values = pick(rng, FIELDS).draw(rng, split, min(count, 6))
    who = who[: len(values)]
    pairs = [*zip(who, values, strict=True)]
    told = rng.sample([*pairs, *((value, name) for name, value in pairs)], 5)
    if rng.random() < 0.3:
        return Recital(dict(pairs), tuple(told))
    between = pick(rng, (": ", " = ", " - ", " | ", ", "))
    return Recital(pick(rng, ("\n", "; ")).join(f"{name}{between}{value}" for name, value in pairs), tuple(told))


def told_events(rng: random.Random, split: Split) -> Recital:
    """Who did something and who did not."""
    event = pick(rng, EVENTS)
    who = distinct(rng, split, rng.randint(2, 4))
    truth = [rng.random() < 0.5 for _ in who]
    told = []
    for name, done in rng.sample(list(zip(who, truth, strict=True)), len(who)):
        positive = rng.random() < 0.65
        frame = (event.asks_done if positive else event.asks_not_done).draw(rng, split)
        told.append((frame.format(who=name), yes_or_no(done == positive)))
    return Recital(_event_state(rng, split, event, who, truth), tuple(told))


def told_mentions(rng: random.Random, split: Split) -> Recital:
    """What a list holds and what it does not."""
    items = _items(rng, split, rng.randint(4, 9))
    held = items[: rng.randint(2, len(items) - 1)]
    told = [
        (_IS_MENTIONED.draw(rng, split).format(item=item), yes_or_no(item in held))
        for item in rng.sample(items, min(6, len(items)))
    ]
    return Recital(_listed(rng, held), tuple(told))


def _event_state(rng: random.Random, split: Split, event: Event, who: list[str], truth: list[bool]) -> Any:
    order = list(range(len(who)))
    rng.shuffle(order)
    kind = rng.random()
    if kind < 0.7:
        parts = [(event.done if truth[i] else event.not_done).draw(rng, split).format(who=who[i]) for i in order]
        if rng.random() < 0.3:
            aside = _REPORTED.draw(rng, split).format(name=person(rng, split), who=pick(rng, who))
            parts.insert(rng.randint(0, len(parts)), aside)
        return pick(rng, (" ", "\n")).join(parts)
    if kind < 0.85:
        return {who[i]: {event.key: truth[i]} for i in order}
    yes, no = pick(rng, ((True, False), ("yes", "no"), ("done", "not yet"), ("true", "false")))
    return [{"name": who[i], event.key: yes if truth[i] else no} for i in order]


def event_noul(rng: random.Random, split: Split) -> Example:
    """Whether somebody did something; others in the record did and did not."""
    event = pick(rng, EVENTS)
    count = 1 + if_hard(rng, pick(rng, (0, 1, 1, 1, 1, 2)))
    who = distinct(rng, split, count)
    truth = [rng.random() < 0.5 for _ in who]
    if count > 1:
        truth[1] = not truth[0]
    state = _event_state(rng, split, event, who, truth)
    positive = rng.random() < 0.65
    frame = (event.asks_done if positive else event.asks_not_done).draw(rng, split)
    return noul(rng, split, "facts", state, frame.format(who=who[0]), truth[0] == positive)


def catalogue_choice(rng: random.Random, split: Split) -> Example:
    """A fact with many options: one of nine to twenty-four made-up names."""
    subject = pick(rng, SUBJECTS)
    count = rng.randint(2, 3)
    who = names(rng, split, subject, count)
    field = pick(rng, (FIELDS[1], FIELDS[5], FIELDS[12]))
    options = field.draw(rng, split, rng.randint(9, 24))
    table = {name: {field.key: options[index]} for index, name in enumerate(who)}
    sentences = {field.key: field.sentences} if field.sentences is not None else {}
    state = render_table(rng, split, subject, table, sentences)
    target = pick(rng, range(count))
    instructions = _WHAT.draw(rng, split).format(key=field.key, who=who[target])
    return choice(rng, split, "facts", state, instructions, [(name, None) for name in options], target)


def _items(rng: random.Random, split: Split, count: int) -> list[str]:
    makers = (coined_name, place, person, thing)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[pick(rng, makers)(rng, split)] = None
    return list(drawn)


def _listed(rng: random.Random, items: list[str]) -> Any:
    items = list(items)
    rng.shuffle(items)
    if rng.random() < 0.3:
        return items
    return pick(rng, (", ", "\n", "; ", " and ")).join(items)


def mention_choice(rng: random.Random, split: Split) -> Example:
    """Which of some names and things a list holds."""
    options = rng.randint(2, 4)
    items = _items(rng, split, options + rng.randint(1, 5))
    state = _listed(rng, items[options - 1 :])
    pairs = [(item, None) for item in items[:options]]
    return choice(rng, split, "facts", state, _MENTIONED.draw(rng, split), pairs, options - 1)


def mention_noul(rng: random.Random, split: Split) -> Example:
    """Whether a list holds a name or a thing."""
    asked, *items = _items(rng, split, rng.randint(3, 7))
    answer = rng.random() < 0.5
    state = _listed(rng, [asked, *items[1:]] if answer else items)
    instructions = _IS_MENTIONED.draw(rng, split).format(item=asked)
    return noul(rng, split, "facts", state, instructions, answer)

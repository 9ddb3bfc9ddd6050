"""Puts a message in a scene with other messages, so that only reading who wrote what, and when, tells them apart.

Every domain that classifies a message uses it: the message that counts and the ones that do not come from the same
pools, and the question names the one that counts. Words alone therefore leave a tie between them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.dice import if_hard
from jevany_tiny.decisions.example import Recital
from jevany_tiny.decisions.phrases import Split, code, coined_name, distinct, fill, phrases, pick, split_words


@dataclass(frozen=True, slots=True)
class Scene:
    """A state and how a question refers to the message in it that counts."""

    state: Any
    focus: str


# A state of several messages, and how a question refers to each of them or to the first ones only.
Thread = tuple[Any, list[str]]

_GREETINGS = phrases(
    "Hi team,",
    "Hello,",
    "Good morning,",
    "Hi,",
    "Dear all,",
    "Hey there,",
    "To whom it may concern,",
    "Hi {person},",
    "Dear {company},",
    held_out=("Hello team,", "Dear {person},", "Good morning all,"),
)
_CLOSINGS = phrases(
    "Thanks, {person}",
    "Best, {person}",
    "Kind regards, {person}",
    "Thank you.",
    "{person}, {company}",
    "Regards, {person}",
    "Many thanks!",
    held_out=("Best regards, {person}", "Thank you, {person}", "{person} from {place}"),
)
_FILLER = phrases(
    "I am writing from our office in {place}.",
    "My name is {person}.",
    "I have been with you for {n} months.",
    "The reference is {code}.",
    "You can reach me on {day}.",
    "I spoke to {person} about it.",
    "I work for {company}.",
    "It was cold in {place} on {day}.",
    "My colleague {person} is copied in.",
    "We are a team of {n} people.",
    "I hope you had a good week.",
    "I wrote this on {day}.",
    held_out=(
        "Our office in {place} has {n} people.",
        "I spoke to {person} on {day}.",
        "My reference is {code}, from {company}.",
        "{person} from {company} is copied in.",
    ),
)

_DONE = split_words("solved|settled|closed|sorted out|fixed|dealt with|done|resolved|finished|taken care of", "|")
_BEFORE = split_words(
    "last week|yesterday|last month|two days ago|in {month}|on {day}|earlier this week|last year|some time ago",
    "|",
)
_SETTLED = phrases(
    'I wrote {before}: "{past}" That is {done}. {now}',
    "{past} That was {before} and it is {done}. Now something else: {now}",
    "{now} Please ignore my older note, which is {done}: {past}",
    "Already {done}: {past} Still open: {now}",
    "Old case from {before}, {done}: {past}\nNew case: {now}",
    "{past} No need to act on that, it was {done} {before}. Today it is this: {now}",
    "New: {now}\nOld ({done}): {past}",
    "Not about this any more: {past} It was {done} {before}. {now}",
    '{now} This has nothing to do with "{past}", which was {done} {before}.',
    "History: {past} (status: {done}).\nToday: {now}",
    '"{past}" was my request {before}, and you {done} it. This time: {now}',
    "What is still open: {now} What was {done} {before}: {past}",
    'A colleague wrote {before}: "{past}" Theirs is {done}, mine is not. {now}',
    "Forget what I said {before}, it is {done}: {past} What I need now: {now}",
    held_out=(
        "{past} This was {done} {before}, so no need to act on it. New today: {now}",
        "Today: {now}\nOlder, {done} {before}: {past}",
        'My older note said "{past}" and it is {done}. What is still open is this: {now}',
        '{now} Please ignore "{past}", which is already {done}.',
        "My request {before} is {done}: {past} Now it is something else. {now}",
    ),
)
_THIS = phrases(
    "this message",
    "the message",
    "this request",
    "the open request",
    "what is still open",
    "the current request",
    "this e-mail",
    held_out=("the current message", "this open request", "the request that is still open"),
)
_FROM_PERSON = phrases(
    "the message from {who}",
    "{who}'s message",
    "what {who} wrote",
    "the request of {who}",
    "the note by {who}",
    "{who}'s request",
    "the e-mail {who} sent",
    held_out=("the note from {who}", "what {who} sent", "the message of {who}", "{who}'s e-mail"),
)
_SAID = phrases(
    "{who} wrote: {text}",
    '{who}: "{text}"',
    "From {who}: {text}",
    'Message from {who}: "{text}"',
    "[{who}] {text}",
    '"{text}" ({who})',
    "{who} says: {text}",
    "{text} - {who}",
    held_out=('From {who}: "{text}"', '{who} wrote: "{text}"', "Message of {who}: {text}"),
)
_TAGGED = phrases(
    "the {noun} with {key} {value}",
    "the {noun} whose {key} is {value}",
    "the {value} {noun}",
    "the {noun} marked {value}",
    "the entry with {key} {value}",
    held_out=("the {noun} where the {key} is {value}", "the {noun} that has {key} {value}", "the entry marked {value}"),
)
_LAST = phrases(
    "the last message",
    "the latest message",
    "the most recent message",
    "the newest entry",
    held_out=("the latest entry", "the most recent entry", "the newest message"),
)
_FIRST = phrases(
    "the first message",
    "the oldest message",
    "the earliest message",
    "the first entry",
    held_out=("the earliest entry", "the oldest entry"),
)

_NOUNS = ("ticket", "message", "case", "request", "entry", "e-mail")
_TEXT_KEYS = ("text", "body", "message", "content")
_TAG_VALUES = {
    "status": ("open", "closed", "pending", "waiting", "archived", "escalated", "draft", "active"),
    "channel": ("phone", "chat", "e-mail", "web form", "letter", "social media", "fax", "app"),
    "colour": ("red", "green", "blue", "yellow", "orange", "purple", "white", "black"),
    "folder": ("inbox", "archive", "later", "personal", "work", "sent", "family", "urgent"),
    "shift": ("morning", "noon", "evening", "night", "weekend"),
}
_TIMES = ("08:15", "09:00", "09:40", "10:05", "11:30", "12:10", "13:45", "14:20", "15:00", "16:35", "17:10", "18:55")


def alone(rng: random.Random, split: Split, text: str) -> Scene:
    """Returns a scene with one message: bare, as a letter, or as a field of an object."""
    kind = rng.random()
    if kind < 0.3:
        state: Any = text
    elif kind < 0.7:
        parts = [text]
        for _ in range(rng.randint(0, 2)):
            parts.insert(rng.randint(0, len(parts)), fill(rng, split, _FILLER.draw(rng, split)))
        body = " ".join(parts)
        gap = pick(rng, ("\n\n", "\n", " "))
        opening = fill(rng, split, _GREETINGS.draw(rng, split)) + gap if rng.random() < 0.7 else ""
        closing = gap + fill(rng, split, _CLOSINGS.draw(rng, split)) if rng.random() < 0.7 else ""
        state = opening + body + closing
    else:
        fields = {pick(rng, _TEXT_KEYS): text}
        for key, slot in rng.sample((("from", "person"), ("id", "code"), ("city", "place"), ("date", "date")), 2):
            fields[key] = fill(rng, split, "{" + slot + "}")
        state = _shuffled(rng, fields)
        if rng.random() < 0.3:
            state = {pick(rng, _NOUNS): state}
    return Scene(state, _THIS.draw(rng, split))


def _shuffled(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    keys = list(fields)
    rng.shuffle(keys)
    return {key: fields[key] for key in keys}


def _settled(rng: random.Random, split: Split, texts: Sequence[str]) -> Thread:
    frame = _SETTLED.draw(rng, split)
    before = fill(rng, split, pick(rng, _BEFORE))
    body = frame.format(now=texts[0], past=" ".join(texts[1:]), done=pick(rng, _DONE), before=before)
    if rng.random() < 0.4:
        body = f"{fill(rng, split, _GREETINGS.draw(rng, split))}\n{body}"
    if rng.random() < 0.4:
        body = f"{body}\n{fill(rng, split, _CLOSINGS.draw(rng, split))}"
    state: Any = {pick(rng, _TEXT_KEYS): body} if rng.random() < 0.2 else body
    return state, [_THIS.draw(rng, split)]


def _by_people(rng: random.Random, split: Split, texts: Sequence[str]) -> Thread:
    names = distinct(rng, split, len(texts))
    reference = _FROM_PERSON.draw(rng, split)
    focuses = [reference.format(who=who) for who in names]
    pairs = list(zip(names, texts, strict=True))
    rng.shuffle(pairs)
    kind = rng.random()
    if kind < 0.45:
        frame = _SAID.draw(rng, split)
        state: Any = pick(rng, ("\n", "\n\n", " ")).join(frame.format(who=who, text=said) for who, said in pairs)
    elif kind < 0.75:
        sender, body = pick(rng, ("from", "sender", "name", "customer", "author")), pick(rng, _TEXT_KEYS)
        state = [{sender: who, body: said} for who, said in pairs]
        if rng.random() < 0.4:
            state = {pick(rng, ("messages", "inbox", "tickets", "notes")): state}
    else:
        state = dict(pairs)
    return state, focuses


def _by_tag(rng: random.Random, split: Split, texts: Sequence[str]) -> Thread:
    noun, body = pick(rng, _NOUNS), pick(rng, _TEXT_KEYS)
    kind = rng.random()
    if kind < 0.5:
        key = pick(rng, tuple(_TAG_VALUES))
        values = rng.sample(_TAG_VALUES[key], len(texts))
    elif kind < 0.75:
        key = pick(rng, ("id", "number", "reference"))
        values = [code(rng) for _ in texts]
    else:
        key = pick(rng, ("project", "product", "site", "account"))
        values = distinct(rng, split, len(texts), coined_name)
    reference = _TAGGED.draw(rng, split)
    focuses = [reference.format(noun=noun, key=key, value=value) for value in values]
    entries = [_shuffled(rng, {key: value, body: said}) for value, said in zip(values, texts, strict=True)]
    rng.shuffle(entries)
    if rng.random() < 0.3:
        return "\n".join(f"{key} {entry[key]}: {entry[body]}" for entry in entries), focuses
    return ({f"{noun}s": entries} if rng.random() < 0.5 else entries), focuses


def _by_time(rng: random.Random, split: Split, texts: Sequence[str]) -> Thread:
    last = rng.random() < 0.65
    focuses = [(_LAST if last else _FIRST).draw(rng, split)]
    texts = [*texts[1:], texts[0]] if last else texts
    times = [_TIMES[index] for index in sorted(rng.sample(range(len(_TIMES)), len(texts)))]
    kind = rng.random()
    if kind < 0.35:
        return "\n".join(f"{time} {said}" for time, said in zip(times, texts, strict=True)), focuses
    if kind < 0.6:
        return list(texts), focuses
    body = pick(rng, _TEXT_KEYS)
    entries = [{"time": time, body: said} for time, said in zip(times, texts, strict=True)]
    return ({pick(rng, ("thread", "messages", "log")): entries} if rng.random() < 0.6 else entries), focuses


_SCENES = (_settled, _settled, _by_people, _by_people, _by_tag, _by_time)


def among(rng: random.Random, split: Split, text: str, others: Sequence[str]) -> Scene:
    """Returns a scene with a message that counts and others that do not; `alone` where there are no others."""
    if not others:
        return alone(rng, split, text)
    state, focuses = pick(rng, _SCENES)(rng, split, [text, *others])
    return Scene(state, focuses[0])


def recite(rng: random.Random, split: Split, texts: Sequence[str]) -> Recital:
    """Returns some messages, and what each of those says that a question can refer to."""
    state, focuses = pick(rng, _SCENES)(rng, split, texts)
    told = list(zip(focuses, texts, strict=False))
    rng.shuffle(told)
    return Recital(state, tuple(told))


def distractor_count(rng: random.Random) -> int:
    """How many other messages a scene has; none in the easy part of the rows, see `Dice`."""
    return if_hard(rng, pick(rng, (0, 0, 1, 1, 1, 1, 1, 2)))

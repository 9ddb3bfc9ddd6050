"""Sentence pools with a training part and a held-out part, and the filler that goes into their slots."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

_HELD_OUT_SHARE = 5
_ALTERNATIVES = re.compile(r"<([^<>]*)>")


@dataclass(frozen=True, slots=True)
class Phrases:
    """Interchangeable sentence frames; the held-out ones are never used for training rows."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        """Returns the frames of one split."""
        return self.train if split == "train" else self.held_out

    def draw(self, rng: random.Random, split: Split) -> str:
        """Returns one frame of a split, with one of the words in each `<this|that>` chosen."""
        frame = pick(rng, self.of(split))
        while "<" in frame:
            frame = _ALTERNATIVES.sub(lambda match: pick(rng, match[1].split("|")), frame)
        return frame


def phrases(*train: str, held_out: Sequence[str]) -> Phrases:
    """Builds a pool from its training frames and its held-out frames."""
    return Phrases(tuple(train), tuple(held_out))


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Returns one item, uniformly. Several times faster than `random.choice`."""
    return items[int(rng.random() * len(items))]


def belongs_to(split: Split, text: str) -> bool:
    """Whether a generated name or option set belongs to a split: one in five is held out, by checksum."""
    return (zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0) == (split == "heldout")


def split_words(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Returns the words of a list written as one text."""
    return tuple(text.split(separator))


def capitalised(text: str) -> str:
    """Returns the text with its first character in upper case."""
    return text[:1].upper() + text[1:]


# Proper names. ---------------------------------------------------------------------------------------------------

_ONSETS = split_words("b br d dr f g gr h j k l m n p pr r s st t tr v z sh th")
_VOWELS = split_words("a e i o u")
_ENDINGS = ["", "", "n", "l", "r", "s", "x", "k", "m", "nd", "th", "ck"]

_FIRST_NAMES = split_words(
    "Anna Ben Carla David Elena Farid Grace Hiro Ines Jonas Kira Liam Mona Nadia Omar Petra Quentin Rosa Samir Tara "
    "Umar Vera Wendy Xenia Yusuf Zoe Aisha Boris Chen Daria Emil Fiona Gavin Helga Igor Julia Kemal Leila Marco Nora "
    "Oskar Paula Rashid Sofia Tomas Ulrike Victor Walid Yara Zeno Alice Bruno Celine Dmitri Esther Felix Gita Hassan "
    "Irene Jamal Klara Lars Mei Nikhil Olga Pablo Rita Stefan Tuan Ursula Viola Wes Ximena Yvonne Zack Amir Bella "
    "Carlos Dora Erik Fatima George Hanna Ivan Joan Karim Lucy Martin Nina Otto Priya Ravi Silvia Theo Uma Valeria"
)

_CITIES = split_words(
    "London Paris Madrid Rome Vienna Oslo Lima Cairo Delhi Tokyo Seoul Dublin Prague Lisbon Athens Boston Malmo "
    "Denver Austin Quito Dakar Nairobi Hanoi Manila Perth Zurich Geneva Turin Porto Ghent Riga Krakow "
    "Berlin Chicago Seattle Dallas Miami Bogota Santiago Lagos Sydney Tunis Amman Doha Mumbai Osaka Busan Auckland"
)

_COMPANY_ENDINGS = ("Ltd", "Labs", "Foods", "Group", "Systems", "Media", "Works", "Partners", "Logistics", "Energy")


def _coined(rng: random.Random, syllables: int) -> str:
    text = "".join(pick(rng, _ONSETS) + pick(rng, _VOWELS) for _ in range(syllables))
    return capitalised(text + pick(rng, _ENDINGS))


def coined_name(rng: random.Random, split: Split) -> str:
    """Returns a made-up capitalised word that no row of the other split uses as a name."""
    while True:
        name = _coined(rng, 2 if rng.random() < 0.85 else 3)
        if belongs_to(split, name):
            return name


def person(rng: random.Random, split: Split) -> str:
    """Returns a person's name: a common first name, a made-up one, or one of them with a surname."""
    while True:
        first = pick(rng, _FIRST_NAMES)
        if belongs_to(split, first):
            break
    kind = rng.random()
    if kind < 0.35:
        return coined_name(rng, split)
    if kind < 0.9:
        return first
    return f"{first} {coined_name(rng, split)}"


def place(rng: random.Random, split: Split) -> str:
    """Returns the name of a real or made-up town."""
    if rng.random() < 0.4:
        return coined_name(rng, split)
    while True:
        city = pick(rng, _CITIES)
        if belongs_to(split, city):
            return city


def company(rng: random.Random, split: Split) -> str:
    """Returns the name of a made-up company."""
    name = coined_name(rng, split)
    return name if rng.random() < 0.4 else f"{name} {pick(rng, _COMPANY_ENDINGS)}"


def distinct(rng: random.Random, split: Split, count: int, draw: object = person) -> list[str]:
    """Returns different names whose first words differ, so that none is a part of another."""
    names: dict[str, str] = {}
    while len(names) < count:
        name: str = draw(rng, split)  # type: ignore[operator]
        names.setdefault(name.split()[0], name)
    return list(names.values())


# Everything else that fills a slot; shared by both splits, so that it carries no label. --------------------------

_ADJECTIVES = split_words(
    "small large grey blue red green black white light heavy folding wooden steel cotton wireless used new"
)
_THINGS = split_words(
    "kettle|desk lamp|coffee grinder|pair of headphones|phone case|office chair|water bottle|backpack|keyboard|"
    "winter jacket|blender|camera|tent|mirror|bookshelf|monitor|printer|pair of shoes|garden table|toaster|watch|"
    "speaker|bike pump|suitcase|sofa|rug|fan|clock|drill|router",
    "|",
)
_MONTHS = split_words("January February March April May June July August September October November December")
_DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_APPS = split_words(
    "app|website|dashboard|mobile app|customer portal|report page|checkout page|admin console|web shop", "|"
)
_PLANS = split_words("basic standard premium team family starter business annual monthly")


def calendar_date(rng: random.Random) -> str:
    """Returns a date in one of three spellings."""
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(2023, 2027)
    kind = rng.random()
    if kind < 0.3:
        return f"{year}-{month:02d}-{day:02d}"
    if kind < 0.6:
        return f"{day} {_MONTHS[month - 1]} {year}"
    return f"{_MONTHS[month - 1]} {day}"


def code(rng: random.Random) -> str:
    """Returns a reference such as `K-4821`."""
    letters = "".join(pick(rng, "ABCDEFGHJKLMNPRSTVWXZ") for _ in range(rng.randint(1, 2)))
    return f"{letters}-{rng.randint(100, 9999)}"


def thing(rng: random.Random, split: Split) -> str:
    """Returns the name of something one can buy; the same ones in both splits."""
    del split
    named = pick(rng, _THINGS)
    return named if rng.random() < 0.5 else f"{pick(rng, _ADJECTIVES)} {named}"


class _Slots(dict[str, str]):
    """Makes a fresh value for every slot that a frame names."""

    def __init__(self, rng: random.Random, split: Split, given: dict[str, str]) -> None:
        super().__init__(given)
        self._rng, self._split = rng, split

    def __missing__(self, slot: str) -> str:
        rng, split = self._rng, self._split
        match slot:
            case "item":
                return thing(rng, split)
            case "order" | "code":
                return code(rng)
            case "amount":
                return f"{pick(rng, ('$', '', 'EUR '))}{rng.randint(5, 990)}"
            case "date":
                return calendar_date(rng)
            case "day":
                return pick(rng, _DAYS)
            case "month":
                return pick(rng, _MONTHS)
            case "n":
                return str(rng.randint(2, 30))
            case "person":
                return person(rng, split)
            case "company":
                return company(rng, split)
            case "place":
                return place(rng, split)
            case "app":
                return pick(rng, _APPS)
            case "plan":
                return pick(rng, _PLANS)
            case "product":
                return coined_name(rng, split)
        raise KeyError(slot)


def fill(rng: random.Random, split: Split, frame: str, **given: str) -> str:
    """Fills the slots of a frame, from `given` or else afresh."""
    return frame.format_map(_Slots(rng, split, given)) if "{" in frame else frame


_LEADS = (
    "It seems that",
    "To be honest:",
    "As I said,",
    "I think",
    "So,",
    "Sorry, but",
    "Once more:",
    "Well,",
    "Just to say:",
    "Look,",
    "Hm,",
    "By the way,",
)


def roughened(rng: random.Random, split: Split, text: str) -> str:
    """Returns a training sentence as hasty people write it: words missing, cut short, or led in.

    A sentence that is never twice the same is not learnt by heart; what is left to learn are the words that carry its
    meaning. Held-out sentences stay as they are.
    """
    kind = rng.random()
    if split == "heldout" or kind < 0.35:
        return text
    if kind < 0.5:
        lead = pick(rng, _LEADS)
        return f"{lead} {text}" if lead[-1] == ":" else f"{lead} {text[:1].lower()}{text[1:]}"
    words = text.split(" ")
    if kind < 0.85:
        share = 0.1 + 0.2 * rng.random()
        kept = [word for word in words if rng.random() > share]
    else:
        length = max(3, round(len(words) * (0.5 + 0.4 * rng.random())))
        start = rng.randint(0, max(0, len(words) - length))
        kept = words[start : start + length]
    return " ".join(kept if len(kept) > 2 else words)

"""Ordered levels: how urgent, how severe, how satisfied, how far along."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jevany_tiny.decisions.example import Example, choice, noul, score
from jevany_tiny.decisions.phrases import Phrases, Split, belongs_to, fill, phrases, pick, roughened
from jevany_tiny.decisions.routing import any_issue
from jevany_tiny.decisions.scene import among, distractor_count


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of a ladder: how a question describes it, and what messages at this level say."""

    levels: Phrases
    texts: Phrases


@dataclass(frozen=True, slots=True)
class Ladder:
    """Levels in rising order and the questions that ask for them.

    Attributes:
        name: What it measures.
        rungs: Its levels.
        questions: Frames with the slot `focus`.
        short: Three bare names each, for the lowest level, a middle one and the highest.
        about_customers: Whether its sentences may stand beside any complaint or wish of a customer.
    """

    name: str
    rungs: tuple[Rung, ...]
    questions: Phrases
    short: tuple[tuple[str, ...], ...] = ()
    about_customers: bool = False


def _rung(levels: Phrases, texts: Phrases) -> Rung:
    return Rung(levels, texts)


URGENCY = Ladder(
    "urgency",
    (
        _rung(
            phrases(
                "no action needed", "for information only", "nothing to do", held_out=("information only, no action",)
            ),
            phrases(
                "Just for your information, the {item} works well.",
                "No need to answer, I only wanted to let you know.",
                "Nothing to do here, this is only for your files.",
                "This is only for information.",
                "You do not need to do anything.",
                held_out=(
                    "Only for your information, no need to do anything.",
                    "I just wanted to let you know, nothing to do.",
                ),
            ),
        ),
        _rung(
            phrases("can wait for weeks", "whenever there is time", "no hurry", held_out=("no hurry, can wait",)),
            phrases(
                "Whenever you have time, please look at the {item}.",
                "There is no hurry, next month is fine.",
                "Take your time with this.",
                "It can wait for a few weeks.",
                "Low priority, but please have a look some day.",
                held_out=("No hurry at all, whenever you have time.", "This can wait, next month is fine."),
            ),
        ),
        _rung(
            phrases("within a few days", "should be done this week", "this week", held_out=("done within this week",)),
            phrases(
                "Please do this by the end of the week.",
                "I need the {item} within a few days.",
                "An answer this week would be good.",
                "We should have this done by {day} this week.",
                "A few days are fine, but not longer.",
                held_out=("I need an answer by the end of the week.", "Please have the {item} done within a few days."),
            ),
        ),
        _rung(
            phrases("needed today", "must be done today", "within hours", held_out=("must be done by today",)),
            phrases(
                "I need this before the end of today.",
                "Please answer within a few hours.",
                "This has to be done today.",
                "The deadline is tonight.",
                "We need it by this afternoon.",
                held_out=("It has to be done before tonight.", "I need an answer today, within a few hours."),
            ),
        ),
        _rung(
            phrases("at once", "drop everything now", "an emergency", held_out=("an emergency, act now",)),
            phrases(
                "This is an emergency, act now!",
                "Everything has stopped, help us immediately!",
                "Drop everything and call me right now!",
                "We are losing money every minute, fix it at once!",
                "Help immediately, people are in danger.",
                held_out=(
                    "Emergency: everything has stopped, call me at once!",
                    "Help us right now, we are losing money!",
                ),
            ),
        ),
    ),
    phrases(
        "How urgent is {focus}?",
        "Rate the urgency of {focus}.",
        "How soon must someone act on {focus}?",
        "What priority does {focus} have?",
        "Urgency of {focus}?",
        held_out=("How soon does {focus} need someone to act?", "Rate how urgent {focus} is."),
    ),
    (
        ("low", "normal", "high"),
        ("low", "medium", "high"),
        ("minor", "normal", "urgent"),
        ("low priority", "normal priority", "high priority"),
        ("not urgent", "somewhat urgent", "very urgent"),
    ),
    about_customers=True,
)

SEVERITY = Ladder(
    "severity",
    (
        _rung(
            phrases("cosmetic only", "a small visual flaw", "looks only", held_out=("a cosmetic flaw",)),
            phrases(
                "The {app} has a typo in the title.",
                "The logo on the {app} is slightly off.",
                "One word on the {app} is spelled wrong.",
                "The colour of a button looks odd.",
                held_out=("A title on the {app} is spelled wrong.", "The colour of the logo looks odd."),
            ),
        ),
        _rung(
            phrases(
                "one person is affected", "a single user", "affects one user", held_out=("one single user is affected",)
            ),
            phrases(
                "Only {person} sees the problem.",
                "It is just me, my colleagues are fine.",
                "One user in {place} has this, nobody else.",
                "Only my own computer shows it.",
                held_out=("Only one user sees this, nobody else.", "It is only {person}, the others are fine."),
            ),
        ),
        _rung(
            phrases(
                "one team is affected", "a department", "a group of users", held_out=("one group or team is affected",)
            ),
            phrases(
                "Our whole team in {place} has the problem.",
                "The {n} people in our department cannot print.",
                "Everyone in the {place} office sees it, other offices do not.",
                "One department is cut off.",
                held_out=(
                    "Our department in {place} has the problem, other offices do not.",
                    "The whole {place} team sees it.",
                ),
            ),
        ),
        _rung(
            phrases(
                "every customer is affected", "all users", "the whole company", held_out=("all customers are affected",)
            ),
            phrases(
                "No customer anywhere can use the {app}.",
                "The {app} is down for all users.",
                "Every customer gets the same fault.",
                "The whole company is offline.",
                "All offices are without the system.",
                held_out=(
                    "The {app} is offline for every customer.",
                    "All users in all offices are without it.",
                ),
            ),
        ),
    ),
    phrases(
        "How severe is {focus}?",
        "How many people does {focus} affect?",
        "Rate the impact described in {focus}.",
        "How far does the problem in {focus} reach?",
        held_out=("How many people are affected in {focus}?", "How severe is the problem in {focus}?"),
    ),
)

MOOD = Ladder(
    "mood",
    (
        _rung(
            phrases("furious", "very angry", "full of anger", held_out=("furious and angry",)),
            phrases(
                "This is a disgrace, I am furious!",
                "I have never been treated so badly!",
                "You people are useless and I am very angry!",
                "What an outrage, shame on you!",
                held_out=("I am so angry, this is an outrage!", "Shame on you, what a disgrace!"),
            ),
        ),
        _rung(
            phrases("disappointed", "unhappy", "not satisfied", held_out=("unhappy or disappointed",)),
            phrases(
                "I am a little disappointed with the {item}.",
                "I had hoped for better.",
                "Not what I expected, to be honest.",
                "I am not really satisfied.",
                held_out=(
                    "To be honest I am disappointed, I had hoped for better.",
                    "I am not satisfied with the {item}.",
                ),
            ),
        ),
        _rung(
            phrases("neutral", "matter-of-fact", "neither happy nor unhappy", held_out=("neutral, matter-of-fact",)),
            phrases(
                "Here is the form you asked for.",
                "The {item} has the number {code}.",
                "I am sending the file on {day}.",
                "My address is in {place}.",
                held_out=("Here is the file with the number {code}.", "I am sending the form you asked for."),
            ),
        ),
        _rung(
            phrases("content", "satisfied", "pleased", held_out=("pleased and satisfied",)),
            phrases(
                "The {item} is good, thank you.",
                "All fine, I am satisfied.",
                "I am pleased with the {item}.",
                "That worked well for us.",
                held_out=("I am satisfied, the {item} worked well.", "We are pleased, all is good."),
            ),
        ),
        _rung(
            phrases("delighted", "thrilled", "overjoyed", held_out=("thrilled and delighted",)),
            phrases(
                "Wow, this is the best {item} ever!",
                "I am thrilled, absolutely wonderful!",
                "You made my year, I am over the moon!",
                "Fantastic, I could not be happier!",
                held_out=("Absolutely fantastic, I am thrilled!", "Wow, I could not be happier with the {item}!"),
            ),
        ),
    ),
    phrases(
        "How satisfied is the writer of {focus}?",
        "What is the mood of {focus}?",
        "Rate the tone of {focus}.",
        "How happy does {focus} sound?",
        held_out=("What is the tone of {focus}?", "How satisfied does {focus} sound?"),
    ),
    (("negative", "neutral", "positive"), ("angry", "neutral", "happy"), ("bad", "mixed", "good")),
)

PROGRESS = Ladder(
    "progress",
    (
        _rung(
            phrases("not started", "nothing done yet", "still to begin", held_out=("nothing started yet",)),
            phrases(
                "Nobody has begun with the {item} yet.",
                "We have not started.",
                "The work will begin on {day}.",
                "Nothing has been done so far.",
                held_out=("Nobody has started so far.", "The work has not begun yet."),
            ),
        ),
        _rung(
            phrases("in progress", "partly done", "under way", held_out=("under way, partly done",)),
            phrases(
                "About half of the work is done.",
                "We are in the middle of it.",
                "{person} is working on it right now.",
                "Some parts are ready and others are not.",
                held_out=("We are working on it, half is ready.", "Some of the work is done, we are in the middle."),
            ),
        ),
        _rung(
            phrases(
                "waiting for approval", "in review", "needs a sign-off", held_out=("waiting for review or approval",)
            ),
            phrases(
                "It is ready and {person} has to approve it.",
                "The draft is with the reviewers.",
                "We wait for a signature from {person}.",
                "All done from our side, only the approval is missing.",
                held_out=(
                    "The draft is ready, only the signature is missing.",
                    "{person} has to review and approve it.",
                ),
            ),
        ),
        _rung(
            phrases("complete", "finished and delivered", "fully done", held_out=("complete and delivered",)),
            phrases(
                "It was approved and delivered on {day}.",
                "The {item} is complete and handed over.",
                "Everything is finished, the customer has it.",
                "We shipped it and closed the project.",
                held_out=(
                    "The project is complete, it was delivered on {day}.",
                    "Everything is handed over and finished.",
                ),
            ),
        ),
    ),
    phrases(
        "How far along is the work in {focus}?",
        "What stage does {focus} describe?",
        "Rate the progress reported in {focus}.",
        "How complete is the task in {focus}?",
        held_out=("What is the progress in {focus}?", "How far along is the task in {focus}?"),
    ),
)

LADDERS = (URGENCY, URGENCY, SEVERITY, MOOD, PROGRESS)

_AT_LEAST = phrases(
    'Is {focus} "{level}"?',
    "Would you rate {focus} as {level}?",
    "Does {level} describe {focus}?",
    "Is this the right level for {focus}: {level}?",
    held_out=("Would {level} be the right level for {focus}?", "Does the level {level} describe {focus}?"),
)
_MIDDLE = {5: (0, 2, 4), 4: (0, 1, 3)}


def _rungs(rng: random.Random, split: Split, ladder: Ladder, smallest: int) -> list[int]:
    """Draws a rising subset of a ladder; which subsets are held out is decided by their checksum."""
    count = len(ladder.rungs)
    while True:
        drawn = sorted(rng.sample(range(count), rng.randint(smallest, count)))
        if len(drawn) == count or belongs_to(split, ladder.name + "".join(map(str, drawn))):
            return drawn


def _text(rng: random.Random, split: Split, ladder: Ladder, rung: int) -> str:
    text = fill(rng, split, roughened(rng, split, ladder.rungs[rung].texts.draw(rng, split)))
    if ladder.about_customers and rng.random() < 0.35:
        issue = any_issue(rng, split)
        return f"{issue} {text}" if rng.random() < 0.7 else f"{text} {issue}"
    return text


def _scene(rng: random.Random, split: Split, ladder: Ladder, rungs: list[int], target: int) -> tuple[object, str, bool]:
    others = [rung for rung in rungs if rung != rungs[target]]
    count = min(distractor_count(rng), len(others))
    distractors = [_text(rng, split, ladder, rung) for rung in rng.sample(others, count)]
    scene = among(rng, split, _text(rng, split, ladder, rungs[target]), distractors)
    return scene.state, scene.focus, not distractors


def level_score(rng: random.Random, split: Split) -> Example:
    """A message and its level on a ladder described in words."""
    ladder = pick(rng, LADDERS)
    if ladder.short and rng.random() < 0.3:
        rungs = list(_MIDDLE[len(ladder.rungs)])
        names = list(pick(rng, ladder.short))
    else:
        rungs = _rungs(rng, split, ladder, 3)
        names = [ladder.rungs[rung].levels.draw(rng, split) for rung in rungs]
        if rng.random() < 0.2:
            rungs.reverse()
            names.reverse()
    target = pick(rng, range(len(rungs)))
    state, focus, _ = _scene(rng, split, ladder, rungs, target)
    instructions = fill(rng, split, ladder.questions.draw(rng, split), focus=focus)
    return score(rng, split, "urgency", state, instructions, names, target)


def level_choice(rng: random.Random, split: Split) -> Example:
    """The same decision, with the levels as shuffled options."""
    ladder = pick(rng, LADDERS)
    if ladder.short and rng.random() < 0.5:
        rungs = list(_MIDDLE[len(ladder.rungs)])
        names = pick(rng, ladder.short)
        described = rng.random() < 0.5
        options = [
            (name, ladder.rungs[rung].levels.draw(rng, split) if described else None)
            for name, rung in zip(names, rungs, strict=True)
        ]
    else:
        rungs = _rungs(rng, split, ladder, 2)
        options = [(ladder.rungs[rung].levels.draw(rng, split), None) for rung in rungs]
    target = pick(rng, range(len(rungs)))
    state, focus, _ = _scene(rng, split, ladder, rungs, target)
    instructions = fill(rng, split, ladder.questions.draw(rng, split), focus=focus)
    return choice(rng, split, "urgency", state, instructions, options, target)


def level_noul(rng: random.Random, split: Split) -> Example:
    """Whether a message is at a named level; another message in the state may be the one that is."""
    ladder = pick(rng, LADDERS)
    rungs = rng.sample(range(len(ladder.rungs)), 3)
    asked = rungs[0]
    answer = rng.random() < 0.5
    if not answer:
        rungs[0], rungs[1] = rungs[1], rungs[0]
    count = distractor_count(rng)
    texts = [_text(rng, split, ladder, rung) for rung in rungs[: 1 + count]]
    scene = among(rng, split, texts[0], texts[1:])
    level = ladder.rungs[asked].levels.draw(rng, split)
    instructions = fill(rng, split, _AT_LEAST.draw(rng, split), focus=scene.focus, level=level)
    return noul(rng, split, "urgency", scene.state, instructions, answer, (level, "another level"))

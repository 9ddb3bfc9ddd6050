"""Answers, from probabilities whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jevany_backend.protocol import Choice, Noul, Question, Score, answer


def choice(count: int) -> Choice:
    return Choice(criteria={f"option {index}": None for index in range(count)})


def score(count: int) -> Score:
    return Score(criteria=[f"level {index}" for index in range(count)])


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.25, 0.75], 0.75),
        ([0.876, 0.124], 0.12),
        ([0.124, 0.876], 0.88),
        ([1.0, 0.0], 0.0),
        ([0.0, 1.0], 1.0),
        ([0.996, 0.004], 0.0),
        ([0.004, 0.996], 1.0),
    ],
)
def test_noul_is_the_probability_of_true(probabilities: list[float], expected: float) -> None:
    assert answer(Noul(), probabilities) == {"type": "noul", "noul": expected}


@pytest.mark.parametrize(
    ("probabilities", "chosen", "confidence"),
    [
        ([0.1, 0.6, 0.3], 1, 0.4),  # (0.6 - 1/3) / (2/3)
        ([0.4, 0.4, 0.2], 0, 0.1),  # a tie goes to the first
        ([0.2, 0.4, 0.4], 1, 0.1),
        ([0.5, 0.5], 0, 0.0),
        ([0.3, 0.7], 1, 0.4),  # (0.7 - 0.5) / 0.5
        ([0.5, 0.3, 0.1, 0.1], 0, 0.33),  # 0.25 / 0.75
        ([0.0, 0.0, 0.25, 0.75], 3, 0.67),  # 0.5 / 0.75
        ([1.0, 0.0, 0.0], 0, 1.0),
        ([1.0], 0, 1.0),  # one option: the formula has no value, certainty is meant
        ([0.25], 0, 1.0),
    ],
)
def test_choice_is_the_most_probable_option(probabilities: list[float], chosen: int, confidence: float) -> None:
    names = [f"option {index}" for index in range(len(probabilities))]

    result = answer(choice(len(probabilities)), probabilities)

    assert result == {
        "type": "choice",
        "choice": names[chosen],
        "confidence": confidence,
        "probabilities": dict(zip(names, probabilities, strict=True)),
    }
    assert list(result["probabilities"]) == names


@pytest.mark.parametrize(
    ("probabilities", "expected", "confidence"),
    [
        ([0.1, 0.2, 0.7], 1.6, 0.8),  # 0.2 + 1.4; 1 - (2 * 0.1 + 0.2) / 2
        ([0.05, 0.1, 0.5, 0.25, 0.1], 2.25, 0.84),  # 0.1 + 1 + 0.75 + 0.4; 1 - (0.1 + 0.1 + 0.25 + 0.2) / 4
        ([0.5, 0.5], 0.5, 0.5),  # the mode of a tie is the first
        ([0.25, 0.25, 0.5, 0.0], 1.25, 0.75),  # 0.25 + 1; 1 - (0.5 + 0.25) / 3
        ([1 / 3, 2 / 3], 0.67, 0.67),
        ([1 / 3, 1 / 3, 1 / 3], 1.0, 0.5),
        ([0.0, 0.0, 1.0], 2.0, 1.0),
        ([1.0, 0.0], 0.0, 1.0),
        ([0.5, 0.0, 0.5], 1.0, 0.5),  # the two ends: 1 - (2 * 0.5) / 2
    ],
)
def test_score_is_the_expected_level(probabilities: list[float], expected: float, confidence: float) -> None:
    levels = [str(index) for index in range(len(probabilities))]

    result = answer(score(len(probabilities)), probabilities)

    assert result == {
        "type": "score",
        "score": expected,
        "legend": {level: f"level {level}" for level in levels},
        "probabilities": dict(zip(levels, probabilities, strict=True)),
        "confidence": confidence,
    }
    assert list(result["probabilities"]) == levels


def test_a_legend_keeps_each_level_as_it_was_written() -> None:
    levels: list[Any] = [None, "low", 3, 4.5, True, ["a", {"b": None}], {"text": "high"}]

    result = answer(Score(criteria=levels), [0.125] * 6 + [0.25])

    assert result["legend"] == dict(zip("0123456", levels, strict=True))
    assert json.loads(json.dumps(result))["legend"]["5"] == ["a", {"b": None}]
    assert result["legend"]["4"] is True


@pytest.mark.parametrize(
    ("question", "probabilities", "message"),
    [
        (Noul(), [1.0], "1 probabilities for 2 options"),
        (Noul(), [0.2, 0.3, 0.5], "3 probabilities for 2 options"),
        (choice(3), [], "0 probabilities for 3 options"),
        (choice(3), [0.5, 0.5], "2 probabilities for 3 options"),
        (score(2), [0.5, 0.25, 0.25], "3 probabilities for 2 options"),
    ],
)
def test_the_wrong_number_of_probabilities_is_refused(
    question: Question, probabilities: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        answer(question, probabilities)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("question", [Noul(), choice(2), score(2)], ids=["noul", "choice", "score"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_probability_that_is_no_number_is_never_an_answer(question: Question, bad: float, place: int) -> None:
    probabilities = [0.5, 0.5]
    probabilities[place] = bad

    with pytest.raises(ValueError, match=r"^a probability is not a finite number$"):
        answer(question, probabilities)


def test_even_odds_in_float32_give_no_negative_zero() -> None:
    # float32(1/25) is 0.0399999991, less than 1/25.
    result = answer(choice(25), [0.03999999910593033] * 25)

    assert math.copysign(1, result["confidence"]) == 1
    assert result["confidence"] == 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=20).filter(lambda weights: sum(weights) > 0))
def test_any_distribution_gives_an_answer_that_is_json(weights: list[float]) -> None:
    probabilities = [weight / sum(weights) for weight in weights]

    for question in (choice(len(weights)), score(len(weights))):
        result = answer(question, probabilities)

        assert 0 <= result["confidence"] <= 1
        assert list(result["probabilities"].values()) == probabilities
        assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("question", [Noul(), choice(2), score(2)], ids=["noul", "choice", "score"])
def test_the_answer_has_the_type_of_its_question(question: Question) -> None:
    assert answer(question, [0.5, 0.5])["type"] == question.type

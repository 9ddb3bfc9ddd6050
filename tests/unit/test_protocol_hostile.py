"""Whatever a caller sends is either read as it was meant or refused by its path, in bounded time and memory."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jevany_backend.protocol import (
    MAX_DEPTH,
    Choice,
    InvalidRequest,
    Noul,
    Question,
    Score,
    parse_request,
    question_from_json,
    question_to_json,
    render,
    request_from_json,
)
from jevany_backend.protocol.json_content import check_content

Step: TypeAlias = "str | int"

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)

NOUL = {"type": "noul"}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
CONTENT = st.recursive(
    SCALARS | st.sampled_from(["\x00", "a\x00b", "\ufeff", "\u2028", "\U0010ffff", "\n", "- ", ": "]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
QUESTIONS: st.SearchStrategy[Question] = st.one_of(
    st.builds(Noul, CONTENT, st.none() | st.dictionaries(st.sampled_from(["false", "true"]), CONTENT)),
    st.builds(Choice, CONTENT, st.dictionaries(st.text(), CONTENT, min_size=1, max_size=6)),
    st.builds(Score, CONTENT, st.lists(CONTENT, min_size=2, max_size=6)),
)
STEPS = st.lists(st.sampled_from(["a", "key", "größe", "x y"]) | st.integers(0, 3), max_size=6)


def wrapped(steps: list[Step], leaf: Any) -> Any:
    """Return content in which ``steps`` lead to ``leaf``."""
    for step in reversed(steps):
        leaf = {"before": ["fine"], step: leaf} if isinstance(step, str) else [*(["fine"] * step), leaf, None]
    return leaf


def spelled(steps: list[Step]) -> str:
    return "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)


def refusal(value: Any) -> str:
    """Return why a request is refused: as Python values and, the same, as JSON."""
    with pytest.raises(InvalidRequest) as as_value:
        request_from_json(value)
    with pytest.raises(InvalidRequest) as as_json:
        parse_request(json.dumps(value).encode())
    assert as_value.value.message == as_json.value.message
    return as_json.value.message


# What is JSON is read.


@PROPERTY
@given(CONTENT, st.booleans())
def test_any_json_value_is_read_as_it_was_sent(state: Any, ascii_only: bool) -> None:
    body = json.dumps({"state": state, "question": NOUL}, ensure_ascii=ascii_only).encode()

    read = parse_request(body).state

    assert read == state
    assert render(read) == render(state)


@PROPERTY
@given(QUESTIONS, st.text())
def test_any_question_makes_the_round_trip(question: Question, identifier: str) -> None:
    value = json.loads(json.dumps(question_to_json(question)))
    [(read_identifier, read)] = parse_request(
        json.dumps({"state": None, "questions": {identifier: value}}).encode()
    ).questions.items()

    assert read == question_from_json(value, "question") == question
    assert read.keys == question.keys
    assert read.option_texts == question.option_texts
    assert len(read.keys) == len(set(read.keys)) == len(read.option_texts)
    assert read_identifier == identifier


# What is not text is refused.

SURROGATES = ["\ud800", "a\udfffb", "\udc00\ud800"]


@PROPERTY
@given(STEPS, st.sampled_from(SURROGATES))
def test_a_lone_surrogate_is_refused_where_it_stands(steps: list[Step], text: str) -> None:
    at = 1 if text.startswith("a") else 0
    problem = f"not Unicode text: lone surrogate at character {at}"
    content, path = wrapped(steps, text), spelled(steps)

    assert refusal({"state": content, "question": NOUL}) == f"state{path}: {problem}"
    assert (
        refusal({"state": "", "question": {**NOUL, "instructions": content}})
        == f"question.instructions{path}: {problem}"
    )
    assert (
        refusal({"state": "", "questions": {"id": {"type": "choice", "criteria": {"a": 1, "b": content}}}})
        == f"questions.id.criteria.b{path}: {problem}"
    )
    assert (
        refusal({"state": "", "question": {"type": "score", "criteria": [1, content]}})
        == f"question.criteria[1]{path}: {problem}"
    )
    assert (
        refusal({"state": "", "question": {**NOUL, "criteria": {"true": content}}})
        == f"question.criteria.true{path}: {problem}"
    )
    content = wrapped(steps, {"fine": 1, text: 1})
    assert refusal({"state": content, "question": NOUL}) == f"state{path} (a key): {problem}"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"state": "", "question": NOUL, "\ud800": 1}, "request (a key)"),
        ({"state": "", "question": NOUL, "model": "\ud800"}, "model"),
        ({"state": "", "questions": {"a": NOUL, "\ud800": NOUL}}, "questions (a key)"),
        ({"state": "", "question": {**NOUL, "\ud800": 1}}, "question (a key)"),
        ({"state": "", "questions": {"id": {**NOUL, "\ud800": 1}}}, "questions.id (a key)"),
        ({"state": "", "question": {**NOUL, "criteria": {"\ud800": 1}}}, "question.criteria (a key)"),
        ({"state": "", "question": {"type": "choice", "criteria": {"\ud800": 1}}}, "question.criteria (a key)"),
    ],
)
def test_a_name_with_a_lone_surrogate_is_refused(value: Any, path: str) -> None:
    assert refusal(value) == f"{path}: not Unicode text: lone surrogate at character 0"


def test_a_type_with_a_lone_surrogate_is_unknown() -> None:
    problem = "unknown type '\\ud800'; needs one of noul, choice, score"

    assert refusal({"state": "", "question": {"type": "\ud800"}}) == f"question.type: {problem}"


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_request(b'{"state": "\\ud83d\\ude00", "question": {"type": "noul"}}').state == "\U0001f600"


# What is not a finite number is refused.

NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", "1e999": "inf", "-1e999": "-inf"}


@PROPERTY
@given(STEPS, st.sampled_from(sorted(NOT_FINITE)))
def test_a_number_that_is_not_finite_is_refused_where_it_stands(steps: list[Step], written: str) -> None:
    path, problem = spelled(steps), f"{NOT_FINITE[written]} is not a finite number"
    content = json.dumps(wrapped(steps, "*")).replace('"*"', written)
    bodies = {
        f"state{path}": f'{{"state": {content}, "question": {{"type": "noul"}}}}',
        f"question.instructions{path}": f'{{"state": "", "question": {{"type": "noul", "instructions": {content}}}}}',
        f"questions.q.criteria.false{path}": (
            f'{{"state": "", "questions": {{"q": {{"type": "noul", "criteria": {{"false": {content}}}}}}}}}'
        ),
        f"question.criteria.o{path}": (
            f'{{"state": "", "question": {{"type": "choice", "criteria": {{"o": {content}}}}}}}'
        ),
        f"question.criteria[1]{path}": (
            f'{{"state": "", "question": {{"type": "score", "criteria": [0, {content}, 2]}}}}'
        ),
    }
    for at, body in bodies.items():
        with pytest.raises(InvalidRequest) as caught:
            parse_request(body.encode())
        assert caught.value.message == f"{at}: {problem}"


@pytest.mark.parametrize("written", NOT_FINITE)
@pytest.mark.parametrize(
    "body",
    [
        '{"state": "", "question": *}',
        '{"state": "", "questions": *}',
        '{"state": "", "questions": {"a": *}}',
        '{"state": "", "question": {"type": *}}',
        '{"state": "", "question": {"type": "noul", "criteria": *}}',
        '{"state": "", "question": {"type": "choice", "criteria": *}}',
        '{"state": "", "question": {"type": "score", "criteria": *}}',
        '{"state": "", "question": {"type": "noul"}, "model": *}',
        '{"state": "", "question": {"type": "noul"}, "media": *}',
        '{"state": "", "question": {"type": "noul"}, "further": *}',
        "*",
        "[*]",
    ],
)
def test_such_a_number_passes_nowhere_else_either(body: str, written: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(body.replace("*", written).encode())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_question_refuses_it_as_a_python_value_too(number: float) -> None:
    for make in (lambda: Noul([number]), lambda: Choice("", {"a": number}), lambda: Score("", ["", number])):
        with pytest.raises(InvalidRequest, match=r"is not a finite number$"):
            make()


# Depth.


@pytest.mark.parametrize("before", ['{"state": ', '{"question": {"type": ', '{"questions": {"a": ', '{"media": ', ""])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":[', '[1,"x",'])
def test_nesting_beyond_the_parser_is_refused(before: str, opening: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^request: nested more than 100 levels deep$"):
        parse_request((before + opening * 100_000).encode())
    # Here it depends on the parser of this Python whether the depth or the missing end comes first.
    for depth in (500, 1_000, 2_000, 5_000, 10_000, 20_000):
        with pytest.raises(InvalidRequest, match=r"^request: (nested more than 100 levels deep|not JSON: .*)$"):
            parse_request((before + opening * depth).encode())


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, MAX_DEPTH + 2, 300, 900, 980, 2_000, 9_000, 50_000])
@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[0,{"a":', "}]")], ids=["lists", "objects", "both"]
)
def test_nesting_beyond_the_limit_is_refused(depth: int, opening: str, closing: str) -> None:
    value = opening * depth + "0" + closing * depth
    for body in (
        f'{{"state": {value}, "question": {{"type": "noul"}}}}',
        f'{{"state": "", "question": {{"type": {value}}}}}',
        f'{{"state": "", "question": {{"type": "noul"}}, "model": {value}}}',
        f'{{"state": "", "question": {{"type": "noul", "instructions": {value}}}}}',
        f'{{"state": "", "question": {{"type": "choice", "criteria": {{"a": {value}}}}}}}',
        f'{{"state": "", "question": {{"type": "score", "criteria": [0, {value}]}}}}',
        f'{{"state": "", "question": {value}}}',
        value,
    ):
        with pytest.raises(InvalidRequest):
            parse_request(body.encode())


def test_the_greatest_depth_is_read_and_rendered() -> None:
    def nested(depth: int, innermost: str) -> bytes:
        return f'{{"state": {"[" * depth}{innermost}{"]" * depth}, "question": {{"type": "noul"}}}}'.encode()

    assert render(parse_request(nested(MAX_DEPTH, "0")).state) == "- " * MAX_DEPTH + "0"
    for innermost in ("", "0", '{"a": 1}', "{}"):
        depth = MAX_DEPTH - innermost.startswith("{")
        parse_request(nested(depth, innermost))
        with pytest.raises(InvalidRequest) as caught:
            parse_request(nested(depth + 1, innermost))
        assert caught.value.message == "state: nested more than 100 levels deep"


# Size.


def test_an_integer_of_too_many_digits_is_refused() -> None:
    for number in ("9" * 5000, "-" + "1" * 5000):
        for state, path in ((number, "state"), (f'[{{"a": {number}}}]', "state[0].a")):
            with pytest.raises(InvalidRequest) as caught:
                parse_request(f'{{"state": {state}, "question": {{"type": "noul"}}}}'.encode())
            assert caught.value.message == f"{path}: an integer has too many digits"
        for body, message in (
            (number, "request: needs an object, not a number"),
            (f'{{"state": "", "question": {number}}}', "question: needs an object, not a number"),
            (f'{{"state": "", "model": {number}}}', "model: needs a model's name, not a huge integer"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                parse_request(body.encode())
            assert caught.value.message == message


def test_an_integer_that_python_still_writes_is_read() -> None:
    number = "9" * 4300

    assert render(parse_request(f'{{"state": {number}, "question": {{"type": "noul"}}}}'.encode()).state) == number


MEGABYTE = 1_000_000
BIG_STATES: dict[str, Any] = {
    "text": "a" * MEGABYTE,
    "unicode": "é\x00\U0001f600" * (MEGABYTE // 7),
    "escapes": "\x00" * (MEGABYTE // 6),
    "quotes": '"\\' * (MEGABYTE // 4),
    "list": [0] * (MEGABYTE // 3),
    "empty lists": [[]] * (MEGABYTE // 4),
    "empty texts": [""] * (MEGABYTE // 4),
    "object": {str(number): None for number in range(MEGABYTE // 15)},
    "records": [{"id": number, "tags": ["a", {"b": 1.5}]} for number in range(MEGABYTE // 40)],
    "deep text": wrapped([0] * (MAX_DEPTH - 1), "a\n" * (MEGABYTE // 3)),
}


@pytest.mark.parametrize("state", BIG_STATES.values(), ids=BIG_STATES)
def test_a_megabyte_is_read_in_reasonable_time(state: Any) -> None:
    body = json.dumps({"state": state, "question": NOUL}, ensure_ascii=False).encode()
    started = time.perf_counter()

    text = render(parse_request(body).state)

    assert time.perf_counter() - started < 5  # 0.1 to 0.4 s; what this guards against takes minutes.
    assert len(text) < 5 * MEGABYTE


def test_a_long_name_over_a_long_list_costs_no_memory() -> None:
    # A path spelt for every item would be 200 MB here, from a body of 40 kB.
    state = {"k" * 20_000: [0] * 10_000}
    tracemalloc.start()

    check_content(state, "state")

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_body_cannot_grow_by_its_indentation() -> None:
    # Every item of the innermost list would be indented by 200 blanks: 400 kB would be 40 MB of text.
    body = b'{"state": ' + b"[" * 99 + b"0" + b",0" * 200_000 + b"]" * 99 + b', "question": {"type": "noul"}}'

    with pytest.raises(InvalidRequest) as caught:
        parse_request(body)

    assert caught.value.message == "state: nested so deeply that its indentation exceeds 2097152 characters"


@PROPERTY
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for body in (data, b'{"state": ' + data + b"}", b'{"state": "", "question": ' + data + b"}"):
        with pytest.raises(InvalidRequest):
            parse_request(body)


@PROPERTY
@given(CONTENT)
def test_any_json_in_the_place_of_a_question_is_read_or_refused(value: Any) -> None:
    for request in (value, {"state": "", "question": value}, {"state": "", "questions": value}):
        with pytest.raises(InvalidRequest):
            parse_request(json.dumps(request).encode())

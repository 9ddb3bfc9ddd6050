"""The table of errors, and that no caller can make a message long or break it into lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jevany_backend.protocol import (
    ERRORS_BY_CODE,
    DecisionError,
    InternalError,
    InvalidRequest,
    NotReady,
    OutOfMemory,
    TooLong,
    Unsupported,
    parse_request,
)
from jevany_backend.protocol.errors import MAX_MESSAGE

CODES: dict[str, type[DecisionError]] = {
    "invalid_request": InvalidRequest,
    "context_length_exceeded": TooLong,
    "unsupported": Unsupported,
    "not_ready": NotReady,
    "out_of_memory": OutOfMemory,
    "internal": InternalError,
}


def test_every_error_has_a_code_of_its_own() -> None:
    assert CODES == ERRORS_BY_CODE
    assert all(error.code == code for code, error in ERRORS_BY_CODE.items())
    assert len({error.code for error in CODES.values()}) == len(CODES)


@pytest.mark.parametrize("error", [TooLong, Unsupported, NotReady, OutOfMemory, InternalError])
def test_an_error_travels_as_its_code_and_message(error: type[DecisionError]) -> None:
    raised = error("why: it failed")

    assert raised.wire_text() == f"{error.code}: why: it failed"
    assert raised.message == str(raised) == "why: it failed"


def test_an_invalid_request_names_its_path_first() -> None:
    raised = InvalidRequest("criteria", "0 options").within("questions.team")

    assert raised.wire_text() == "invalid_request: questions.team.criteria: 0 options"
    assert (raised.path, raised.problem) == ("questions.team.criteria", "0 options")


def test_a_long_message_is_cut_in_its_middle() -> None:
    raised = InvalidRequest(f"questions.{'x' * 100_000}.criteria", "0 options; needs 1 to 4096")

    assert len(raised.message) <= MAX_MESSAGE
    assert raised.message.startswith("questions.xxx")
    assert raised.message.endswith("xxx.criteria: 0 options; needs 1 to 4096")
    assert "x...x" in raised.message
    assert len(raised.path) <= MAX_MESSAGE


def test_a_message_of_the_greatest_length_is_whole() -> None:
    assert TooLong("m" * MAX_MESSAGE).message == "m" * MAX_MESSAGE
    assert len(TooLong("m" * (MAX_MESSAGE + 1)).message) <= MAX_MESSAGE


def test_what_is_not_printable_is_escaped() -> None:
    assert InvalidRequest("a\nb\x00\u202e\ud800é\U0001f600", "c\r\td\u2028e").message == (
        "a\\nb\\x00\\u202e\\ud800é\U0001f600: c\\r\\td\\u2028e"
    )


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.text(st.characters(), max_size=30),
    st.text(st.characters(), max_size=30),
    st.integers(1, 1000),
)
def test_any_message_is_one_short_printable_line(path: str, problem: str, times: int) -> None:
    errors = [InvalidRequest(path * times, problem * times), InvalidRequest(path, problem).within(path * times)]
    for error in (*errors, TooLong(path * times + problem)):
        assert len(error.message) <= MAX_MESSAGE
        assert error.message.isprintable()
        assert error.wire_text() == f"{error.code}: {error.message}"
        error.wire_text().encode("utf-8")


NOUL = {"type": "noul"}
HUGE_NAMES = {
    "long": "x" * 100_000,
    "identifier": "_" + "é" * 100_000,
    "lines": "line\n" * 20_000,
    "controls": "\x00\r\x1b[31m\u2028\u202e" * 10_000,
    "surrogates": "\ud800" * 100_000,
    "emoji": "\U0001f600\U000e0001" * 50_000,
}


def _bad_requests(name: str) -> dict[str, Any]:
    deep: Any = "\ud800"
    for _ in range(90):
        deep = {name[:10_000]: deep}
    return {
        "request field": {"state": 1, "question": NOUL, name: 1},
        "model": {"state": 1, "question": {"type": "nil"}, "model": name},
        "state key": {"state": {name: "\ud800"}, "question": NOUL},
        "state deep": {"state": deep, "question": NOUL},
        "state value": {"state": {name: float("nan")}, "question": NOUL},
        "question": {"state": 1, "question": name},
        "questions": {"state": 1, "questions": name},
        "question id": {"state": 1, "questions": {name: {}}},
        "question of id": {"state": 1, "questions": {name: {"type": "choice", "criteria": {}}}},
        "question field": {"state": 1, "question": {**NOUL, name: 1}},
        "type": {"state": 1, "question": {"type": name}},
        "type list": {"state": 1, "question": {"type": [name] * 10}},
        "type object": {"state": 1, "question": {"type": {name: name}}},
        "type deep": {"state": 1, "question": {"type": deep}},
        "type number": {"state": 1, "question": {"type": 10**4000}},
        "instructions": {"state": 1, "question": {**NOUL, "instructions": {name: ["\ud800"]}}},
        "noul criteria": {"state": 1, "question": {**NOUL, "criteria": {name: ""}}},
        "option": {"state": 1, "question": {"type": "choice", "criteria": {name: float("inf")}}},
        "level": {"state": 1, "question": {"type": "score", "criteria": ["", {name: float("inf")}]}},
        "model list": {"state": 1, "question": NOUL, "model": [name]},
        "media": {"state": 1, "question": NOUL, "media": name},
        "media list": {"state": 1, "question": NOUL, "media": [name]},
    }


@pytest.mark.parametrize("place", _bad_requests("x"))
@pytest.mark.parametrize("name", HUGE_NAMES.values(), ids=HUGE_NAMES)
def test_no_request_makes_a_long_message_or_one_of_many_lines(name: str, place: str) -> None:
    with pytest.raises(DecisionError) as caught:
        parse_request(json.dumps(_bad_requests(name)[place]).encode())

    text = caught.value.wire_text()
    assert text.isprintable()
    assert len(text) <= MAX_MESSAGE + len("invalid_request: ")


@pytest.mark.parametrize("name", HUGE_NAMES.values(), ids=HUGE_NAMES)
def test_a_key_that_stands_twice_is_named_shortly(name: str) -> None:
    key = json.dumps(name[:80_000])

    with pytest.raises(InvalidRequest, match=r"stands twice in one object$") as caught:
        parse_request(f'{{"state": {{{key}: 1, {key}: 2}}, "question": {{"type": "noul"}}}}'.encode())

    assert len(caught.value.message) < 130
    assert caught.value.message.isprintable()

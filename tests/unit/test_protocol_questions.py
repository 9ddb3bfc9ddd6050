"""Questions and requests: what the model is shown, what is refused and with which words."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from jevany_backend.protocol import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    MAX_REQUEST_BYTES,
    Choice,
    DecisionRequest,
    InvalidRequest,
    Noul,
    Question,
    Score,
    TooLong,
    Unsupported,
    parse_request,
    question_from_json,
    question_to_json,
    request_from_json,
)

NOUL = {"type": "noul"}
TYPES = "noul, choice, score"


def parsed(value: Any) -> DecisionRequest:
    return parse_request(json.dumps(value).encode())


# What the model is shown.


@pytest.mark.parametrize(
    ("criteria", "texts"),
    [
        (None, ["no", "yes"]),
        ({}, ["no", "yes"]),
        ({"true": "it is spam"}, ["no", "yes: it is spam"]),
        ({"false": "it is not"}, ["no: it is not", "yes"]),
        ({"true": "spam", "false": "ham"}, ["no: ham", "yes: spam"]),
        ({"true": None, "false": ""}, ["no", "yes"]),
        ({"true": ["a", "b"], "false": {"why": 1}}, ["no: why: 1", "yes: - a\n- b"]),
        ({"true": 0, "false": False}, ["no: False", "yes: 0"]),
    ],
)
def test_a_noul_shows_no_and_then_yes(criteria: Any, texts: list[str]) -> None:
    question = Noul("Is it spam?", criteria)

    assert question.option_texts == texts
    assert question.keys == ["false", "true"]


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (None, "billing"),
        ("", "billing"),
        ("about money", "billing: about money"),
        (" ", "billing:  "),
        (0, "billing: 0"),
        (False, "billing: False"),
        (1.0, "billing: 1.0"),
        ([], "billing: "),
        ({}, "billing: "),
        (["refunds", ["a", "b"]], "billing: - refunds\n- - a\n  - b"),
        ({"what": "money", "who": ["ann"]}, "billing: what: money\nwho:\n  - ann"),
    ],
)
def test_an_option_shows_its_name_and_its_description(description: Any, text: str) -> None:
    question = Choice("Which team?", {"billing": description})

    assert question.option_texts == [text]
    assert question.keys == ["billing"]


def test_options_keep_the_order_of_the_caller() -> None:
    question = parsed({"state": "", "question": {"type": "choice", "criteria": {"z": None, "a": "x", "": "y"}}})

    assert question.questions["question"].keys == ["z", "a", ""]
    assert question.questions["question"].option_texts == ["z", "a: x", ": y"]


def test_levels_show_their_descriptions_and_are_named_by_number() -> None:
    levels: list[Any] = ["low", None, "", 3, ["a", "b"], {"x": True}, "low", "7", False, 1e22, "ten"]

    question = Score("How bad?", levels)

    assert question.option_texts == ["low", "", "", "3", "- a\n- b", "x: True", "low", "7", "False", "1e+22", "ten"]
    assert question.keys == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]


def test_options_with_equal_texts_stay_apart_by_name() -> None:
    question = Choice(None, {"a": "b: c", "a: b": "c", "a: b: c": None})

    assert question.option_texts == ["a: b: c"] * 3
    assert question.keys == ["a", "a: b", "a: b: c"]


# Requests that are well.


def test_a_request_may_carry_one_question_without_an_id() -> None:
    request = parsed({"state": {"a": 1}, "question": {"type": "noul", "instructions": "Is it?"}, "model": "jevany-4b"})

    assert request == DecisionRequest({"a": 1}, {"question": Noul("Is it?")}, "jevany-4b", single=True)


def test_a_request_may_carry_questions_by_id() -> None:
    request = parsed(
        {
            "state": None,
            "questions": {
                "spam": {"type": "noul", "instructions": {"ask": ["Is it?"]}, "criteria": {"true": "spam"}},
                "team": {"type": "choice", "criteria": {"a": None, "b": "x"}},
                "": {"type": "score", "instructions": None, "criteria": ["low", None]},
            },
        }
    )

    assert request.state is None
    assert request.model is None
    assert request.single is False
    assert request.questions == {
        "spam": Noul({"ask": ["Is it?"]}, {"true": "spam"}),
        "team": Choice(None, {"a": None, "b": "x"}),
        "": Score(None, ["low", None]),
    }
    assert list(request.questions) == ["spam", "team", ""]


@pytest.mark.parametrize("optional", [{"model": None}, {"media": None}, {"media": []}])
def test_an_optional_field_may_be_null_or_empty(optional: dict[str, Any]) -> None:
    assert parsed({"state": "", "question": NOUL, **optional}) == DecisionRequest("", {"question": Noul()}, single=True)


@pytest.mark.parametrize("criteria", [None, {}])
def test_a_noul_may_have_null_or_no_criteria(criteria: Any) -> None:
    assert question_from_json({"type": "noul", "criteria": criteria}, "question").option_texts == ["no", "yes"]


@pytest.mark.parametrize(
    "question", [NOUL, {"type": "choice", "criteria": {"a": None}}, {"type": "score", "criteria": ["low", "high"]}]
)
def test_a_question_may_have_no_instructions(question: dict[str, Any]) -> None:
    for value in (question, {**question, "instructions": None}):
        read = question_from_json(value, "question")
        assert read.instructions is None
        assert question_to_json(read) == question


@pytest.mark.parametrize("count", [1, 2, MAX_OPTIONS])
def test_a_choice_has_from_1_to_4096_options(count: int) -> None:
    question = question_from_json({"type": "choice", "criteria": {f"o{i}": None for i in range(count)}}, "question")

    assert len(question.option_texts) == len(question.keys) == count


@pytest.mark.parametrize("count", [2, 3, MAX_OPTIONS])
def test_a_score_has_from_2_to_4096_levels(count: int) -> None:
    question = question_from_json({"type": "score", "criteria": ["same"] * count}, "question")

    assert len(question.option_texts) == len(question.keys) == count


@pytest.mark.parametrize("count", [1, MAX_QUESTIONS])
def test_a_request_has_from_1_to_64_questions(count: int) -> None:
    assert len(parsed({"state": "", "questions": {str(i): NOUL for i in range(count)}}).questions) == count


def test_the_limits_are_those_of_the_format() -> None:
    assert (MAX_OPTIONS, MAX_QUESTIONS) == (4096, 64)


def test_a_body_of_the_greatest_size_is_read() -> None:
    body = b'{"state": "", "question": {"type": "noul"}}'

    assert parse_request(body.ljust(MAX_REQUEST_BYTES)).state == ""


# Requests that are not.

BAD_REQUESTS: list[tuple[Any, str]] = [
    (None, "request: needs an object, not null"),
    ([], "request: needs an object, not a list"),
    ("text", "request: needs an object, not text"),
    (True, "request: needs an object, not a boolean"),
    (1, "request: needs an object, not a number"),
    (1.5, "request: needs an object, not a number"),
    ({}, "state: missing"),
    ({"question": NOUL}, "state: missing"),
    ({"state": ""}, "question: missing; a request has 'question', or 'questions' by id"),
    ({"state": "", "question": NOUL, "stat": 1}, "stat: unknown field of a request"),
    ({"state": "", "question": NOUL, "a b": 1}, "'a b': unknown field of a request"),
    ({"state": "", "question": NOUL, "": 1}, "'': unknown field of a request"),
    ({"state": "", "question": NOUL, "State": 1}, "State: unknown field of a request"),
    (
        {"state": "", "question": NOUL, "questions": {"a": NOUL}},
        "question: stands beside 'questions'; a request has one of them",
    ),
    (
        {"state": "", "question": None, "questions": None},
        "question: stands beside 'questions'; a request has one of them",
    ),
    ({"state": "", "question": NOUL, "model": ""}, "model: needs a model's name, not ''"),
    ({"state": "", "question": NOUL, "model": 4}, "model: needs a model's name, not 4"),
    ({"state": "", "question": NOUL, "model": False}, "model: needs a model's name, not False"),
    ({"state": "", "question": NOUL, "model": ["a"]}, "model: needs a model's name, not a list"),
    ({"state": "", "question": NOUL, "media": {}}, "media: needs a list, not an object"),
    ({"state": "", "question": NOUL, "media": "x.png"}, "media: needs a list, not text"),
    ({"state": "", "question": NOUL, "media": 0}, "media: needs a list, not a number"),
    ({"state": "", "question": None}, "question: needs an object, not null"),
    ({"state": "", "question": "Is it?"}, "question: needs an object, not text"),
    ({"state": "", "question": [NOUL]}, "question: needs an object, not a list"),
    ({"state": "", "questions": None}, "questions: needs an object of questions by id, not null"),
    ({"state": "", "questions": [NOUL]}, "questions: needs an object of questions by id, not a list"),
    ({"state": "", "questions": {}}, "questions: 0 questions; needs 1 to 64"),
    ({"state": "", "questions": {str(i): NOUL for i in range(65)}}, "questions: 65 questions; needs 1 to 64"),
    ({"state": "", "questions": {"team": None}}, "questions.team: needs an object, not null"),
    ({"state": "", "questions": {"a": NOUL, "b": []}}, "questions.b: needs an object, not a list"),
    ({"state": "", "questions": {"a\nb": []}}, "questions.a\\nb: needs an object, not a list"),
]

BAD_QUESTIONS: list[tuple[Any, str]] = [
    ({}, f".type: missing; needs one of {TYPES}"),
    ({"criteria": {"a": None}}, f".type: missing; needs one of {TYPES}"),
    ({"type": "Noul"}, f".type: unknown type 'Noul'; needs one of {TYPES}"),
    ({"type": ""}, f".type: unknown type ''; needs one of {TYPES}"),
    ({"type": "é\n"}, f".type: unknown type '\\xe9\\n'; needs one of {TYPES}"),
    ({"type": "x" * 61}, f".type: unknown type '{'x' * 56}...; needs one of {TYPES}"),
    ({"type": None}, f".type: needs one of {TYPES}, not null"),
    ({"type": 1}, f".type: needs one of {TYPES}, not a number"),
    ({"type": ["noul"]}, f".type: needs one of {TYPES}, not a list"),
    ({"type": {"noul": 1}}, f".type: needs one of {TYPES}, not an object"),
    ({**NOUL, "instruction": ""}, ".instruction: unknown field 'instruction'"),
    ({**NOUL, "options": []}, ".options: unknown field 'options'"),
    ({**NOUL, "a b": 1}, ": unknown field 'a b'"),
    ({**NOUL, "criteria": []}, ".criteria: needs an object, not a list"),
    ({**NOUL, "criteria": "spam"}, ".criteria: needs an object, not text"),
    ({**NOUL, "criteria": False}, ".criteria: needs an object, not a boolean"),
    ({**NOUL, "criteria": {"True": ""}}, ".criteria.True: unknown key 'True'; a noul has only 'false' and 'true'"),
    (
        {**NOUL, "criteria": {"true": "", "yes": ""}},
        ".criteria.yes: unknown key 'yes'; a noul has only 'false' and 'true'",
    ),
    ({"type": "choice"}, ".criteria: missing; a choice needs its options"),
    ({"type": "choice", "criteria": None}, ".criteria: missing; a choice needs its options"),
    ({"type": "choice", "criteria": {}}, ".criteria: 0 options; needs 1 to 4096"),
    ({"type": "choice", "criteria": {str(i): 0 for i in range(4097)}}, ".criteria: 4097 options; needs 1 to 4096"),
    ({"type": "choice", "criteria": ["a", "b"]}, ".criteria: needs an object, not a list"),
    ({"type": "choice", "criteria": "a"}, ".criteria: needs an object, not text"),
    ({"type": "choice", "criteria": 0}, ".criteria: needs an object, not a number"),
    ({"type": "score"}, ".criteria: missing; a score needs its levels"),
    ({"type": "score", "criteria": None}, ".criteria: missing; a score needs its levels"),
    ({"type": "score", "criteria": []}, ".criteria: 0 levels; needs 2 to 4096"),
    ({"type": "score", "criteria": ["one"]}, ".criteria: 1 level; needs 2 to 4096"),
    ({"type": "score", "criteria": [None] * 4097}, ".criteria: 4097 levels; needs 2 to 4096"),
    ({"type": "score", "criteria": {"0": "a", "1": "b"}}, ".criteria: needs a list of levels, not an object"),
    ({"type": "score", "criteria": "ab"}, ".criteria: needs a list of levels, not text"),
    ({"type": "score", "criteria": 2}, ".criteria: needs a list of levels, not a number"),
]


@pytest.mark.parametrize(("value", "message"), BAD_REQUESTS, ids=[message for _, message in BAD_REQUESTS])
def test_a_bad_request_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(value)

    assert caught.value.message == message


@pytest.mark.parametrize(("question", "message"), BAD_QUESTIONS, ids=[message for _, message in BAD_QUESTIONS])
def test_a_bad_question_is_refused_by_its_path(question: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as single:
        parsed({"state": "", "question": question})
    with pytest.raises(InvalidRequest) as named:
        parsed({"state": "", "questions": {"fine": NOUL, "department": question}})

    assert single.value.message == f"question{message}"
    assert named.value.message == f"questions.department{message}"


@pytest.mark.parametrize("media", [[{"type": "image", "uri": "x"}], [{"type": "video", "uri": "x"}], [1], [None]])
def test_media_are_not_supported(media: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        parsed({"state": "", "question": NOUL, "media": media})

    assert caught.value.wire_text() == "unsupported: media: this server reads text only, no images or video"


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON: Expecting value at line 1 column 1"),
    (b"{", "not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
    (b'{"state": ""}}', "not JSON: Extra data at line 1 column 14"),
    (b"{\"state\": ''}", "not JSON: Expecting value at line 1 column 11"),
    (b'{"state":\n undefined}', "not JSON: Expecting value at line 2 column 2"),
    (b'{"state": "a\nb"}', "not JSON: Invalid control character at line 1 column 13"),
    (b'{"state": "a', "not JSON: Unterminated string starting at line 1 column 11"),
    (b'{"state": "\\x"}', "not JSON: Invalid \\escape at line 1 column 12"),
    (b'{"state": "\\u12"}', "not JSON: Invalid \\uXXXX escape at line 1 column 13"),
    (b'\xef\xbb\xbf{"state": ""}', "not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) at line 1 column 1"),
    (b'{"state": "\xff"}', "not UTF-8 at byte 11"),
    (b'{"state": "\xed\xa0\x80"}', "not UTF-8 at byte 11"),  # a surrogate, as UTF-8 would write it
    (b'{"state": "\xc0\x80"}', "not UTF-8 at byte 11"),  # NUL in more bytes than it needs
    ('{"state": ""}'.encode("utf-16"), "not UTF-8 at byte 0"),
    (b'{"state": "", "state": ""}', "the key 'state' stands twice in one object"),
]


@pytest.mark.parametrize(("body", "problem"), BAD_BODIES, ids=[repr(body) for body, _ in BAD_BODIES])
def test_a_body_that_is_not_json_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body)

    assert caught.value.message == f"request: {problem}"


REPEATED = [
    ('{"state": {"a": 1, "\\u0061": 2}, "question": {"type": "noul"}}', "state: the key 'a'"),
    ('{"state": [[{"x": 1, "y": {"z": 1, "z": 1}}]], "question": {"type": "noul"}}', "state[0][0].y: the key 'z'"),
    ('{"state": "", "question": {"type": "noul", "type": "noul"}}', "question: the key 'type'"),
    (
        '{"state": "", "question": {"type": "noul", "instructions": {"b": 1, "b": 1}}}',
        "question.instructions: the key 'b'",
    ),
    (
        '{"state": "", "question": {"type": "noul", "criteria": {"true": 1, "true": 1}}}',
        "question.criteria: the key 'true'",
    ),
    ('{"state": "", "question": {"type": "choice", "criteria": {"a": 1, "a": 1}}}', "question.criteria: the key 'a'"),
    (
        '{"state": "", "question": {"type": "choice", "criteria": {"a": {"b": 1, "b": 1}}}}',
        "question.criteria.a: the key 'b'",
    ),
    (
        '{"state": "", "question": {"type": "score", "criteria": ["", {"b": 1, "b": 1}]}}',
        "question.criteria[1]: the key 'b'",
    ),
    ('{"state": "", "questions": {"id": {"type": "noul"}, "id": {"type": "noul"}}}', "questions: the key 'id'"),
    ('{"state": "", "questions": {"id": {"type": "noul", "type": "noul"}}}', "questions.id: the key 'type'"),
]


@pytest.mark.parametrize(("body", "problem"), REPEATED, ids=[body for body, _ in REPEATED])
def test_a_key_that_stands_twice_is_refused_by_its_object(body: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body.encode())

    assert caught.value.message == f"{problem} stands twice in one object"


def test_a_body_over_the_greatest_size_is_refused_unread() -> None:
    with pytest.raises(TooLong) as caught:
        parse_request(b"\xff" * (MAX_REQUEST_BYTES + 1))

    assert caught.value.wire_text() == "context_length_exceeded: request: 2097153 bytes; the limit is 2097152"


# Questions that Python code makes.


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Choice, {}, "criteria: 0 options; needs 1 to 4096"),
        (Score, {}, "criteria: 0 levels; needs 2 to 4096"),
        (Score, {"criteria": ("a", "b")}, "criteria: needs a list of levels, not tuple"),
        (Choice, {"criteria": ["a"]}, "criteria: needs an object, not a list"),
        (Choice, {"criteria": {"a", "b"}}, "criteria: needs an object, not set"),
        (Choice, {"criteria": {1: "a"}}, "criteria (a key): 1 is not a string"),
        (Choice, {"criteria": {None: "a"}}, "criteria (a key): None is not a string"),
        (Choice, {"criteria": {(1, "x" * 999): "a"}}, "criteria (a key): tuple is not a string"),
        (Choice, {"criteria": {10**9999: "a"}}, "criteria (a key): a huge integer is not a string"),
        (Choice, {"criteria": {"a": (1, 2)}}, "criteria.a: tuple is not a JSON value"),
        (Choice, {"criteria": {"a": [b"bytes"]}}, "criteria.a[0]: bytes is not a JSON value"),
        (Noul, {"criteria": {True: "a"}}, "criteria (a key): True is not a string"),
        (Noul, {"instructions": object()}, "instructions: object is not a JSON value"),
        (Noul, {"instructions": {"a": [1, {"b": 1j}]}}, "instructions.a[1].b: complex is not a JSON value"),
        (Noul, {"instructions": 10**9999}, "instructions: an integer has too many digits"),
        (Noul, {"instructions": [-(10**9999)]}, "instructions[0]: an integer has too many digits"),
    ],
)
def test_a_question_checks_itself(kind: type[Question], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kind(**fields)

    assert caught.value.message == message


def test_a_python_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    rings: dict[str, Any] = {}
    rings["a"] = rings["b"] = rings

    for value in (loop, rings):
        with pytest.raises(InvalidRequest, match="nested more than 100 levels deep"):
            Noul(value)
        with pytest.raises(InvalidRequest, match="nested more than 100 levels deep"):
            request_from_json({"state": value, "question": NOUL})


@pytest.mark.parametrize(
    ("question", "value"),
    [
        (Noul(), {"type": "noul"}),
        (Noul("Is it?", {}), {"type": "noul", "instructions": "Is it?", "criteria": {}}),
        (Noul("", {"true": None}), {"type": "noul", "instructions": "", "criteria": {"true": None}}),
        (Choice(0, {"b": None, "a": ""}), {"type": "choice", "instructions": 0, "criteria": {"b": None, "a": ""}}),
        (Choice(None, MappingProxyType({"a": [1]})), {"type": "choice", "criteria": {"a": [1]}}),
        (Score(["x"], [None, {}]), {"type": "score", "instructions": ["x"], "criteria": [None, {}]}),
    ],
)
def test_a_question_goes_over_the_wire_as_its_fields(question: Question, value: dict[str, Any]) -> None:
    assert question_to_json(question) == value
    assert json.loads(json.dumps(question_to_json(question))) == value
    back = question_from_json(value, "question")
    assert (back.option_texts, back.keys) == (question.option_texts, question.keys)

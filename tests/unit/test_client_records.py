"""Requests from files as people and data sets write them."""

from __future__ import annotations

import json

import pytest

from jevany_backend.protocol import DecisionError, InvalidRequest, TooLong, Unsupported
from jevany_client.records import ignored_note, read_record, split

ONE = b'{"state": "text", "question": {"type": "noul"}}'


@pytest.mark.parametrize(
    ("data", "name", "many", "lines"),
    [
        (b"", "a.json", False, []),
        (b" \n\r\n", "a.jsonl", True, []),
        (ONE, "a.json", False, [1]),
        (ONE, "a.jsonl", True, [1]),
        (ONE, "A.NDJSON", True, [1]),
        (b"\xef\xbb\xbf" + ONE, "-", False, [1]),
        (b"\n\n" + json.dumps(json.loads(ONE), indent=2).encode(), "-", False, [3]),
        (ONE + b"\n\n" + ONE + b"\r\n", "-", True, [1, 3]),
        (b"\xef\xbb\xbf" + ONE + b"\n" + ONE, "-", True, [1, 2]),
        (b'{"state": \n' + ONE, "-", True, [1, 2]),
        (b'{"state": \n', "-", False, [1]),
        (b'{"state":\n  "text",\n  "question": }', "-", False, [1]),
    ],
)
def test_one_request_or_one_a_line(data: bytes, name: str, many: bool, lines: list[int]) -> None:
    source = split(data, name)
    assert [line for line, _ in source.texts] == lines
    assert source.many == many or not lines


def test_a_byte_order_mark_is_no_part_of_the_request() -> None:
    for data in (b"\xef\xbb\xbf" + ONE, b"\xef\xbb\xbf" + ONE + b"\n" + ONE):
        for _, text in split(data, "-").texts:
            assert read_record(text).request.state == "text"


def test_bookkeeping_is_passed_over() -> None:
    record = read_record(
        b'{"id": 7, "_meta": {"seed": 1}, "label": "x", "state": null,'
        b' "questions": {"urgent": {"type": "noul", "label": true, "_source": 1}}}'
    )
    assert record.labels == {"id": 7}
    assert not record.ignored
    assert list(record.request.questions) == ["urgent"]


def test_unknown_fields_are_named() -> None:
    record = read_record(b'{"state": 1, "tier": 2, "question": {"type": "noul", "critera": {"true": "yes"}}}')
    assert record.ignored == {"tier", "questions.*.critera"}
    assert record.labels == {}
    assert ignored_note(record.ignored) == "unknown fields ignored: questions.*.critera, tier"
    assert ignored_note(str(i) for i in range(12)).endswith("7 and 2 more")


def test_a_misspelt_field_is_named_beside_the_missing_one() -> None:
    with pytest.raises(InvalidRequest, match=r"questions\.team\.criteria: missing.*questions\.\*\.critera"):
        read_record(b'{"state": 1, "questions": {"team": {"type": "choice", "critera": {"a": null}}}}')


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        (b'{"state": ', InvalidRequest, "not JSON"),
        (b"[1]", InvalidRequest, "request: needs an object, not a list"),
        (b"\xff\xfe{", InvalidRequest, "not UTF-8"),
        (b'{"question": {"type": "noul"}}', InvalidRequest, "state: missing"),
        (b'{"state": 1, "question": 2}', InvalidRequest, "question: needs an object"),
        (b'{"state": 1, "questions": [2]}', InvalidRequest, "questions: needs an object"),
        (b'{"state": 1, "state": 2}', InvalidRequest, "stands twice"),
        (b'{"state": 1, "media": [{}], "question": {"type": "noul"}}', Unsupported, "media"),
        (b'{"state": "' + b"x" * 5_000_000 + b'"}', TooLong, "the limit is"),
    ],
)
def test_a_bad_request_says_what_is_wrong(text: bytes, kind: type[DecisionError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        read_record(text)

"""Requests from files as people and data sets write them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jevany_backend.protocol import DecisionError, InvalidRequest, Noul, TooLong, Unsupported
from jevany_client.lines import lines_of
from jevany_client.records import follow, ignored_note, read_labels, read_record, split

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


def test_unknown_fields_of_a_request_are_passed_over_and_named() -> None:
    record = read_record(
        b'{"id": 7, "_meta": {"seed": 1}, "label": "x", "state": null, "questions": {"urgent": {"type": "noul"}}}'
    )
    assert record.labels == {"id": 7}
    assert record.ignored == {"_meta", "label"}
    assert record.request.questions == {"urgent": Noul()}
    assert ignored_note(record.ignored) == "unknown fields ignored: _meta, label"
    assert ignored_note(str(i) for i in range(12)).endswith("7 and 2 more")


def test_labels_of_questions_are_passed_over() -> None:
    one = read_record(b'{"state": 1, "question": {"type": "noul", "label": true}}')
    several = read_record(
        b'{"state": 1, "questions": {"a": {"type": "noul"}, "b": {"label": {"x": 1}, "type": "noul"}}}'
    )
    assert one.request.questions == {"question": Noul()}
    assert several.request.questions == {"a": Noul(), "b": Noul()}
    assert one.ignored == several.ignored == {"label"}


@pytest.mark.parametrize("field", ["instruction", "labels", "_source", "id"])
def test_unknown_fields_of_a_question_are_refused(field: str) -> None:
    question = {"type": "noul", "instructions": "Urgent?", field: 1}
    with pytest.raises(InvalidRequest, match=rf"^question\.{field}: unknown field '{field}'$"):
        read_record(json.dumps({"state": 1, "question": question}).encode())
    with pytest.raises(InvalidRequest, match=rf"^questions\.urgent\.{field}: unknown field '{field}'$"):
        read_record(json.dumps({"state": 1, "questions": {"urgent": question}, "label": 2}).encode())


def test_a_misspelt_field_is_named_beside_the_missing_one() -> None:
    with pytest.raises(InvalidRequest, match=r"^state: missing \(unknown fields ignored: stat\)$"):
        read_record(b'{"stat": 1, "question": {"type": "noul"}}')
    with pytest.raises(InvalidRequest, match=r"^question: missing; .* \(unknown fields ignored: label, qestion\)$"):
        read_record(b'{"state": 1, "label": 2, "qestion": {"type": "noul"}}')
    with pytest.raises(InvalidRequest, match=r"^question\.criteria: missing; a choice needs its options$"):
        read_record(b'{"state": 1, "label": 2, "question": {"type": "choice"}}')


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        (b'{"id": [1, "a"]}', {"id": [1, "a"]}),
        (b'{"id": null, "state": 1, "state": 2}', {"id": None}),
        (b'{"id": 1, "state": "' + b"x" * 5_000_000 + b'"}', {"id": 1}),
        (b'{"id": Infinity}', {}),
        (b'{"id": "\\ud800"}', {}),
        (b'{"state": 1}', {}),
        (b'["id"]', {}),
        (b'{"id": 1', {}),
        (b"\xff\xfe{", {}),
        (b"[" * 100_000, {}),
    ],
)
def test_the_id_of_what_is_no_request(text: bytes, labels: dict[str, Any]) -> None:
    assert read_labels(text) == labels


@pytest.mark.parametrize(
    ("data", "many", "texts"),
    [
        (b"", False, []),
        (b"\n \n", False, []),
        (ONE, True, [(1, ONE)]),
        (b"\xef\xbb\xbf\n" + ONE + b"\n\n{broken\n" + ONE, True, [(2, ONE), (4, b"{broken"), (5, ONE)]),
        (b"\xef\xbb\xbf" + ONE + b"\r\n" + ONE, True, [(1, ONE), (2, ONE)]),
        (b'{"state": \n' + ONE, True, [(1, b'{"state":'), (2, ONE)]),
        (
            b'\n{"state": 1, "question":\n{"type": "noul"}\n}',
            False,
            [(2, b'{"state": 1, "question":\n{"type": "noul"}\n}')],
        ),
        (b"some\ntext", False, [(1, b"some\ntext")]),
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_what_comes_in_line_by_line(data: bytes, many: bool, texts: list[tuple[int, bytes]], end: bytes) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in (data + end).splitlines():
            yield line

    async def followed() -> tuple[bool, list[tuple[int, bytes]]]:
        source = await follow(lines())
        return source.many, [(line, text.strip()) async for line, text in source.each()]

    assert asyncio.run(followed()) == (many, texts)


def test_a_first_line_of_json_is_a_request_before_the_second_comes() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield ONE
        raise AssertionError("waited for more than was needed")

    assert asyncio.run(follow(lines())).texts == [(1, ONE)]


def test_lines_are_there_as_soon_as_they_are_written() -> None:
    async def read() -> None:
        reader, writer = os.pipe()
        lines = lines_of(reader)
        for written, expected in ((b"a\nb", b"a"), (b"c\n\n", b"bc"), (b"", b""), (b"x" * 200_000 + b"\n", None)):
            # A pipe holds less than the longest.
            writing = asyncio.create_task(asyncio.to_thread(os.write, writer, written)) if written else None
            assert await anext(lines) == expected or expected is None
            if writing is not None:
                await writing
        os.write(writer, b"last")
        os.close(writer)
        assert [line async for line in lines] == [b"last"]
        os.close(reader)

    asyncio.run(read())


def test_what_cannot_be_read_by_line_says_so(tmp_path: Path) -> None:
    async def read(descriptor: int) -> None:
        async for _ in lines_of(descriptor):
            pass

    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            asyncio.run(read(descriptor))
    finally:
        os.close(descriptor)


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

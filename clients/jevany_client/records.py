"""Requests from a file: one JSON object, or JSONL with one object a line."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from jevany_backend.protocol import JSON, REQUEST_FIELDS, DecisionRequest, InvalidRequest, request_from_json
from jevany_backend.protocol.json_content import check_content, check_keys, loads, parse_json

# Where data sets keep what is right, in a question. Any other unknown field of one is refused: it may be misspelt.
_LABEL = "label"


@dataclass(frozen=True)
class Record:
    """One request of a file.

    Attributes:
        request: The request.
        labels: The record's ``id``, when it has one, under that key: it goes into the reply.
        ignored: The fields beside those of a request that were passed over, such as a data set's labels.
    """

    request: DecisionRequest
    labels: dict[str, JSON] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """The requests of a file, not yet parsed.

    Attributes:
        many: Whether it is JSONL.
        texts: The line each request begins on, from 1, and its JSON.
        more: Those that have yet to come in, None where all are there.
    """

    many: bool
    texts: list[tuple[int, bytes]]
    more: AsyncIterator[tuple[int, bytes]] | None = None

    async def each(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield every text with its line, as it comes in."""
        for text in self.texts:
            yield text
        if self.more is not None:
            async for text in self.more:
                yield text


def split(data: bytes, name: str) -> Source:
    """Find the requests in a file: one for the whole of it, or one a line.

    It is JSONL by its name, or when it is not one JSON document but has a line, among its first two, that is.

    Args:
        data: The file.
        name: The file's name.

    Returns:
        The requests; none for an empty file.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    named_so = name.lower().endswith((".jsonl", ".ndjson"))
    if lines and not named_so and (is_json(data) or not any(is_json(line) for _, line in lines[:2])):
        return Source(many=False, texts=[(lines[0][0], data)])
    return Source(many=named_so or len(lines) > 1, texts=lines)


async def follow(lines: AsyncIterator[bytes]) -> Source:
    """Find the requests in what comes in line by line.

    It is JSONL as soon as its first line is JSON, though that may be the only one. Otherwise see `split`.
    """
    head: list[bytes] = []
    async for line in lines:
        text = line if head else line.removeprefix(codecs.BOM_UTF8)
        head.append(line)
        if is_json(text):
            return Source(many=True, texts=[(len(head), text)], more=_numbered(lines, len(head) + 1))
        if text.strip():
            break
    return split(b"\n".join([*head, *[line async for line in lines]]), "-")


async def _numbered(lines: AsyncIterator[bytes], number: int) -> AsyncIterator[tuple[int, bytes]]:
    async for line in lines:
        if line.strip():
            yield number, line
        number += 1


def is_json(text: bytes) -> bool:
    """Return whether a text is one JSON document."""
    try:
        loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_record(text: bytes) -> Record:
    """Read one request and what comes with it.

    Raises:
        DecisionError: Names the path of the first bad value.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        return Record(request_from_json(value))  # Raises the error that says so.
    check_keys(value, "request")
    labels = _labels(value)
    ignored = frozenset(value) - {*REQUEST_FIELDS, *labels}
    questions = value.get("questions")
    for question in (value.get("question"), *(questions.values() if isinstance(questions, dict) else ())):
        if isinstance(question, dict) and _LABEL in question:
            del question[_LABEL]
            ignored |= {_LABEL}
    try:
        parsed = request_from_json({key: value[key] for key in REQUEST_FIELDS if key in value})
    except InvalidRequest as error:
        if not ignored or error.path in value or error.path not in REQUEST_FIELDS:
            raise
        # Most likely the reason: the misspelt field is the missing one.
        raise InvalidRequest(error.path, f"{error.problem} ({ignored_note(ignored)})") from None
    return Record(parsed, labels, ignored)


def read_labels(text: bytes) -> dict[str, JSON]:
    """Return the labels of a record that is no request; none where it is not even JSON with labels."""
    try:
        value = loads(text)
        return _labels(value) if isinstance(value, dict) else {}
    except (ValueError, RecursionError, InvalidRequest):
        return {}


def _labels(value: dict[str, JSON]) -> dict[str, JSON]:
    if "id" not in value:
        return {}
    check_content(value["id"], "id")
    return {"id": value["id"]}


def ignored_note(names: Iterable[str]) -> str:
    """Return the one line that says which fields were passed over."""
    shown = sorted(names)
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return f"unknown fields ignored: {', '.join(shown[:10])}{more}"

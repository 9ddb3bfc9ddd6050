"""Requests from a file: one JSON object, or JSONL with one object a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jevany_backend.protocol import JSON, DecisionRequest, InvalidRequest, request_from_json
from jevany_backend.protocol.json_content import parse_json

_REQUEST_FIELDS = ("state", "question", "questions", "model", "media")
_QUESTION_FIELDS = ("type", "instructions", "criteria")

# What data files carry beside the request. Any other field we do not know may be a typing error.
_BOOKKEEPING = ("id", "label")


@dataclass(frozen=True)
class Record:
    """One request of a file.

    Attributes:
        request: The request.
        labels: The record's ``id``, when it has one, under that key: it goes into the reply.
        ignored: The fields that were passed over and may be typing errors; those of questions as ``questions.*.name``.
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
    """

    many: bool
    texts: list[tuple[int, bytes]]


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
    if lines and not named_so and (_is_json(data) or not any(_is_json(line) for _, line in lines[:2])):
        return Source(many=False, texts=[(lines[0][0], data)])
    return Source(many=named_so or len(lines) > 1, texts=lines)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
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
    ignored = _unknown(value, _REQUEST_FIELDS)
    request = {key: value[key] for key in _REQUEST_FIELDS if key in value}
    if "question" in request:
        request["question"] = _known(request["question"], ignored)
    if isinstance(request.get("questions"), dict):
        request["questions"] = {name: _known(question, ignored) for name, question in request["questions"].items()}
    try:
        parsed = request_from_json(request)
    except InvalidRequest as error:
        if not ignored:
            raise
        # Most likely the reason: the misspelt field is the missing one.
        raise InvalidRequest(error.path, f"{error.problem} ({ignored_note(ignored)})") from None
    labels = {"id": value["id"]} if "id" in value else {}
    return Record(parsed, labels, frozenset(ignored))


def _known(question: Any, ignored: set[str]) -> Any:
    if not isinstance(question, dict):
        return question
    ignored.update(f"questions.*.{name}" for name in _unknown(question, _QUESTION_FIELDS))
    return {key: question[key] for key in _QUESTION_FIELDS if key in question}


def _unknown(value: dict[str, Any], fields: tuple[str, ...]) -> set[str]:
    return {key for key in value if key not in fields and key not in _BOOKKEEPING and not key.startswith("_")}


def ignored_note(names: Iterable[str]) -> str:
    """Return the one line that says which fields were passed over."""
    shown = sorted(names)
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return f"unknown fields ignored: {', '.join(shown[:10])}{more}"

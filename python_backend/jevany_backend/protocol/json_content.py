"""JSON values as the wire format allows them, and the text that the model reads for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from jevany_backend.protocol.errors import InvalidRequest, TooLong

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"

MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_DEPTH = 100


def parse_json(data: bytes) -> Any:
    """Parse one request body.

    What is JSON and yet refused passes through here, so that `check_content` and `check_keys` can name where it stands:
    numbers that are not finite or too long, strings that are not text, an object with the same key twice.

    Args:
        data: UTF-8 encoded JSON, at most `MAX_REQUEST_BYTES` long.

    Raises:
        TooLong: More bytes than `MAX_REQUEST_BYTES`.
        InvalidRequest: Not UTF-8, not JSON, or nesting beyond the parser.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise TooLong(f"request: {len(data)} bytes; the limit is {MAX_REQUEST_BYTES}")
    try:
        return loads(data)
    except UnicodeDecodeError as error:
        raise InvalidRequest("request", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        # Python's reasons end as it would go on: "starting at", "Invalid \\escape: ".
        reason = error.msg.rstrip(": ").removesuffix(" at")
        raise InvalidRequest("request", f"not JSON: {reason} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest("request", f"nested more than {MAX_DEPTH} levels deep") from None


def loads(data: bytes) -> Any:
    """Parse UTF-8 encoded JSON as `parse_json` does, of any length, with Python's own errors.

    Raises:
        ValueError: Not UTF-8, or not JSON.
        RecursionError: Nesting beyond the parser.
    """
    return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer)


class _RepeatedKey(dict[str, Any]):
    """An object of which one key stands twice in the JSON."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    repeated = _RepeatedKey(result)
    # set.add returns None: this is the first key that has been seen before.
    repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return repeated


class _Overlong(int):
    """An integer of more digits than Python converts, 4,300; its value is lost."""


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        return _Overlong()


def check_content(value: Any, path: str) -> None:
    """Check that ``value`` is JSON content the model can read: finite numbers, real text, bounded nesting.

    Args:
        value: A parsed JSON value, or a Python value from a caller of the client.
        path: Where the value stands, for the error message.

    Raises:
        InvalidRequest: Names the path of the first bad value.
    """
    # Two explicit stacks, since a hostile value must not be able to exhaust the interpreter's: the open lists and
    # objects, and the step into each. Only an error spells the steps out; a path for every item would cost memory by
    # the product of a long key and a long list under it.
    levels: list[Iterator[tuple[Any, Any]]] = [iter([(path, value)])]
    steps: list[Any] = [path]
    indentation = 0
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            steps.pop()
            continue
        steps[-1], item = entry
        depth = len(levels) - 1
        if depth >= MAX_DEPTH and isinstance(item, (list, dict)):
            raise InvalidRequest(path, f"nested more than {MAX_DEPTH} levels deep")
        indentation += 2 * depth
        if indentation > MAX_REQUEST_BYTES:
            raise InvalidRequest(path, f"nested so deeply that its indentation exceeds {MAX_REQUEST_BYTES} characters")
        if isinstance(item, list):
            levels.append(iter(enumerate(item)))
            steps.append(None)
        elif isinstance(item, dict):
            if (found := _key_problem(item)) is not None:
                raise InvalidRequest(_spelled(steps) + found[0], found[1])
            levels.append(iter(item.items()))
            steps.append(None)
        else:
            problem = _scalar_problem(item)
            if problem is not None:
                raise InvalidRequest(_spelled(steps), problem)


def _spelled(steps: list[Any]) -> str:
    return steps[0] + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[1:])


def check_keys(value: Mapping[Any, Any], path: str) -> None:
    """Refuse an object with a key that is not text, or that stands twice.

    Raises:
        InvalidRequest: Names the object.
    """
    if (found := _key_problem(value)) is not None:
        raise InvalidRequest(path + found[0], found[1])


def _key_problem(value: Mapping[Any, Any]) -> tuple[str, str] | None:
    """Return what is wrong with an object's keys, behind what to add to its path."""
    if isinstance(value, _RepeatedKey):
        return "", f"the key {shown(value.key)} stands twice in one object"
    for key in value:
        problem = _text_problem(key) if isinstance(key, str) else f"{shown(key)} is not a string"
        if problem is not None:
            return " (a key)", problem
    return None


def _scalar_problem(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _text_problem(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not a finite number"
    if isinstance(value, int):
        return "an integer has too many digits" if _is_overlong(value) else None
    return f"{type(value).__name__} is not a JSON value"


def _is_overlong(value: int) -> bool:
    if isinstance(value, _Overlong):
        return True
    try:
        str(value)
    except ValueError:
        return True
    return False


def _text_problem(text: str) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # No tokenizer can read it.
        return f"not Unicode text: lone surrogate at character {error.start}"
    return None


def shown(value: object) -> str:
    """Return ``value`` as an error message shows it: one line, at most 60 characters; a list or an object by kind."""
    if isinstance(value, str):
        text = ascii(value[:60])
    elif value is None or isinstance(value, (bool, float)):
        text = ascii(value)
    elif isinstance(value, int):
        text = "a huge integer" if isinstance(value, _Overlong) or value.bit_length() > 256 else ascii(value)
    else:
        text = kind_of(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(value: object) -> str:
    """Return what kind of JSON value ``value`` is, with its article; for another value, its type's name."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    names |= {_RepeatedKey: "an object", _Overlong: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def counted(count: int, what: str) -> str:
    """Return a count as an error message shows it, as in ``1 level`` and ``0 levels``."""
    return f"{count} {what if count == 1 else f'{what}s'}"


def render(value: JSON) -> str:
    r"""Return the text that the model reads for a JSON value.

    null is empty; strings, numbers and booleans are Python's ``str()``; a list has one ``- item`` a line; an object
    has one ``key: value`` a line, or ``key:`` and the value on the next lines where it is a list or an object.
    Each level of nesting indents by two spaces, and an item's own first line follows its dash.

    Example:
        >>> print(render({"plan": "pro", "tags": ["new", "eu"], "seats": {"paid": 3}}))
        plan: pro
        tags:
          - new
          - eu
        seats:
          paid: 3
    """
    return _render(value, 0)


def _render(value: JSON, level: int) -> str:
    indent = "  " * level
    if value is None:
        return ""
    if isinstance(value, list):
        # The dash stands where the item's indentation would, so the item gives up its leading white space.
        return "\n".join(f"{indent}- {_render(item, level + 1).lstrip()}" for item in value)
    if isinstance(value, dict):
        return "\n".join(
            f"{indent}{key}:\n{_render(item, level + 1)}"
            if isinstance(item, (dict, list))
            else f"{indent}{key}: {_render(item, 0)}"
            for key, item in value.items()
        )
    return str(value)

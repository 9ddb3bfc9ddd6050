"""JSON values as the wire format allows them, and the text that the model reads for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from jevany_backend.protocol.errors import InvalidRequest, TooLong

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"

MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_DEPTH = 100


def parse_json(data: bytes) -> Any:
    """Parse one request body.

    Numbers that are not finite and strings that are not text pass through here, so that `check_content` can name
    where they stand.

    Args:
        data: UTF-8 encoded JSON, at most `MAX_REQUEST_BYTES` long.

    Raises:
        TooLong: More bytes than `MAX_REQUEST_BYTES`.
        InvalidRequest: Not UTF-8, not JSON, an object with the same key twice, or nesting beyond the parser.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise TooLong(f"request: {len(data)} bytes; the limit is {MAX_REQUEST_BYTES}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
    except UnicodeDecodeError as error:
        raise InvalidRequest("request", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        # Python's reasons end as it would go on: "starting at", "Invalid \\escape: ".
        reason = error.msg.rstrip(": ").removesuffix(" at")
        raise InvalidRequest("request", f"not JSON: {reason} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest("request", f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # Python refuses to convert integers of more than 4,300 digits.
        raise InvalidRequest("request", "an integer has too many digits") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest("request", f"the key {shown(key)} stands twice in one object")
            seen.add(key)
    return result


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
        if depth > MAX_DEPTH:
            raise InvalidRequest(path, f"nested more than {MAX_DEPTH} levels deep")
        indentation += 2 * depth
        if indentation > MAX_REQUEST_BYTES:
            raise InvalidRequest(path, f"nested so deeply that its indentation exceeds {MAX_REQUEST_BYTES} characters")
        if isinstance(item, list):
            levels.append(iter(enumerate(item)))
            steps.append(None)
        elif isinstance(item, dict):
            for key in item:
                problem = _key_problem(key)
                if problem is not None:
                    raise InvalidRequest(f"{_spelled(steps)} (a key)", problem)
            levels.append(iter(item.items()))
            steps.append(None)
        else:
            problem = _scalar_problem(item)
            if problem is not None:
                raise InvalidRequest(_spelled(steps), problem)


def _spelled(steps: list[Any]) -> str:
    return steps[0] + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[1:])


def check_key(key: Any, path: str) -> None:
    """Refuse an object key that is not text.

    Raises:
        InvalidRequest: Names the object that holds the key.
    """
    problem = _key_problem(key)
    if problem is not None:
        raise InvalidRequest(f"{path} (a key)", problem)


def _key_problem(key: Any) -> str | None:
    return _text_problem(key) if isinstance(key, str) else f"{shown(key)} is not a string"


def _scalar_problem(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _text_problem(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not a finite number"
    if isinstance(value, int):
        try:
            str(value)
        except ValueError:  # As in `parse_json`.
            return "an integer has too many digits"
        return None
    return f"{type(value).__name__} is not a JSON value"


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
        text = ascii(value) if value.bit_length() <= 256 else "a huge integer"
    else:
        text = kind_of(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(value: object) -> str:
    """Return what kind of JSON value ``value`` is, with its article; for another value, its type's name."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
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

"""JSON values as the wire format allows them, and the text that the model reads for them."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

from jevany_backend.protocol.errors import InvalidRequest, TooLong

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"

MAX_REQUEST_BYTES = 4 * 1024 * 1024
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
        raise InvalidRequest("request", f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
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
    # An explicit stack: a hostile value must not be able to exhaust the interpreter's.
    stack: list[tuple[Any, str, int]] = [(value, path, 0)]
    while stack:
        item, at, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(path, f"nested more than {MAX_DEPTH} levels deep")
        if item is None or isinstance(item, bool):
            continue
        if isinstance(item, str):
            check_text(item, at)
        elif isinstance(item, int):
            check_integer(item, at)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidRequest(at, f"{item} is not a finite number")
        elif isinstance(item, list):
            stack.extend((child, f"{at}[{index}]", depth + 1) for index, child in reversed(list(enumerate(item))))
        elif isinstance(item, dict):
            for key in item:
                check_key(key, at)
            stack.extend((child, f"{at}.{key}", depth + 1) for key, child in reversed(list(item.items())))
        else:
            raise InvalidRequest(at, f"{type(item).__name__} is not a JSON value")


def check_text(text: str, path: str) -> None:
    """Refuse a string with lone surrogates, which no tokenizer can read.

    Raises:
        InvalidRequest: Names the path and the position of the surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(path, f"not Unicode text: lone surrogate at character {error.start}") from None


def check_integer(number: int, path: str) -> None:
    """Refuse an integer that Python would not print.

    Raises:
        InvalidRequest: The integer has more digits than Python converts to text.
    """
    try:
        str(number)
    except ValueError:
        raise InvalidRequest(path, "an integer has too many digits") from None


def check_key(key: Any, path: str) -> None:
    """Refuse an object key that is not text.

    Raises:
        InvalidRequest: Names the object that holds the key.
    """
    if not isinstance(key, str):
        raise InvalidRequest(path, f"the key {shown(key)} is not a string")
    check_text(key, f"{path} (a key)")


def shown(value: object) -> str:
    """Return ``value`` as an error message shows it: one line, at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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

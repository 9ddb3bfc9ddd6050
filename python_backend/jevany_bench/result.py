"""The result file of ``make bench`` and ``make loadtest``: one JSON schema for both, ``result.schema.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
# What of a result changes from one moment to the next, or with how far a run has come.
_UNSTEADY = ("clocks.sm", "clocks.mem", "url", "stages")
_SCHEMA = Path(__file__).with_name("result.schema.json")


class ResultError(ValueError):
    """A file is no result of this schema; the message says where and why in one line."""


def begun(kind: str) -> dict[str, Any]:
    """Return the first fields of a result, of ``bench``, ``serial`` or ``open``."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": SCHEMA_VERSION, "kind": kind, "started": started, "complete": False}


def check(result: Any) -> None:
    """Check a result against the schema, and that its columns are of one length.

    Raises:
        ResultError: It does not hold.
    """
    for error in sorted(_validator().iter_errors(result), key=lambda error: list(map(str, error.path))):
        raise ResultError(f"{'.'.join(map(str, error.path)) or 'result'}: {error.message[:200]}")
    tables = [result["samples"]] if "samples" in result else []
    tables += [mode["samples"] for mode in result.get("modes", {}).values() if "samples" in mode]
    for table in tables:
        if len({len(column) for column in table.values()}) > 1:
            raise ResultError("samples: the columns are not of one length")


@cache
def _validator() -> Any:
    # Whoever only measures on a bare machine does not need it.
    from jsonschema import Draft202012Validator, FormatChecker

    schema = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    formats = FormatChecker()
    # jsonschema knows this format only with a package that is not among ours.
    formats.checks("date-time", ValueError)(_is_date_time)
    return Draft202012Validator(schema, format_checker=formats)


def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


def read(path: Path) -> dict[str, Any]:
    """Read a result.

    Raises:
        OSError: There is no such file.
        ResultError: It is no result; the message names the file.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        check(result)
    except ValueError as error:
        raise ResultError(f"{path}: {error}") from None
    return result


def read_earlier(path: Path, begun: dict[str, Any], same: Iterable[str]) -> dict[str, Any] | None:
    """Read what a run that was cut short has left, None where there is nothing.

    Args:
        path: Where it would be.
        begun: The result that shall go on with it.
        same: The fields that have to be the same for samples to be put together.

    Raises:
        ResultError: It is of another run.
    """
    if not path.exists():
        return None
    earlier = read(path)
    for name in same:
        if _steady(begun[name]) != _steady(earlier.get(name)):
            raise ResultError(f"{path} cannot be resumed: its {name} is another")
    return earlier


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steady(inner) for name, inner in value.items() if name not in _UNSTEADY}
    return [_steady(inner) for inner in value] if isinstance(value, list) else value


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)

"""What was measured, as columns of equal length, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

DROPPED = "dropped"

# Column of a result file -> field of a generator's event. Times are in milliseconds, but `at`: seconds since the start.
_COLUMNS = {
    "row": "row",
    "at": "at",
    "client_ms": "milliseconds",
    "server_ms": "server_milliseconds",
    "model_ms": "model_milliseconds",
    "tokens": "tokens",
    "error": "error",
}
_OPEN_COLUMNS = {"stage": "stage", "due_ms": "since_due", "late_ms": "late"}


def columns(*, open_loop: bool) -> dict[str, list[Any]]:
    """Return empty columns.

    ``row`` is the request's place in the panel, ``at`` seconds since the start: of the call, in the open loop of the
    scheduled instant. ``client_ms`` is from the call to the answer, ``server_ms`` Triton's own time, ``model_ms`` the
    model's. Where ``error`` has a kind, times and tokens are None. The open loop adds ``stage``, ``due_ms``, from the
    scheduled instant to the answer, and ``late_ms``, from there to the call.
    """
    return {name: [] for name in {**_COLUMNS, **(_OPEN_COLUMNS if open_loop else {})}}


def append(table: dict[str, list[Any]], event: dict[str, Any]) -> None:
    """Add a generator's event to columns."""
    for name in table:
        value = event.get(_COLUMNS.get(name) or _OPEN_COLUMNS[name])
        if event["error"] and name.endswith("_ms"):
            value = None
        table[name].append(round(value, 4) if isinstance(value, float) else value)


def summary(milliseconds: Iterable[float | None]) -> dict[str, Any]:
    """Return the number of samples, their mean, median, 90th, 95th and 99th percentile; of what is not None.

    Quantiles are between samples linearly, as numpy's are.
    """
    times = np.array([value for value in milliseconds if value is not None])
    if not len(times):
        return {"samples": 0}
    quantiles = np.quantile(times, (0.5, 0.9, 0.95, 0.99))
    return {
        "samples": len(times),
        "mean": float(times.mean()),
        **dict(zip(("median", "p90", "p95", "p99"), map(float, quantiles), strict=True)),
    }


def error_counts(kinds: Sequence[str | None]) -> dict[str, int]:
    """Return how often each kind of error came, the most frequent first."""
    return dict(Counter(kind for kind in kinds if kind).most_common())

"""What Triton's metrics endpoint says of a model beyond Triton's own figures.

How it runs, what its graphs did, and the requests that it answered with an error: Triton counts an answered request as
a success, whatever the answer (server#7713).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from jevany_backend.engine.graphs import Counters
from jevany_backend.protocol.errors import ERRORS_BY_CODE

# Metric, field of `Counters`, help text. Tokens last: whoever sees those of a row sees all that it did.
_COUNTERS = (
    ("jevany_graph_replays_total", "replays", "Rows that replayed a CUDA graph"),
    ("jevany_eager_calls_total", "eager_calls", "Rows that ran without a CUDA graph"),
    ("jevany_padding_tokens_total", "padding_tokens", "Tokens computed beside those of the rows, to fill a graph"),
    ("jevany_captures_after_ready_total", "captures_after_ready", "Graphs captured while serving; 0, or it is a fault"),
    ("jevany_tokens_total", "tokens", "Tokens of all rows"),
)

# Requests that nobody waits for any more are not computed.
CANCELLED = "cancelled"
EXPIRED = "deadline_exceeded"
_PERIOD = 1.0


class Metrics:
    """The metrics of one instance of a model, which Triton serves until they are closed.

    The label ``weights`` of every metric says whether they are ``random``, so that answers mean nothing, or those of a
    ``checkpoint``. ``jevany_model_info`` is always 1; its label ``engine`` says what runs.
    ``jevany_failed_requests_total`` has a counter for each code of an error, in the label ``error``. The other counters
    are there for engines that capture graphs. All are brought up to date once a second by a thread of their own: each
    counter costs some 60 microseconds of messages to Triton's process, which no caller shall wait for.

    Args:
        labels: `model`, `version` and `instance`; every metric has them, too.
        engine: The mode that runs, one of `engine.modes.MODES`.
        random_weights: Whether the weights are random.
        counters: What the engine counts; None where it captures no graphs.
    """

    def __init__(self, labels: dict[str, str], engine: str, *, random_weights: bool, counters: Counters | None) -> None:
        labels = {**labels, "weights": "random" if random_weights else "checkpoint"}
        family = _family("jevany_model_info", "How a model runs", pb_utils.MetricFamily.GAUGE)
        self._info = family.Metric(labels={**labels, "engine": engine})
        self._info.set(1)
        self._families = [family]
        family = _family(
            "jevany_failed_requests_total",
            "Requests answered with an error, by its code",
            pb_utils.MetricFamily.COUNTER,
        )
        self._families.append(family)
        self._failures: dict[str, int] = dict.fromkeys((*ERRORS_BY_CODE, CANCELLED, EXPIRED), 0)
        self._published_failures = dict(self._failures)
        self._failure_metrics: dict[str, Any] = {
            code: family.Metric(labels={**labels, "error": code}) for code in self._failures
        }
        self._metrics: dict[str, Any] = {}
        self._counters = counters
        if counters is not None:
            self._published = dataclasses.replace(counters)
            for name, field, text in _COUNTERS:
                family = _family(name, text, pb_utils.MetricFamily.COUNTER)
                self._families.append(family)
                self._metrics[field] = family.Metric(labels=labels)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="jevany metrics", daemon=True)
        self._thread.start()

    def failed(self, code: str) -> None:
        """Count a request that was answered with an error.

        Args:
            code: The error's code, `CANCELLED` or `EXPIRED`.
        """
        self._failures[code] += 1

    def close(self) -> None:
        """Publish a last time and take the metrics away from Triton's endpoint."""
        self._closing.set()
        self._thread.join()
        self._metrics.clear()
        self._failure_metrics.clear()
        self._families.clear()
        del self._info

    def _keep_publishing(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        for code, metric in self._failure_metrics.items():
            failures = self._failures[code]
            if more := failures - self._published_failures[code]:
                metric.increment(more)
            self._published_failures[code] = failures
        if self._counters is None:
            return
        now = dataclasses.replace(self._counters)
        for field, metric in self._metrics.items():
            if more := getattr(now, field) - getattr(self._published, field):
                metric.increment(more)
        self._published = now


def _family(name: str, text: str, kind: Any) -> Any:
    return pb_utils.MetricFamily(name=name, description=text, kind=kind)

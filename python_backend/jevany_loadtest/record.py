"""A run's result while it grows: valid on disk at every moment, so that what is cut short counts and can be resumed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jevany_bench import machine, result
from jevany_bench.panel import Panel
from jevany_loadtest import samples
from jevany_loadtest.accuracy import accuracy
from jevany_loadtest.arrivals import AFTER_SPIKE, PROBE, WARM_UP
from jevany_loadtest.server import Server

_WRITE_SECONDS = 5.0
# What has to be the same for samples to be put together.
_SAME = ("schema", "kind", "model", "machine", "commit", "panel", "protocol", "server")
# Stages that mean nothing without the one before them.
_CONTINUING = (PROBE, AFTER_SPIKE)


class Record:
    """One run's result.

    Args:
        kind: ``serial`` or ``open``.
        model: The model's name.
        panel: The panel, of which `rows` are asked.
        rows: How many requests of the panel, from its start.
        protocol: The settings that the samples depend on, with ``transport``, ``grpc`` or ``http``.
        server: The server.
        path: Where the file goes.

    Attributes:
        content: The result.
        position: How many requests have been sent, errors and all, warm-up apart.
    """

    def __init__(
        self, kind: str, model: str, panel: Panel, rows: int, protocol: Mapping[str, Any], server: Server, path: Path
    ) -> None:
        entry, host = server.describe(model, protocol["transport"])
        self.path = path
        self._panel = panel
        self._written = 0.0
        self.content: dict[str, Any] = {
            **result.begun(kind),
            "model": model,
            "weights": None,
            "machine": host,
            "commit": machine.commit(),
            "panel": {
                "name": panel.name,
                "sha256": panel.sha256,
                "rows": rows,
                "of": len(panel.requests),
                "labelled": sum(request.label is not None for request in panel.requests),
            },
            "protocol": dict(protocol),
            "server": entry,
            "samples": samples.columns(open_loop=kind == "open"),
            "probabilities": {},
            "summary": {},
            "counters": None,
            "accuracy": None,
            "comparison": [],
            "errors": {},
            "error_messages": {},
        }

    @property
    def position(self) -> int:
        """How many requests have been sent."""
        return len(self.content["samples"]["row"])

    def resume(self) -> bool:
        """Go on with the file that lies there; return whether there was one to go on with.

        Of an open run its whole stages are kept: arrivals of a stage cannot be taken up in its middle.

        Raises:
            ValueError: It is of another run, or already complete.
        """
        earlier = result.read_earlier(self.path, self.content, _SAME)
        if earlier is None:
            return False
        if earlier["complete"]:
            raise ValueError(f"{self.path} is complete; nothing is left to resume")
        self.content = {**earlier, "server": self.content["server"]}
        if self.content["kind"] == "open":
            _keep_whole_stages(self.content)
        return True

    def add(self, event: dict[str, Any]) -> None:
        """Take a sample from the generator; the file is written every few seconds."""
        samples.append(self.content["samples"], event)
        if event["error"]:
            # One message of each kind says enough.
            self.content["error_messages"].setdefault(event["error"], event["message"])
        else:
            self.content["weights"] = event["weights"] or "real"
            self.content["probabilities"][str(event["row"])] = [round(p, 7) for p in event["probabilities"]]
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file, with what follows from the samples so far."""
        table = self.content["samples"]
        self.content["errors"] = samples.error_counts(table["error"])
        answers = {int(row): values for row, values in self.content["probabilities"].items()}
        # With random weights an answer means nothing, right or wrong.
        self.content["accuracy"] = accuracy(self._panel, answers) if self.content["weights"] == "real" else None
        serial = self.content["kind"] == "serial"
        self.content["summary"] = serial_summary(table) if serial else open_summary(self.content)
        result.check(self.content)
        result.write(self.content, self.path)
        self._written = time.monotonic()


def serial_summary(table: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return what is said of a serial run: client, server and model time, and requests a second.

    As in the published protocol, the rate is that of requests one after the other: 1000 / mean.
    """
    summary: dict[str, Any] = {name: samples.summary(table[name]) for name in ("client_ms", "server_ms", "model_ms")}
    mean = summary["client_ms"].get("mean")
    return summary | {"requests_a_second": 1e3 / mean if mean else None}


def open_summary(content: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of an open run: of all stages but warm-ups together, and of each stage.

    ``due_ms`` counts from the scheduled instant, so that it holds the time that a request had to wait for its turn to
    be sent; ``late_ms`` is that wait, the generator's own delay.
    """
    table = content["samples"]
    named = content["protocol"]["stages"]
    counted = [index for index, stage in enumerate(table["stage"]) if named[stage]["name"] != WARM_UP]

    def of(indices: Sequence[int], seconds: float) -> dict[str, Any]:
        part = {name: [table[name][i] for i in indices] for name in ("due_ms", "client_ms", "model_ms", "late_ms")}
        kinds = [table["error"][index] for index in indices]
        errors = samples.error_counts(kinds)
        answered = len(kinds) - sum(errors.values())
        return {
            **{name: samples.summary(values) for name, values in part.items()},
            "dropped": errors.get(samples.DROPPED, 0),
            "errors": errors,
            "requests_a_second": answered / seconds if seconds else None,
        }

    each = []
    for number, stage in enumerate(named):
        indices = [index for index, at in enumerate(table["stage"]) if at == number]
        each.append({**stage, **of(indices, stage["seconds"])})
    seconds = sum(stage["seconds"] for stage in named if stage["name"] != WARM_UP)
    return {**of(counted, seconds), "stages": each}


def _keep_whole_stages(content: dict[str, Any]) -> None:
    table, stages = content["samples"], content["protocol"]["stages"]
    sent = Counter(table["stage"])
    whole = 0
    while whole < len(stages) and sent[whole] == stages[whole]["requests"]:
        whole += 1
    while whole < len(stages) and stages[whole]["name"] in _CONTINUING:
        whole -= 1
    del stages[whole:]
    kept = [index for index, stage in enumerate(table["stage"]) if stage < whole]
    content["samples"] = {name: [column[index] for index in kept] for name, column in table.items()}
    content["summary"] = open_summary(content)

"""A run's result while it grows: valid on disk at every moment, so that what is cut short counts and can be resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jevany_bench import machine, result
from jevany_bench.panel import Panel
from jevany_loadtest import samples
from jevany_loadtest.accuracy import accuracy
from jevany_loadtest.server import Server

_WRITE_SECONDS = 5.0
# What has to be the same for samples to be put together.
_SAME = ("schema", "kind", "model", "machine", "commit", "panel", "protocol")


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

        Raises:
            ValueError: It is of another run, or already complete.
        """
        if not self.path.exists():
            return False
        earlier = result.read(self.path)
        if earlier["complete"]:
            raise ValueError(f"{self.path} is complete; nothing is left to resume")
        for name in _SAME:
            ours, theirs = (_steady(part[name]) for part in (self.content, earlier))
            if ours != theirs:
                raise ValueError(f"{self.path} cannot be resumed: its {name} is another")
        self.content = earlier
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
        if self.content["kind"] == "serial":
            self.content["summary"] = serial_summary(table)
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


def _steady(value: Any) -> Any:
    """Return a value without the clocks, which change from one moment to the next."""
    if isinstance(value, dict):
        return {name: _steady(inner) for name, inner in value.items() if not name.startswith("clocks.")}
    return [_steady(inner) for inner in value] if isinstance(value, list) else value

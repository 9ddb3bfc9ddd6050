"""``loadtest/targets.toml``: the published numbers and our own, and how a result stands beside them."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).parents[2] / "loadtest" / "targets.toml"
MEASURES = ("median", "mean", "p90", "p95", "accuracy")
PASS, FAIL = "pass", "fail"


@dataclass(frozen=True)
class Targets:
    """The file's tables.

    Attributes:
        panels: What a result says of a panel -> the panel that rows call by name.
        hardware: A device's name -> what rows call it.
        ours: Our own targets.
        published: The JevAny project's rows.
        changes: What it has published as a change only.
        others: Other projects' rows.
    """

    panels: list[dict[str, Any]]
    hardware: dict[str, str]
    ours: list[dict[str, Any]]
    published: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    others: list[dict[str, Any]]

    def hardware_of(self, device: str | None) -> str | None:
        """Return what rows call a device, None for one that no row is of."""
        return self.hardware.get(device or "")

    def panel_of(self, panel: dict[str, Any]) -> str | None:
        """Return what rows call a result's panel, by its content; None for one that no row is of."""
        for known in self.panels:
            if all(panel.get(name) == value for name, value in known.items() if name != "panel"):
                return str(known["panel"])
        return None

    def fastest(self, model: str, hardware: str | None, panel: str | None) -> dict[str, Any] | None:
        """Return the published row with the least median, or 90th percentile where no median is published."""
        rows = [
            row
            for row in self.published
            if (row["model"], row["hardware"], row["panel"]) == (model, hardware, panel) and _time(row) < math.inf
        ]
        return min(rows, key=_time, default=None)


def _time(row: dict[str, Any]) -> float:
    return float(row.get("median", row.get("p90", math.inf)))


def read_targets(path: Path) -> Targets:
    """Read the file.

    Raises:
        OSError: There is none.
        ValueError: It is not as it should be; the message names it.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return Targets(
            tables["panels"],
            tables["hardware"],
            tables["ours"],
            tables["published"],
            tables["published_change"],
            tables["others"],
        )
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None


def accuracy_percent(row: dict[str, Any]) -> float | None:
    """Return the accuracy of a published row, in percent, by its count where that is what was published."""
    if "accuracy" in row:
        return float(row["accuracy"])
    return 100 * row["correct"] / row["of"] if "correct" in row else None


def compare(result: dict[str, Any], targets: Targets) -> list[dict[str, Any]]:
    """Hold a serial result against the rows of its model.

    Args:
        result: A result of kind ``serial``, with its summary.
        targets: The rows.

    Returns:
        For each row of the model its values, those measured beside them, and a verdict: ``pass`` or ``fail`` for our
        own targets, for the fastest published row and for the last of each published table; ``published`` for the
        other rows of the same hardware and panel, which are there to be seen; else why there is no verdict. Our own
        targets are the model's time, published rows are held against the client's.
    """
    hardware = targets.hardware_of(result["machine"]["device"])
    panel = targets.panel_of(result["panel"])
    fastest = targets.fastest(result["model"], hardware, panel)
    found = []
    for against, rows, time in (("ours", targets.ours, "model_ms"), ("published", targets.published, "client_ms")):
        measured = {**result["summary"].get(time, {})}
        if result["accuracy"]:
            measured["accuracy"] = result["accuracy"]["accuracy"] * 100
        for row in rows:
            if row["model"] != result["model"]:
                continue
            values = {name: row[name] for name in MEASURES if name in row}
            if (right := accuracy_percent(row)) is not None:
                values["accuracy"] = right
            both = {name: measured[name] for name in values if name in measured}
            verdict = _other(row, hardware, panel, result)
            if verdict is None:
                held = row.get("role", "after") == "after" or row is fastest
                verdict = _verdict(values, both) if held else "published"
            entry = {"against": against, "time": time, "verdict": verdict, "values": values}
            entry |= {name: row[name] for name in ("hardware", "panel", "configuration", "role") if name in row}
            # Numbers of other hardware or panels are not put side by side.
            found.append(entry | ({} if verdict.startswith("not compared") else {"measured": both}))
    return found


def _other(row: dict[str, Any], hardware: str | None, panel: str | None, result: dict[str, Any]) -> str | None:
    if row["panel"] != panel:
        return f"not compared: panel {row['panel']}"
    # A model here runs on one GPU, so a row of several is of other hardware.
    gpus = row.get("gpus", 1)
    if row["hardware"] not in (hardware, "any") or gpus > 1:
        count = f"{gpus} x " if gpus > 1 else ""
        return f"not compared: {count}{row['hardware']}, and this is {result['machine']['device'] or 'not known'}"
    if result["weights"] == "random":
        return "random weights"
    if not result["complete"] or result["panel"]["rows"] < result["panel"]["of"]:
        return "a part of the panel"
    return None


def _verdict(values: dict[str, float], measured: dict[str, float]) -> str:
    # Accuracy is held only where labels gave one. As many right answers as published pass: the percentages have two
    # decimals.
    bad = [
        name
        for name, value in measured.items()
        if (round(value, 2) < round(values[name], 2) if name == "accuracy" else value > values[name])
    ]
    return f"{FAIL}: {', '.join(bad)}" if bad else PASS


def good(comparison: list[dict[str, Any]]) -> bool:
    """Return whether no row failed."""
    return not any(entry["verdict"].startswith(FAIL) for entry in comparison)

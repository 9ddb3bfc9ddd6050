"""``loadtest/targets.toml``: the published numbers and our own, and how a result stands beside them."""

from __future__ import annotations

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
        panels: Panel file -> the panel that rows call by name.
        hardware: A part of a device's name -> what rows call it.
        ours: Our own targets.
        published: The JevAny project's rows.
        changes: What it has published as a change only.
        others: Other projects' rows.
    """

    panels: dict[str, str]
    hardware: dict[str, str]
    ours: list[dict[str, Any]]
    published: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    others: list[dict[str, Any]]

    def hardware_of(self, device: str | None) -> str | None:
        """Return what rows call a device, None for one that no row is of."""
        return next((name for part, name in self.hardware.items() if part in (device or "")), None)


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
    return row.get("accuracy") or (100 * row["correct"] / row["of"] if "correct" in row else None)


def compare(result: dict[str, Any], targets: Targets) -> list[dict[str, Any]]:
    """Hold a serial result against the rows of its model.

    Args:
        result: A result of kind ``serial``, with its summary.
        targets: The rows.

    Returns:
        For each row of the model its values, those measured beside them, and a verdict: ``pass`` or ``fail`` for our
        own targets and for what is published as fastest; ``published`` for the other rows of the same hardware and
        panel, which are there to be seen; else why there is no verdict.
    """
    hardware = targets.hardware_of(result["machine"]["device"])
    panel = targets.panels.get(result["panel"]["name"])
    measured = {**result["summary"].get("client_ms", {})}
    if result["accuracy"]:
        measured["accuracy"] = result["accuracy"]["accuracy"] * 100
    found = []
    for against, rows in (("ours", targets.ours), ("published", targets.published)):
        for row in rows:
            if row["model"] != result["model"]:
                continue
            values = {name: row[name] for name in MEASURES if name in row}
            both = {name: measured[name] for name in values if name in measured}
            verdict = _other(row, hardware, panel, result)
            if verdict is None:
                role = row.get("role", "after")
                verdict = _verdict(values, both) if role == "after" else "published"
            entry = {"against": against, "verdict": verdict, "values": values}
            entry |= {name: row[name] for name in ("hardware", "panel", "configuration", "role") if name in row}
            # Numbers of other hardware or panels are not put side by side.
            found.append(entry | ({} if verdict.startswith("not compared") else {"measured": both}))
    return found


def _other(row: dict[str, Any], hardware: str | None, panel: str | None, result: dict[str, Any]) -> str | None:
    if row["panel"] != panel:
        return f"not compared: panel {row['panel']}"
    if row["hardware"] not in (hardware, "any"):
        return f"not compared: {row['hardware']}, and this is {result['machine']['device'] or 'not known'}"
    if result["weights"] == "random":
        return "random weights"
    if not result["complete"] or result["panel"]["rows"] < result["panel"]["of"]:
        return "a part of the panel"
    return None


def _verdict(values: dict[str, float], measured: dict[str, float]) -> str:
    # Accuracy is held only where labels gave one.
    bad = [n for n, value in measured.items() if (value < values[n] if n == "accuracy" else value > values[n])]
    return f"{FAIL}: {', '.join(bad)}" if bad else PASS


def good(comparison: list[dict[str, Any]]) -> bool:
    """Return whether no row failed."""
    return not any(entry["verdict"].startswith(FAIL) for entry in comparison)

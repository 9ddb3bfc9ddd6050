"""``python -m jevany_loadtest.report FOLDER``: ``REPORT.md``, pages and the figure from a folder's result files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jevany_bench import report as bench
from jevany_bench.result import read
from jevany_loadtest import tables
from jevany_loadtest.figure import draw
from jevany_loadtest.page import page
from jevany_loadtest.tables import number
from jevany_loadtest.targets import TARGETS, Targets, accuracy_percent, read_targets

ROOT = Path(__file__).parents[2]
_MEASURES = ("median", "mean", "p90", "p95")
_INTRODUCTION = """Written by `make report`. Times are in milliseconds, one request at a time unless a table says
otherwise. What is called published comes from the JevAny project's documents and has no server in it; each number
stands in `loadtest/targets.toml` with its source. Random weights have the model's true shape, so that their times hold
and their answers mean nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when all was written."""
    parser = argparse.ArgumentParser(prog="jevany_loadtest.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the result files are")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report", help="where they go")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"report: {options.folder}: no such directory", file=sys.stderr)
        return 1
    try:
        files = sorted(options.folder.glob("*.json"))
        others = [path for path in files if _is_of_another_kind(path)]
        named = {path.stem: read(path) for path in files if path not in others}
        targets = read_targets(TARGETS)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    if others:
        print(f"report: no results of a bench or load test: {', '.join(path.name for path in others)}", file=sys.stderr)
    results = list(named.values())
    options.out.mkdir(parents=True, exist_ok=True)
    written = [options.out / "REPORT.md", *draw(targets, results, options.out / "figures")]
    written[0].write_text(report_page(targets, results), encoding="utf-8")
    for name, result in named.items():
        if result["kind"] != "bench":
            written.append(options.out / f"{name}.html")
            written[-1].write_text(page(result), encoding="utf-8")
    for path in written:
        print(f"{path}: written")
    return 0


def _is_of_another_kind(path: Path) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False  # Which `read` says, with the file's name.
    return not isinstance(content, dict) or "schema" not in content


def report_page(targets: Targets, results: Sequence[dict[str, Any]]) -> str:
    """Return all tables in Markdown, each under its heading."""
    parts = [
        "# Measured and published",
        _INTRODUCTION,
        "![Published accuracy against median latency](figures/accuracy-latency.svg)",
        "## Before and after",
        summary_table(targets, results),
        "## Through Triton",
        through_triton_table(targets, results),
        "## Step by step",
        *(
            part
            for model in dict.fromkeys([*(row["model"] for row in targets.published), *(r["model"] for r in results)])
            for part in _ablation(targets, model, results)
        ),
        "## Other projects (published, not measured here)",
        others_table(targets),
    ]
    for result in results:
        if result["kind"] != "bench":
            parts += [f"## {tables.title(result)}", tables.times_table(result["summary"]), tables.facts(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ablation(targets: Targets, model: str, results: Sequence[dict[str, Any]]) -> list[str]:
    benches = [bench.table(result) for result in results if (result["kind"], result["model"]) == ("bench", model)]
    parts = [ablation_table(targets, model), *(f"Measured here: {table}" for table in benches)]
    return [f"### {model}", *parts] if any(parts) else []


def summary_table(targets: Targets, results: Sequence[dict[str, Any]]) -> str:
    """Return what is published as default and as fastest, and what was measured on the same panel and hardware."""
    lines = [
        "| model | hardware | panel | | median | mean | p90 | p95 | accuracy % |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in targets.published:
        place = row["model"], row["hardware"], row["panel"]
        fastest = row is targets.fastest(*place)
        # What is published of one configuration alone is neither before nor after.
        if row["role"] in ("before", "after") or (fastest and place in groups):
            name = {"before": "default"}.get(row["role"], "fastest" if fastest else "")
            what = f"published {name}".strip()
            what += f": {row['configuration']}" if row["configuration"] != name else ""
            groups.setdefault(place, []).append(_line(row["model"], _hardware(row), row["panel"], what, row))
    for result in results:
        if result["kind"] == "serial" and result["complete"]:
            panel = targets.panel_of(result["panel"]) or result["panel"]["name"]
            device = result["machine"]["device"] or "not known"
            place = result["model"], targets.hardware_of(device) or device, panel
            what = f"measured here through Triton, {result['weights']} weights"
            values = {**result["summary"]["client_ms"]}
            if right := result["accuracy"]:
                values["accuracy"] = 100 * right["accuracy"]
            groups.setdefault(place, []).append(_line(*place, what, values))
    return "\n".join([*lines, *(line for group in groups.values() for line in group)])


def through_triton_table(targets: Targets, results: Sequence[dict[str, Any]]) -> str:
    """Return the serial runs, a model a line: the whole call, Triton's part and the model's, in milliseconds.

    Beside each stands the fastest that is published for its panel and hardware, measured without a server.
    """
    lines = [
        "| model | panel | engine | samples | client median / mean / p90 | server median / mean | model median / mean "
        "| published fastest, no server, median / mean |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        if result["kind"] != "serial":
            continue
        summary = result["summary"]
        hardware = targets.hardware_of(result["machine"]["device"])
        panel = targets.panel_of(result["panel"])
        fastest = targets.fastest(result["model"], hardware, panel)
        cells = [
            f"`{result['model']}`",
            panel or result["panel"]["name"],
            f"`{result['server']['engine']}`",
            f"{summary['client_ms']['samples']}{'' if result['complete'] else ' (cut short)'}",
            _of(summary["client_ms"], "median", "mean", "p90"),
            _of(summary["server_ms"], "median", "mean"),
            _of(summary["model_ms"], "median", "mean"),
            _of(fastest, "median", "mean") if fastest else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(values: dict[str, Any], *measures: str) -> str:
    return " / ".join(number(values.get(measure)) for measure in measures)


def _line(model: str, hardware: str, panel: str, what: str, values: dict[str, Any]) -> str:
    return f"| {model} | {hardware} | {panel} | {what} | {_numbers(values)} |"


def _numbers(values: dict[str, Any]) -> str:
    return " | ".join(number(value) for value in (*map(values.get, _MEASURES), accuracy_percent(values)))


def _hardware(row: dict[str, Any]) -> str:
    return f"{row['gpus']} x {row['hardware']}" if "gpus" in row else str(row["hardware"])


def ablation_table(targets: Targets, model: str) -> str:
    """Return what is published of a model, a configuration a line; empty where that is only one."""
    rows = [row for row in targets.published if row["model"] == model and row["role"] != "accuracy"]
    lines = [
        "Published, not measured here, times in ms:",
        "",
        "| hardware | panel | configuration | median | mean | p90 | p95 | accuracy % |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(f"| {_hardware(row)} | {row['panel']} | {row['configuration']} | {_numbers(row)} |")
    return "\n".join(lines) if len(rows) > 1 else ""


def others_table(targets: Targets) -> str:
    """Return the other projects' rows."""
    lines = ["| project | hardware | panel | median | mean | p90 | accuracy % |", "|---|---|---|--:|--:|--:|--:|"]
    for row in targets.others:
        numbers = " | ".join(number(row.get(name)) for name in ("median", "mean", "p90", "accuracy"))
        lines.append(f"| {row['project']} | {row['hardware']} | {row['panel']} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

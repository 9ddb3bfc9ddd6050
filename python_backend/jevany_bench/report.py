"""Tables made of results: `python -m jevany_bench.report FILE...` prints the README's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FASTEST = {"graphs": "published recipe", "engine": "this project"}


def table(result: dict[str, Any]) -> str:
    """Return the ablation table in Markdown: a mode a line, in milliseconds, against the first mode and the floor."""
    lines = [
        f"{result['model']}, {result['weights']} weights, {result['machine']['device']}, "
        f"{result['panel']['name']} ({result['panel']['rows']} rows), forward time in ms",
        "",
        "| mode | samples | median | mean | p90 | p95 | times faster (median / mean) | of the floor (median / mean) "
        "| argmax changes | largest change |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    floor = result.get("floor") or {}
    first: dict[str, Any] | None = None
    for mode, entry in result["modes"].items():
        summary = entry.get("summary") or {}
        if not summary.get("samples"):
            lines.append(f"| {mode} | {entry.get('error') or 'not reached'} |||||||||")
            continue
        first = first or summary
        faster = " / ".join(f"{first[key] / summary[key]:.2f}" for key in ("median", "mean"))
        share = " / ".join(f"{floor[key] / summary[key]:.0%}" for key in ("median", "mean")) if floor else "-"
        change = entry.get("against_first") or {}
        largest = change.get("largest_probability_change")
        numbers = " | ".join(f"{summary[key]:.2f}" for key in ("median", "mean", "p90", "p95"))
        lines.append(
            f"| {mode} | {summary['samples']}{'' if summary['complete'] else ' (cut short)'} | {numbers} | {faster} "
            f"| {share} | {change.get('argmax_changes', '-')} | {'-' if largest is None else f'{largest:.4f}'} |"
        )
    return "\n".join(lines)


def speed_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of several models in Markdown: the published recipe and our engine, beside the memory's floor."""
    lines = [
        "| model | forward pass | median ms | mean ms | p90 ms | samples | weights read once, ms |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        for mode, name in _FASTEST.items():
            summary = result["modes"].get(mode, {}).get("summary") or {}
            if not summary.get("samples"):
                continue
            wanted = result["protocol"]["repeats"] * result["panel"]["rows"]
            numbers = " | ".join(f"{summary[key]:.2f}" for key in ("median", "mean", "p90"))
            samples = f"{summary['samples']}{'' if summary['complete'] else f' of {wanted}'}"
            floor = f"{result['floor']['matrices_once']:.2f}" if result.get("floor") else "-"
            lines.append(f"| `{result['model']}` | {name} (`{mode}`) | {numbers} | {samples} | {floor} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the speed table of some result files; the exit code is 2 if one cannot be read."""
    parser = argparse.ArgumentParser(prog="jevany_bench.report", description="Print the speed table of some results.")
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="results of `make bench`")
    try:
        results = [json.loads(path.read_text()) for path in parser.parse_args(arguments).results]
        print(speed_table(results))
    except (OSError, ValueError, KeyError) as error:
        print(f"jevany_bench.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The ablation table made of a result."""

from __future__ import annotations

from typing import Any


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

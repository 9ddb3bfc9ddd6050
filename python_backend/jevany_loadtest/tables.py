"""What a run says of itself on the terminal, in Markdown."""

from __future__ import annotations

from typing import Any

_MEASURES = ("mean", "median", "p90", "p95", "p99")
_TIMES = {
    "due_ms": "from the scheduled instant",
    "client_ms": "client",
    "server_ms": "server (Triton)",
    "model_ms": "model",
    "late_ms": "of it, waiting to be sent",
}


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for a table, a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def title(result: dict[str, Any]) -> str:
    """Return the line over a run's tables: what was measured, where and how."""
    panel = result["panel"]
    rows = f"{panel['rows']} of {panel['of']} requests" if panel["rows"] < panel["of"] else f"{panel['of']} requests"
    return (
        f"{result['model']}, {result['weights'] or 'unknown'} weights, "
        f"{result['machine']['device'] or 'hardware not known'}, {panel['name']} ({rows}), "
        f"{result['protocol']['transport']}{'' if result['complete'] else ', cut short'}"
    )


def times_table(summary: dict[str, Any]) -> str:
    """Return the times of a run or stage, in milliseconds."""
    lines = ["| time in ms | samples | mean | median | p90 | p95 | p99 |", "|---|--:|--:|--:|--:|--:|--:|"]
    for name, label in _TIMES.items():
        if summary.get(name, {}).get("samples"):
            values = " | ".join(number(summary[name][measure]) for measure in _MEASURES)
            lines.append(f"| {label} | {summary[name]['samples']} | {values} |")
    return "\n".join(lines)


def facts(result: dict[str, Any]) -> str:
    """Return what stands below the times: rate, graphs, errors, accuracy."""
    lines = [f"Requests a second: {number(result['summary'].get('requests_a_second'))}"]
    counters = result["counters"]
    if counters is None:
        lines.append("Graphs: not counted")
    else:
        lines.append(
            f"Graph replays: {counters['replays']}, eager calls: {counters['eager_calls']}, "
            f"captured while serving: {counters['captures_after_ready']}"
        )
    errors = ", ".join(f"{count} {kind}" for kind, count in result["errors"].items())
    lines.append(f"Errors: {errors or 'none'}")
    lines += [f"  {kind}: {message}" for kind, message in result.get("error_messages", {}).items() if message]
    if right := result["accuracy"]:
        lines.append(
            f"Accuracy: {right['correct']} of {right['rows']} ({right['accuracy']:.2%}), "
            f"Brier score {right['brier']:.4f}, calibration error {right['calibration_error']:.4f}"
        )
    return "\n".join(lines)


def comparison_table(result: dict[str, Any]) -> str:
    """Return how a run stands beside the rows of `targets`; what cannot be compared is said in one line for all."""
    lines = []
    apart: dict[str, int] = {}
    for entry in result["comparison"]:
        if entry["verdict"].startswith("not compared"):
            apart[entry["verdict"]] = apart.get(entry["verdict"], 0) + 1
            continue
        sides = (
            ", ".join(f"{name} {value:g}" for name, value in entry[side].items()) for side in ("values", "measured")
        )
        target, measured = sides
        time = _TIMES[entry.get("time", "client_ms")]
        against = f"{entry['against']}, {entry.get('configuration', 'target')} ({time} time)"
        lines.append(f"| {against} | {target} | {measured} | {entry['verdict']} |")
    if lines:
        lines = ["| against | its values | measured | verdict |", "|---|---|---|---|", *lines]
    lines += [f"{verdict} ({count} row{'s' if count > 1 else ''})" for verdict, count in apart.items()]
    return "\n".join(lines) or f"No published row and no target for {result['model']}."


def stages_table(result: dict[str, Any]) -> str:
    """Return the stages of an open run."""
    lines = [
        "| stage | rate asked | answered a second | dropped | errors | median | p90 | p99 | generator late p99 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for stage in result["summary"]["stages"]:
        due = stage["due_ms"]
        others = sum(stage["errors"].values()) - stage["dropped"]
        values = " | ".join(number(due.get(name)) for name in ("median", "p90", "p99"))
        lines.append(
            f"| {stage['name']} | {stage['rate']:.2f} | {number(stage['requests_a_second'])} | {stage['dropped']} "
            f"| {others} | {values} | {number(stage['late_ms'].get('p99'))} |"
        )
    return "\n".join(lines)

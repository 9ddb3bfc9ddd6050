"""The figure: accuracy against median latency, before and after joined by an arrow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jevany_loadtest.targets import Targets, accuracy_percent

PANEL = "jevbench-231"
_FRONTIER_HARDWARE = "A100-40GB"
# Ink, paper, what stands back: on light and on dark.
LIGHT = {"ink": "#1f2328", "paper": "#ffffff", "back": "#8c959f"}
_DARK = {"ink": "#e6edf3", "paper": "#0d1117", "back": "#768390"}
# Names that would otherwise lie on something: where they stand, in points from their dot.
_PLACES = {"Bespoke-Nimble-9B": (-7, -3), "Intern-Decision-4B": (-5, 5), "Open-Jev-9B": (-7, -3)}
# Readable on both.
_COLOURS = {
    "jevany-27b": "#d1495b",
    "jevany-30b": "#8f5fd7",
    "jevany-4b": "#1f8fd6",
    "jevany-4b-direct-token": "#1a9e75",
    "jevany-gemma-4b": "#d9822b",
}


def pairs(targets: Targets) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Return model, hardware and the points before and after: median in ms, accuracy in percent."""
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in targets.published:
        right = accuracy_percent(row)
        if row["panel"] == PANEL and row["role"] in ("before", "after") and right and "median" in row:
            found.setdefault((row["model"], row["hardware"]), {})[row["role"]] = (row["median"], right)
    return [(model, hardware, [ends["before"], ends["after"]]) for (model, hardware), ends in found.items()]


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both, from the fastest on."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def measured_points(targets: Targets, results: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return label, median and accuracy of complete serial results on the figure's panel with real weights."""
    return [
        (
            f"{r['model']}, measured on {r['machine']['device']}",
            r["summary"]["client_ms"]["median"],
            100 * a["accuracy"],
        )
        for r in results
        if r["kind"] == "serial" and r["complete"] and targets.panel_of(r["panel"]) == PANEL and (a := r["accuracy"])
    ]


def draw(targets: Targets, results: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the figure.

    Args:
        targets: The published rows.
        results: Result files' contents; see `measured_points`.
        folder: Where ``accuracy-latency.svg`` goes, which follows the reader's light or dark, and the same as PNG for
            light and for dark.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = measured_points(targets, results)
    files = []
    for name, colours in (("accuracy-latency.png", LIGHT), ("accuracy-latency-dark.png", _DARK)):
        figure = _figure(targets, measured, colours)
        files.append(folder / name)
        figure.savefig(files[-1], dpi=160)
        plt.close(figure)
    with plt.rc_context({"svg.hashsalt": "jevany", "svg.fonttype": "none"}):
        figure = _figure(targets, measured, LIGHT)
        files.append(folder / "accuracy-latency.svg")
        figure.savefig(files[-1], metadata={"Date": None})
        plt.close(figure)
    files[-1].write_text(follow_scheme(files[-1].read_text(encoding="utf-8")), encoding="utf-8")
    return files


def follow_scheme(svg: str) -> str:
    """Return an SVG drawn for light whose colours change where the reader's scheme is dark."""
    rules = "".join(
        f'[style*="{kind}: {LIGHT[name]}"]{{{kind}:{_DARK[name]} !important}}'
        for name in LIGHT
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda tag: tag[1] + style, svg, count=1)


def name_axes(axes: Any, title: str, across: str, up: str, colours: dict[str, str]) -> None:
    """Give axes their names and the colours of `LIGHT`, or of another table like it."""
    axes.set_facecolor(colours["paper"])
    axes.set_title(title, color=colours["ink"], fontsize=11, loc="left")
    axes.set_xlabel(across, color=colours["ink"])
    axes.set_ylabel(up, color=colours["ink"])
    axes.tick_params(colors=colours["ink"])
    axes.grid(color=colours["back"], alpha=0.25, lw=0.6)
    for spine in axes.spines.values():
        spine.set_color(colours["back"])


def _figure(targets: Targets, measured: list[tuple[str, float, float]], colours: dict[str, str]) -> Any:
    ink, back = colours["ink"], colours["back"]
    figure, axes = plt.subplots(figsize=(9, 5.6), facecolor=colours["paper"], layout="constrained")
    axes.set_xscale("log")
    on_frontier = []
    for model, hardware, (before, after) in pairs(targets):
        colour, other = _COLOURS[model], hardware != _FRONTIER_HARDWARE
        marker = "D" if other else "o"
        arrow = {"arrowstyle": "->", "color": colour, "lw": 1.6, "shrinkA": 5, "shrinkB": 5}
        axes.annotate("", after, before, arrowprops=arrow)
        axes.plot(*before, marker, mfc=colours["paper"], mec=colour, ms=7)
        label = f"{model.removeprefix('jevany-')}{f' ({hardware})' if other else ''}"
        axes.plot(*after, marker, color=colour, ms=7, label=label)
        if not other:
            on_frontier += [before, after]
    for row in targets.others:
        if row["panel"] == PANEL and "accuracy" in row:
            point = row["median"], row["accuracy"]
            on_frontier.append(point)
            axes.plot(*point, "o", color=back, ms=5)
            place = _PLACES.get(row["project"], (5, -11))
            side = "right" if place[0] < 0 else "left"
            axes.annotate(row["project"], point, place, textcoords="offset points", fontsize=7.5, color=back, ha=side)
    best = frontier(on_frontier)
    axes.step(*zip(*best, strict=True), where="post", color=back, lw=1.2, ls="--", label="Pareto frontier, A100")
    for label, median, right in measured:
        axes.plot(median, right, "*", color=ink, ms=12)
        axes.annotate(label, (median, right), (7, 5), textcoords="offset points", fontsize=8, color=ink)
    ticks = (10, 20, 50, 100, 200)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    name_axes(
        axes,
        "Published: default (hollow) to fastest with an accuracy (full)",
        "median latency of public JevBench, ms (batch 1, log scale)",
        "accuracy, %",
        colours,
    )
    legend = axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=2)
    for text in legend.get_texts():
        text.set_color(ink)
    return figure

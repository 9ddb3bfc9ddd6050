"""The HTML report of one run: its tables and four pictures, in one file that needs no network."""

from __future__ import annotations

import html
import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jevany_backend.engine.graphs import OUR_GRID
from jevany_loadtest import tables
from jevany_loadtest.figure import LIGHT, follow_scheme, name_axes

_GRAPH, _EAGER = "#1f8fd6", "#d9822b"
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:light-dark(#1f2328,#e6edf3);background:light-dark(#fff,#0d1117)}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid #8c959f66}
td:not(:first-child),th:not(:first-child){text-align:right}svg{max-width:100%;height:auto}pre{white-space:pre-wrap}
"""


def page(result: dict[str, Any]) -> str:
    """Return the page of a serial or open run.

    Args:
        result: Its content.
    """
    parts = [_table(tables.times_table(result["summary"]))]
    if result["kind"] == "open":
        parts.append(_table(tables.stages_table(result)))
    else:
        parts.append(_table(tables.comparison_table(result)))
    parts.append(f"<pre>{html.escape(tables.facts(result))}</pre>")
    parts.append(pictures(result))
    packages = ", ".join(f"{name} {version}" for name, version in result["machine"]["packages"].items())
    origin = (
        f"Started {result['started']}, commit {result['commit']}, Triton {result['server']['triton']} "
        f"({result['server']['origin']}), driver {result['machine']['driver'] or 'none'}; {packages}. "
        f"Panel sha256 {result['panel']['sha256']}."
    )
    name = html.escape(tables.title(result))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{html.escape(result['model'])}</h1><p>{name}</p>{''.join(parts)}<p>{html.escape(origin)}</p></html>\n"
    )


def eager_samples(result: dict[str, Any]) -> np.ndarray:
    """Return for each sample whether it ran without a graph.

    The server counts eager calls and does not say which they were. Rows are eager that are too long for any graph, so
    of the answered samples it was the longest.
    """
    tokens = np.array([count or 0 for count in result["samples"]["tokens"]])
    eager = np.ones(len(tokens), bool)
    if result["counters"] is not None:
        calls = result["counters"]["eager_calls"] or 0
        eager[np.argsort(tokens, kind="stable")[: max(len(tokens) - calls, 0)]] = False
    return eager


def pictures(result: dict[str, Any]) -> str:
    """Return an SVG: latency against row length, its distribution, the timeline, and the histogram of buckets."""
    table = result["samples"]
    name = "due_ms" if result["kind"] == "open" else "client_ms"
    answered = np.array([error is None for error in table["error"]])
    times = np.array([value if value is not None else np.nan for value in table[name]], float)[answered]
    tokens = np.array([count or 0 for count in table["tokens"]])[answered]
    at = np.array(table["at"], float)[answered]
    eager = eager_samples(result)[answered]
    with plt.rc_context({"svg.hashsalt": "jevany", "svg.fonttype": "none", "text.color": LIGHT["ink"]}):
        figure, axes = plt.subplots(2, 2, figsize=(10, 7), facecolor=LIGHT["paper"], layout="constrained")
        without = "eager" if result["counters"] else "graphs not counted"
        for label, colour, chosen in (("graph", _GRAPH, ~eager), (without, _EAGER, eager)):
            if chosen.any():
                axes[0, 0].plot(tokens[chosen], times[chosen], ".", color=colour, label=label, ms=5)
                axes[1, 0].plot(at[chosen], times[chosen], ".", color=colour, label=label, ms=5)
        name_axes(axes[0, 0], "Latency against row length", "tokens of the row", "ms", LIGHT)
        name_axes(axes[1, 0], "Timeline", "seconds since the start", "ms", LIGHT)
        if answered.any():
            axes[0, 0].legend(frameon=False, labelcolor=LIGHT["ink"])
        shares = np.arange(1, len(times) + 1) / max(len(times), 1) * 100
        axes[0, 1].step(np.sort(times), shares, color=_GRAPH, where="post")
        name_axes(axes[0, 1], "Distribution", "ms", "% of requests at most", LIGHT)
        buckets, counts = np.unique([OUR_GRID.length(int(count)) for count in tokens], return_counts=True)
        axes[1, 1].bar(range(len(buckets)), counts, color=_GRAPH)
        step = max(1, len(buckets) // 12)
        axes[1, 1].set_xticks(range(0, len(buckets), step), [str(bucket) for bucket in buckets[::step]], rotation=45)
        name_axes(axes[1, 1], "Requests in each bucket", "tokens, padded to our engine's buckets", "requests", LIGHT)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        plt.close(figure)
    svg = drawn.getvalue()
    return follow_scheme(svg[svg.index("<svg") :])


def _table(markdown: str) -> str:
    """Return a Markdown table as HTML, and its other lines as paragraphs."""
    rows: list[str] = []
    others: list[str] = []
    for line in markdown.splitlines():
        if not line.startswith("|"):
            others.append(f"<p>{html.escape(line)}</p>")
        elif not line.startswith("|-"):
            tag = "td" if rows else "th"
            cells = (html.escape(cell.strip()) for cell in line.strip("|").split("|"))
            rows.append(f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>")
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return table + "".join(others)

"""How right the answers are, by a panel's labels, and how two results differ in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jevany_bench.panel import Panel
from jevany_bench.protocol import Samples, changes
from jevany_tiny.decisions import Example
from jevany_tiny.evaluate import measure


def accuracy(panel: Panel, probabilities: Mapping[int, list[float]]) -> dict[str, Any] | None:
    """Return accuracy, Brier score and calibration error as `jevany_tiny.evaluate` defines them.

    Args:
        panel: The panel.
        probabilities: Of the options, by the request's place in the panel.

    Returns:
        ``rows``, ``correct``, ``accuracy`` (a share), ``brier`` and ``calibration_error``, over the requests that have a
        label and an answer; None where there are none.
    """
    labelled = [
        (request.label, np.array(probabilities[row]))
        for row, request in enumerate(panel.requests)
        if request.label is not None and row in probabilities
    ]
    if not labelled:
        return None
    answers = [answer for _, answer in labelled]
    examples = [
        Example(domain="", state="", question={"type": "choice", "criteria": dict.fromkeys(range(len(p)))}, label=label)
        for label, p in labelled
    ]
    # There is no second run with blank states here; what it gives beside the others is left out.
    measures = measure(examples, answers, answers, None)
    return {
        "rows": measures.rows,
        "correct": sum(int(p.argmax()) == label for label, p in labelled),
        "accuracy": measures.accuracy,
        "brier": measures.brier,
        "calibration_error": measures.calibration_error,
    }


def answer_changes(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Compare the answers of two results: see `jevany_bench.protocol.changes`.

    Raises:
        ValueError: They are of different panels.
    """
    if result["panel"]["sha256"] != baseline["panel"]["sha256"]:
        raise ValueError(f"different panels: {result['panel']['name']} and {baseline['panel']['name']}")
    ours, theirs = (
        Samples(probabilities={int(row): values for row, values in part["probabilities"].items()})
        for part in (result, baseline)
    )
    return changes(ours, theirs)

"""How right the answers are, by a panel's labels, and how two results differ in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jevany_backend.protocol import question_to_json
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
        ``rows``, ``correct``, ``accuracy`` (a share), ``brier`` and ``calibration_error``, over the requests that
        have a label and an answer; None where there are none.
    """
    examples, answers = [], []
    for row, request in enumerate(panel.requests):
        if request.label is not None and row in probabilities:
            question = question_to_json(request.question)
            examples.append(Example(request.state, question, "decision", request.label, panel.name, "heldout"))
            answers.append(np.array(probabilities[row]))
    if not examples:
        return None
    # There is no second run with blank states here; what it gives beside the others is left out.
    measures = measure(examples, answers, answers, None)
    return {
        "rows": measures.rows,
        "correct": sum(int(p.argmax()) == example.label for example, p in zip(examples, answers, strict=True)),
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

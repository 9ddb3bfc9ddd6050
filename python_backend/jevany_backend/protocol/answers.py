"""The reply: one answer a question, from the probability of every option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jevany_backend.protocol.questions import Noul, Question, Score


def answer(question: Question, probabilities: Sequence[float]) -> dict[str, Any]:
    """Turn the options' probabilities into the answer to a question.

    Args:
        question: The question that was asked; K options.
        probabilities: K numbers in option order that sum to 1.

    Returns:
        The answer as it goes over the wire:

        - noul: ``noul`` = P(true), 2 decimals.
        - choice: ``choice`` = the most probable option, the first on a tie; ``confidence`` =
          (max - 1/K) / (1 - 1/K), 1 when K = 1, 2 decimals; ``probabilities`` by name.
        - score: ``score`` = sum(i p_i), 2 decimals; ``legend`` = each level as the caller wrote it; ``probabilities``
          by level; ``confidence`` = 1 - sum(p_i |i - mode|) / (L - 1), 2 decimals.

    Raises:
        ValueError: The number of probabilities is not the number of options, or one is not a finite number.
    """
    numbers = [float(probability) for probability in probabilities]
    keys = question.keys
    if len(numbers) != len(keys):
        raise ValueError(f"{len(numbers)} probabilities for {len(keys)} options")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a probability is not a finite number")
    if isinstance(question, Noul):
        return {"type": "noul", "noul": round(numbers[1], 2)}
    mode = max(range(len(numbers)), key=numbers.__getitem__)
    by_key = dict(zip(keys, numbers, strict=True))
    if isinstance(question, Score):
        return {
            "type": "score",
            "score": round(sum(level * p for level, p in enumerate(numbers)), 2),
            "legend": dict(zip(keys, question.criteria, strict=True)),
            "probabilities": by_key,
            "confidence": round(1 - sum(p * abs(i - mode) for i, p in enumerate(numbers)) / (len(numbers) - 1), 2),
        }
    return {
        "type": "choice",
        "choice": keys[mode],
        "confidence": round(_choice_confidence(numbers), 2),
        "probabilities": by_key,
    }


def _choice_confidence(probabilities: list[float]) -> float:
    count = len(probabilities)
    if count == 1:
        return 1.0
    # In float32, 1/K may be a little less than 1/K, and an answer must not say -0.0.
    return max(0.0, (max(probabilities) - 1 / count) / (1 - 1 / count))

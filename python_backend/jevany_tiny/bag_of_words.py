"""The baseline: logistic regression over bags of words, which sees every word and no order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression

from jevany_backend.protocol import question_from_json, render
from jevany_tiny.decisions import Example

_WORD = re.compile(r"[a-z]+|\d+", re.IGNORECASE)
_PENALTIES = (0.03, 0.3, 3.0)


def words(text: str) -> set[str]:
    """Returns the words and numbers of a text, in small letters."""
    return {word.lower() for word in _WORD.findall(text)}


def option_features(example: Example) -> Iterator[list[str]]:
    """Yields the features of each option of a decision.

    They are the option's words, each of them paired with every word of the state and of the instruction, the words
    that the option shares with the state and with the instruction, how many those are, and the option's place. The two
    options of a yes/no question are told apart by their first word, so that state and instruction words speak for yes
    or for no; there the words that state and instruction share count too.
    """
    question = question_from_json(example.question, "question")
    state, asked = words(render(example.state)), words(render(question.instructions))
    options = question.option_texts
    for place, text in enumerate(options):
        option = words(text)
        features = [f"o:{word}" for word in option]
        features.append(f"place:{place}/{len(options) if question.type == 'score' else question.type}")
        features += [f"s:{word}*{other}" for word in option for other in state]
        features += [f"q:{word}*{other}" for word in option for other in asked]
        features += [f"shared s:{word}" for word in option & state]
        features += [f"shared q:{word}" for word in option & asked]
        features.append(f"shares s:{min(5, len(option & state))}/{min(5, len(option))}")
        features.append(f"shares q:{min(5, len(option & asked))}/{min(5, len(option))}")
        if question.type == "noul":
            features += [f"{place}:both {word}" for word in state & asked]
            features += [f"{place}:asked only {word}" for word in asked - state]
            features.append(f"{place}:both {min(12, len(state & asked))}/{min(12, len(asked))}")
        yield features


class BagOfWords:
    """Rates every option on its own, right or wrong; the best-rated option is the answer."""

    def __init__(self) -> None:
        self._hasher = FeatureHasher(2**19, input_type="string", alternate_sign=False)
        self._model: LogisticRegression | None = None

    def _matrix(self, examples: Sequence[Example]) -> tuple[object, np.ndarray, np.ndarray]:
        rows, right, counts = [], [], []
        for example in examples:
            features = list(option_features(example))
            rows += features
            right += [place == example.label for place in range(len(features))]
            counts.append(len(features))
        matrix = self._hasher.transform(rows)
        matrix.data = np.minimum(matrix.data, 1.0)
        return matrix, np.array(right), np.array(counts)

    def fit(self, examples: Sequence[Example]) -> float:
        """Fits on training decisions; the penalty is chosen on the last fifth of them.

        Returns:
            The accuracy on that fifth, at the chosen penalty.
        """
        border = len(examples) * 4 // 5
        matrix, right, counts = self._matrix(examples[:border])
        best = -1.0
        for penalty in _PENALTIES:
            # Options of one decision weigh one together, so that long lists do not dominate.
            model = LogisticRegression(C=penalty, max_iter=60, class_weight="balanced")
            model.fit(matrix, right, sample_weight=np.repeat(2.0 / counts, counts))
            previous, self._model = self._model, model
            accuracy = float(np.mean(self.right(examples[border:])))
            if accuracy > best:
                best = accuracy
            else:
                self._model = previous
        return best

    def right(self, examples: Sequence[Example]) -> np.ndarray:
        """Returns whether the best-rated option of each decision is the right one."""
        if self._model is None:
            raise RuntimeError("fit comes first")
        matrix, right, counts = self._matrix(examples)
        ratings = self._model.decision_function(matrix)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        return np.array(
            [
                bool(right[start + int(np.argmax(ratings[start : start + count]))])
                for start, count in zip(starts, counts, strict=True)
            ]
        )

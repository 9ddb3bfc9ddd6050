"""Measures tiny models on held-out decisions: `python -m jevany_tiny.evaluate CHECKPOINT...`.

For each checkpoint, each question type and each domain: accuracy beside chance and beside a bag-of-words logistic
regression on the same rows, Brier score, expected calibration error, and accuracy with the state left blank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jevany_backend.checkpoint import load_readout, load_text_model, open_checkpoint
from jevany_backend.encoding import RowEncoder
from jevany_backend.protocol import question_from_json
from jevany_backend.readout import Readout
from jevany_tiny.decisions import DOMAINS, Example, take
from jevany_tiny.learner import NO_MASKS

TEST_SEED = "test"
BINS = 15


class Predictor:
    """A checkpoint that rates many decisions at a time.

    Args:
        checkpoint: Its folder.
        base: The folder of its base.
        device: Where it runs.
        dtype: The dtype of its weights.
    """

    def __init__(self, checkpoint: str, base: str, device: torch.device, dtype: torch.dtype) -> None:
        files = open_checkpoint(checkpoint, base)
        self.device = device
        self.decision_mode = files.head.decision_mode
        self._encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels)
        self._model = load_text_model(files, device, dtype)
        self._readout: Readout = load_readout(files, device, dtype)

    @torch.inference_mode()
    def probabilities(self, examples: Sequence[Example], batch: int = 32) -> list[np.ndarray]:
        """Returns each decision's probabilities, in option order."""
        rows = [
            self._encoder.encode(example.state, question_from_json(example.question, "question"))
            for example in examples
        ]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
        results: dict[int, np.ndarray] = {}
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            length = max(len(rows[index].ids) for index in part)
            ids = torch.zeros((len(part), length), dtype=torch.long)
            for place, index in enumerate(part):
                ids[place, : len(rows[index].ids)] = torch.tensor(rows[index].ids)
            hidden = self._model(ids.to(self.device), attention_mask=NO_MASKS, use_cache=False).last_hidden_state
            for place, index in enumerate(part):
                row = rows[index]
                results[index] = self._readout(hidden[place, [row.decide, *row.option_ends]]).cpu().numpy()
        return [results[index] for index in range(len(rows))]


@dataclasses.dataclass(frozen=True, slots=True)
class Measures:
    """What is measured on some decisions.

    Attributes:
        rows: How many.
        chance: Expected accuracy of a uniform guess: the mean of 1 / K.
        accuracy: Share of decisions whose likeliest option is right.
        brier: Mean over decisions of the sum over options of (p - y) squared.
        calibration_error: Mean gap between confidence and accuracy over 15 equal-width bins of the likeliest
            option's probability, weighted by their rows.
        blank_accuracy: Accuracy with an empty state.
        bag_of_words: Accuracy of the baseline.
        times_bag_of_words: Distance of the accuracy from chance over that of the baseline.
    """

    rows: int
    chance: float
    accuracy: float
    brier: float
    calibration_error: float
    blank_accuracy: float
    bag_of_words: float | None
    times_bag_of_words: float | None


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """Returns the expected calibration error over equal-width bins."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    total = 0.0
    for index in range(bins):
        inside = place == index
        if inside.any():
            total += inside.sum() * abs(confidence[inside].mean() - right[inside].mean())
    return float(total / len(confidence))


def measure(
    examples: Sequence[Example],
    probabilities: Sequence[np.ndarray],
    blank: Sequence[np.ndarray],
    baseline: np.ndarray | None,
) -> Measures:
    """Measures predictions on some decisions."""
    labels = [example.label for example in examples]
    right = np.array([int(p.argmax()) == label for p, label in zip(probabilities, labels, strict=True)])
    blank_right = np.array([int(p.argmax()) == label for p, label in zip(blank, labels, strict=True)])
    brier = [float(((p - np.eye(len(p))[label]) ** 2).sum()) for p, label in zip(probabilities, labels, strict=True)]
    chance = float(np.mean([1 / example.option_count for example in examples]))
    words = None if baseline is None else float(baseline.mean())
    accuracy = float(right.mean())
    gain = None if words is None or words <= chance else round((accuracy - chance) / (words - chance), 2)
    return Measures(
        rows=len(examples),
        chance=round(chance, 4),
        accuracy=round(accuracy, 4),
        brier=round(float(np.mean(brier)), 4),
        calibration_error=round(calibration_error(np.array([p.max() for p in probabilities]), right), 4),
        blank_accuracy=round(float(blank_right.mean()), 4),
        bag_of_words=None if words is None else round(words, 4),
        times_bag_of_words=gain,
    )


def groups(examples: Sequence[Example]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the places of all decisions, of each question type and of each domain."""
    yield "all", np.arange(len(examples))
    keys: list[tuple[str, Callable[[Example], bool]]] = [
        *((kind, lambda e, kind=kind: e.question["type"] == kind) for kind in ("noul", "choice", "score")),
        *((domain, lambda e, domain=domain: e.domain == domain) for domain in DOMAINS),
    ]
    for name, belongs in keys:
        places = np.array([index for index, example in enumerate(examples) if belongs(example)], dtype=int)
        if len(places):
            yield name, places


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m jevany_tiny.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--base", type=Path, help="the base; without it, the folder base/ beside each checkpoint")
    parser.add_argument("--rows", type=int, default=4000, help="held-out decisions")
    parser.add_argument("--baseline-rows", type=int, default=40_000, help="training decisions of the baseline; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on CUDA, else float32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))

    examples = take("heldout", TEST_SEED, options.rows)
    blanked = [dataclasses.replace(example, state="") for example in examples]
    baseline = _baseline(options.baseline_rows, examples) if options.baseline_rows else None
    report: dict[str, Any] = {
        "split": "heldout",
        "seed": TEST_SEED,
        "rows": options.rows,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "calibration_error": f"{BINS} equal-width bins of the likeliest option's probability",
        "brier": "sum over options of squared errors",
        "baseline": f"logistic regression over bags of words, {options.baseline_rows} training decisions",
        "checkpoints": {},
    }
    for checkpoint in options.checkpoints:
        base = options.base or checkpoint.resolve().parent / "base"
        predictor = Predictor(str(checkpoint), str(base), device, dtype)
        probabilities, blank = predictor.probabilities(examples), predictor.probabilities(blanked)
        results = {}
        for name, places in groups(examples):
            results[name] = dataclasses.asdict(
                measure(
                    [examples[place] for place in places],
                    [probabilities[place] for place in places],
                    [blank[place] for place in places],
                    None if baseline is None else baseline[places],
                )
            )
        report["checkpoints"][str(checkpoint)] = results
        print(_table(str(checkpoint), results), flush=True)
    text = json.dumps(report, indent=2) + "\n"
    if options.out:
        options.out.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


def _baseline(rows: int, examples: Sequence[Example]) -> np.ndarray | None:
    try:
        from jevany_tiny.bag_of_words import BagOfWords
    except ImportError as error:
        print(f"no baseline: {error}", flush=True)
        return None
    model = BagOfWords()
    model.fit(take("train", "bag of words", rows))
    return model.right(examples)


def _table(name: str, results: dict[str, dict[str, Any]]) -> str:
    columns = [field.name for field in dataclasses.fields(Measures)]
    lines = [name, f"{'':12}" + "".join(f"{column.replace('_', ' '):>20}" for column in columns)]
    for group, values in results.items():
        lines.append(
            f"{group:12}"
            + "".join(f"{values[column] if values[column] is not None else '-':>20}" for column in columns)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

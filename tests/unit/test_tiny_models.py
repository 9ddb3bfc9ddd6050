"""The trained models of the repository: what they know, and that they know it from the state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from jevany_tiny.decisions import take
from jevany_tiny.evaluate import Predictor, measure

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
MODELS = ["jevany-tiny", "jevany-tiny-direct-token"]
ROWS = 240


@pytest.fixture(scope="module", params=MODELS)
def predictor(request: pytest.FixtureRequest) -> Predictor:
    base = REPOSITORY / "jevany-tiny" / "1" / "base"
    checkpoint = REPOSITORY / request.param / "1" / "checkpoint"
    return Predictor(str(checkpoint), str(base), torch.device("cpu"), torch.float32)


def test_answers_come_from_the_state(predictor: Predictor) -> None:
    examples = take("heldout", "suite", ROWS)
    blanked = predictor.probabilities([dataclasses.replace(example, state="") for example in examples])
    measures = measure(examples, predictor.probabilities(examples), blanked, None)
    # Three standard errors of a share of 240 rows are 0.1.
    assert abs(measures.blank_accuracy - measures.chance) < 0.1
    assert measures.accuracy > 0.8
    assert measures.calibration_error < 0.1


def test_probabilities_are_distributions(predictor: Predictor) -> None:
    for probabilities in predictor.probabilities(take("heldout", "distributions", 32)):
        assert probabilities.dtype == np.float32
        assert probabilities.min() >= 0
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_the_readme_gives_the_measured_figures() -> None:
    results = json.loads((ROOT / "loadtest" / "results" / "tiny-held-out.json").read_text())["checkpoints"]
    lines = (ROOT / "README.md").read_text().splitlines()
    for name in MODELS:
        for kind in ("noul", "choice", "score", "all"):
            figures = results[name][kind]
            shares = [f"{100 * figures[key]:.1f}" for key in ("accuracy", "chance", "bag_of_words")]
            errors = [f"{figures[key]:.3f}" for key in ("brier", "calibration_error")]
            blank = f"{100 * figures['blank_accuracy']:.1f}"
            assert f"| {' | '.join([f'`{name}`', kind, *shares, *errors, blank])} |" in lines


def test_the_models_are_small_enough_for_a_repository() -> None:
    files = [file for name in MODELS for file in (REPOSITORY / name).rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 8_000_000

"""What training computes on its own, against PyTorch and transformers."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5

from jevany_tiny.batches import NO_DECISION, Batch
from jevany_tiny.delta_rule import short_row_delta_rule
from jevany_tiny.kernels import shifted_convolution
from jevany_tiny.learner import DeviceBatch, Learner, PointerHead
from jevany_tiny.shape import new_base
from jevany_tiny.training_step import Muon, TrainingStep

# On the CPU in the interpreter, see tests/conftest.py.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("length", [1, 5, 40])
def test_delta_rule_is_that_of_transformers(length: int) -> None:
    torch.manual_seed(length)
    query, key, value = (torch.randn(2, length, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    decay = (-functional.softplus(torch.randn(2, length, 2, device=DEVICE))).requires_grad_()
    beta = torch.rand(2, length, 2, device=DEVICE, requires_grad=True)
    upstream = torch.randn(2, length, 2, 16, device=DEVICE)
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    results = []
    for rule in (short_row_delta_rule, reference):
        out, _ = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
        results.append([out, *torch.autograd.grad((out * upstream).sum(), (query, key, value, decay, beta))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_convolution_is_pytorchs() -> None:
    torch.manual_seed(0)
    states, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
    expected = functional.conv1d(states, weight[:, None], bias, padding=3, groups=6)[..., :9]
    torch.testing.assert_close(shifted_convolution(states, weight, bias, "silu"), functional.silu(expected))


def test_muon_is_pytorchs() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in ((32, 16), (16, 32), (32, 16))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    start = [parameter.detach().clone() for parameter in ours]
    muon = Muon(ours, torch.tensor(0.01))
    reference = torch.optim.Muon(theirs, lr=0.01, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        muon.step()
        reference.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        # Both orthogonalise in bf16; the difference is its rounding, a small part of the way gone.
        assert (one - other).norm() < 0.03 * (one - before).norm()


def training_step(*, from_scratch: bool) -> tuple[TrainingStep, Batch]:
    """Returns a step and a batch of two decisions and two recitals."""
    torch.manual_seed(0)
    base = new_base(64, 0)
    learner = Learner(base, PointerHead(base.config.hidden_size), base.embed_tokens, range(8, 16))
    batch = Batch(
        readout="pointer",
        ids=np.random.default_rng(0).integers(1, 64, (4, 32)).astype(np.int16),
        decide=np.array([20, 25, 31, 31], np.int16),
        option_ends=np.array([[8, 16, -1], [7, 14, 21], [-1] * 3, [-1] * 3], np.int16),
        labels=np.array([1, 0, NO_DECISION, NO_DECISION], np.int16),
        told=np.array([[3, 5], [4, -1], [10, 20], [12, -1]], np.int16),
    )
    return TrainingStep(learner, 1e-3, from_scratch=from_scratch), batch


def test_a_report_gives_the_means_since_the_last_one() -> None:
    step, batch = training_step(from_scratch=True)
    rows = DeviceBatch.of(batch, step.device)
    expected = []
    for _ in range(2):
        with torch.no_grad():
            hidden = step.learner.hidden_states(rows.ids)
            logits = step.learner.logits(hidden, rows)[:2]
            tokens = step.learner.told_logits(hidden, rows)[[2, 2, 3], [0, 1, 0]]
        labels, next_ids = torch.tensor([1, 0]), rows.ids[[2, 2, 3], [11, 21, 13]]
        means = []
        for predicted, right in ((logits, labels), (tokens, next_ids)):
            means += [functional.cross_entropy(predicted, right), (predicted.argmax(-1) == right).float().mean()]
        expected.append(torch.stack(means))
        step(batch, 1.0, 0.5)
    report = step.report()
    got = torch.tensor([report.loss, report.accuracy, report.recital_loss, report.recital_accuracy])
    torch.testing.assert_close(got, torch.stack(expected).mean(0), rtol=1e-4, atol=1e-5)
    assert "recital" in str(report)
    assert not step.sums.any()


def test_a_report_without_recitals_tells_of_none() -> None:
    step, batch = training_step(from_scratch=False)
    step(batch, 1.0, 0.0)
    report = step.report()
    assert math.isfinite(report.loss)
    assert math.isnan(report.recital_loss)
    assert "recital" not in str(report)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3])
def test_a_report_of_no_finite_loss_stops_the_training(value: float, place: int) -> None:
    step, _ = training_step(from_scratch=True)
    step.sums[place] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        step.report()

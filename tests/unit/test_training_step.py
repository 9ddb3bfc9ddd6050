"""What training computes on its own, against PyTorch and transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5

from jevany_tiny.kernels import shifted_convolution, short_row_delta_rule, unit_triangular_inverse
from jevany_tiny.training_step import Muon


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 100])
def test_inverse_and_its_gradient(length: int) -> None:
    torch.manual_seed(length)
    system = torch.rand(2, 3, length, length, dtype=torch.float64, requires_grad=True)
    inverse = unit_triangular_inverse(system)
    expected = torch.linalg.inv(torch.eye(length, dtype=torch.float64) + system.tril(-1))
    torch.testing.assert_close(inverse, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(inverse)
    [ours] = torch.autograd.grad((inverse * upstream).sum(), system)
    [theirs] = torch.autograd.grad((expected * upstream).sum(), system)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_inverse_stays_exact_where_a_power_series_would_overflow() -> None:
    system = torch.ones(200, 200).tril(-1)
    assert torch.equal(unit_triangular_inverse(system) @ (system + torch.eye(200)), torch.eye(200))


@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_delta_rule_is_that_of_transformers(length: int) -> None:
    torch.manual_seed(length)
    query, key, value = (torch.randn(2, length, 4, 16, requires_grad=True) for _ in range(3))
    decay = (-functional.softplus(torch.randn(2, length, 4))).requires_grad_()
    beta = torch.rand(2, length, 4, requires_grad=True)
    upstream = torch.randn(2, length, 4, 16)
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    results = []
    for rule in (short_row_delta_rule, reference):
        out, _ = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
        results.append([out, *torch.autograd.grad((out * upstream).sum(), (query, key, value, decay, beta))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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

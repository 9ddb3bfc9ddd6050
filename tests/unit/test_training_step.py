"""What training computes on its own, against PyTorch and transformers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from jevany_tiny.kernels import shifted_convolution
from jevany_tiny.training_step import Muon


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

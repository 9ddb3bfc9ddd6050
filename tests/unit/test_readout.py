"""The readouts, against numbers worked out by hand and against PyTorch's own modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from jevany_backend.readout import DirectTokenReadout, PointerReadout


def test_pointer_by_hand() -> None:
    head = {
        "q.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [1.0, 1.0]]),
        "q.bias": torch.tensor([0.0, 0.0, 1.0, 0.0]),
        "k.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        "k.bias": torch.tensor([0.0, 0.0, 1.0, 0.0]),
    }
    hidden = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    # q = (1, 4, 1, 3); k_0 = (3, 0, 1, 0), k_1 = (0, 1, 1, 0); logits (3 + 1) / 2 = 2 and (4 + 1) / 2 = 2.5.
    for temperature in (1.0, 2.0):
        first = 1 / (1 + math.exp(0.5 / temperature))
        torch.testing.assert_close(PointerReadout(head, temperature)(hidden), torch.tensor([first, 1 - first]))


@pytest.mark.parametrize("residual", [0, 8])
def test_pointer_is_the_published_head(residual: int) -> None:
    torch.manual_seed(0)
    head = nn.ModuleDict({"q": nn.Linear(12, 16), "k": nn.Linear(12, 16)})
    if residual:
        head["residual"] = nn.Sequential(nn.Linear(16, residual), nn.GELU(), nn.Linear(residual, 1))
    hidden = torch.randn(1 + 5, 12)
    query, keys = head["q"](hidden[0]), head["k"](hidden[1:])
    logits = keys @ query / 4
    if residual:
        logits = logits + head["residual"](keys * query)[:, 0]
    expected = torch.softmax(logits / 0.7, -1)
    torch.testing.assert_close(PointerReadout(dict(head.state_dict()), 0.7)(hidden), expected)


def test_direct_token_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    hidden = torch.tensor([[2.0, 1.0], [9.0, 9.0], [9.0, 9.0]])
    # Two options: the third label, however likely, has no part.
    expected = torch.softmax(torch.tensor([2.0, 1.0]) / 0.5, -1)
    torch.testing.assert_close(DirectTokenReadout(rows, 0.5)(hidden), expected)


def test_direct_token_multiplies_in_the_dtype_of_the_head() -> None:
    torch.manual_seed(1)
    rows, hidden = torch.randn(4, 64).bfloat16(), torch.randn(5, 64)
    result = DirectTokenReadout(rows)(hidden)
    assert result.dtype == torch.float32
    assert torch.equal(result, torch.softmax((rows @ hidden[0].bfloat16()).float(), -1))


def test_pointer_head_stays_float32_over_bfloat16_states() -> None:
    torch.manual_seed(2)
    head = {
        "q.weight": torch.randn(8, 6),
        "q.bias": torch.randn(8),
        "k.weight": torch.randn(8, 6),
        "k.bias": torch.randn(8),
    }
    hidden = torch.randn(4, 6).bfloat16()
    assert torch.equal(PointerReadout(head)(hidden), PointerReadout(head)(hidden.float()))


def test_one_option_is_certain() -> None:
    head = {
        "q.weight": torch.ones(2, 3),
        "q.bias": torch.ones(2),
        "k.weight": torch.ones(2, 3),
        "k.bias": torch.ones(2),
    }
    assert PointerReadout(head)(torch.randn(2, 3)).tolist() == [1.0]

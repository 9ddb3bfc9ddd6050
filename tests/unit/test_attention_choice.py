"""Causal attention by the kernel that was the fastest for a length."""

from __future__ import annotations

import pytest
import torch

from jevany_backend.engine import attention_choice
from jevany_backend.engine.attention_choice import CausalAttention
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured
from tests.unit.test_measured import Told

SHAPE = AttentionShape(4, 2, 8)
CPU = torch.device("cpu")


def test_it_is_causal_and_heads_share_keys() -> None:
    query, key, value = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    attended = CausalAttention(Measured(CPU), SHAPE, torch.float32, 128)(query, key, value)
    assert attended.shape == (5, 4, 8)
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].T * 8**-0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(attended[:, head], scores.softmax(-1) @ value[:, head // 2])


def test_the_fastest_kernel_that_is_right_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: set[str] = set()
    monkeypatch.setattr(attention_choice, "_example", lambda *_: None)
    monkeypatch.setattr(attention_choice, "_is_right", lambda _, name: name not in wrong)
    told = Told({"flash": 2.0, "cudnn": 1.0, "64 flash": 0.5})

    def choice() -> CausalAttention:
        return CausalAttention(told, SHAPE, torch.bfloat16, 4096)

    # No plan is made for a row that no graph was captured for.
    assert [choice().name(rows) for rows in (32, 33, 65, 4096, 4097)] == ["cudnn", "flash", "cudnn", "cudnn", "flash"]
    assert str(choice()) == "cudnn (11), flash (1)"
    wrong.add("cudnn")
    assert str(choice()) == "flash (12)"

"""Attention by the kernel that was the fastest for a length."""

from __future__ import annotations

import pytest
import torch

from jevany_backend.engine.attention_choice import Attention
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured
from tests.unit.test_measured import Told

SHAPE = AttentionShape(4, 2, 8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 2, 5, 6])
def test_it_is_causal_within_its_window_and_heads_share_keys(window: int | None) -> None:
    query, key, value = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    attention = Attention(Measured(CPU), SHAPE, torch.float32, 128, window=window, scale=0.7)
    attended = attention(query, key, value)
    assert attended.shape == (5, 4, 8)
    sees = torch.ones(5, 5).tril().bool() & torch.ones(5, 5).triu(1 - (window or 5)).bool()
    for head in range(4):
        scores = (query[:, head] @ key[:, head // 2].T * 0.7).masked_fill(~sees, -torch.inf)
        torch.testing.assert_close(attended[:, head], scores.softmax(-1) @ value[:, head // 2])
    reads = torch.tensor([4, 1])
    torch.testing.assert_close(attention.of_rows(query[reads], key, value, reads), attended[reads])


def test_scores_are_scaled_by_the_root_of_the_width_if_nothing_else_is_said() -> None:
    query, key, value = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    plain = Attention(Measured(CPU), SHAPE, torch.float32, 128)(query, key, value)
    said = Attention(Measured(CPU), SHAPE, torch.float32, 128, scale=8**-0.5)(query, key, value)
    assert torch.equal(plain, said)


OURS = "ours 16 x 16, 1 stages, 4 warps"
OTHER = "ours 64 x 64, 2 stages, 4 warps"
WIDE = "ours 32 x 32, 2 stages, 4 warps"


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of kernels that compute something else."""
    names: set[str] = set()
    monkeypatch.setattr("jevany_backend.engine.attention_choice._example", lambda *_, **__: ())
    monkeypatch.setattr(Attention, "_is_right", lambda _, __, name: name not in names)
    return names


def test_the_fastest_kernel_that_is_right_runs(wrong: set[str]) -> None:
    told = Told({"flash": 2.0, "cudnn": 1.0, OURS: 3.0, OTHER: 4.0, "64 flash": 0.5})

    def choice() -> Attention:
        return Attention(told, SHAPE, torch.bfloat16, 8192)

    # No plan is made for a row that no graph was captured for.
    assert [choice().name(rows) for rows in (32, 33, 65, 4096, 4097)] == ["cudnn", "flash", "cudnn", "cudnn", "flash"]
    assert str(choice()) == "cudnn (11), flash (1)"
    assert set(choice().read_names) == {OURS}
    wrong |= {"cudnn", OURS}
    assert str(choice()) == "flash (12)"
    assert set(choice().read_names) == {OTHER}


def test_beyond_its_window_and_for_wide_heads_only_our_kernel_runs(wrong: set[str]) -> None:
    told = Told({"flash": 2.0, "cudnn": 1.0, OURS: 4.0, OTHER: 3.0})
    windowed = Attention(told, SHAPE, torch.bfloat16, 8192, window=512)
    assert [windowed.name(rows) for rows in (512, 513, 4096, 5000)] == ["cudnn", OTHER, OTHER, OTHER]
    wide = Attention(Told({WIDE: 1.0}), AttentionShape(4, 2, 512, "none"), torch.bfloat16, 8192)
    assert {wide.name(rows) for rows in (32, 512, 4096, 5000)} == {WIDE}


def test_a_window_that_ends_beyond_what_is_timed_is_kept(wrong: set[str]) -> None:
    told = Told({"flash": 2.0, "cudnn": 1.0, OURS: 4.0, OTHER: 3.0})
    windowed = Attention(told, SHAPE, torch.bfloat16, 8192, window=6000)
    assert [windowed.name(rows) for rows in (4096, 5000, 7000)] == ["cudnn", OTHER, OTHER]

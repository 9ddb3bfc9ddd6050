"""The graph grid without a GPU: which bucket a row takes, what goes in and out of the buffers, and what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jevany_backend.checkpoint import CheckpointError
from jevany_backend.checkpoint.plan import build_model
from jevany_backend.encoding import Row
from jevany_backend.engine.graphs import OUR_GRID, PUBLISHED_GRID, GraphEngine, Grid, NoGraphs, padding_share
from jevany_backend.engine.modes import MODES, build_engine, choose_mode
from jevany_backend.engine.reference import CapturableTransformers, ReferenceEngine
from jevany_backend.readout import DirectTokenReadout, PointerReadout, Readout
from tests.checkpoint_factory import gemma_config, muse_config, qwen_config, randomise
from tests.unit.test_decoders import DEVICE, FAMILIES, packed, small_model

SMALL = Grid(buckets=(16, 24, 48), beyond=32, reads=8)
WIDTH = 64
PANEL = Path(__file__).parents[2] / "loadtest" / "panels" / "jevbench-shape-231.jsonl"


def _pointer() -> PointerReadout:
    torch.manual_seed(1)
    shapes = {"q.weight": (16, WIDTH), "q.bias": (16,), "k.weight": (16, WIDTH), "k.bias": (16,)}
    return PointerReadout({name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}, 1.5)


def _direct_token() -> DirectTokenReadout:
    return DirectTokenReadout(torch.randn(5, WIDTH, device=DEVICE) / 4)


def row(tokens: int, options: int = 3, seed: int = 0) -> Row:
    ids = torch.randint(0, 300, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = [tokens - 2 - option for option in range(options)][::-1]
    return Row(ids, tokens - 1, ends)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def _engine(model: Any, readout: Readout, longest: int = 96, **changes: Any) -> GraphEngine:
    engine = GraphEngine(packed(model, fused=False), readout, NoGraphs(DEVICE), SMALL, longest, **changes)
    engine.prepare()
    return engine


def test_the_grid_pads_the_panel_by_less_than_8_percent() -> None:
    lengths = [json.loads(line)["row_tokens_qwen"] for line in PANEL.read_text().splitlines()]
    assert len(lengths) == 231
    assert padding_share(OUR_GRID, lengths) < 0.08
    assert sum(OUR_GRID.length(n) / n for n in lengths) / len(lengths) < 1.08
    assert padding_share(PUBLISHED_GRID, [n for n in lengths if n <= 2048]) > 0.15
    assert OUR_GRID.buckets[0] == 32
    assert OUR_GRID.buckets[-1] == 4096
    assert list(OUR_GRID.buckets) == sorted(set(OUR_GRID.buckets))
    assert not any(length % 8 for length in OUR_GRID.buckets)


@pytest.mark.parametrize(
    ("tokens", "length"), [(1, 16), (16, 16), (17, 24), (24, 24), (48, 48), (49, 64), (64, 64), (65, 96)]
)
def test_a_row_takes_the_next_length(tokens: int, length: int) -> None:
    assert SMALL.length(tokens) == length
    assert SMALL.has_graph(tokens, 4) == (tokens <= 48)


def test_a_limit_drops_the_buckets_that_no_row_needs() -> None:
    assert SMALL.up_to(20).buckets == (16, 24)
    assert SMALL.up_to(24).buckets == (16, 24)
    assert SMALL.up_to(25).buckets == (16, 24, 48)
    assert SMALL.up_to(8192) == SMALL


@pytest.mark.parametrize("make", [_pointer, _direct_token])
@pytest.mark.parametrize("tokens", [9, 15, 16, 17, 23, 24, 25, 47, 48, 49, 96])
def test_bucket_edges_answer_as_the_row_alone(model: Any, make: Callable[[], Readout], tokens: int) -> None:
    readout = make()
    expected = ReferenceEngine(model, readout)
    engine = _engine(model, readout)
    ours = engine.probabilities(row(tokens))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.probabilities(row(tokens)), rtol=1e-3, atol=1e-5)
    states = engine.hidden_states(row(tokens))
    torch.testing.assert_close(states, expected.hidden_states(row(tokens)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [15, 17, 40, 60])
def test_padding_changes_no_bit(model: Any, tokens: int) -> None:
    readout = _pointer()
    answers = []
    for pad in (0, 299):
        engine = _engine(model, readout, pad=pad)
        for earlier in (48, 33):  # Leaves its tokens in the buffers.
            engine.probabilities(row(earlier, seed=pad))
        answers.append(engine.probabilities(row(tokens)))
    assert np.array_equal(answers[0], answers[1])


def test_a_row_with_more_options_than_a_graph_reads_runs_without(model: Any) -> None:
    readout = _pointer()
    engine = _engine(model, readout)
    many = row(40, options=20)
    np.testing.assert_allclose(
        engine.probabilities(many), ReferenceEngine(model, readout).probabilities(many), rtol=1e-3, atol=1e-5
    )
    assert (engine.counters.replays, engine.counters.eager_calls) == (0, 1)
    assert len(engine.probabilities(row(40, options=7))) == 7
    assert engine.counters.replays == 1


def test_counters(model: Any) -> None:
    engine = _engine(model, _pointer())
    assert engine.counters.captures == 3
    for tokens in (10, 16, 30, 70):
        engine.probabilities(row(tokens))
    counters = engine.counters
    assert (counters.replays, counters.eager_calls) == (3, 1)
    assert (counters.tokens, counters.padding_tokens) == (126, 6 + 0 + 18 + 26)
    assert (counters.captures, counters.captures_after_ready) == (3, 0)
    engine._capture(lambda: None)
    assert counters.captures_after_ready == 1


def test_the_longest_bucket_is_captured_first_and_no_longer_one_than_needed(model: Any) -> None:
    seen: list[int] = []

    class Recorder(NoGraphs):
        def warm(self, function: Callable[[], None]) -> None:
            function()

        def capture(self, function: Callable[[], None]) -> Callable[[], None]:
            function()
            seen.append(len(lengths))
            return function

    lengths: list[int] = []
    inner = packed(model, fused=False)

    def forward(ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        lengths.append(len(ids))
        return inner(ids, reads)

    done: list[tuple[int, int]] = []
    GraphEngine(forward, _pointer(), Recorder(DEVICE), SMALL, 20).prepare(lambda *step: done.append(step))
    assert sorted(set(lengths), reverse=True) == list(dict.fromkeys(lengths)) == [24, 16]
    assert len(seen) == 2
    assert done == [(1, 2), (2, 2)]


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_every_mode_answers_alike(changes: dict[str, Any]) -> None:
    readout = _pointer()
    expected = ReferenceEngine(small_model(**changes), readout).probabilities(row(40))
    for mode in MODES:
        engine = build_engine(mode, small_model(**changes), readout, longest=64)
        np.testing.assert_allclose(engine.probabilities(row(40)), expected, rtol=1e-3, atol=1e-5, err_msg=mode)


def test_what_is_proven_for_a_model_runs_it() -> None:
    gpu, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert choose_mode(None, gpu, bf16, "qwen3_5_text") == "engine"
    assert choose_mode(None, gpu, torch.float32, "qwen3_5_text") == "sdpa"
    assert choose_mode(None, gpu, bf16, "muse_glimmer_text") == choose_mode(None, gpu, bf16, "gemma4_text") == "engine"
    assert choose_mode(None, gpu, bf16, "llama") == "sdpa"
    assert choose_mode(None, cpu, bf16, "qwen3_5_text") == "reference"
    for mode in MODES:
        for device in (gpu, cpu):
            assert choose_mode(mode, device, bf16, "gemma4_text") == mode


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("graphs", "muse_glimmer_text has layers of chunked_attention"), ("engine", "layers of chunked_attention")],
)
def test_a_family_that_a_mode_cannot_run_is_named(mode: str, reason: str) -> None:
    muse = build_model(muse_config(300), DEVICE, torch.float32)
    muse.config.layer_types[0] = "chunked_attention"
    with pytest.raises(CheckpointError, match=reason):
        build_engine(mode, muse, _pointer(), longest=64)


@pytest.fixture(params=[qwen_config, muse_config, gemma_config], ids=["qwen", "muse", "gemma"])
def any_family(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(2)
    model = build_model(request.param(300), DEVICE, torch.float32)
    randomise(model)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [7, 8, 9, 40])  # The window of the small models is 8.
def test_what_is_captured_gives_transformers_states(any_family: Any, tokens: int) -> None:
    one = row(tokens, options=2)
    reads = torch.tensor([one.decide, *one.option_ends], device=DEVICE)
    states = CapturableTransformers(any_family)(torch.tensor(one.ids, device=DEVICE), reads)
    expected = ReferenceEngine(any_family, _pointer()).hidden_states(one)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [40, 128, 129])
def test_the_published_recipe_runs_every_family(any_family: Any, tokens: int) -> None:
    expected = ReferenceEngine(any_family, _pointer()).probabilities(row(tokens))
    engine = build_engine("graphs", any_family, _pointer(), longest=160)
    np.testing.assert_allclose(engine.probabilities(row(tokens)), expected, rtol=1e-3, atol=1e-5)

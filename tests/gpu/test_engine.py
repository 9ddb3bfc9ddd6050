"""Our engine's graphs on a real GPU, on a small model of true structure in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jevany_backend.engine.families import family
from jevany_backend.engine.families.decoder import Decoder
from jevany_backend.engine.graphs import CudaGraphs, GraphEngine, Grid, NoGraphs
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.modes import MODES, build_engine
from jevany_backend.engine.reference import ReferenceEngine, own_kernels
from jevany_backend.readout import PointerReadout
from tests.checkpoint_factory import TRUE_WIDTHS, gemma_config, muse_config
from tests.unit.test_decoders import small_model
from tests.unit.test_graphs import row

pytestmark = pytest.mark.gpu

GRID = Grid(buckets=(32, 64, 128, 256), beyond=128, reads=16)
HIDDEN: int = TRUE_WIDTHS["qwen3_5"]["hidden_size"]
# The released models' widths of a head, at which the kernels' layouts on the GPU are the true ones, and windows that
# end between two graphs.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": TRUE_WIDTHS["qwen3_5"]
    | {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
    },
    "muse_glimmer": TRUE_WIDTHS["muse_glimmer"] | {"config": muse_config, "sliding_window": 100},
    "gemma4": TRUE_WIDTHS["gemma4"] | {"config": gemma_config, "sliding_window": 100},
}


def _readout() -> PointerReadout:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = {"q.weight": (64, HIDDEN), "q.bias": (64,), "k.weight": (64, HIDDEN), "k.bias": (64,)}
    return PointerReadout(
        {name: torch.randn(shape, generator=generator, device="cuda") * 0.1 for name, shape in shapes.items()}
    )


def _forward(model: Any, longest: int) -> Decoder:
    return family(model.config.model_type)(model, Measured(torch.device("cuda", 0)), longest, fused=True)


@pytest.fixture(scope="module", params=FAMILIES)
def forward(request: pytest.FixtureRequest) -> Decoder:
    return _forward(small_model(torch.bfloat16, **FAMILIES[request.param]), 512)


def _graphs(forward: Decoder, pad: int = 0) -> GraphEngine:
    engine = GraphEngine(forward, _readout(), CudaGraphs(torch.device("cuda", 0)), GRID, 400, pad)
    engine.prepare()
    return engine


@pytest.mark.parametrize("tokens", [31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400])
def test_a_graph_answers_as_the_same_pass_without(forward: Decoder, tokens: int) -> None:
    eager = GraphEngine(forward, _readout(), NoGraphs(torch.device("cuda", 0)), GRID, 400)
    eager.prepare()
    graphs = _graphs(forward)
    assert np.array_equal(graphs.probabilities(row(tokens)), eager.probabilities(row(tokens)))
    assert graphs.counters.replays == (tokens <= 256)


def test_padding_changes_no_bit(forward: Decoder) -> None:
    one, other = _graphs(forward, 0), _graphs(forward, 299)
    for tokens in (33, 50, 64, 100, 129, 300):
        assert np.array_equal(one.probabilities(row(tokens)), other.probabilities(row(tokens)))


def test_the_same_request_gives_the_same_bits_a_thousand_times(forward: Decoder) -> None:
    engine = _graphs(forward)
    first = engine.probabilities(row(100))
    for seed in range(1000):
        if seed % 10 == 0:
            engine.probabilities(row(120, seed=seed))  # Leaves other tokens in the buffers.
        assert np.array_equal(engine.probabilities(row(100)), first)
    assert engine.counters.captures_after_ready == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_every_mode_answers_as_float32_transformers(mode: str, shape: dict[str, Any]) -> None:
    readout = _readout()
    exact_model = small_model(torch.bfloat16, **shape).float()
    exact = ReferenceEngine(exact_model, readout, gpu_kernels=False).probabilities(row(100))
    engine = build_engine(mode, small_model(torch.bfloat16, **shape), readout, longest=300)
    assert np.abs(engine.probabilities(row(100)) - exact).max() < 0.1


@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
@torch.inference_mode()
def test_bfloat16_errs_no_more_than_transformers(shape: dict[str, Any]) -> None:
    ours, theirs = [], []
    reads = torch.arange(200, device="cuda")
    for seed in range(4):
        model = small_model(torch.bfloat16, seed=seed, **shape)
        ids = torch.tensor(row(200, seed=seed).ids, device="cuda")

        def states(model: Any, ids: torch.Tensor = ids) -> torch.Tensor:
            return model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()

        theirs.append(states(model))
        exact_model = small_model(torch.bfloat16, seed=seed, **shape).float()
        with own_kernels(exact_model):
            exact = states(exact_model)
        theirs[-1] = (theirs[-1] - exact).norm() / exact.norm()
        ours.append((_forward(model, 256)(ids, reads).float() - exact).norm() / exact.norm())
    assert sum(ours) < 1.1 * sum(theirs), (ours, theirs)

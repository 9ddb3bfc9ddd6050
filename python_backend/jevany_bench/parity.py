"""How far answers move: our forward pass and transformers' own against float32, on a model of true width."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from jevany_backend.checkpoint.plan import build_model
from jevany_backend.engine.families import family
from jevany_backend.engine.graphs import CudaGraphs, Executor, GraphEngine, Grid, NoGraphs
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.reference import CapturableTransformers, own_kernels
from jevany_backend.readout import PointerReadout
from jevany_bench.panel import synthetic_row

# As many as show what a family has: three layers of the delta rule or of a window and one of full attention; in Gemma
# five and one, and as many again that take the keys and values of those.
_LAYERS = {"gemma4_text": 12}
_FEW_LAYERS = 4
_BEYOND_WINDOW = 100


@torch.inference_mode()
def error_against_float32(
    config: Any, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> dict[str, Any]:
    """Measure errors of hidden states on a random model of the true width and few layers.

    Args:
        config: The text decoder's configuration.
        dtype: What it is served in.
        device: Where.
        lengths: Tokens of a row; in a family with a window, one that is a little longer is added.

    Returns:
        Length -> the error of ``ours`` and of ``transformers`` (its kernels, as installed), both in `dtype`, relative
        to the norm of float32 transformers' states; ``ratio`` is over all lengths.
    """
    torch.backends.cudnn.allow_tf32 = False
    model = _small(config, dtype, device)
    if window := getattr(config, "sliding_window", None):
        lengths = sorted({*lengths, window + _BEYOND_WINDOW})
    rows = {length: torch.randint(0, config.vocab_size, (length,), device=device) for length in lengths}
    exact_model = copy.deepcopy(model).float()
    with own_kernels(exact_model):  # Others multiply in TF32.
        exact = {n: CapturableTransformers(exact_model)(ids, torch.arange(n, device=device)) for n, ids in rows.items()}
    del exact_model
    theirs = {n: CapturableTransformers(model)(ids, torch.arange(n, device=device)) for n, ids in rows.items()}
    forward = family(config.model_type)(model, Measured(device), max(lengths), fused=device.type == "cuda")
    found: dict[str, Any] = {"layers": len(model.layers), "lengths": {}}
    totals = [0.0, 0.0]
    for length, ids in rows.items():
        ours = forward(ids, torch.arange(length, device=device))
        errors = [
            float((states.float() - exact[length]).norm() / exact[length].norm()) for states in (ours, theirs[length])
        ]
        totals = [total + error for total, error in zip(totals, errors, strict=True)]
        found["lengths"][str(length)] = {"ours": errors[0], "transformers": errors[1]}
    return found | {"ratio": totals[0] / totals[1] if totals[1] else None}


@torch.inference_mode()
def bucket_edges(config: Any, dtype: torch.dtype, device: torch.device, buckets: Sequence[int]) -> dict[str, Any]:
    """Compare graphs with the same forward pass without, at the edges of buckets, and poison the padding.

    Args:
        config: The text decoder's configuration.
        dtype: What it is served in.
        device: Where.
        buckets: Lengths of graphs; rows of one token less, as many, and one more are run.

    Returns:
        The largest change of a probability between graph and no graph, between two contents of the padding, and
        between repeats of one request.
    """
    model, fused = _small(config, dtype, device), device.type == "cuda"
    forward = family(config.model_type)(model, Measured(device), 2 * max(buckets), fused=fused)
    readout = _readout(config.hidden_size, device)
    grid = Grid(tuple(sorted(buckets)))

    def made(executor: Executor, pad: int) -> GraphEngine:
        engine = GraphEngine(forward, readout, executor, grid, max(buckets) + 1, pad)
        engine.prepare()
        return engine

    def graphs() -> Executor:
        return CudaGraphs(device) if device.type == "cuda" else NoGraphs(device)

    graphed, poisoned, eager = made(graphs(), 0), made(graphs(), config.vocab_size - 1), made(NoGraphs(device), 0)
    largest = {"graph_or_not": 0.0, "padding": 0.0, "repeats": 0.0}
    for length in sorted({n + step for n in buckets for step in (-1, 0, 1)}):
        row = synthetic_row(f"edge-{length}", length, 3, (1, 2, 3, 4, 5), config.vocab_size)
        first = graphed.probabilities(row)
        others = {"graph_or_not": eager.probabilities(row), "padding": poisoned.probabilities(row)}
        others["repeats"] = graphed.probabilities(row)
        for name, other in others.items():
            largest[name] = max(largest[name], float(abs(first - other).max()))
    return {"buckets": list(buckets), "largest_probability_change": largest}


def _small(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    small = copy.deepcopy(config)
    layers = min(_LAYERS.get(config.model_type, _FEW_LAYERS), config.num_hidden_layers)
    small.num_hidden_layers = layers
    small.layer_types = config.layer_types[:layers]
    if config.model_type == "muse_glimmer_text":
        small.layer_rope_theta = config.layer_rope_theta[:layers]
    if config.model_type == "gemma4_text":
        small.num_kv_shared_layers = layers // 2
    model = build_model(small, device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
            elif name.endswith("A_log"):
                parameter.uniform_(1, 16, generator=generator).log_()
            else:
                parameter.uniform_(0, 0.5, generator=generator)
    return model


def _readout(width: int, device: torch.device) -> PointerReadout:
    generator = torch.Generator(device).manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5

    names = ("q.weight", "k.weight"), ("q.bias", "k.bias")
    return PointerReadout({n: values(256, width) for n in names[0]} | {n: values(256) for n in names[1]})

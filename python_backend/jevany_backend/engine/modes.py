"""The ways a model can run, from transformers as it comes to our own engine: the rows of the ablation table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from jevany_backend.checkpoint.errors import CheckpointError
from jevany_backend.engine.families import OUR_FAMILIES, family
from jevany_backend.engine.graphs import OUR_GRID, PUBLISHED_GRID, CudaGraphs, Executor, GraphEngine, NoGraphs
from jevany_backend.engine.measured import Measured, counted
from jevany_backend.engine.reference import CapturableTransformers, ReferenceEngine, live_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jevany_backend.engine.families.decoder import Decoder
    from jevany_backend.readout import Readout

log = logging.getLogger(__name__)

MODES = {
    "reference": "transformers with whatever kernels it finds",
    "default": "transformers, no kernels of other packages, attention written out, TF32 off",
    "kernels": "transformers with the kernels of flash-linear-attention and causal-conv1d, attention written out",
    "sdpa": "the same with fused attention",
    "graphs": "the same with the whole forward pass in CUDA graphs: the published recipe",
    "engine": "our forward pass over packed weights, fused kernels, CUDA graphs",
}


def choose_mode(mode: str | None, device: torch.device, dtype: torch.dtype, model_type: str) -> str:
    """Return the mode that a model runs in: the one that is named, else the fastest that is proven for it.

    Args:
        mode: One of `MODES`, or None: on a GPU ``engine`` for the families that it computes, in bfloat16, and ``sdpa``
            for all else; on the CPU ``reference``.
        device: Where it runs.
        dtype: What it is served in.
        model_type: The text decoder's type, as transformers names it.
    """
    if mode is not None:
        return mode
    if device.type != "cuda":
        return "reference"
    return "engine" if model_type in OUR_FAMILIES and dtype == torch.bfloat16 else "sdpa"


def build_engine(
    mode: str,
    model: PreTrainedModel,
    readout: Readout,
    longest: int,
    progress: Callable[[int, int], None] | None = None,
) -> ReferenceEngine | GraphEngine:
    """Make the engine of a mode, ready to answer, and log what it really runs.

    Args:
        mode: One of `MODES`. On a CPU nothing is captured, and ``engine`` runs the kernels' PyTorch twins.
        model: The text decoder with the adapter merged, on its device. ``engine`` takes its weights, so that it cannot
            run by itself afterwards.
        readout: Reads the options' probabilities off its states.
        longest: The longest row, in tokens.
        progress: Called with the number of graphs captured and of all.

    Raises:
        CheckpointError: The model cannot run in this mode, or the device has not the memory for it.
    """
    device = next(model.parameters()).device
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    log.info("engine %s: %s", mode, MODES[mode])
    if mode == "engine":
        return _our_engine(model, readout, device, longest, progress)
    _log_kernels(model, slow=mode == "default")
    if mode == "graphs":
        try:
            forward = CapturableTransformers(model)
        except ValueError as error:
            raise CheckpointError(f"parameter engine: graphs cannot run this model: {error}") from None
        return _ready(GraphEngine(forward, readout, _executor(device), PUBLISHED_GRID, longest), progress)
    return ReferenceEngine(
        model,
        readout,
        gpu_kernels=mode != "default",
        fused_attention=mode in ("reference", "sdpa"),
    )


def _our_engine(
    model: PreTrainedModel,
    readout: Readout,
    device: torch.device,
    longest: int,
    progress: Callable[[int, int], None] | None,
) -> GraphEngine:
    model_type = model.config.model_type
    if model_type not in OUR_FAMILIES:
        raise CheckpointError(
            f"parameter engine: engine runs {', '.join(OUR_FAMILIES)}, and this model is {model_type}"
        )
    measured = Measured(device)
    longest_padded = OUR_GRID.up_to(longest).length(longest)
    try:
        forward = family(model_type)(model, measured, longest_padded, fused=device.type == "cuda")
    except ValueError as error:
        raise CheckpointError(f"parameter engine: engine cannot run this model: {error}") from None
    _log_choices(forward)
    return _ready(GraphEngine(forward, readout, _executor(device), OUR_GRID, longest), progress)


def _ready(engine: GraphEngine, progress: Callable[[int, int], None] | None) -> GraphEngine:
    engine.prepare(progress)
    return engine


def _executor(device: torch.device) -> Executor:
    return CudaGraphs(device) if device.type == "cuda" else NoGraphs(device)


def _log_kernels(model: PreTrainedModel, *, slow: bool) -> None:
    on_gpu = next(model.parameters()).is_cuda
    for kernel, module in live_kernels(model).items():
        if slow:
            log.info("%s is from transformers, as this mode says", kernel)
            continue
        missing = on_gpu and module.startswith("transformers")
        hint = ", which is slow: install flash-linear-attention and causal-conv1d" if missing else ""
        log.log(logging.WARNING if missing else logging.INFO, "%s is from %s%s", kernel, module, hint)


def _log_choices(forward: Decoder) -> None:
    if not forward.fused:
        log.info("plain PyTorch twins in place of fused kernels")
        return
    measured = forward.measured
    log.info("%d times measured now, %d known", measured.measured_now, sum(map(len, measured.times.values())))
    log.info("fused kernels launched %s", "early" if forward.early else "one after another")
    for name, choice in forward.choices.items():
        log.info("%s: %s", name.replace("_", " "), counted(choice.names))
    for (outputs, inputs, summed, rows), plan in forward.plans.items():
        layout = "transposed" if plan.transposed else "as stored"
        reader = " (added up)" if summed else ""
        few = f" of up to {rows} rows" if rows != forward.longest else ""
        log.info("product %d -> %d%s%s: weights %s, %s", inputs, outputs, reader, few, layout, counted(plan.ways))

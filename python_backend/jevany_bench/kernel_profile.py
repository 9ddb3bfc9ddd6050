"""Where the time of one forward pass goes: its kernels by class, out of PyTorch's profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from jevany_backend.decision_model import Engine
    from jevany_backend.encoding import Row

_CALLS = 3
# The first class whose word occurs in a kernel's name.
_CLASSES = (
    (
        "delta rule",
        ("chunk_", "delta_rule", "_scan", "_prepare", "kkt", "recompute_w_u", "solve_tril", "cumsum_scalar"),
    ),
    ("convolution and gates", ("causal_conv1d", "conv1d", "_delta_inputs")),
    ("attention", ("flash", "fmha", "attention", "softmax_warp")),
    (
        "products",
        ("_skinny_product", "gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas", "gemv", "aten::mm", "aten::addmm"),
    ),
    ("norms", ("rms_norm", "layer_norm", "l2norm")),
    ("gated linear units", ("_glu",)),
    ("rotary and gates of attention", ("_qk_norm_rotary", "_sigmoid_gate")),
    ("per-layer inputs", ("_per_layer_inputs",)),
    ("copies to and from the host", ("memcpy htod", "memcpy dtoh")),
)


def profile_row(engine: Engine, row: Row, device: torch.device) -> dict[str, Any]:
    """Profile an engine on one row.

    Args:
        engine: Ready, and warm for this length.
        row: The row.
        device: Where it runs; on a CPU operators stand in for kernels.

    Returns:
        Kernels and milliseconds a forward pass, by class and for the most expensive kernels.
    """
    on_gpu = device.type == "cuda"
    engine.probabilities(row)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(_CALLS):
            engine.probabilities(row)
        if on_gpu:
            torch.cuda.synchronize(device)
    classes: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in recorded.key_averages():
        milliseconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if milliseconds <= 0:
            continue
        for table, key in ((classes, _class_of(event.key)), (kernels, event.key)):
            table[key][0] += event.count / _CALLS
            table[key][1] += milliseconds / _CALLS
    most = sorted(kernels.items(), key=lambda item: -item[1][1])[:25]
    return {
        "tokens": len(row.ids),
        "kernels": sum(count for count, _ in classes.values()),
        "milliseconds": sum(time for _, time in classes.values()),
        "classes": {
            name: {"kernels": count, "milliseconds": time}
            for name, (count, time) in sorted(classes.items(), key=lambda item: -item[1][1])
        },
        "most_expensive": [{"kernel": n[:160], "kernels": count, "milliseconds": time} for n, (count, time) in most],
    }


def _class_of(kernel: str) -> str:
    name = kernel.lower()
    return next((label for label, words in _CLASSES if any(word in name for word in words)), "element-wise and other")

"""Each fused kernel against its PyTorch twin, at the shapes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from jevany_backend.engine.kernels import FUSED, TWINS, Kernels
from jevany_backend.engine.kernels.delta_inputs import DeltaShape
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape
from jevany_backend.engine.measured import Measured, elapsed

_REPEATS = 5


def time_kernels(
    config: Any, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Time the kernels of the Qwen3.5 family, and hold their results against their twins'.

    Args:
        config: The text decoder's configuration.
        dtype: What it is served in.
        device: A GPU.
        lengths: Tokens of a row.

    Returns:
        Kernel -> length -> microseconds of ``fused`` in a graph and of ``twin`` without one, and ``difference``, the
        largest of their results' relative to the twin's norm.
    """
    measured = Measured(device)
    measured.times = {}
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for length in lengths:
        for name, (fused, twin) in _calls(config, dtype, device, length).items():
            times = measured.compare(f"{name} {length}", {"fused": fused})
            found.setdefault(name, {})[str(length)] = {
                "difference": max(map(_difference, _tensors(fused(0)), _tensors(twin(0)))),
                "fused": times["fused"],
                "twin": min(elapsed(partial(twin, index)) for index in range(_REPEATS)) * 1e6,
            }
    return found


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result if isinstance(result, tuple) else vars(result).values())


def _difference(ours: torch.Tensor, twin: torch.Tensor) -> float:
    return float((ours.float() - twin.float()).norm() / twin.float().norm().clamp(min=1e-30))


def _calls(
    config: Any, dtype: torch.dtype, device: torch.device, length: int
) -> dict[str, tuple[Callable[[int], object], Callable[[int], object]]]:
    delta = DeltaShape(
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )
    attention = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    def noise(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(kind)

    stream, update = noise(length, config.hidden_size), noise(length, config.hidden_size)
    gate_up = noise(length, 2 * config.intermediate_size)
    packed = noise(length, 2 * (attention.queries + attention.keys) * attention.width)
    half = attention.width // 8
    angles = torch.rand(length, half, device=device)
    attended = noise(length, attention.queries, attention.width)
    mixed = noise(length, delta.columns)
    filters, a_log, bias = noise(delta.convolved, 4), noise(delta.values), noise(delta.values)
    heads = noise(length, delta.values, delta.value_width)
    inputs = TWINS.delta_inputs(mixed, delta, filters, a_log, bias)
    head, width = noise(attention.width), noise(config.hidden_size)
    value_norm = noise(delta.value_width)

    def both(run: Callable[[Kernels], object]) -> tuple[Callable[[int], object], Callable[[int], object]]:
        return (lambda _: run(FUSED)), (lambda _: run(TWINS))

    return {
        # The stream would grow with every run.
        "add_rms_norm": both(lambda kernels: kernels.add_rms_norm(stream.clone(), update, width, 1e-6)),
        "swiglu": both(lambda kernels: kernels.swiglu(gate_up)),
        "qk_norm_rotary": both(
            lambda kernels: kernels.qk_norm_rotary(packed, attention, head, head, angles, angles, None, 1e-6)
        ),
        "sigmoid_gate": both(lambda kernels: kernels.sigmoid_gate(attended, packed)),
        "delta_inputs": both(lambda kernels: kernels.delta_inputs(mixed, delta, filters, a_log, bias)),
        "gated_rms_norm": both(lambda kernels: kernels.gated_rms_norm(heads, mixed[:, delta.gate], value_norm, 1e-6)),
        "delta_rule": both(lambda kernels: kernels.delta_rule(inputs)),
    }

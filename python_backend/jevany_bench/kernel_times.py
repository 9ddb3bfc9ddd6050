"""Each fused kernel against its PyTorch twin, at the shapes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from jevany_backend.engine.families.qwen3_5 import delta_shape
from jevany_backend.engine.kernels import FUSED, TWINS, Kernels
from jevany_backend.engine.kernels.add_rms_norm import Norm
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape, Rotary
from jevany_backend.engine.measured import Measured, elapsed

_REPEATS = 5


def time_kernels(
    config: Any, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Time the kernels of a family, and hold their results against their twins'.

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
    def noise(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(kind)

    def both(run: Callable[[Kernels], object]) -> tuple[Callable[[int], object], Callable[[int], object]]:
        return (lambda _: run(FUSED)), (lambda _: run(TWINS))

    gates: dict[str, Literal["beside", "behind", "none"]] = {"qwen3_5_text": "beside", "muse_glimmer_text": "behind"}
    layer = config.per_layer_config[0]
    attention = AttentionShape(
        config.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
        gates.get(config.model_type, "none"),
        values_normed=config.model_type == "gemma4_text",
    )
    stream, update = noise(length, config.hidden_size), noise(length, config.hidden_size)
    norm = Norm(noise(config.hidden_size), 1e-6)
    halves = noise(length, 2 * config.intermediate_size).chunk(2, dim=1)
    activation = "gelu_pytorch_tanh" if config.model_type == "gemma4_text" else "silu"
    packed = noise(length, attention.keys_begin + 2 * attention.keys * attention.width)
    angles = torch.rand(length, attention.width // 8, device=device)
    head = Norm(noise(attention.width), 1e-6)
    calls = {
        # The stream would grow with every run.
        "add_rms_norm": both(lambda kernels: kernels.add_rms_norm(stream.clone(), update, norm)),
        "add_rms_norm of a normed delta": both(
            lambda kernels: kernels.add_rms_norm(stream.clone(), update, norm, delta_norm=norm)
        ),
        "glu": both(lambda kernels: kernels.glu(*halves, activation)),
        "qk_norm_rotary": both(
            lambda kernels: kernels.qk_norm_rotary(packed, attention, head, head, Rotary(angles, angles), None)
        ),
    }
    if attention.gates != "none":
        attended = noise(length, attention.queries, attention.width)
        calls["sigmoid_gate"] = both(lambda kernels: kernels.sigmoid_gate(attended, packed, attention))
    if config.model_type == "gemma4_text":
        columns = config.num_hidden_layers * config.hidden_size_per_layer_input
        projected, table = noise(length, columns), noise(1000, columns)
        ids = torch.randint(0, 1000, (length,), device=device)
        narrow = Norm(noise(config.hidden_size_per_layer_input), 1e-6)
        calls["per_layer_inputs"] = both(
            lambda kernels: kernels.per_layer_inputs(projected, ids, table, narrow, config.hidden_size**-0.5)
        )
    if config.model_type == "qwen3_5_text":
        delta = delta_shape(config)
        mixed = noise(length, delta.columns)
        filters, a_log, bias = noise(delta.convolved, 4), noise(delta.values), noise(delta.values)
        heads, value_norm = noise(length, delta.values, delta.value_width), noise(delta.value_width)
        inputs = TWINS.delta_inputs(mixed, delta, filters, a_log, bias)
        calls |= {
            "delta_inputs": both(lambda kernels: kernels.delta_inputs(mixed, delta, filters, a_log, bias)),
            "gated_rms_norm": both(
                lambda kernels: kernels.gated_rms_norm(heads, mixed[:, delta.gate], value_norm, 1e-6)
            ),
            "delta_rule": both(lambda kernels: kernels.delta_rule(inputs)),
        }
    return calls

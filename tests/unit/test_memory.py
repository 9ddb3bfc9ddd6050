"""Whether a model fits, said before its first byte is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from jevany_backend.checkpoint import (
    CheckpointError,
    load,
    load_text_model,
    memory,
    memory_need,
    open_checkpoint,
    plan,
)
from jevany_backend.checkpoint.memory import MemoryNeed, check_memory, free_memory, workspace
from jevany_backend.checkpoint.random_weights import released_config
from tests.checkpoint_factory import make_checkpoint

GB = 10**9
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
NEED = MemoryNeed(51 * GB, 10**7, 2 * GB, torch.bfloat16)


def test_what_fits_is_let_through() -> None:
    check_memory(NEED, GPU, (NEED.total, 80 * GB))
    check_memory(NEED, CPU, (NEED.total, 80 * GB))


@pytest.mark.parametrize(
    ("device", "dtype", "free", "total", "place", "changes"),
    [
        (GPU, torch.bfloat16, 22, 24, "GPU 1", "a smaller variant (jevany-4b), a lower max_row_tokens, another GPU "
         "(gpus in instance_group)"),
        (GPU, torch.float32, 22, 24, "GPU 1", "dtype bfloat16, a smaller variant (jevany-4b), a lower max_row_tokens, "
         "another GPU (gpus in instance_group)"),
        (GPU, torch.bfloat16, 50, 80, "GPU 1", "a smaller variant (jevany-4b), a lower max_row_tokens, another GPU "
         "(gpus in instance_group), ending what else uses this one"),
        (CPU, torch.bfloat16, 22, 24, "this machine", "a smaller variant (jevany-4b), a lower max_row_tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_explained(
    device: torch.device, dtype: torch.dtype, free: int, total: int, place: str, changes: str
) -> None:
    need = MemoryNeed(NEED.weights, NEED.head, NEED.workspace, dtype)
    with pytest.raises(CheckpointError) as raised:
        check_memory(need, device, (free * GB, total * GB))
    assert str(raised.value) == (
        f"not enough memory: the model needs 53.0 GB (51.0 of weights in {str(dtype).removeprefix('torch.')}, 0.01 of "
        f"head, 2.0 to load and to run), but {place} has {free}.0 GB free of {total}.0; what helps: {changes}"
    )


def test_a_model_that_does_not_fit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_checkpoint(tmp_path)
    files = open_checkpoint(str(made.adapter), str(made.base))
    monkeypatch.setattr(memory, "free_memory", lambda device: (10**6, 10**6))
    monkeypatch.setattr(load, "build_model", None)
    with pytest.raises(CheckpointError, match="not enough memory: the model needs"):
        load_text_model(files, CPU, torch.float32)


@pytest.mark.parametrize("mode", ["pointer", "lm_token"])
def test_the_need_is_that_of_the_loaded_weights(tmp_path: Path, mode: str) -> None:
    made = make_checkpoint(tmp_path, family="gemma4", added_tokens=True, decision_mode=mode)
    files = open_checkpoint(str(made.adapter), str(made.base))
    need = memory_need(files, plan(files, torch.bfloat16), 100)
    model = load_text_model(files, CPU, torch.bfloat16)
    assert need.weights == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert need.head == (255 * 64 * 2 if mode == "lm_token" else (2 * 16 * 64 + 2 * 16) * 4)


MEASURED = [
    ("jevany-27b", "qwen3.8-27b"),
    ("jevany-30b", "muse-glimmer-30b"),
    ("jevany-4b", "qwen3.5-4b"),
    ("jevany-gemma-4b", "gemma-4-e4b-it"),
]


@pytest.mark.parametrize(("model", "shape"), MEASURED)
def test_the_estimate_is_what_the_releases_took_on_an_h200(model: str, shape: str) -> None:
    config = released_config(shape)
    results = Path(__file__).parents[2] / "loadtest" / "results" / "released-models-variants.json"
    measured = json.loads(results.read_text())[model]
    took, weights = measured["device_GB_peak"], measured["need"]["weights_GB"]
    assert took - 0.5 < weights + workspace(config, torch.bfloat16, 8192) / GB < took + 2
    assert workspace(config, torch.bfloat16, 128) < workspace(config, torch.bfloat16, 8192)


def test_this_machines_memory() -> None:
    free, total = free_memory(CPU)
    kilobytes = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert kilobytes is not None
    assert 0 < free <= total <= int(kilobytes[1]) * 1024


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 500000\n")
    control_group = memory._control_group
    assert control_group(tmp_path) == (1_000_000, 200_000)
    monkeypatch.setattr(memory, "_control_group", lambda: control_group(tmp_path))
    assert free_memory(CPU) == (800_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert control_group(tmp_path) == (None, 200_000)

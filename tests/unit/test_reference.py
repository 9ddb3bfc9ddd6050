"""The reference engine's choice of kernels."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jevany_backend.checkpoint.plan import build_model
from jevany_backend.encoding import Row
from jevany_backend.engine.reference import ReferenceEngine
from jevany_backend.readout import DirectTokenReadout
from tests.checkpoint_factory import qwen_config

_WHERE_FROM = """
import inspect, sys
from jevany_backend.engine.reference import hide_gpu_kernels
if sys.argv[1] == "cpu":
    hide_gpu_kernels()
from transformers.models.qwen3_5 import modeling_qwen3_5 as family
print(inspect.getclosurevars(family.causal_conv1d_fn).nonlocals["implementation"].__module__)
"""


def test_a_process_on_the_cpu_takes_no_gpu_kernel(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d.py").write_text("def causal_conv1d_fn(): ...\ncausal_conv1d_update = causal_conv1d_fn\n")
    found = {}
    for device in ("cpu", "cuda"):
        result = subprocess.run(
            [sys.executable, "-c", _WHERE_FROM, device],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found[device] = result.stdout.strip()
    assert found == {"cpu": "transformers.models.qwen3_5.modeling_qwen3_5", "cuda": "causal_conv1d"}


def test_without_gpu_kernels_transformers_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as family

    def found(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inspect.unwrap(function))
        def kernel(*_: Any, **__: Any) -> None:
            raise RuntimeError("a kernel from elsewhere")

        return kernel

    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(family, name, found(getattr(family, name)))
    model = build_model(qwen_config(300), torch.device("cpu"), torch.float32)
    readout, row = DirectTokenReadout(torch.randn(4, 64)), Row([1, 2, 3, 4, 5], 4, [2, 3])
    assert len(ReferenceEngine(model, readout, gpu_kernels=False).probabilities(row)) == 2
    with pytest.raises(RuntimeError, match="elsewhere"):
        ReferenceEngine(model, readout).probabilities(row)

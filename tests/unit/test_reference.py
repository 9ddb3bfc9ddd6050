"""The reference engine's choice of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

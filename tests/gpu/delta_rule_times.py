"""The delta rule of the released models by every implementation that is installed, over row lengths, on one GPU.

``python -m tests.gpu.delta_rule_times OUT.json``: our kernels in all their plans, flash-linear-attention's, and
FlashQLA's where ``flash_qla`` is installed. FLA hands over to that one without a word, so the names of the GPU kernels
that really ran stand beside the times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jevany_backend.checkpoint.random_weights import released_config
from jevany_backend.engine.delta_choice import DeltaRule, example
from jevany_backend.engine.families.qwen3_5 import delta_shape
from jevany_backend.engine.kernels.fla_delta_rule import fla_delta_rule, installed
from jevany_backend.engine.measured import Measured
from jevany_bench import machine, result

SHAPES = ("qwen3.8-27b", "qwen3.5-4b")
LONGEST = 4096
NAMED = 512


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="delta_rule_times", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="what the result names as the code's commit; git's answer if left out")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    content: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": options.commit or machine.commit() or "unknown",
        "machine": machine.describe(device),
        "kernels": {},
        "microseconds": {},
        "fastest": {},
    }
    for shape in SHAPES:
        delta = delta_shape(released_config(shape))
        if not content["kernels"]:
            inputs = example(NAMED, delta, torch.bfloat16, device)
            for name, flash_qla in installed().items():
                run = partial(fla_delta_rule, inputs, flash_qla=flash_qla)
                run()
                content["kernels"][name] = _kernel_names(run)
        measured = Measured(device)
        measured.times = {}
        chosen = DeltaRule(measured, delta, torch.bfloat16, LONGEST)
        content["microseconds"][shape] = measured.times
        content["fastest"][shape] = dict(zip(map(str, chosen.rows), chosen.names, strict=True))
        result.write(content, options.out)
        print(f"{shape}: {chosen}", flush=True)


def _kernel_names(run: Callable[[], object]) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return sorted({event.key[:100] for event in recorded.key_averages() if event.self_device_time_total > 0})


if __name__ == "__main__":
    main()

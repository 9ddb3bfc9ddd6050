"""The machine under the benchmark: what it is, and what its memory and tensor cores can do at best."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jevany_backend.engine.measured import driver_version, elapsed, package_version

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "causal-conv1d",
    "flash-qla",
    "tilelang",
    "numpy",
    "tritonclient",
    "locust",
)
_GPU_FIELDS = ("name", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "mig.mode.current")


@dataclass(frozen=True)
class Limits:
    """What no forward pass can beat on this machine.

    Attributes:
        bytes_a_second: Of copying, reading and writing together.
        operations_a_second: Of a large product in the model's dtype, two for each multiply-add.
    """

    bytes_a_second: float
    operations_a_second: float

    def floor_ms(self, matrix_bytes: int, itemsize: int, tokens: int) -> float:
        """Return the least milliseconds of a row: its matrices read once, or its products at the peak.

        Args:
            matrix_bytes: The bytes of all matrices of the model.
            itemsize: Bytes a weight.
            tokens: The row's length.
        """
        operations = 2 * matrix_bytes / itemsize * tokens
        return 1e3 * max(matrix_bytes / self.bytes_a_second, operations / self.operations_a_second)


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware, driver and versions, as this process uses them."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        **describe_host(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def describe_host() -> dict[str, Any]:
    """Return what is known of this machine without using its GPUs."""
    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "gpus": gpus(),
        "driver": driver_version(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
    }


def processor() -> str:
    """Return the processor's name, ``cpu`` where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "cpu"


def container_image() -> str | None:
    """Return which of NVIDIA's Triton images this process runs in, None where in none."""
    version = os.environ.get("NVIDIA_TRITON_SERVER_VERSION")
    return version and f"container image {version}"


def origin() -> str:
    """Return how this process's software came here: in a container image, as a package or as files."""
    version = package_version("jevany-triton")
    return container_image() or (f"jevany-triton {version}" if version else "files without an installation")


def gpus() -> list[dict[str, str]]:
    """Return each GPU's name, clocks in MHz, power limit in W and MIG mode, by its driver; none without a driver."""
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    try:
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(_GPU_FIELDS, line.split(", "), strict=True)) for line in found.stdout.splitlines() if line]


def commit() -> str | None:
    """Return the commit of the working tree, with a plus sign where it is changed; None where there is none."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits | None:
    """Measure what the GPU can do at best; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(elapsed(lambda: target.copy_(source)) for _ in range(5))
    # The cache gives both back where the model needs them.
    square = torch.randn(8192, 8192, dtype=dtype, device=device)
    product = min(elapsed(lambda: square @ square) for _ in range(5))
    return Limits(2 * (1 << 30) / seconds, 2 * 8192**3 / product)

"""Times measured on this GPU, kept on disk, so that what is fastest is chosen once for a machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch

log = logging.getLogger(__name__)

Times = dict[str, float | None]

# Lengths of rows at which what works on a whole row is timed; the last is the longest that has a graph.
ROW_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)

# A graph is repeated until about this long has passed, so that a clock's tick and a launch do not count.
_SECONDS_A_REPLAY = 300e-6
_REPLAYS = 3
_MAX_RUNS = 24
_ROUNDING = 0.02  # Some steps of bfloat16.


class Measured:
    """Answers "how long does each of these take here?", from disk where it has been asked before.

    Args:
        device: The device. On a CPU nothing is measured.
        directory: Where times are kept; None for ``jevany-triton`` in the user's cache directory.
    """

    def __init__(self, device: torch.device, directory: Path | None = None) -> None:
        self.device = device
        self.measured_now = 0
        self._kept = 0
        self.times: dict[str, Times] = {}
        self._path: Path | None = None
        if device.type == "cuda":
            self.machine = describe_gpu(device)
            key = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
            self._path = (directory or _cache_directory()) / f"times-{key}.json"
            self.times = self._read()

    def compare(self, question: str, candidates: Mapping[str, Callable[[int], object]]) -> Times:
        """Time candidates against each other.

        Args:
            question: What is asked, with all that the times depend on but the machine.
            candidates: Name -> a function that does the work once; its argument counts the runs, so that it can take
                different weights each time, as a model does.

        Returns:
            Name -> microseconds a run, or None for one that cannot run here; empty on a CPU.
        """
        if self.device.type != "cuda":
            return {}
        known = self.times.setdefault(question, {})
        for name, run in candidates.items():
            if name not in known:
                known[name] = _time(run)
                self.measured_now += 1
        return {name: known[name] for name in candidates}

    def keep(self) -> None:
        """Write what has been measured to disk. Where that fails, the next start measures again."""
        if self._path is None or self.measured_now == self._kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"machine": self.machine, "microseconds": self.times}, indent=1))
            new.replace(self._path)
            self._kept = self.measured_now
        except OSError as error:
            log.warning("%s: %s; what was measured is not kept", self._path, error.strerror or error)

    def _read(self) -> dict[str, Times]:
        assert self._path is not None
        try:
            content = json.loads(self._path.read_text())
            return dict(content["microseconds"]) if content["machine"] == self.machine else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def lengths_up_to(longest: int, lengths: Collection[int] = ROW_LENGTHS) -> list[int]:
    """Return those of the lengths that are at most so long, and the least of them in any case."""
    return [length for length in lengths if length <= longest] or [min(lengths)]


def fastest(times: Times, is_right: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return the name of the least time whose result is right; None where there is none.

    Args:
        times: As `Measured.compare` returns them.
        is_right: Whether a candidate computes what it should; asked in order of time, until one does.
    """
    ran = sorted((time, name) for name, time in times.items() if time is not None)
    for _, name in ran:
        if is_right(name):
            return name
        log.error("%s computes something else on this GPU, and is left out", name)
    return None


def counted(chosen: Iterable[object]) -> str:
    """Return in words what was chosen how often: ``flash (4), cudnn (8)``."""
    return ", ".join(f"{name} ({count})" for name, count in Counter(map(str, chosen)).items())


def agree(ours: torch.Tensor, twin: torch.Tensor) -> bool:
    """Return whether two results differ by rounding alone, as a norm; what is not finite does not agree."""
    return bool((ours.float() - twin.float()).norm() <= _ROUNDING * twin.float().norm())


def describe_gpu(device: torch.device) -> dict[str, str]:
    """Return what times depend on: the GPU, its driver, the libraries that compute, and our own kernels."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version() or "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        **{
            package: package_version(package) or "none" for package in ("triton", "flash-linear-attention", "flash-qla")
        },
        "kernels": _source_hash(Path(__file__).parent / "kernels"),
    }


def driver_version() -> str | None:
    """Return the line in which NVIDIA's driver names itself; None where there is none."""
    driver = Path("/proc/driver/nvidia/version")
    return driver.read_text().splitlines()[0] if driver.is_file() else None


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_hash(directory: Path) -> str:
    sources = b"".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:16]


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "jevany-triton"


def _time(run: Callable[[int], object]) -> float | None:
    """Return the microseconds of one run, inside a graph, as it will be used; None if it cannot run."""
    try:
        run(0)
        torch.cuda.synchronize()
        once = elapsed(lambda: run(1))
        runs = max(2, min(_MAX_RUNS, int(_SECONDS_A_REPLAY / max(once, 1e-6))))
        stream, graph = _stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(0)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for index in range(runs):
                    run(index)
            finally:
                graph.capture_end()
            graph.replay()
            best = min(elapsed(graph.replay) for _ in range(_REPLAYS))
        return best / runs * 1e6
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # A kernel that needs more than this GPU has, or that its compiler refuses, is no candidate.
        log.info("a candidate does not run here: %s", str(error).strip().splitlines()[:1])
        return None


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace for each stream that it has been called on.
    return torch.cuda.Stream(device)


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """Return the median of some runs' seconds, by the host's clock."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def elapsed(run: Callable[[], object]) -> float:
    """Return the seconds that work takes on the current stream, and wait for its end."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3

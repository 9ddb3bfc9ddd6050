"""The released models at their true shapes on one GPU: parity, every variant through Triton, and loading from disk.

``python -m tests.gpu.released_models OUT`` writes a JSON file for each phase. Nothing is downloaded: weights are
random, and the results say so. With ``--tiny`` every shape is small and the CPU does. Each phase has its share of the
time, and what it has found when that is over stays.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jevany_backend.engine.measured import package_version
from jevany_bench import machine
from jevany_bench import result as results

ROOT = Path(__file__).parents[2]
GB = 1e9
# Those that compile few kernels first: what they leave of their time, the others have.
VARIANTS = ("jevany-30b", "jevany-gemma-4b", "jevany-4b", "jevany-4b-direct-token", "jevany-27b")
FAMILIES = ("qwen3_5", "muse_glimmer", "gemma4")
# In the order in which they run. Of the time, each keeps this share whatever those before it take; the last, which
# needs the most, has all that they leave.
SHARES = {"loading": 0.33, "parity": 0.1, "parity_with_kernels": 0.12, "variants": 0.45}
# What a phase then has to end in, and what a killed one has.
GRACE_SECONDS = 10
KILL_SECONDS = 2
QUESTIONS: dict[str, dict[str, Any]] = {
    "noul": {"type": "noul", "instructions": "Is the customer asking for a refund?"},
    "choice": {"type": "choice", "criteria": {"billing": "Charges", "shipping": "Parcels", "technical": None}},
    "score": {"type": "score", "instructions": "How urgent is it?", "criteria": ["can wait", "this week", "today"]},
}
STATE = "We were charged twice for the October invoice. Please refund one of the payments today."


def main() -> int:
    """Run the phases one after another, each in a process of its own; the exit code is 0 if all gave results."""
    options = _arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.phase:
        return _run_phase(options)
    deadline = time.monotonic() + options.seconds - GRACE_SECONDS - KILL_SECONDS
    kept = 1.0
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for phase, share in SHARES.items():
            kept -= share
            limit = max(deadline - time.monotonic() - kept * options.seconds, 1)
            command = [sys.executable, "-m", "tests.gpu.released_models", str(options.out), "--phase", phase]
            command += ["--seconds", str(limit), "--scratch", scratch, *(["--tiny"] if options.tiny else [])]
            command += ["--triton", str(options.triton)] if options.triton else []
            command += ["--disk", str(options.disk)] if options.disk else []
            command += ["--commit", options.commit or machine.commit() or "unknown"]
            _say(f"{phase}: {limit:.0f} s at most")
            if code := _wait(subprocess.Popen(command, cwd=ROOT), limit):
                failed.append(f"{phase} ended with {code}")
    _say("; ".join(failed) or "all phases gave results")
    return 1 if failed else 0


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | str:
    """Return a process's exit code; end it when the time is over, in good order if it can."""
    for end in (process.terminate, process.kill):
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            end()
            limit = GRACE_SECONDS
    with suppress(subprocess.TimeoutExpired):  # One that waits for a disk cannot even be killed.
        return process.wait(KILL_SECONDS)
    return "no end"


def _run_phase(options: argparse.Namespace) -> int:
    # The end of the time unwinds what has been begun: servers stop, and files go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("released_models: the time is over"))
    results = _Results(options.out / f"{options.phase}.json", options)
    run = {"parity": _parity, "parity_with_kernels": _parity_with_kernels, "variants": _variants, "loading": _loading}
    started = time.monotonic()
    try:
        with results.part(options.phase):
            run[options.phase](options, results)
            results.content["complete"] = not results.errors
    except SystemExit as end:
        results.errors[options.phase] = str(end)
        raise
    finally:
        results.add("seconds", round(time.monotonic() - started, 1))
    return 1 if results.errors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="released_models", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--seconds", type=float, default=400, help="time for everything (400)")
    parser.add_argument("--triton", type=Path, help="unpacked Triton archive; the installed wheel's if left out")
    parser.add_argument("--disk", type=Path, help="directory for the 27B base; the one for temporary files if left out")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--commit", help="what the results name as the code's commit; git's answer if left out")
    parser.add_argument("--phase", choices=list(SHARES), help="run this one only, in this process")
    parser.add_argument("--models", nargs="+", choices=VARIANTS, default=VARIANTS, help="of the phase variants; all")
    parser.add_argument("--scratch", type=Path, help="directory for what one parity phase leaves the other; OUT")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"released_models: {text}", flush=True)


class _Results:
    """A result file that is whole after every entry.

    Attributes:
        errors: Part -> why it failed.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path
        self.errors: dict[str, str] = {}
        self.content: dict[str, Any] = {
            "weights": "random",
            "tiny": options.tiny,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": options.commit or machine.commit() or "unknown",
            "hardware": _hardware(options.tiny),
            "versions": _versions(),
            "complete": False,
            "errors": self.errors,
        }
        self.save()

    def save(self) -> None:
        results.write(self.content, self.path)

    def add(self, name: str, value: Any) -> None:
        self.content[name] = value
        self.save()
        _say(f"{self.path.stem} {name}: {json.dumps(value)}")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note why a part fails, and go on after it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.errors[name] = f"{type(error).__name__}: {error}"[:500]
            self.save()


def _versions() -> dict[str, str]:
    import torch

    packages = ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d", "peft", "numpy")
    return {
        "python": sys.version.split()[0],
        "cuda": str(torch.version.cuda),
        **{name: package_version(name) or "not installed" for name in (*packages, "safetensors", "tritonclient")},
    }


def _hardware(tiny: bool) -> dict[str, Any]:
    processor = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    found = {
        "processor": processor[1] if processor else platform.machine(),
        "processors": os.cpu_count(),
        "host_memory_GB_now": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB,
        "kernel": platform.release(),
        "gpu": "none used",
    }
    if not tiny:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        with suppress(OSError):
            found["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


# Parity: small models of each family's true structure, ours against transformers' own.

_CASES = (("pointer", 300), ("lm_token", 45))  # Both longer than every window.


def _parity(options: argparse.Namespace, results: _Results) -> None:
    from jevany_backend.engine.reference import hide_gpu_kernels

    # Without the kernels, which take no float32. Where they are missing, transformers computes the same in PyTorch.
    hide_gpu_kernels()
    _compare_families(options, results, FAMILIES, kernels=False)


def _parity_with_kernels(options: argparse.Namespace, results: _Results) -> None:
    from jevany_backend.engine.reference import hide_gpu_kernels

    if options.tiny:
        hide_gpu_kernels()  # They run on a GPU alone.
    _compare_families(options, results, ("qwen3_5",), kernels=True)


def _compare_families(
    options: argparse.Namespace, results: _Results, families: Sequence[str], *, kernels: bool
) -> None:
    import torch

    torch.backends.cudnn.allow_tf32 = False  # Else a float32 convolution is none.
    device = torch.device("cpu" if options.tiny else "cuda")
    for family in families:
        for readout, length in _CASES:
            name = f"{family} {readout} {length}"
            reference = (options.scratch or options.out) / f"{name.replace(' ', '-')}.pt"
            with results.part(name), tempfile.TemporaryDirectory() as directory:
                entry = _compare(Path(directory), family, readout, length, device, options.tiny, reference, kernels)
                results.add(name, entry)


def _compare(
    directory: Path, family: str, readout: str, length: int, device: Any, tiny: bool, saved: Path, kernels: bool
) -> dict[str, Any]:
    """Compare one small model; the float32 reference is computed without kernels and kept for the run with them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from jevany_backend.checkpoint import load_readout, load_text_model, open_checkpoint
    from jevany_backend.encoding import Row
    from jevany_backend.engine.reference import ReferenceEngine, live_kernels
    from tests.checkpoint_factory import TRUE_WIDTHS, make_checkpoint

    made = make_checkpoint(
        directory,
        family=family,
        decision_mode=readout,
        base_dtype=torch.bfloat16,
        config_changes={} if tiny else TRUE_WIDTHS[family],
    )
    files = open_checkpoint(str(made.adapter), str(made.base))
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    row = Row(ids, decide=length - 1, option_ends=[20, 30, length - 3])
    whole = AutoModelForImageTextToText.from_pretrained(made.base, dtype=torch.float32).model.eval()
    whole.language_model = PeftModel.from_pretrained(whole.language_model, str(made.adapter)).merge_and_unload()

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        # As transformers loads it in that dtype, which keeps its rotary tables in float32; with the merged weights.
        model = AutoModelForImageTextToText.from_pretrained(made.base, dtype=dtype).model.eval()
        model.load_state_dict(whole.state_dict())
        model.to(device)
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0]
        return hidden[[row.decide, *row.option_ends]]

    def ours(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        model = load_text_model(files, device, dtype)
        return model, ReferenceEngine(model, load_readout(files, device, dtype)).hidden_states(row)

    entry: dict[str, Any] = {}
    if kernels:
        reference = torch.load(saved).to(device)
    else:
        reference = theirs(torch.float32)
        torch.save(reference.cpu(), saved)
        _, exact = ours(torch.float32)
        head = load_readout(files, device, torch.float32)
        entry["float32_to_transformers"] = _error(exact, reference)
        entry["largest_probability_difference_float32"] = _largest(head(exact), head(reference))
    model, rounded = ours(torch.bfloat16)
    own = theirs(torch.bfloat16)
    head = load_readout(files, device, torch.bfloat16)
    return entry | {
        "bfloat16_to_transformers_bfloat16": _error(rounded, own),
        "bfloat16_to_transformers_float32": _error(rounded, reference),
        "transformers_bfloat16_to_float32": _error(own, reference),
        "largest_probability_difference_bfloat16": _largest(head(rounded), head(own)),
        "kernels": live_kernels(model),
    }


def _error(value: Any, reference: Any) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def _largest(value: Any, reference: Any) -> float:
    return float((value.double() - reference.double()).abs().max())


# Variants: each through its real Triton model code, with random weights of its true shape.


# Of a variant's time, what is kept for its long row, whatever start and short rows take: the first pass of a shape
# compiles and tunes kernels.
_LONG_ROW_SHARE = 0.4


def _variants(options: argparse.Namespace, results: _Results) -> None:
    deadline = time.monotonic() + options.seconds - 5
    for number, name in enumerate(options.models):
        now = time.monotonic()
        entry: dict[str, Any] = {"seconds_at_most": round((deadline - now) / (len(options.models) - number), 1)}
        results.content[name] = entry  # What there is of it stays if it fails.
        with results.part(name):
            _variant(options, name, entry["seconds_at_most"], entry, results.save)
        entry["seconds"] = round(time.monotonic() - now, 1)
        results.add(name, entry)


def _variant(
    options: argparse.Namespace, name: str, seconds: float, entry: dict[str, Any], save: Callable[[], None]
) -> None:
    """Serve one variant, ask it one question of each type and a row as long as it takes, and stop it again."""
    import torch
    import tritonclient.grpc as triton

    from jevany_backend.checkpoint.random_weights import open_random, random_memory_need
    from jevany_server.process import Ports, TritonServer

    end = time.monotonic() + seconds
    deadline = end - seconds * _LONG_ROW_SHARE

    def used() -> float:
        return 0 if options.tiny else _device_memory()

    if not options.tiny:
        adapter = re.search(r'key: "adapter" value: { string_value: "(.*?)"', _config(name).read_text())
        assert adapter is not None
        need = random_memory_need(open_random(adapter[1]), torch.bfloat16, 8192)
        entry["need"] = {"weights_GB": need.weights / GB, "workspace_GB": need.workspace / GB}
    with (
        tempfile.TemporaryDirectory() as directory,
        (options.out / "triton.log").open("a+b") as log,
        _Sampler(used) as peak,
    ):
        repository = _variant_folder(Path(directory), name, options.tiny)
        installation = _installation(options.triton)
        before, started, log_begin = used(), time.monotonic(), log.seek(0, os.SEEK_END)
        try:
            with TritonServer(
                repository,
                [name],
                ports=Ports(0, 0, 0),
                log=log,
                weights="random",
                installation=installation,
            ) as server:
                server.wait_until_ready(max(deadline - time.monotonic(), 1))
                entry["ready_seconds"] = round(time.monotonic() - started, 1)
                entry["device_GB_at_ready"] = (used() - before) / GB
                entry["host_at_ready"] = _host_memory(server.process.pid)
                with triton.InferenceServerClient(server.grpc_url) as client:
                    entry["triton_server"] = client.get_server_metadata().version
                save()
                entry["answers"] = answers = {}
                for kind, question in QUESTIONS.items():
                    answers[kind] = _ask(server.grpc_url, name, STATE, question, deadline)
                    save()
                entry["device_GB_after_answers"] = (used() - before) / GB
                # One byte is one token of the stand-in tokenizer.
                state = STATE * (1000 if options.tiny else 8000 // len(STATE))
                state = state[: 800 if options.tiny else 8000]
                entry["long_row"] = _ask(server.grpc_url, name, state, QUESTIONS["choice"], end, times=2)
                entry["device_GB_after_long_row"] = (used() - before) / GB
                entry["host_at_end"] = _host_memory(server.process.pid)
        finally:
            entry["device_GB_peak"] = (peak.largest - before) / GB
            log.seek(log_begin)
            entry["log"] = re.findall(rf'"{name}[^":]*: (.*)"\n', log.read().decode(errors="replace"))


def _config(name: str) -> Path:
    return ROOT / "model_repository" / name / "config.pbtxt"


def _variant_folder(directory: Path, name: str, tiny: bool) -> Path:
    """Return a repository with a model: the one there is, or a copy of the model that is small and for the CPU."""
    if not tiny:
        return ROOT / "model_repository"
    from tests.checkpoint_factory import gemma_config, muse_config, qwen_config

    repository = directory / "models"
    shutil.copytree(ROOT / "model_repository" / name, repository / name)
    path = repository / name / "config.pbtxt"
    make = gemma_config if "gemma" in name else muse_config if "30b" in name else qwen_config
    make(600).save_pretrained(directory / "shape")
    (repository / name / "1" / "base").symlink_to(directory / "shape")
    text = re.sub(r'(key: "base" value: \{ string_value: )"[^"]*"', r'\1"1/base"', path.read_text())
    path.write_text(re.sub(r"kind: KIND_GPU\s+gpus: \[ 0 \]", "kind: KIND_CPU", text))
    return repository


def _installation(archive: Path | None) -> Any:
    from jevany_server.installation import STUB_NAME, Installation, find_installation

    if archive is None:
        return find_installation()
    triton = archive / "tritonserver"
    stub = triton / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / STUB_NAME
    python_backend = triton / "backends" / "python"
    return Installation(triton / "bin" / "tritonserver", python_backend, stub, (archive / "nvidia_pytriton.libs",))


def _ask(url: str, model: str, state: str, question: dict[str, Any], deadline: float, times: int = 6) -> dict[str, Any]:
    """Ask a question several times; the first call may compile kernels."""
    import numpy as np
    import tritonclient.grpc as triton

    tensor = triton.InferInput("REQUEST", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[json.dumps({"state": state, "question": question}).encode()]], np.object_))
    taken, model_ms = [], []
    with triton.InferenceServerClient(url) as client:
        for _ in range(times):
            started = time.perf_counter()
            reply = client.infer(model, [tensor], client_timeout=max(deadline - time.monotonic(), 1))
            taken.append((time.perf_counter() - started) * 1000)
            content = json.loads(reply.as_numpy("ANSWER").reshape(-1)[0])
            assert content["weights"] == "random", content
            model_ms.append(content["latency_ms"])
    probabilities = reply.as_numpy("PROBABILITIES").reshape(-1)
    assert np.isfinite(probabilities).all(), probabilities
    assert abs(float(probabilities.sum()) - 1) < 1e-3, probabilities
    return {
        "weights": content["weights"],
        "probabilities": probabilities.tolist(),
        "input_tokens": content["usage"]["input_tokens"],
        "first_ms": round(taken[0], 1),
        "median_ms_of_the_others": round(statistics.median(taken[1:]), 2),
        "first_model_ms": model_ms[0],
        "median_model_ms_of_the_others": round(statistics.median(model_ms[1:]), 3),
    }


def _host_memory(server: int) -> dict[str, float]:
    from jevany_server.backend_processes import find_backend_processes

    [process] = find_backend_processes(server)
    return _process_memory(process.pid)


def _process_memory(pid: int | str) -> dict[str, float]:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    names = {"VmHWM": "peak_GB", "RssAnon": "own_GB", "RssFile": "mapped_files_GB", "RssShmem": "shared_GB"}
    return {label: int(fields[name].split()[0]) * 1024 / GB for name, label in names.items()}


def _device_memory() -> float:
    """The bytes in use on the GPU, asked for without making a context there."""
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


class _Sampler:
    """Calls a function again and again and keeps the largest value."""

    def __init__(self, value: Callable[[], float]) -> None:
        self._value = value
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.largest = 0.0

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self.largest = max(self.largest, self._value())

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# Loading: a base of random values with the true names and shapes, as shards on disk, through the real loader.


def _loading(options: argparse.Namespace, results: _Results) -> None:
    import torch

    deadline = time.monotonic() + options.seconds
    device = torch.device("cpu" if options.tiny else "cuda")
    directory = Path(tempfile.mkdtemp(prefix="base-", dir=options.disk))
    try:
        writer = _BaseWriter(directory, device, options.tiny)
        # Two readings of everything, two loads and the cold shards take about as long as the writing.
        results.add("written", writer.write((deadline - time.monotonic()) * 0.5))
        _load(results, directory, writer, device, deadline)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _load(results: _Results, directory: Path, writer: _BaseWriter, device: Any, deadline: float) -> None:
    import torch

    from jevany_backend.checkpoint import memory_need, open_checkpoint, plan

    cuda = device.type == "cuda"
    files = open_checkpoint(str(directory / "adapter"), str(directory / "base"))
    weights = plan(files, torch.bfloat16)
    by_shard = weights.by_shard()
    size = sum(weights.stored[name].nbytes for names in by_shard.values() for name in names)
    results.add("sizes", {"read_GB": size / GB, "served_GB": weights.nbytes / GB, "shards_read": len(by_shard)})
    results.add("memory_need", str(memory_need(files, weights, 8192)))
    # Before and after, since the host that this machine is on has other guests. If the page cache could not hold the
    # files, it may only take so long: the loads need their time, too.
    results.add("plain_read", PLAIN_READ)
    plain = [_plain_read(list(by_shard), (deadline - time.monotonic()) * 0.2)]
    results.add("plain_read_before", plain[0])
    if cuda:
        results.add("pinned_memory_to_device", _link_rate(device))
    # The first load of a process also sets up cuBLAS and loads kernels, as that of a server does.
    model, load = _measured_load(files, weights.nbytes, size, device)
    loads = {"load": load}
    results.add("load", load)
    with results.part("values"):
        results.add("values", writer.check(model))
    with results.part("load_again"):
        if deadline - time.monotonic() < 10:
            raise TimeoutError("not begun: the time is over")
        del model
        model, loads["load_again"] = _measured_load(files, weights.nbytes, size, device)
        results.add("load_again", loads["load_again"])
    with results.part("cold"):
        if deadline - time.monotonic() < 5:
            raise TimeoutError("not begun: the time is over")
        results.add("cold", _cold(weights, model, device, writer.settled))
    with results.part("plain_read_after"):
        if deadline - time.monotonic() < 5:
            raise TimeoutError("not begun: the time is over")
        plain.append(_plain_read(list(by_shard), deadline - time.monotonic() - 4))
        results.add("plain_read_after", plain[1])
    plain_rate = statistics.mean(reading["GB_per_s"] for reading in plain)
    shares = {
        name: {part: rate / plain_rate for part, rate in load["GB_per_s"].items()} for name, load in loads.items()
    }
    results.add("share_of_plain_read", shares)
    if cuda:
        goals = {
            "whole_call_is_70_percent_of_plain_read": shares["load"]["whole_call"] >= 0.7,
            "device_memory_is_under_weights_and_2_GB": load["device_GB_over_weights"]["used_peak"] < 2,
        }
        results.add("goals", goals)


def _measured_load(files: Any, served: int, read: int, device: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model of so many bytes from so many; return it with times, rates and the peaks of memory."""
    import torch

    from jevany_backend.checkpoint import load_text_model

    cuda = device.type == "cuda"
    lines = _LogLines()
    logger = logging.getLogger("jevany_backend")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    if cuda:
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # The peak of the host's memory starts anew.
    host, used, from_disk = _process_memory("self"), _device_memory() if cuda else 0, _bytes_from_disk()
    with _Sampler(lambda: _device_memory() if cuda else 0) as sampler:
        begun = time.monotonic(), time.thread_time(), time.process_time()
        model = load_text_model(files, device, torch.bfloat16)
        ended = time.monotonic(), time.thread_time(), time.process_time()
    logger.removeHandler(lines)
    after = _process_memory("self")
    seconds, in_thread, in_process = (end - begin for begin, end in zip(begun, ended, strict=True))
    stream = float(lines.lines[-1].split(" GB in ")[1].split(" s, ")[0])
    entry: dict[str, Any] = {
        "seconds": {"whole_call": round(seconds, 3), "stream": stream},
        # Where the first is near the whole call's, the thread that gives the device its work is what limits.
        "processor_seconds": {"calling_thread": round(in_thread, 3), "all_threads": round(in_process, 3)},
        "GB_per_s": {"whole_call": read / GB / seconds, "stream": read / GB / max(stream, 0.01)},
        "GB_from_disk": (_bytes_from_disk() - from_disk) / GB,
        "host_GB_before": host,
        "host_GB_after": after,
        "host_GB_over_before": after["peak_GB"] - sum(value for key, value in host.items() if key != "peak_GB"),
        "log": lines.lines,
    }
    if cuda:
        peaks = {
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "reserved_after": torch.cuda.memory_reserved(),
            "used_peak": sampler.largest - used,
        }
        entry["device_GB"] = {name: peak / GB for name, peak in peaks.items()}
        entry["device_GB_over_weights"] = {name: (peak - served) / GB for name, peak in peaks.items()}
    return model, entry


class _LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _BaseWriter:
    """Writes a 27B base of as many layers as the time and the disk allow, and an adapter for it."""

    LAYERS_A_SHARD = 4
    RANK = 16

    def __init__(self, directory: Path, device: Any, tiny: bool) -> None:
        from transformers import Qwen3_5TextConfig

        from tests.checkpoint_factory import qwen_config

        self.base, self.adapter = directory / "base", directory / "adapter"
        self.base.mkdir()
        self.adapter.mkdir()
        self.device = device
        shape = ROOT / "python_backend" / "jevany_backend" / "shapes" / "qwen3.8-27b.json"
        layers = ["linear_attention"] * 3 + ["full_attention"]
        self.config = (
            qwen_config(600, num_hidden_layers=16, layer_types=layers * 4)
            if tiny
            else Qwen3_5TextConfig.from_json_file(str(shape))
        )
        self.config.tie_word_embeddings = False
        # Shards of layers that are on the disk as well as in the page cache.
        self.settled: list[Path] = []

    def write(self, seconds: float) -> dict[str, Any]:
        """Write the shards; take about so many seconds."""
        started = time.monotonic()
        shapes = self._shapes()
        width = (self.config.vocab_size, self.config.hidden_size)
        first: dict[str, tuple[int, ...]] = {
            "model.language_model.embed_tokens.weight": width,
            "model.language_model.norm.weight": width[1:],
        }
        # What a real base has and text serving must not read.
        head: dict[str, tuple[int, ...]] = {
            "lm_head.weight": width,
            "model.visual.blocks.0.mlp.up_proj.weight": (64, 64),
            "mtp.fc.weight": (64, 64),
        }
        groups: list[dict[str, tuple[int, ...]]] = [first, head]
        layers = self.config.num_hidden_layers
        for begin in range(0, layers, self.LAYERS_A_SHARD):
            mine = tuple(f"layers.{layer}." for layer in range(begin, begin + self.LAYERS_A_SHARD))
            groups.append(
                {f"model.language_model.{name}": shape for name, shape in shapes.items() if name.startswith(mine)}
            )
        shard_bytes = 2 * sum(math.prod(shape) for shape in groups[2].values())
        free = shutil.disk_usage(self.base).free - 4 * GB - 4 * math.prod(width)
        groups = groups[: 2 + max(4, int(free // shard_bytes))]
        # Threads take one shard after another, so those that are written when the time is over are the first ones.
        numbers, sizes, longest = itertools.count(), [0] * len(groups), [0.0]

        def work() -> None:
            while (number := next(numbers)) < len(groups):
                begun = time.monotonic()
                if number >= 2 + 4 and begun + longest[0] > started + seconds:
                    return
                sizes[number] = self._write_shard(number, groups[number], settle=number in (2, 3))
                longest[0] = max(longest[0], time.monotonic() - begun)

        with ThreadPoolExecutor(6) as pool:
            for part in [pool.submit(work) for _ in range(6)]:
                part.result()
        groups = groups[: sizes.index(0)] if 0 in sizes else groups
        for number in range(len(groups), len(sizes)):  # Left by a thread that still had time for one.
            (self.base / _shard_name(number)).unlink(missing_ok=True)
        layers = (len(groups) - 2) * self.LAYERS_A_SHARD
        self.config.num_hidden_layers = layers
        self.config.layer_types = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
        self._write_index(groups)
        self._write_adapter()
        took = time.monotonic() - started
        return {
            "layers": layers,
            "of_layers": 64,
            "layers_the_disk_allows": min(64, int(free // shard_bytes) * self.LAYERS_A_SHARD),
            "GB": sum(sizes) / GB,
            "shards": len(groups),
            "seconds": round(took, 1),
            "filesystem": subprocess.run(["df", "-hT", self.base], capture_output=True, text=True).stdout,
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        import torch

        from jevany_backend.checkpoint.plan import build_model

        model = build_model(self.config, torch.device("meta"), torch.bfloat16)
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def _values(self, name: str, shape: tuple[int, ...]) -> Any:
        """The random values of a tensor, which its name decides."""
        import torch

        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(std=shape[-1] ** -0.5, generator=generator)

    def _write_shard(self, number: int, tensors: dict[str, tuple[int, ...]], *, settle: bool) -> int:
        import torch

        header: dict[str, Any] = {}
        offset = 0
        for name, shape in tensors.items():
            nbytes = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = self.base / _shard_name(number)
        with path.open("wb", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in tensors.items():
                content = self._values(name, shape).cpu().reshape(-1).view(torch.uint8).numpy().data
                while content:
                    content = content[file.write(content) :]
            if settle:
                os.fsync(file.fileno())
                self.settled.append(path)
        return offset

    def _write_index(self, groups: list[dict[str, tuple[int, ...]]]) -> None:
        weight_map = {name: _shard_name(number) for number, group in enumerate(groups) for name in group}
        (self.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        whole = {"model_type": "qwen3_5", "text_config": self.config.to_dict(), "tie_word_embeddings": False}
        (self.base / "config.json").write_text(json.dumps(whole))

    def _write_adapter(self) -> None:
        import torch
        from safetensors.torch import save_file

        from jevany_backend.checkpoint.random_weights import stand_in_tokenizer
        from tests.checkpoint_factory import LORA_TARGETS

        tensors = {}
        for name, shape in self._shapes().items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in LORA_TARGETS:
                key = f"base_model.model.{module}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(self.RANK, shape[1]) * 0.02
                tensors[f"{key}.lora_B.weight"] = torch.randn(shape[0], self.RANK) * 0.02
        save_file(tensors, self.adapter / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": self.RANK, "lora_alpha": 2 * self.RANK, "target_modules": LORA_TARGETS}
        (self.adapter / "adapter_config.json").write_text(json.dumps(settings))
        stand_in_tokenizer(self.config.vocab_size).save_pretrained(self.adapter)
        width = self.config.hidden_size
        head = {"q.weight": (256, width), "q.bias": (256,), "k.weight": (256, width), "k.bias": (256,)}
        content = {"base": str(self.base), "lora": self.RANK, "head_dim": 256, "tokenizer_saved": True}
        content |= {"head": {name: torch.randn(shape) for name, shape in head.items()}, "weights_dtype": "bf16"}
        torch.save(content, self.adapter / "head.pt")

    def check(self, model: Any) -> dict[str, Any]:
        """Compare weights of the loaded model with their values, merged as a whole and rounded once."""
        from jevany_backend.checkpoint.adapter import read_adapter

        pairs = read_adapter(self.adapter).pairs
        last = self.config.num_hidden_layers - 1
        names = [
            "embed_tokens.weight",
            "norm.weight",
            "layers.0.linear_attn.conv1d.weight",
            "layers.0.linear_attn.A_log",
        ]
        names += [f"layers.{layer}.mlp.{part}_proj.weight" for layer in (0, last) for part in ("gate", "down")]
        names += [f"layers.{last}.self_attn.q_proj.weight", "layers.1.linear_attn.in_proj_a.weight"]
        compared = {}
        for name in names:
            weight = model.state_dict()[name]
            expected = self._values(f"model.language_model.{name}", tuple(weight.shape))
            if pair := pairs.get(name.removesuffix(".weight")):
                product = pair.up.to(self.device) @ pair.down.to(self.device)
                expected = expected.float().add_(product, alpha=pair.scale).bfloat16()
            compared[name] = int((weight == expected).sum()) / weight.numel()
        return {"share_of_equal_values": compared, "all_equal": all(share == 1 for share in compared.values())}


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05}.safetensors"


PLAIN_READ = (
    "every byte of the shards that are loaded, with the loader's number of threads, each from the page cache into two "
    "buffers of 8 MiB in host memory, made and touched before, used in turns; nothing goes to a device"
)


def _plain_read(paths: list[Path], limit: float = math.inf) -> dict[str, float]:
    """Read files to nowhere, see `PLAIN_READ`; in so many seconds, as much as can be."""
    from jevany_backend.checkpoint.stream import MAX_READERS

    threads, block = min(MAX_READERS, os.cpu_count() or 1), 8 << 20
    blocks = [(path, begin) for path in paths for begin in range(0, path.stat().st_size, block)]
    files = {path: os.open(path, os.O_RDONLY) for path in paths}
    buffers = [(bytearray(block), bytearray(block)) for _ in range(threads)]

    def read(thread: int) -> int:
        mine = itertools.takewhile(lambda _: time.monotonic() < started + limit, blocks[thread::threads])
        return sum(
            os.preadv(files[path], [buffers[thread][turn % 2]], begin) for turn, (path, begin) in enumerate(mine)
        )

    from_disk, started = _bytes_from_disk(), time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(threads)))
    seconds = time.monotonic() - started
    for file in files.values():
        os.close(file)
    return _reading(total, seconds, from_disk) | {"threads": threads}


def _link_rate(device: Any) -> dict[str, float]:
    """Copy from pinned memory to the device, in blocks of the loader's size: no load can be faster."""
    import torch

    from jevany_backend.checkpoint.stream import BLOCK_BYTES

    source = torch.empty(4, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(4, BLOCK_BYTES, dtype=torch.uint8, device=device)
    copies = 256
    for number in range(-4, copies):
        if not number:
            torch.cuda.synchronize()
            started = time.monotonic()
        target[number % 4].copy_(source[number % 4], non_blocking=True)
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    return {"GB": copies * BLOCK_BYTES / GB, "seconds": seconds, "GB_per_s": copies * BLOCK_BYTES / GB / seconds}


def _reading(nbytes: int, seconds: float, disk_before: int) -> dict[str, float]:
    return {
        "GB": nbytes / GB,
        "seconds": round(seconds, 3),
        "GB_per_s": nbytes / GB / seconds,
        "GB_from_disk": (_bytes_from_disk() - disk_before) / GB,
    }


def _bytes_from_disk() -> int:
    """Return how many bytes this process has had fetched from a disk, past the page cache."""
    with suppress(OSError):
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])
    return 0


def _cold(weights: Any, model: Any, device: Any, shards: Sequence[Path]) -> dict[str, Any]:
    """Read shards from the disk, to nowhere and through the loader's stream, in turns."""
    from jevany_backend.checkpoint.stream import WeightStream

    def evict(path: Path) -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def load(path: Path) -> dict[str, float]:
        from_disk, started = _bytes_from_disk(), time.monotonic()
        with WeightStream(device) as stream:
            total = stream.read([weights.weight(name, targets[name]) for name in weights.by_shard()[path]])
        return _reading(total, time.monotonic() - started, from_disk)

    targets = dict(model.state_dict(keep_vars=True))
    readings: dict[str, list[dict[str, float]]] = {"plain": [], "load": []}
    # Whoever reads a file second may find it in a cache outside this machine: each is second once.
    for path, order in zip(shards, (("plain", "load"), ("load", "plain")), strict=False):
        for kind in order:
            evict(path)
            readings[kind].append(_plain_read([path]) if kind == "plain" else load(path))
    rates = {kind: sum(r["GB"] for r in many) / sum(r["seconds"] for r in many) for kind, many in readings.items()}
    return {**readings, "GB_per_s": rates, "share": rates["load"] / rates["plain"]}


if __name__ == "__main__":
    sys.exit(main())

"""``python -m jevany_bench``: time every mode of a model on one panel, and write a result and a table.

Exit code: 0 if every mode of every model was measured, 1 if one was not, 2 for a wrong command line, 130 after Ctrl-C;
then what there is lies in the file, and ``--resume`` measures the modes that are not whole.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jevany_backend.checkpoint import CheckpointError, first_line
from jevany_backend.encoding import Row
from jevany_backend.engine.families import OUR_FAMILIES
from jevany_backend.engine.graphs import OUR_GRID, GraphEngine, padding_share
from jevany_backend.engine.measured import median_seconds
from jevany_backend.engine.modes import MODES, build_engine
from jevany_backend.engine.reference import ReferenceEngine, hide_gpu_kernels, live_kernels
from jevany_bench import machine, report, result
from jevany_bench.models import Candidate, find_candidate
from jevany_bench.panel import Panel, read_panel
from jevany_bench.progress import Progress
from jevany_bench.protocol import REPEATS, SEED, WARM_UP, Samples, changes, measure
from jevany_bench.result import ResultError

_ROOT = Path(__file__).parents[2]
_PANEL = _ROOT / "loadtest" / "panels" / "jevbench-shape-231.jsonl"
_ABLATION = ("default", "kernels", "sdpa", "graphs", "engine")
# Of the time that is left, a mode gets its share by the first of these numbers, but in any case as many seconds of
# samples as the second says. The two fastest are to finish all repeats; a few dozen samples place the others.
_SHARES = {"graphs": (5, 10), "engine": (5, 10)}
_SHARE = (1, 2)
_PROFILED = ("graphs", "engine")
_HOST_RUNS = 50
_PARITY_LENGTHS = (33, 100, 128, 200, 500)
_EDGES = (32, 64, 104, 128, 256, 512)
# What has to be the same for modes to be put together.
_SAME = ("schema", "kind", "model", "weights", "dtype", "machine", "origin", "commit", "panel", "protocol")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.cpu else torch.device("cpu")
    if device.type == "cpu":
        hide_gpu_kernels()
    else:
        torch.cuda.set_device(device)
    deadline = time.monotonic() + options.seconds
    try:
        return _measure(options, device, deadline)
    except KeyboardInterrupt:
        print(f"\njevany_bench: stopped; {options.out} has what there is", file=sys.stderr)
        return 130


def _measure(options: argparse.Namespace, device: torch.device, deadline: float) -> int:
    try:
        panel = read_panel(options.panel)
        candidates = [find_candidate(options.repository / name, options.weights) for name in options.models]
        rows = [candidate.rows(panel)[: options.rows] for candidate in candidates]
    except (OSError, ValueError, KeyError, CheckpointError) as error:
        print(f"jevany_bench: {error}", file=sys.stderr)
        return 2
    good = True
    for number, candidate in enumerate(candidates):
        # Larger models, which come last, take more of the time.
        share = (deadline - time.monotonic()) * (number + 1) / sum(range(number + 1, len(candidates) + 1))
        run = _Run(candidate, panel, rows[number], device, options, time.monotonic() + share)
        if options.resume:
            try:
                run.resume()
            except ResultError as error:
                print(f"jevany_bench: {error}", file=sys.stderr)
                return 2
        good &= run.all()
        print(f"\n{report.table(run.result)}\n", flush=True)
        print(f"{run.path}: written", flush=True)
    return 0 if good else 1


class _Run:
    """One model's benchmark. Every part leaves its result in the file when it ends, and its error when it fails."""

    def __init__(
        self,
        candidate: Candidate,
        panel: Panel,
        rows: list[Row],
        device: torch.device,
        options: argparse.Namespace,
        deadline: float,
    ) -> None:
        self.candidate = candidate
        self.device = device
        self.options = options
        # Our engine takes the weights out of the model, so it comes last, as in MODES.
        self.modes = sorted(options.modes, key=list(MODES).index)
        self.deadline = deadline
        self.rows = rows
        self.path: Path = options.out / f"{candidate.name}.json"
        # The first mode's answers, which those of the others are compared with.
        self.first: Samples | None = None
        lengths = [len(row.ids) for row in self.rows]
        self.result: dict[str, Any] = {
            **result.begun("bench"),
            "model": candidate.name,
            "weights": "random" if candidate.random else "real",
            "dtype": str(candidate.dtype).removeprefix("torch."),
            "machine": machine.describe(device),
            "origin": machine.origin(),
            "commit": options.commit or machine.commit(),
            "panel": {
                "name": panel.name,
                "sha256": panel.sha256,
                "rows": len(self.rows),
                "tokens": lengths,
                "padding_share": padding_share(OUR_GRID, lengths),
            },
            "protocol": {"repeats": options.repeats, "warm_up": options.warm_up, "seed": SEED},
            "modes": {mode: {} for mode in self.modes},
            "errors": {},
        }

    def resume(self) -> None:
        """Take over the modes that the file holds whole.

        Raises:
            ResultError: It is of another run.
        """
        earlier = result.read_earlier(self.path, self.result, _SAME)
        if earlier is None:
            return
        whole = {mode: e for mode, e in earlier["modes"].items() if e.get("summary", {}).get("complete")}
        names = sorted({*whole, *self.modes}, key=list(MODES).index)
        self.result = {**earlier, "modes": {mode: whole.get(mode, {}) for mode in names}, "errors": {}}
        for entry in whole.values():
            if "probabilities" in entry:
                answers = {int(row): values for row, values in entry["probabilities"].items()}
                self.first = Samples(probabilities=answers)
        self.modes = [mode for mode in self.modes if mode not in whole]
        print(f"jevany_bench: resumed with {', '.join(whole) or 'no mode'} measured", file=sys.stderr)

    def all(self) -> bool:
        """Run every part; return whether all modes gave samples."""
        result.write(self.result, self.path)
        config = self.candidate.files.config
        ours = config.model_type in OUR_FAMILIES and "engine" in self.result["modes"]
        # What has the least behind it comes first: an error on the GPU may end everything that would come after it.
        if self.modes:
            self._part("model", self._modes)
        if ours and self.device.type == "cuda" and "kernel_microseconds" not in self.result:
            self._part("kernel_times", self._kernel_times)
        if ours and self.options.parity and "parity" not in self.result:
            self._part("parity", self._parity)
        modes = self.result["modes"].values()
        self.result["complete"] = all(entry.get("summary", {}).get("complete", False) for entry in modes)
        result.write(self.result, self.path)
        return not self.result["errors"] and all(entry.get("summary") for entry in modes)

    def _part(self, name: str, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # Whatever it is, the other parts are worth having.
            traceback.print_exc()
            self.result["errors"][name] = f"{type(error).__name__}: {first_line(error)}"
        finally:
            result.write(self.result, self.path)
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # After an error on the GPU there is nothing to give back.
                torch.cuda.empty_cache()

    def _parity(self) -> None:
        from jevany_bench.parity import bucket_edges, error_against_float32

        config, dtype = self.candidate.files.config, self.candidate.dtype
        error = error_against_float32(config, dtype, self.device, _PARITY_LENGTHS)
        self.result["parity"] = {"error_against_float32": error}
        self.result["parity"]["bucket_edges"] = bucket_edges(config, dtype, self.device, _EDGES)

    def _kernel_times(self) -> None:
        from jevany_bench.kernel_times import time_kernels

        times = time_kernels(self.candidate.files.config, self.candidate.dtype, self.device, (128, 1024))
        self.result["kernel_microseconds"] = times

    def _modes(self) -> None:
        limits = machine.measure_limits(self.device, self.candidate.dtype)
        started = time.perf_counter()
        longest = max(len(row.ids) for row in self.rows)
        model, readout = self.candidate.load(self.device, longest)
        self.result["load_seconds"] = time.perf_counter() - started
        matrices = sum(p.nbytes for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n)
        if limits is not None:
            floors = [limits.floor_ms(matrices, self.candidate.dtype.itemsize, len(row.ids)) for row in self.rows]
            self.result["floor"] = {
                **asdict(limits),
                "matrix_bytes": matrices,
                "matrices_once": limits.floor_ms(matrices, self.candidate.dtype.itemsize, 1),
                "median": float(np.median(floors)),
                "mean": float(np.mean(floors)),
            }
        self.result["kernels_of_transformers"] = live_kernels(model)
        for number, mode in enumerate(self.modes):
            weights = [_SHARES.get(other, _SHARE)[0] for other in self.modes[number:]]
            until = time.monotonic() + (self.deadline - time.monotonic()) * weights[0] / sum(weights)
            self._part(mode, partial(self._mode, mode, model, readout, longest, until))

    def _mode(self, mode: str, model: Any, readout: Any, longest: int, deadline: float) -> None:
        entry = self.result["modes"][mode]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        bars: list[Progress] = []

        def captured(done: int, total: int) -> None:
            if not bars:
                bars.append(Progress(f"{self.candidate.name} {mode}: graphs", total))
            bars[0].to(done)

        started = time.perf_counter()
        try:
            engine = build_engine(mode, model, readout, longest, captured)
        except Exception as error:
            entry["error"] = first_line(error)
            raise
        finally:
            for bar in bars:
                bar.end()
        ready = time.perf_counter() - started
        bar = Progress(f"{self.candidate.name} {mode}: samples", self.options.repeats * len(self.rows))
        samples = Samples()
        try:
            measure(
                engine,
                self.rows,
                self.device,
                repeats=self.options.repeats,
                warm_up=self.options.warm_up,
                warm_lengths=not isinstance(engine, GraphEngine),
                samples=samples,
                deadline=max(deadline, time.monotonic() + _SHARES.get(mode, _SHARE)[1]),
                progress=bar.to,
            )
        finally:
            bar.end()
            del samples.milliseconds[len(samples.rows) :]  # An exception may have come between a time and its row.
            entry["ready_seconds"] = ready
            entry["summary"] = samples.summary()
            entry["samples"] = {"row": samples.rows, "milliseconds": [round(ms, 4) for ms in samples.milliseconds]}
        if self.first is None:
            self.first = samples
            answers = samples.probabilities.items()
            entry["probabilities"] = {str(row): [round(p, 7) for p in values] for row, values in answers}
        entry["against_first"] = changes(samples, self.first)
        if self.device.type == "cuda":
            entry["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if isinstance(engine, GraphEngine):
            entry["counters"] = asdict(engine.counters)
            entry["capture_seconds"] = engine.capture_seconds
            entry["graph_bytes"] = engine.graph_bytes
            entry["choices"] = _choices(engine)
        result.write(self.result, self.path)
        self._part(f"{mode}: by length", partial(self._by_length, mode, entry, engine, longest))

    def _by_length(self, mode: str, entry: dict[str, Any], engine: GraphEngine | ReferenceEngine, longest: int) -> None:
        if self.options.repeats_of_one and isinstance(engine, GraphEngine):
            row = self._row(min(100, longest))
            first = engine.probabilities(row)
            same = sum(np.array_equal(first, engine.probabilities(row)) for _ in range(self.options.repeats_of_one))
            entry["same_bits"] = {"repeats": self.options.repeats_of_one, "same": same}
            whole = median_seconds(lambda: engine.probabilities(row), _HOST_RUNS)
            replay = median_seconds(lambda: engine.replay(len(row.ids)), _HOST_RUNS)
            entry["host_milliseconds"] = (whole - replay) * 1e3
        from jevany_bench.kernel_profile import profile_row

        for length in self.options.profile:
            if length <= longest and mode in _PROFILED:
                profiled = profile_row(engine, self._row(length), self.device)
                entry.setdefault("profile", {})[str(length)] = profiled

    def _row(self, tokens: int) -> Row:
        # Four options, as most rows of the panel have.
        options = len(max(self.rows, key=lambda row: len(row.option_ends) == 4).option_ends)
        return self.candidate.synthetic_row(f"length-{tokens}", tokens, options)


def _choices(engine: GraphEngine) -> dict[str, Any]:
    """Return what was chosen by measurement, for an engine of ours."""
    forward: Any = engine.forward
    if not getattr(forward, "fused", False):
        return {}

    def product(outputs: int, inputs: int, summed: bool, rows: int) -> str:
        few = f", up to {rows} rows" if rows != forward.longest else ""
        return f"{inputs} -> {outputs}{' (added up)' if summed else ''}{few}"

    return {
        "launched_early": forward.early,
        **{
            name: dict(zip(map(str, choice.rows), choice.names, strict=True))
            for name, choice in forward.choices.items()
        },
        "products": {
            product(*key): {
                "transposed": plan.transposed,
                "by_rows": dict(zip(map(str, plan.rows), map(str, plan.ways), strict=True)),
            }
            for key, plan in forward.plans.items()
        },
        "microseconds": forward.measured.times,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jevany_bench", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of the model repository")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(_ABLATION), metavar="MODE")
    parser.add_argument("--weights", choices=("random", "checkpoint"), help="in the place of what config.pbtxt says")
    parser.add_argument("--panel", type=Path, default=_PANEL)
    parser.add_argument("--rows", type=int, help="take only so many requests of the panel, from its start")
    parser.add_argument("--repository", type=Path, default=_ROOT / "model_repository")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "bench", help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="measure the modes that a run that was cut short lacks")
    parser.add_argument("--seconds", type=float, default=3600, help="write what there is when these have passed")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="TOKENS", help="rows to profile")
    parser.add_argument("--repeats-of-one", type=int, default=0, metavar="N", help="answer one row N times; same bits?")
    parser.add_argument("--parity", action="store_true", help="errors against float32 at the model's true width")
    parser.add_argument("--commit", help="what to write as the commit, where there is no git")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())

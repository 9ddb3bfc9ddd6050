"""The load test without a server: schedules, percentiles, targets, result files, panels, reports."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jevany_backend.checkpoint.random_weights import stand_in_tokenizer
from jevany_backend.encoding import Limits, RowEncoder, build_labels, find_delimiters
from jevany_backend.engine.graphs import OUR_GRID
from jevany_bench.panel import Panel, Request, encoded_row, read_panel
from jevany_bench.progress import Progress
from jevany_bench.protocol import orders
from jevany_bench.result import ResultError, check, read, write
from jevany_loadtest import __main__ as loadtest
from jevany_loadtest import changes, convert, open_loop, report, samples
from jevany_loadtest.accuracy import accuracy, answer_changes
from jevany_loadtest.arrivals import Stage, poisson, stages
from jevany_loadtest.connection import Outcome
from jevany_loadtest.figure import PANEL, draw, frontier, pairs
from jevany_loadtest.page import eager_samples, page
from jevany_loadtest.random_text import in_random_text
from jevany_loadtest.record import open_summary, serial_summary
from jevany_loadtest.server import Counters
from jevany_loadtest.targets import MEASURES, compare, good, read_targets

ROOT = Path(__file__).parents[2]
TARGETS = read_targets(ROOT / "loadtest" / "targets.toml")


# ---- random text


@pytest.mark.parametrize("direct_token", [False, True])
@pytest.mark.parametrize("name", ["jevbench-shape", "transfer-shape"])
def test_with_random_weights_rows_have_the_panels_lengths_and_options(name: str, direct_token: bool) -> None:
    panel = read_panel(loadtest.PANELS[name])
    requests = panel.requests
    tokenizer = stand_in_tokenizer(2000)
    labels = build_labels(tokenizer) if direct_token else None
    encoder = RowEncoder(tokenizer, find_delimiters(tokenizer), labels, Limits(10**6, 10**6))
    asked = []

    def ask(request: Request) -> Outcome:
        asked.append(request)
        return Outcome(1.0, tokens=len(encoded_row(request, encoder).ids))

    random = in_random_text(panel, ask)
    assert len(asked) == 1
    rows = [encoded_row(request, encoder) for request in random]
    assert [len(row.ids) for row in rows] == [request.tokens for request in requests]
    assert [len(row.option_ends) for row in rows] == [len(request.question.option_texts) for request in requests]
    assert random == in_random_text(panel, ask)


def test_random_text_needs_lengths_and_an_answer() -> None:
    panel = read_panel(loadtest.PANELS["transfer-shape"])
    request = panel.requests[0]
    with pytest.raises(ValueError, match=f"{request.id}: no row_tokens_qwen"):
        in_random_text(replace(panel, requests=[replace(request, tokens=None)]), lambda _: Outcome(1.0))
    with pytest.raises(ValueError, match="no answer to a first question: the server is gone"):
        in_random_text(panel, lambda _: Outcome(1.0, "unavailable", "the server is gone"))


# ---- arrivals


def test_arrivals_have_the_rates_of_their_stages_and_the_same_seed_the_same_arrivals() -> None:
    plan = [Stage("a", 50, 100), Stage("b", 5, 100)]
    drawn = poisson(plan, 7, seed=0)
    assert drawn == poisson(plan, 7, seed=0) != poisson(plan, 7, seed=1)
    count = Counter(arrival.stage for arrival in drawn)
    # Counts of a Poisson process: within five standard deviations.
    assert abs(count[0] - 5000) < 5 * 5000**0.5
    assert abs(count[1] - 500) < 5 * 500**0.5
    assert {arrival.row for arrival in drawn} == set(range(7))
    instants = [arrival.seconds for arrival in drawn]
    assert instants == sorted(instants)
    gaps = np.diff([arrival.seconds for arrival in drawn if arrival.stage == 0])
    # Of exponential gaps the deviation equals the mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_workers_share_the_rate_and_draw_apart() -> None:
    plan = [Stage("a", 60, 50)]
    parts = [poisson(plan, 3, 0, worker, 3) for worker in range(3)]
    assert abs(sum(map(len, parts)) - 3000) < 5 * 3000**0.5
    assert len({part[0].seconds for part in parts}) == 3


def test_stages() -> None:
    made = stages(["warm-up", "steps", "spike", "soak"], 20, 100)
    assert made[0] == Stage("warm-up", 20, 10)
    assert [stage.rate for stage in made[1:5]] == [5, 10, 15, 20]
    assert made[5:] == [Stage("spike", 60, 10), Stage("after spike", 20, 10), Stage("soak", 20, 100)]


def test_orders_are_those_of_the_benchmark() -> None:
    asked = orders(5, 3)
    assert all(sorted(asked[first : first + 5]) == [0, 1, 2, 3, 4] for first in (0, 5, 10))
    assert asked == orders(5, 3)
    assert asked[:5] != asked[5:10]


# ---- samples


def test_summary_is_exact_and_passes_over_errors() -> None:
    times = np.random.default_rng(0).lognormal(size=1000)
    found = samples.summary([None, *times.tolist(), None])
    assert found["samples"] == 1000
    for name, quantile in (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert found[name] == pytest.approx(np.quantile(times, quantile))
    assert samples.summary([None]) == {"samples": 0}


def test_errors_are_counted_by_kind() -> None:
    table = samples.columns(open_loop=False)
    for error in (None, "unavailable", "deadline_exceeded", "unavailable"):
        samples.append(table, {"row": 0, "milliseconds": 1.0, "error": error})
    assert table["client_ms"] == [1.0, None, None, None]
    assert samples.error_counts(table["error"]) == {"unavailable": 2, "deadline_exceeded": 1}


def _probe(plan: Any) -> dict[str, Any]:
    """What a stage says of a server whose p99 is ten times the rate."""
    return {"rate": plan[-1].rate, "due_ms": {"p99": 10 * plan[-1].rate}, "errors": {}}


@pytest.mark.parametrize(("begin", "limit"), [(1, 500), (400, 500), (49, 500)])
def test_search_finds_the_highest_rate(begin: float, limit: float) -> None:
    found = open_loop.search(_probe, rate=begin, seconds=1, p99=limit)
    assert limit / 10 / 1.05 <= found["highest_rate"] <= limit / 10
    assert all(probe["held"] == (probe["p99"] <= limit) for probe in found["probes"])


def test_search_without_a_rate_that_holds() -> None:
    assert open_loop.search(_probe, rate=5, seconds=1, p99=0.1)["highest_rate"] is None


@pytest.mark.parametrize(
    ("content", "good"),
    [
        ({"comparison": [], "errors": {}}, True),
        ({"comparison": [], "errors": {"dropped": 1}}, False),
        ({"comparison": [{"verdict": "fail"}], "errors": {}}, False),
        # A search goes beyond what the server can do on purpose.
        ({"comparison": [], "errors": {"dropped": 52}, "search": {"highest_rate": 16.0}}, True),
        ({"comparison": [], "errors": {}, "search": {"highest_rate": None}}, False),
    ],
)
def test_a_run_passes_by_its_targets_and_errors_and_a_search_by_what_it_finds(
    content: dict[str, Any], good: bool
) -> None:
    assert loadtest.passed(content) == good


def test_counters_are_differences_and_null_where_nothing_is_counted() -> None:
    before = Counters({"replays": 5, "eager_calls": 1}, 100)
    assert Counters({"replays": 8, "eager_calls": 1}, 200).since(before) == {"replays": 3, "eager_calls": 0}
    nothing = Counters({"replays": None, "eager_calls": None}, None)
    assert nothing.since(nothing) is None


# ---- targets


def test_every_published_number_is_there() -> None:
    rows = TARGETS.published
    kinds = Counter((row["hardware"], row["panel"], row["role"] == "accuracy") for row in rows)
    assert kinds["H200", "jevbench-231", False] == 4  # Two models, before and after.
    assert kinds["H200", "transfer-44", False] == 2
    assert kinds["H200", "typed-decisions-400", False] == 5
    assert sum(count for (_, panel, _), count in kinds.items() if panel.startswith("fixed-")) == 4
    assert sum(count for (_, panel, _), count in kinds.items() if panel.endswith("-requests")) == 4
    # Eleven configurations of three models on both panels, six split over GPUs, two of fused kernels.
    assert kinds["A100-40GB", "jevbench-231", False] == 11 + 6 + 2
    assert kinds["A100-40GB", "transfer-1264", False] == 11 + 6 + 2
    assert kinds["any", "jevbench-231", True] == kinds["any", "transfer-1264", True] == 5
    assert len(rows) == 4 + 2 + 5 + 4 + 4 + 2 * 19 + 10
    values = Counter(name for row in rows for name in row if isinstance(row[name], int | float) and name != "gpus")
    times = {name: values[name] for name in ("median", "mean", "p90", "p95")}
    assert times == {"median": 51, "mean": 28, "p90": 40, "p95": 4}
    assert values["accuracy"] == 22 + 12 + 2 + 10
    assert values["correct"] == 4 + 2 + 5
    assert values["capture_seconds"] == 2
    assert values["argmax_changes"] == 4
    assert len(TARGETS.changes) == 12
    assert len(TARGETS.others) == 8 * 2
    assert all(row["source"] for row in [*rows, *TARGETS.others])


def test_no_number_is_another() -> None:
    def numbers(rows: list[dict[str, Any]]) -> list[Any]:
        return [
            [row.get("model"), row["panel"], *(v for v in row.values() if isinstance(v, int | float))] for row in rows
        ]

    every = [numbers(rows) for rows in (TARGETS.published, TARGETS.changes, TARGETS.others)]
    # Of the numbers as they were compared, one by one, with the sources' own tables.
    assert (
        hashlib.sha256(json.dumps(every).encode()).hexdigest()
        == "8ec2763722dc3efd0755b3f7bc3ed27d6a3abdf3834b70b275e2e2a85d12a7e3"
    )
    assert numbers(TARGETS.ours) == [
        ["jevany-27b", "jevbench-231", 15, 52, 185],
        ["jevany-30b", "jevbench-231", 55, 190],
        ["jevany-30b", "transfer-44", 15],
        ["jevany-4b", "jevbench-231", 4.2, 10.5, 35],
        ["jevany-4b-direct-token", "jevbench-231", 4.2, 10.5, 35],
        ["jevany-gemma-4b", "jevbench-231", 5.5, 11, 40],
    ]


def test_some_published_numbers_are_the_ones_they_are() -> None:
    def row(**fields: Any) -> dict[str, Any]:
        [found] = [row for row in TARGETS.published if fields.items() <= row.items()]
        return found

    big = row(model="jevany-27b", hardware="H200", role="after")
    assert (big["median"], big["mean"], big["p95"]) == (30.53, 81.20, 279.17)
    small = row(model="jevany-4b", hardware="H200", panel="jevbench-231", role="after")
    assert (small["median"], small["mean"], small["correct"]) == (9.70, 22.10, 185)
    gemma = row(model="jevany-gemma-4b", panel="jevbench-231", configuration="+ graphs")
    assert (gemma["accuracy"], gemma["mean"], gemma["median"], gemma["p90"]) == (75.32, 94.0, 32.1, 288.0)


GPU = dict.fromkeys(("name", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "mig.mode.current"), "1")


def serial_result(**changed: Any) -> dict[str, Any]:
    """A complete serial result of 3 rows, 2 repeats."""
    table = samples.columns(open_loop=False)
    for place, row in enumerate((0, 1, 2, 1, 0, 2)):
        event: dict[str, Any] = {
            "row": row,
            "at": float(place),
            "milliseconds": 4.0 + row,
            "server_milliseconds": 3.5 + row,
        }
        event |= {"model_milliseconds": 3.0 + row, "tokens": 100 * (row + 1), "error": None}
        samples.append(table, event)
    machine = {"device": "NVIDIA H200", "processor": "p", "processors": 2, "gpus": [GPU], "driver": "1"}
    return {
        "schema": 2,
        "kind": "serial",
        "started": "2026-01-01T00:00:00+00:00",
        "complete": True,
        "model": "jevany-4b",
        "weights": "real",
        "machine": {**machine, "python": "3.11", "packages": {"torch": "2"}},
        "commit": None,
        "panel": {"name": "mine.jsonl", "sha256": "1" * 64, "rows": 231, "of": 231, "labelled": 231},
        "protocol": {"transport": "grpc", "seed": 0},
        "server": {"url": "grpc://x", "triton": "2", "origin": "wheel", "engine": "engine"},
        "samples": table,
        "probabilities": {"0": [0.9, 0.1], "1": [0.4, 0.6], "2": [0.5, 0.3, 0.2]},
        "summary": serial_summary(table),
        "counters": {"replays": 4, "eager_calls": 2, "padding_tokens": 9, "captures_after_ready": 0},
        "accuracy": None,
        "comparison": [],
        "errors": {},
    } | changed


def test_a_result_is_held_against_its_own_hardware_and_panel_only() -> None:
    found = compare(serial_result(), TARGETS)
    ours = [entry for entry in found if entry["against"] == "ours"]
    # The model's time, of 3, 4 and 5 ms; the client's is held against what is published.
    assert ours[0]["measured"] == {"median": 4.0, "mean": 4.0, "p90": 5.0}
    assert [entry["verdict"] for entry in ours] == ["pass"]
    verdicts = {(e.get("hardware"), e["panel"], e.get("role")): e["verdict"] for e in found if e["against"] != "ours"}
    assert verdicts["H200", "jevbench-231", "after"] == "pass"
    assert verdicts["H200", "jevbench-231", "before"] == "published"
    assert verdicts["A100-40GB", "jevbench-231", "after"] == "not compared: A100-40GB, and this is NVIDIA H200"
    assert verdicts["H200", "typed-decisions-400", "step"] == "not compared: panel typed-decisions-400"
    assert good(found)
    assert all("measured" not in entry for entry in found if entry["verdict"].startswith("not compared"))
    slow = serial_result()
    slow["summary"]["model_ms"]["median"] = 4.21
    assert not good(compare(slow, TARGETS))


@pytest.mark.parametrize(("correct", "verdict"), [(185, "pass"), (184, "fail: accuracy"), (23, "fail: accuracy")])
def test_accuracy_is_held_where_it_is_published_as_a_count(correct: int, verdict: str) -> None:
    result = serial_result(accuracy={"rows": 231, "correct": correct, "accuracy": correct / 231})
    [fastest] = [entry for entry in compare(result, TARGETS) if entry.get("configuration") == "+ graphs to 2,048"]
    assert fastest["verdict"] == verdict
    assert fastest["measured"]["accuracy"] == pytest.approx(100 * correct / 231)


def test_a_run_is_held_against_the_fastest_that_is_published_whatever_its_table() -> None:
    result = serial_result(machine={"device": "NVIDIA A100-SXM4-40GB"})
    result["summary"]["client_ms"] = {"median": 20.0, "mean": 30.0, "p90": 100.0}
    verdicts = {
        entry.get("configuration"): entry["verdict"] for entry in compare(result, TARGETS) if "measured" in entry
    }
    assert verdicts["+ graphs"] == "pass"
    assert verdicts["LoRA merged + graphs to 2,048 + fused kernels"] == "fail: median"
    assert verdicts["+ fused SDPA"] == "published"
    fastest = TARGETS.fastest("jevany-4b", "A100-40GB", "jevbench-231")
    assert fastest is not None
    assert fastest["median"] == 11.25
    assert TARGETS.fastest("jevany-4b", None, "jevbench-231") is None


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H200 (MIG)",
        "NVIDIA H200 NVL",
    ],
)
def test_a_gpu_of_another_size_and_a_slice_are_other_hardware(device: str) -> None:
    verdicts = [
        e["verdict"] for e in compare(serial_result(machine={"device": device}), TARGETS) if e["panel"] == PANEL
    ]
    assert {v for v in verdicts if v != "published"} == {
        f"not compared: {hardware}, and this is {device}" for hardware in ("H200", "A100-40GB")
    }


def test_rows_of_several_gpus_are_other_hardware() -> None:
    result = serial_result(model="jevany-27b", machine={"device": "NVIDIA A100-SXM4-40GB"})
    verdicts = {entry["verdict"] for entry in compare(result, TARGETS) if entry.get("hardware") == "A100-40GB"}
    assert "not compared: 2 x A100-40GB, and this is NVIDIA A100-SXM4-40GB" in verdicts
    assert all(verdict.startswith("not compared") for verdict in verdicts)
    assert set(TARGETS.hardware.values()) == {row["hardware"] for row in TARGETS.published} - {"any"}


def test_a_panel_is_known_by_its_content() -> None:
    def verdict(**panel: Any) -> str:
        return str(compare(serial_result(panel=panel), TARGETS)[0]["verdict"])

    shape: dict[str, Any] = {
        "rows": 231,
        "of": 231,
        "labelled": 0,
        "sha256": read_panel(loadtest.PANELS["jevbench-shape"]).sha256,
    }
    assert verdict(name="any.jsonl", **shape) == "pass"
    assert verdict(name="any.jsonl", rows=231, of=231, labelled=231, sha256="1" * 64) == "pass"
    for of, labelled in ((3, 3), (231, 3)):
        assert (
            verdict(name="jevbench-231.jsonl", rows=of, of=of, labelled=labelled, sha256="1" * 64)
            == f"not compared: panel {PANEL}"
        )
    assert TARGETS.panel_of({"sha256": read_panel(loadtest.PANELS["transfer-shape"]).sha256}) == "transfer-44"
    assert TARGETS.panel_of({"sha256": "1" * 64, "of": 1264, "labelled": 1046}) == "transfer-1264"


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"weights": "random"}, "random weights"),
        ({"complete": False}, "a part of the panel"),
        ({"machine": {"device": None}}, "not compared: H200, and this is not known"),
        ({"machine": {"device": "AMD EPYC"}}, "not compared: H200, and this is AMD EPYC"),
        ({"panel": {"name": "mine.jsonl", "sha256": "1" * 64, "rows": 3, "of": 3}}, "not compared: panel jevbench-231"),
    ],
)
def test_what_is_something_else_says_so_instead_of_pass(changed: dict[str, Any], verdict: str) -> None:
    found = compare(serial_result(**changed), TARGETS)
    assert found[0]["verdict"] == verdict
    assert good(found)
    assert not any(entry["verdict"] == "pass" for entry in found)


# ---- result files


def test_a_result_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(serial_result(), path)
    assert read(path)["model"] == "jevany-4b"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"schema": 3}, r"schema: 3 is not one of \[1, 2\]"),
        ({"started": "yesterday"}, "started: 'yesterday' is not a 'date-time'"),
        ({"started": "2026-01-01T00:00:00"}, "started: .* is not a 'date-time'"),
        ({"protocol": {}}, "protocol: 'seed' is a required property"),
        ({"protocol": {"seed": 0}}, "protocol: 'transport' is a required property"),
        ({"machine": {**serial_result()["machine"], "packages": {}}}, r"machine\.packages: {} "),
        *(
            ({"machine": {**serial_result()["machine"], "gpus": [{n: v for n, v in GPU.items() if n != name}]}}, name)
            for name in GPU
        ),
        ({"server": {**serial_result()["server"], "origin": None}}, r"server\.origin: "),
        ({"kind": "other"}, "kind: "),
        ({"weights": "some"}, "weights: "),
        ({"panel": {"name": "x", "sha256": "0", "rows": 1}}, r"panel\.sha256: "),
        ({"samples": {**serial_result()["samples"], "row": [0]}}, "not of one length"),
    ]
    for changed, message in cases:
        with pytest.raises(ResultError, match=message):
            check(serial_result(**changed))
    path.write_text("{")
    with pytest.raises(ResultError, match=r"result\.json"):
        read(path)
    # Of a machine that is not known nothing has to be.
    elsewhere = {**serial_result()["machine"], "device": None, "gpus": [], "packages": {}}
    check(serial_result(machine=elsewhere))


def test_the_first_version_has_less_to_say() -> None:
    gpu = {name: value for name, value in GPU.items() if name != "mig.mode.current"}
    check(serial_result(schema=1, machine={**serial_result()["machine"], "gpus": [gpu]}))
    for path in (ROOT / "loadtest" / "results").glob("*h200-jevany-*.json"):
        if not path.name.startswith(("clocks", "delta-rule")):
            read(path)


# ---- accuracy


def labelled_panel(path: Path) -> Panel:
    rows = [
        ("noul", None, 0),
        ("choice", {"a": None, "b": None}, 0),
        ("score", ["x", "y", "z"], None),
    ]
    lines = []
    for number, (kind, criteria, label) in enumerate(rows):
        question = {"type": kind, "instructions": "?"} | ({} if criteria is None else {"criteria": criteria})
        lines.append(json.dumps({"id": str(number), "state": "s", "questions": {"q": question}, "label": label}))
    path.write_text("\n".join(lines))
    return read_panel(path)


def test_accuracy_is_over_what_has_a_label_and_an_answer(tmp_path: Path) -> None:
    panel = labelled_panel(tmp_path / "panel.jsonl")
    found = accuracy(panel, {0: [0.9, 0.1], 1: [0.4, 0.6], 2: [0.5, 0.3, 0.2]})
    assert found == {
        "rows": 2,
        "correct": 1,
        "accuracy": 0.5,
        "brier": pytest.approx((0.02 + 0.72) / 2),
        "calibration_error": pytest.approx((0.1 + 0.6) / 2),
    }
    assert accuracy(panel, {2: [0.5, 0.3, 0.2]}) is None


def test_a_label_that_is_no_option_is_named(tmp_path: Path) -> None:
    question = {"type": "noul", "instructions": "?"}
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "1", "state": "", "questions": {"q": question}, "label": 2}))
    with pytest.raises(ValueError, match=r"p\.jsonl: line 1: .*there is no option 2"):
        read_panel(tmp_path / "p.jsonl")


def test_changes_between_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = serial_result(probabilities={"0": [0.8, 0.2], "1": [0.6, 0.4]})
    for name, content in (("a", serial_result()), ("b", other)):
        write(content, tmp_path / f"{name}.json")
    assert changes.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "2 requests: 1 argmax changes, largest probability change 0.2000" in capsys.readouterr().out
    other["panel"] = {**other["panel"], "sha256": "2" * 64}
    with pytest.raises(ValueError, match="different panels"):
        answer_changes(serial_result(), other)
    bench = ROOT / "loadtest" / "results" / "bench-h200-jevany-4b.json"
    assert changes.main([str(bench), str(tmp_path / "a.json")]) == 1
    assert f"changes: {bench}: a result of make bench" in capsys.readouterr().err


# ---- panels


def test_the_benchmarks_files_become_panels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noul = {"type": "noul", "instructions": "?", "criteria": {"false": "f", "true": "t"}}
    choice = {"type": "choice", "instructions": "?", "criteria": {"a": "A", "b": "B"}}
    score = {"type": "score", "instructions": "?", "criteria": ["low", "high"]}
    kinds = [(noul, "yes", 1), (choice, "a", 0), (score, 1, 1), (choice, {"a": 0.3, "b": 0.7}, 1)]
    for name, count in (("easy", 48), ("original", 72), ("hard", 111)):
        tasks = []
        for number in range(count):
            question, expected, _ = kinds[number % 4]
            tasks.append({"id": f"{name}-{number}", "state": "s", "question": question, "expected": expected})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("easy", "original", "hard")]
    out = tmp_path / "out.jsonl"
    assert convert.main(["jevbench", *files, "--out", str(out)]) == 0
    panel = read_panel(out)
    assert len(panel.requests) == 231
    assert [request.label for request in panel.requests[:4]] == [label for _, _, label in kinds]
    assert panel.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert convert.main(["jevbench", files[0], "--out", str(out)]) == 1
    assert "48 requests, 48 with a label; published are 231 and 231" in capsys.readouterr().err


def test_transfer_records_that_are_not_scored_get_no_label(tmp_path: Path) -> None:
    sources = {"mmlu": 116, "emotion": 116, "sciq": 116, "unknowable": 110, "control": 806}
    lines = []
    for source, count in sources.items():
        for number in range(count):
            variant = "clean" if number < 80 else "shuffled"
            asked = {
                "type": "choice",
                "instructions": "?",
                "criteria": {"a": "A", "b": "B"},
                "label": "b",
                "src": source,
            }
            meta = {"id": f"{source}/{number}", "source": source, "variant": variant}
            lines.append(json.dumps({"state": {"x": 1}, "questions": {"answer": asked}, "_meta": meta}))
    (tmp_path / "development.jsonl").write_text("\n".join(lines))
    out = tmp_path / "transfer-1264.jsonl"
    assert convert.main(["transfer", str(tmp_path / "development.jsonl"), "--out", str(out)]) == 0
    requests = read_panel(out).requests
    assert Counter(request.label for request in requests) == {1: 1046, None: 218}


# ---- reports


def test_the_report_is_written_again(tmp_path: Path) -> None:
    write(serial_result(), tmp_path / "results" / "run.json")
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "results"), "--out", str(out)]) == 0
    text = (out / "REPORT.md").read_text()
    before_and_after = text.partition("## Before and after")[2].partition("\n## ")[0]
    assert "| published fastest: + graphs to 2,048 | 30.53 | 81.20 | - | 279.17 | 89.61 |" in before_and_after
    rows = [line for line in before_and_after.splitlines() if line.startswith(f"| jevany-4b | A100-40GB | {PANEL} |")]
    assert [row.split(" | ")[3:5] for row in rows] == [
        ["published default", "108.80"],
        ["published: + graphs", "25.40"],
        ["published fastest: LoRA merged + graphs to 2,048 + fused kernels", "11.25"],
    ]
    assert "| H200 | jevbench-231 | measured here through Triton, real weights | 5.00 |" in before_and_after
    places = {(row["model"], row["hardware"], row["panel"]) for row in TARGETS.published if row["role"] == "before"}
    assert before_and_after.count("published fastest") == len(places)
    assert "typed-decisions" not in before_and_after
    assert "published, not measured here" in text
    assert "| Laya | A100-40GB | jevbench-231 | 21.80 | - | 24.70 | 58.87 |" in text
    for name in ("accuracy-latency.png", "accuracy-latency-dark.png"):
        assert (out / "figures" / name).read_bytes().startswith(b"\x89PNG")
    svg = (out / "figures" / "accuracy-latency.svg").read_text()
    assert "prefers-color-scheme: dark" in svg
    assert "4b (H200)" in svg
    # The same files give the same picture.
    assert report.main([str(tmp_path / "results"), "--out", str(out)]) == 0
    assert (out / "figures" / "accuracy-latency.svg").read_text() == svg
    html = (out / "run.html").read_text()
    assert "Latency against row length" in html
    assert html.count("<svg") == 1


def test_the_readme_has_the_table_of_the_runs_through_triton(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(ROOT / "loadtest" / "results"), "--out", str(tmp_path)]) == 0
    assert (
        "no results of a bench or load test: clocks-h200-jevany-27b.json, delta-rule-h200-jevany-27b.json, released"
        in capsys.readouterr().err
    )
    written = (tmp_path / "REPORT.md").read_text()
    assert written == (ROOT / "loadtest" / "REPORT.md").read_text()
    assert "](loadtest/REPORT.md)" in (ROOT / "README.md").read_text()
    table = re.search(r"^## Through Triton\n\n(.*?)\n\n", written, re.S | re.M)
    assert table is not None
    assert table[1].count("\n") == 1 + 6
    assert f"\n\n{table[1]}\n\n" in (ROOT / "README.md").read_text()


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"report: {tmp_path / 'nowhere'}: no such directory\n"
    assert not (tmp_path / "out").exists()
    (tmp_path / "cut.json").write_text('{"schema": 1')
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"report: {tmp_path / 'cut.json'}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "4"), "loadtest: --rate is for --mode open\n"),
        (("--search-p99", "4"), "loadtest: --search-p99 is for --mode open\n"),
        (("--workers", "2"), "loadtest: --workers is for --mode open\n"),
        (("--remote-workers", "2"), "loadtest: --remote-workers is for --mode open\n"),
        (
            ("--mode", "open", "--rate", "4", "--remote-workers", "2"),
            "loadtest: --remote-workers needs --host, the server's address on the network: 127.0.0.1 is another "
            "machine for each of them\n",
        ),
    ],
)
def test_what_the_mode_does_not_heed_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loadtest.main(["jevany-tiny", *arguments]) == 2
    assert capsys.readouterr().err == message


def test_the_committed_figure_is_that_of_the_targets(tmp_path: Path) -> None:
    for path in draw(TARGETS, [], tmp_path):
        committed = ROOT / "loadtest" / "figures" / path.name
        assert committed.is_file()
        if path.suffix == ".svg":
            assert committed.read_text() == path.read_text()


def test_no_name_in_the_figure_lies_on_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("jevany_loadtest.figure.plt.close", figures.append)
    draw(TARGETS, [], tmp_path)
    monkeypatch.undo()
    [axes] = figures[0].axes
    figures[0].canvas.draw()
    marks = [
        axes.transData.transform(xy) for line in axes.lines if line.get_marker() != "None" for xy in line.get_xydata()
    ]
    names = [text for text in axes.texts if text.get_text()]
    assert len(names) == sum(row["panel"] == PANEL and "accuracy" in row for row in TARGETS.others)
    for name in names:
        # A mark reaches half its size of 7 points beyond its middle.
        box = name.get_window_extent().padded(3.5 * figures[0].dpi / 72)
        # Its own dot may be near.
        close = [
            mark for mark in marks if box.contains(*mark) and not np.allclose(mark, axes.transData.transform(name.xy))
        ]
        assert not close, name.get_text()


def test_the_h200_pairs_are_apart_from_the_frontier() -> None:
    hardware = Counter(where for _, where, _ in pairs(TARGETS))
    assert hardware == {"H200": 2, "A100-40GB": 5}
    assert frontier([(10, 70), (20, 65), (20, 80), (30, 80), (40, 90)]) == [(10, 70), (20, 80), (40, 90)]


def test_eager_calls_are_the_longest_rows() -> None:
    result = serial_result()
    tokens = np.array(result["samples"]["tokens"])
    assert eager_samples(result).tolist() == (tokens == 300).tolist()
    assert eager_samples(serial_result(counters=None)).all()


def test_the_page_of_a_run_has_four_pictures_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("jevany_loadtest.page.plt.close", figures.append)
    result = serial_result()
    written = page(result)
    monkeypatch.undo()
    table = result["samples"]
    tokens, times = table["tokens"], table["client_ms"]
    by_length, shares, timeline, buckets = figures[0].axes
    for axes, title in zip(
        figures[0].axes,
        ("Latency against row length", "Distribution", "Timeline", "Requests in each bucket"),
        strict=True,
    ):
        assert axes.get_title(loc="left") == title
        assert title in written
    for axes, across in ((by_length, tokens), (timeline, table["at"])):
        points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        expected = [[a, t, n] for a, t, n in zip(across, times, tokens, strict=True)]
        # Two calls were eager: the rows of 300 tokens.
        assert points == {
            "graph": [[a, t] for a, t, n in expected if n < 300],
            "eager": [[a, t] for a, t, n in expected if n == 300],
        }
        assert len({line.get_color() for line in axes.lines}) == 2
    assert shares.lines[0].get_xdata().tolist() == sorted(times)
    assert shares.lines[0].get_ydata()[-1] == 100
    assert sum(bar.get_height() for bar in buckets.patches) == len(times)
    assert {label.get_text() for label in buckets.get_xticklabels()} == {
        str(OUR_GRID.length(count)) for count in set(tokens)
    }


def test_what_a_killed_open_run_has_left_is_reported(tmp_path: Path) -> None:
    for name, count in (("none", 0), ("some", 3)):
        table = samples.columns(open_loop=True)
        for number in range(count):
            event = {"row": 0, "at": 1.0 * number, "milliseconds": 4.0, "since_due": 5.0, "late": 1.0, "stage": number}
            samples.append(table, {**event, "error": None, "tokens": 100})
        samples.append(table, {"row": 0, "at": 9.0, "stage": 1, "error": "dropped"})
        stages = [{"name": stage, "rate": 1, "seconds": 2, "requests": 2} for stage in ("warm-up", "soak", "spike")]
        content = serial_result(kind="open", complete=False, samples=table, counters=None)
        content["protocol"] = {**content["protocol"], "stages": stages}
        write({**content, "summary": open_summary(content)}, tmp_path / f"{name}.json")
    out = tmp_path / "out"
    assert report.main([str(tmp_path), "--out", str(out)]) == 0
    assert "cut short" in (out / "some.html").read_text()
    assert "graphs not counted" in (out / "some.html").read_text()
    assert (out / "none.html").exists()


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Tty() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    moments = iter((0.0, 1.0, 1.01, 2.0, 3.5))
    monkeypatch.setattr("jevany_bench.progress.time.monotonic", lambda: next(moments))
    bar = Progress("m grpc: samples", 60)
    for done in (30, 31, 60):
        bar.to(done)
    bar.end()
    # 31 comes too soon after 30 to be drawn.
    drawn = [f"\rm grpc: samples                  [{'#' * n:30}] {2 * n} of 60" for n in (15, 30)]
    whole = "".join(drawn) + "\n (3.5 s)\n" if terminal else "m grpc: samples: 60 of 60 (3.5 s)\n"
    assert stream.getvalue() == whole


def test_the_tables_of_each_model_are_step_by_step() -> None:
    bench = read(ROOT / "loadtest" / "results" / "bench-h200-jevany-4b.json")
    steps = report.report_page(TARGETS, [bench]).partition("## Step by step")[2].partition("\n## ")[0]
    for model in {row["model"] for row in TARGETS.published}:
        rows = [row for row in TARGETS.published if row["model"] == model and row["role"] != "accuracy"]
        part = steps.partition(f"### {model}\n")[2].partition("\n### ")[0]
        table = part.partition("Published, not measured here")[2].partition("Measured here")[0]
        assert [line.split(" | ")[2] for line in table.splitlines()[4:] if line] == [r["configuration"] for r in rows]
        assert ("| engine | 693 |" in part) == (model == "jevany-4b")


def test_a_run_repeats_three_times_after_sixteen_requests_unless_told_otherwise() -> None:
    options = loadtest._parser().parse_args(["jevany-tiny"])
    assert (options.repeats, options.warm_up) == (3, 16)


def test_targets_name_measures_that_exist() -> None:
    assert all(set(row) & set(MEASURES) for row in [*TARGETS.ours, *TARGETS.published, *TARGETS.others])

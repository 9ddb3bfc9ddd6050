"""The benchmark: its rows, its bounds, and a whole run on the CPU."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from jevany_backend.encoding import Row
from jevany_bench.__main__ import main
from jevany_bench.compare import main as compare
from jevany_bench.compare import table as compare_table
from jevany_bench.machine import Limits
from jevany_bench.models import find_candidate
from jevany_bench.panel import read_panel, synthetic_row
from jevany_bench.protocol import Samples, changes, measure
from jevany_bench.report import main as report
from jevany_bench.report import table
from jevany_bench.result import check
from jevany_tiny.panel import main as write_panel

ROOT = Path(__file__).parents[2]
PANEL = ROOT / "loadtest" / "panels" / "jevbench-shape-231.jsonl"
CPU = torch.device("cpu")


def test_synthetic_rows_have_the_lengths_of_the_panel() -> None:
    panel = read_panel(PANEL)
    assert len(panel.requests) == 231
    for request in panel.requests:
        options = len(request.question.option_texts)
        assert request.tokens is not None
        row = synthetic_row(request.id, request.tokens, options, (1, 2, 3, 4, 5), 1000)
        assert len(row.ids) == request.tokens
        assert row.decide == request.tokens - 1
        assert [row.ids[end] for end in row.option_ends] == [4] * options
        assert row == synthetic_row(request.id, request.tokens, options, (1, 2, 3, 4, 5), 1000)


def test_a_release_is_measured_with_random_weights_and_without_its_files() -> None:
    candidate = find_candidate(ROOT / "model_repository" / "jevany-27b", "random")
    assert candidate.random
    assert candidate.dtype is torch.bfloat16
    assert candidate.files.config.num_hidden_layers == 64
    rows = candidate.rows(read_panel(PANEL))
    assert [len(row.ids) for row in rows] == [request.tokens for request in read_panel(PANEL).requests]


class _Sleeper:
    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self.seen: list[int] = []

    def probabilities(self, row: Row) -> np.ndarray:
        self.seen.append(row.ids[0])
        time.sleep(self.seconds)
        return np.array([0.25, 0.75], np.float32)


ROWS = [Row([number], 0, [0, 0]) for number in range(5)]


def test_measure_warms_up_from_the_start_and_shuffles_each_repeat() -> None:
    engine = _Sleeper()
    samples = measure(engine, ROWS, CPU, repeats=3, warm_up=7)
    assert engine.seen[:7] == [0, 1, 2, 3, 4, 0, 1]
    orders = [engine.seen[7 + 5 * repeat :][:5] for repeat in range(3)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert samples.rows == engine.seen[7:]
    assert samples.summary()["complete"]
    again = _Sleeper()
    measure(again, ROWS, CPU, repeats=3, warm_up=7)
    assert again.seen == engine.seen


def test_measure_stops_at_its_deadline() -> None:
    samples = measure(_Sleeper(0.02), ROWS, CPU, repeats=1000, warm_up=1, deadline=time.monotonic() + 0.2)
    assert 2 <= len(samples.rows) <= 10
    assert samples.summary()["complete"] is False
    assert samples.summary()["median"] >= 20


def test_changes() -> None:
    one = Samples(probabilities={0: [0.4, 0.6], 1: [0.9, 0.1], 2: [0.5, 0.5]})
    other = Samples(probabilities={0: [0.6, 0.4], 1: [0.8, 0.2]})
    assert changes(one, other) == {
        "rows": 2,
        "argmax_changes": 1,
        "mean_probability_change": pytest.approx(0.15),
        "largest_probability_change": pytest.approx(0.2),
    }
    nothing = {"rows": 0, "argmax_changes": 0, "mean_probability_change": None, "largest_probability_change": None}
    assert changes(one, Samples()) == nothing


def test_floor() -> None:
    limits = Limits(bytes_a_second=4e12, operations_a_second=700e12)
    assert limits.floor_ms(48_000_000_000, 2, 1) == pytest.approx(12)
    assert limits.floor_ms(48_000_000_000, 2, 2048) == pytest.approx(48e9 * 2048 / 700e9)


def test_a_whole_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["jevany-tiny", "--out", str(tmp_path), "--rows", "4", "--repeats", "2", "--warm-up", "1", "--cpu"]
    assert main([*arguments, "--profile", "40", "--repeats-of-one", "3", "--modes", "engine", "sdpa"]) == 0
    result = json.loads((tmp_path / "jevany-tiny.json").read_text())
    check(result)
    assert result["complete"]
    assert result["weights"] == "real"
    assert result["panel"]["sha256"] == read_panel(PANEL).sha256
    assert len(result["panel"]["tokens"]) == 4
    for mode in ("sdpa", "engine"):
        entry = result["modes"][mode]
        assert entry["summary"]["samples"] == len(entry["samples"]["milliseconds"]) == 8
    engine = result["modes"]["engine"]
    assert engine["profile"]["40"]["classes"]
    assert engine["counters"]["captures_after_ready"] == 0
    assert engine["counters"]["replays"] == 9
    assert engine["same_bits"] == {"repeats": 3, "same": 3}
    assert "host_milliseconds" in engine
    assert engine["against_first"]["argmax_changes"] == 0
    assert engine["against_first"]["largest_probability_change"] < 1e-4
    assert "| engine | 8 |" in capsys.readouterr().out


def test_our_engine_answers_held_out_decisions_as_transformers_do(tmp_path: Path) -> None:
    panel = tmp_path / "held-out.jsonl"
    write_panel([str(panel), "--rows", "100"])
    models = ["jevany-tiny", "jevany-tiny-direct-token"]
    options = ["--panel", str(panel), "--repeats", "1", "--warm-up", "0", "--cpu", "--out", str(tmp_path)]
    assert main([*models, *options, "--modes", "default", "engine"]) == 0
    for model in models:
        moved = json.loads((tmp_path / f"{model}.json").read_text())["modes"]["engine"]["against_first"]
        assert moved["rows"] == 100
        assert moved["argmax_changes"] == 0
        assert 0 < moved["largest_probability_change"] < 1e-4


def test_compare_says_how_right_and_how_far_apart_modes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    panel = tmp_path / "held-out.jsonl"
    write_panel([str(panel), "--rows", "12"])
    assert compare(["jevany-tiny", "--panel", str(panel), "--modes", "sdpa", "engine", "--cpu"]) == 0
    sdpa, engine = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert (sdpa[0], engine[0]) == ("| `sdpa`", "| `engine`")
    assert sdpa[1] == engine[1] == "12"
    assert sdpa[2] == engine[2]
    assert float(sdpa[2]) > 50
    assert [float(value.strip(" |")) for value in sdpa[5:]] == [0, 0, 0]
    assert float(engine[5]) == 0
    assert 0 < float(engine[7].strip(" |")) < 1e-4


def test_compare_knows_an_answer_that_changes() -> None:
    panel = read_panel(PANEL)
    before, after = Samples(probabilities={0: [0.4, 0.6], 1: [0.5, 0.5]}), Samples(probabilities={0: [0.7, 0.3]})
    assert compare_table(panel, {"a": before, "b": after}).splitlines()[-1] == "| `b` | 1 | - | - | - | 1 | 0.3 | 0.3 |"


def test_compare_refuses_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "jevany-4b"
    folder.mkdir()
    text = (ROOT / "model_repository" / "jevany-4b" / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace('"checkpoint"', '"random"'))
    assert compare(["jevany-4b", "--panel", str(PANEL), "--repository", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "compare: jevany-4b: random weights have no answers to compare\n"


def test_the_readme_has_the_speed_table_of_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ("jevany-27b", "jevany-30b", "jevany-4b", "jevany-4b-direct-token", "jevany-gemma-4b")
    assert report([str(ROOT / "loadtest" / "results" / f"bench-h200-{name}.json") for name in models]) == 0
    table_of_results = capsys.readouterr().out
    assert table_of_results.count("\n") == 2 + 2 * len(models)
    assert table_of_results in (ROOT / "README.md").read_text()
    (tmp_path / "broken.json").write_text("{}")
    assert report([str(tmp_path / "broken.json")]) == 2


def test_the_readme_says_how_far_answers_move() -> None:
    results = [json.loads(path.read_text()) for path in (ROOT / "loadtest" / "results").glob("bench-h200-*.json")]
    parities = [result["parity"] for result in results if "parity" in result]
    assert len(parities) == 4
    ratios = [parity["error_against_float32"]["ratio"] for parity in parities]
    text = f"our bfloat16 errs {min(ratios):.2f} to {max(ratios):.2f} times as much as transformers' own"
    assert text in (ROOT / "README.md").read_text().replace("\n", " ")
    assert {
        value for parity in parities for value in parity["bucket_edges"]["largest_probability_change"].values()
    } == {0}
    for result in results:
        same = result["modes"]["engine"]["same_bits"]
        assert same["same"] == same["repeats"] == 1000


def test_the_readme_says_where_the_time_goes() -> None:
    results = ROOT / "loadtest" / "results"
    bench = json.loads((results / "bench-h200-jevany-27b.json").read_text())
    clocks = json.loads((results / "clocks-h200-jevany-27b.json").read_text())["while_over_2000_tokens"]
    short, long = (bench["modes"]["engine"]["profile"][length] for length in ("128", "2048"))
    in_products = [part["classes"]["products"]["milliseconds"] for part in (short, long)]
    operations = bench["floor"]["matrix_bytes"] * 2048  # A weight of 2 bytes takes part in 2 operations a token.
    for figure in (
        f"{in_products[0]:.1f} of {short['milliseconds']:.1f} ms at 128 tokens",
        f"at {bench['floor']['matrices_once'] / in_products[0]:.0%}".replace("%", " %"),
        f"{in_products[1]:.1f} of {long['milliseconds']:.1f} ms at 2,048",
        f"{operations / in_products[1] / 1e9:.0f} TFLOP/s",
        f"{statistics.median(moment['sm_MHz'] for moment in clocks):,.0f} of 1,980 MHz",
    ):
        assert figure in (ROOT / "README.md").read_text().replace("\n", " ")


def test_random_weights_need_the_lengths_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    panel = tmp_path / "held-out.jsonl"
    write_panel([str(panel), "--rows", "2"])
    assert main(["jevany-4b", "--weights", "random", "--panel", str(panel)]) == 2
    expected = "held-out.jsonl: held-out-0000: no row_tokens_qwen, which random weights need"
    assert expected in capsys.readouterr().err


def test_what_fails_is_in_the_result_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr("jevany_backend.engine.modes._our_engine", broken)
    arguments = ["jevany-tiny", "--out", str(tmp_path), "--rows", "2", "--repeats", "1", "--warm-up", "0", "--cpu"]
    assert main([*arguments, "--modes", "engine", "sdpa"]) == 1
    result = json.loads((tmp_path / "jevany-tiny.json").read_text())
    check(result)
    assert result["errors"] == {"engine": "RuntimeError: no such kernel"}
    assert not result["complete"]
    assert result["modes"]["sdpa"]["summary"]["samples"] == 2
    assert list(result["modes"]) == ["sdpa", "engine"]
    assert "| engine | no such kernel |" in table(result)


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jevany-none"]) == 2
    assert "jevany-none" in capsys.readouterr().err

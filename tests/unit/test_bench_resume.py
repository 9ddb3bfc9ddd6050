"""A benchmark that is cut short: what it leaves, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jevany_backend.decision_model import Engine
from jevany_bench import __main__ as bench
from jevany_bench import machine
from jevany_bench.protocol import REPEATS, WARM_UP
from jevany_bench.report import table
from jevany_bench.result import ResultError, check, read, read_earlier, write

ARGUMENTS = ["jevany-tiny", "--rows", "3", "--repeats", "2", "--warm-up", "0", "--cpu", "--modes", "default", "sdpa"]
BUILD = bench.build_engine


class _Cut:
    """An engine that Ctrl-C meets in the middle of its samples."""

    def __init__(self, engine: Engine, answers: int) -> None:
        self.engine = engine
        self.left = answers

    def probabilities(self, row: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.engine.probabilities(row)


def run(out: Path, *more: str) -> int:
    return bench.main([*ARGUMENTS, "--out", str(out), *more])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes whose engine has been built; in the first `sdpa` Ctrl-C comes after five rows."""
    names: list[str] = []

    def build(mode: str, *arguments: Any) -> Any:
        names.append(mode)
        engine = BUILD(mode, *arguments)
        return _Cut(engine, 5) if mode == "sdpa" and names.count(mode) == 1 else engine

    monkeypatch.setattr(bench, "build_engine", build)
    return names


def test_what_ctrl_c_leaves_is_valid_and_is_resumed(
    tmp_path: Path, built: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"jevany_bench: stopped; {tmp_path} has what there is"
    partial = read(tmp_path / "jevany-tiny.json")
    assert not partial["complete"]
    first, second = partial["modes"]["default"], partial["modes"]["sdpa"]
    assert len(first["samples"]["row"]) == first["summary"]["samples"] == 6
    assert 0 < len(second["samples"]["row"]) == second["summary"]["samples"] < 6
    assert "(cut short)" in table(partial)
    assert partial["origin"] == machine.origin()

    assert run(tmp_path, "--resume") == 0
    assert "resumed with default measured" in capsys.readouterr().err
    whole = read(tmp_path / "jevany-tiny.json")
    assert built == ["default", "sdpa", "sdpa"]
    assert whole["complete"]
    assert whole["modes"]["default"] == first
    assert whole["modes"]["sdpa"]["summary"]["samples"] == 6
    assert whole["modes"]["sdpa"]["against_first"]["rows"] == 3
    assert whole["started"] == partial["started"]
    # Nothing is left, and nothing is measured again.
    assert run(tmp_path, "--resume") == 0
    assert read(tmp_path / "jevany-tiny.json") == whole
    assert len(built) == 3


def test_ctrl_c_before_the_first_sample_leaves_a_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "build_engine", stop)
    assert run(tmp_path) == 130
    assert read(tmp_path / "jevany-tiny.json")["modes"] == {"default": {}, "sdpa": {}}


def test_only_the_same_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    assert run(tmp_path, "--resume", "--repeats", "3") == 2
    path = tmp_path / "jevany-tiny.json"
    assert capsys.readouterr().err.endswith(f"jevany_bench: {path} cannot be resumed: its protocol is another\n")


def test_a_mode_that_ran_has_samples_and_a_bench_an_origin(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    content = read(tmp_path / "jevany-tiny.json")
    for name in ("origin", "modes", "protocol"):
        with pytest.raises(ResultError, match=f"'{name}' is a required property"):
            check({key: value for key, value in content.items() if key != name})
    for lacking in ("samples", "summary"):
        modes = {**content["modes"], "sdpa": {k: v for k, v in content["modes"]["sdpa"].items() if k != lacking}}
        with pytest.raises(ResultError, match=rf"modes\.sdpa: '{lacking}' is a dependency of"):
            check({**content, "modes": modes})
    with pytest.raises(ResultError, match="modes: "):
        check({**content, "modes": {}})


def test_an_image_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TRITON_SERVER_VERSION", raising=False)
    assert machine.container_image() is None
    assert machine.origin().startswith("jevany-triton ")
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", "26.04")
    assert machine.origin() == "container image 26.04"


def test_three_repeats_after_sixteen_requests_are_the_default() -> None:
    options = bench._parser().parse_args(["jevany-tiny"])
    assert (options.repeats, options.warm_up) == (REPEATS, WARM_UP) == (3, 16)


def test_clocks_may_change_and_the_gpu_may_not(tmp_path: Path) -> None:
    gpu = {"name": "g", "clocks.sm": "1980", "clocks.max.sm": "1980", "clocks.mem": "3201", "power.limit": "700"}
    assert run(tmp_path) == 0
    path = tmp_path / "jevany-tiny.json"
    content = read(path)
    content["machine"]["gpus"] = [{**gpu, "mig.mode.current": "Disabled"}]
    write(content, path)
    for changed, same in (("clocks.sm", True), ("clocks.mem", True), ("clocks.max.sm", False), ("name", False)):
        other = {
            **content,
            "machine": {**content["machine"], "gpus": [{**content["machine"]["gpus"][0], changed: "1"}]},
        }
        if same:
            assert read_earlier(path, other, ["machine"]) == content
        else:
            with pytest.raises(ResultError, match="its machine is another"):
                read_earlier(path, other, ["machine"])

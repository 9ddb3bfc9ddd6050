"""Choices by measurement: what is chosen from times, and that times are kept and asked for once."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from jevany_backend.engine import measured as module
from jevany_backend.engine.delta_choice import DeltaRule
from jevany_backend.engine.early_choice import choose_launch
from jevany_backend.engine.kernels import FUSED, Kernels
from jevany_backend.engine.kernels.delta_inputs import DeltaInputs, DeltaShape
from jevany_backend.engine.kernels.fla_delta_rule import fla_delta_rule
from jevany_backend.engine.kernels.skinny_product import skinny_plans
from jevany_backend.engine.measured import Measured, Times, agree, fastest
from jevany_backend.engine.packed import LAYOUTS, LIBRARIES, Padded, ProductPlan, multiply, plan_product

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU as far as measuring is concerned, whose times are a list; returns what has been timed."""
    timed: list[Any] = []

    def time_it(run: Callable[[int], object]) -> float | None:
        timed.append(run(0))
        return timed[-1]

    monkeypatch.setattr(module, "_time", time_it)
    monkeypatch.setattr(module, "describe_gpu", lambda device: {"gpu": "one", "driver": "1"})
    return timed


def _compare(measured: Measured, **times: float | None) -> Times:
    def taking(time: float | None) -> Callable[[int], object]:
        return lambda _: time

    return measured.compare("which?", {name: taking(time) for name, time in times.items()})


def test_times_are_measured_once_and_kept(tmp_path: Path, gpu: list[Any]) -> None:
    first = Measured(torch.device("cuda"), tmp_path)
    assert _compare(first, a=2.0, b=1.0, c=None) == {"a": 2.0, "b": 1.0, "c": None}
    assert _compare(first, a=9.0, b=9.0) == {"a": 2.0, "b": 1.0}
    first.keep()
    again = Measured(torch.device("cuda"), tmp_path)
    assert _compare(again, a=9.0, d=3.0) == {"a": 2.0, "d": 3.0}
    assert gpu == [2.0, 1.0, None, 3.0]
    assert again.measured_now == 1


def test_another_machine_measures_for_itself(tmp_path: Path, gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = Measured(torch.device("cuda"), tmp_path)
    _compare(first, a=2.0)
    first.keep()
    monkeypatch.setattr(module, "describe_gpu", lambda device: {"gpu": "one", "driver": "2"})
    assert Measured(torch.device("cuda"), tmp_path).times == {}


def test_a_machine_is_known_by_its_versions_and_our_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    machine = module.describe_gpu(torch.device("cuda"))
    assert {"gpu", "driver", "cuda", "torch", "triton", "flash-linear-attention", "kernels"} <= machine.keys()
    assert machine["triton"] == triton.__version__
    (tmp_path / "one.py").write_text("1")
    before = module._source_hash(tmp_path)
    (tmp_path / "one.py").write_text("2")
    assert module._source_hash(tmp_path) != before


def test_a_broken_file_is_measured_anew(tmp_path: Path, gpu: list[Any]) -> None:
    first = Measured(torch.device("cuda"), tmp_path)
    _compare(first, a=2.0)
    first.keep()
    [path] = tmp_path.iterdir()
    path.write_text("{")
    assert Measured(torch.device("cuda"), tmp_path).times == {}


def test_where_nothing_can_be_written_nothing_fails(tmp_path: Path, gpu: list[Any]) -> None:
    (tmp_path / "file").write_text("")
    measured = Measured(torch.device("cuda"), tmp_path / "file" / "below")
    _compare(measured, a=2.0)
    measured.keep()


def test_nothing_is_measured_on_a_cpu() -> None:
    assert Measured(CPU).compare("which?", {"a": lambda _: pytest.fail("ran")}) == {}


def test_what_computes_something_else_is_not_the_fastest(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def is_right(name: str) -> bool:
        asked.append(name)
        return name != "a"

    assert fastest({"b": 2.0, "a": 1.0, "c": 3.0}, is_right) == "b"
    assert asked == ["a", "b"]
    assert "a computes something else" in caplog.text
    assert fastest({"a": 1.0}, is_right) is None


def test_agree() -> None:
    one = torch.randn(50, dtype=torch.bfloat16)
    assert agree(one, one.float() * 1.001)
    assert not agree(one, one * 1.1)
    assert not agree(one * torch.nan, one)
    assert not agree(one, one * torch.nan)


def test_fastest() -> None:
    assert fastest({"a": 2.0, "b": None, "c": 1.0}) == "c"
    assert fastest({"a": None}) is None
    assert fastest({}) is None


class Told(Measured):
    """Times that are told, not measured."""

    def __init__(self, times: Mapping[str, float]) -> None:
        super().__init__(CPU)
        self.device = torch.device("cuda")
        self.told = times

    def compare(self, question: str, candidates: Mapping[str, Callable[[int], object]]) -> Times:
        rows = next(word for word in question.split() if word.isdigit())
        return {name: self.told.get(f"{rows} {name}", self.told.get(name)) for name in candidates}


def test_fla_runs_with_and_without_what_it_hands_over_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def rule(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        seen.append(os.environ.get("FLA_FLASH_QLA"))
        return q, None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setenv("FLA_FLASH_QLA", "mine")
    inputs = DeltaInputs(*(torch.ones(3, 1, 16) for _ in range(3)), *(torch.ones(3, 1) for _ in range(2)))
    for flash_qla in (True, False):
        assert torch.equal(fla_delta_rule(inputs, flash_qla=flash_qla), inputs.queries)
    assert [*seen, os.environ["FLA_FLASH_QLA"]] == ["1", "0", "mine"]


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, **options: real(*sizes, **(options | {"device": CPU})))


def _plan(times: Mapping[str, float]) -> ProductPlan:
    return plan_product(Told(times), (64, 32), torch.float32, 192, summed=False)


def test_a_product_takes_the_fastest_way_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch)
    times = {"stored cublas": 10.0, "stored cublaslt": 11.0, "transposed cublas": 12.0, "transposed cublaslt": 11.0}
    plan = _plan(times | {"96 stored cublaslt": 5.0})
    assert plan.rows == (32, 64, 96, 128, 160, 192)
    assert [plan.way(rows) for rows in (1, 64, 65, 96, 97, 5000)] == [
        *("cublas", "cublas", "cublaslt", "cublaslt", "cublas", "cublas")
    ]
    assert not plan.transposed


def test_a_layout_is_chosen_for_all_rows_by_how_many_come_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch)
    times = {f"{layout} {library}": 10.0 for layout in LAYOUTS for library in LIBRARIES}
    # Half as slow again for the 7 rows of up to 192 tokens, and an eighth faster for the 61 of up to 96.
    slow = {f"{rows} transposed {library}": 15.0 for rows in (160, 192) for library in LIBRARIES}
    assert not _plan(times | slow).transposed
    assert _plan(times | slow | {"96 transposed cublaslt": 8.75}).transposed


def test_more_rows_are_multiplied_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch)
    times = {f"{layout} {library}": 20.0 for layout in LAYOUTS for library in LIBRARIES}
    times |= {"192 transposed cublas of 256 rows": 13.0, "160 transposed cublas of 256 rows": 5.0}  # Too many more.
    plan = _plan(times)
    assert [plan.way(rows) for rows in (160, 161, 192)] == ["cublas", *[Padded(256, "cublas")] * 2]


@pytest.mark.parametrize("transposed", [False, True])
def test_padded_rows_have_the_products_of_the_rows(transposed: bool) -> None:
    rows, weight = torch.randn(5, 32), torch.randn(64, 32)
    product = multiply(rows, weight.T.contiguous() if transposed else weight, transposed, Padded(8, "cublas"))
    assert product.is_contiguous()
    torch.testing.assert_close(product, rows @ weight.T)


def test_our_kernel_is_taken_where_it_is_faster_and_there_are_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch)
    shape = (4096, 1024)
    ours = skinny_plans(shape, summed=True)[0]
    times = {f"{layout} {library}": 10.0 for layout in LAYOUTS for library in LIBRARIES} | {f"64 stored {ours}": 5.0}
    plan = plan_product(Told(times), shape, torch.bfloat16, 192, summed=True)
    assert not plan.transposed
    assert [plan.way(rows) for rows in (64, 128, 192)] == [ours, "cublas", "cublas"]


def test_the_delta_rule_takes_the_fastest_for_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jevany_backend.engine.delta_choice.example", lambda *_: None)
    wrong: set[str] = set()
    monkeypatch.setattr(DeltaRule, "_is_right", lambda _, inputs, name: name not in wrong)
    rule = DeltaRule(Measured(CPU), DeltaShape(1, 16, 2, 16), torch.float32, 128)
    first, second = list(rule.candidates)[:2]
    assert rule.name(10) == rule.name(4096) == first
    told = Told({first: 2.0, second: 3.0, f"96 {second}": 1.0})
    rule = DeltaRule(told, DeltaShape(1, 16, 2, 16), torch.float32, 128)
    assert [rule.name(rows) for rows in (1, 64, 65, 96, 97, 128, 5000)] == [
        *(first, first, second, second, first, first, first)
    ]
    assert str(rule) == f"{first} (3), {second} (1)"
    wrong.add(second)
    rule = DeltaRule(told, DeltaShape(1, 16, 2, 16), torch.float32, 128)
    assert rule.name(96) == first


@pytest.mark.parametrize(
    ("capability", "times", "right", "early"),
    [
        ((9, 0), {"ordinary": 2.0, "early": 1.0}, True, True),
        ((9, 0), {"ordinary": 1.0, "early": 2.0}, True, False),
        ((9, 0), {"ordinary": 2.0, "early": 1.0}, False, False),
        ((8, 0), {"ordinary": 2.0, "early": 1.0}, True, False),
    ],
)
def test_kernels_are_launched_early_where_that_is_faster_and_right(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], times: dict[str, float], right: bool, early: bool
) -> None:
    class Chain:
        def __init__(self, *_: Any) -> None: ...

        def run(self, kernels: Kernels, _: int = 0) -> torch.Tensor:
            return torch.ones(3) * (1 if kernels is FUSED or right else 2)

    monkeypatch.setattr("jevany_backend.engine.early_choice._Chain", Chain)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    kernels = choose_launch(Told(times), DeltaShape(1, 16, 2, 16), torch.bfloat16)
    assert (kernels is not FUSED) == early
    assert (getattr(kernels.glu, "keywords", {}) == {"early": True}) == early
    assert choose_launch(Measured(CPU), DeltaShape(1, 16, 2, 16), torch.bfloat16) is FUSED

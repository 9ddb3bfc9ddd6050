"""The load test against a real Triton: figures are looked at for their structure, never for their size."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jevany_backend.protocol import parse_request
from jevany_bench.panel import read_panel
from jevany_bench.result import read
from jevany_client import AsyncClient
from jevany_loadtest.__main__ import PANELS, _parser
from jevany_loadtest.connection import Connection
from jevany_loadtest.serial import request_bodies
from jevany_server.process import TritonServer
from tests.triton.conftest import FREE_PORTS

ROOT = Path(__file__).parents[2]


def command(server: TritonServer | None, model: str, out: Path, *arguments: str) -> list[str]:
    ports = FREE_PORTS if server is None else server.ports
    return [
        *(sys.executable, "-m", "jevany_loadtest", model, "--out", str(out), "--panel", "transfer-shape"),
        *(f"--{name}-port={port}" for name, port in vars(ports).items()),
        *arguments,
    ]


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def result(out: Path) -> dict[str, Any]:
    [path] = out.glob("*.json")
    return read(path)


def generators_of(pid: int) -> list[Path]:
    """The load generators among a process's children, as their directories in /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"jevany_loadtest.generator" in (status.parent / "cmdline").read_bytes():
                found.append(status.parent)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_serial_run(server: TritonServer, tmp_path: Path, transport: str) -> None:
    arguments = ("--transport", transport, "--rows", "5", "--repeats", "2", "--warm-up", "3")
    done = run(command(server, "jevany-tiny", tmp_path, *arguments))
    assert done.returncode == 0, done.stderr
    assert "already running" in done.stderr
    content = result(tmp_path)
    assert content["complete"]
    assert content["weights"] == "real"
    assert content["protocol"] == {"transport": transport, "repeats": 2, "warm_up": 3, "seed": 0}
    assert content["panel"]["sha256"] == read_panel(PANELS["transfer-shape"]).sha256
    assert (content["panel"]["rows"], content["panel"]["of"]) == (5, 44)
    assert content["machine"]["device"]
    assert content["server"]["engine"] == "reference"
    assert content["counters"] is None  # This engine captures no graphs.
    table = content["samples"]
    assert sorted(table["row"][:5]) == sorted(table["row"][5:]) == [0, 1, 2, 3, 4]
    assert table["error"] == [None] * 10
    for client, served, model in zip(table["client_ms"], table["server_ms"], table["model_ms"], strict=True):
        assert client > model > 0
        # None where another caller came between. It may be above the client's: it ends when Triton lets go of the
        # request, and the answer has left by then.
        assert served is None or served > model
    for name, column in (("client_ms", table["client_ms"]), ("model_ms", table["model_ms"])):
        assert content["summary"][name]["p99"] == pytest.approx(np.quantile(column, 0.99))
        assert content["summary"][name]["median"] == pytest.approx(np.median(column))
    assert content["summary"]["requests_a_second"] == pytest.approx(1e3 / np.mean(table["client_ms"]))
    assert re.search(r"\| client \| 10 \|", done.stdout)
    assert "No published row and no target for jevany-tiny" in done.stdout


def test_without_a_server_one_is_started_and_stopped_and_its_graphs_are_counted(
    repository: Path, tmp_path: Path
) -> None:
    config = repository / "small" / "config.pbtxt"
    config.write_text(config.read_text().replace('"automatic"', '"engine"'))
    arguments = ("--repository", str(repository), "--rows", "4", "--repeats", "2", "--warm-up", "2")
    done = run(command(None, "small", tmp_path / "out", *arguments))
    assert done.returncode == 0, done.stderr
    assert "started for this run" in done.stderr
    content = result(tmp_path / "out")
    assert content["counters"]["replays"] == 8
    assert content["counters"]["eager_calls"] == 0
    assert content["counters"]["captures_after_ready"] == 0
    assert "Graph replays: 8, eager calls: 0" in done.stdout
    address = re.search(r"grpc://([\d.]+):(\d+)", done.stderr)
    assert address
    with pytest.raises(ConnectionError):
        socket.create_connection((address[1], int(address[2])))


def test_a_run_that_was_cut_short_leaves_a_valid_file_and_is_resumed(server: TritonServer, tmp_path: Path) -> None:
    arguments = command(server, "jevany-tiny", tmp_path, "--repeats", "40", "--rows", "5", "--warm-up", "1")
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    generators = generators_of(process.pid)
    assert len(generators) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not any(directory.exists() for directory in generators)
    partial = result(tmp_path)
    count = len(partial["samples"]["row"])
    assert not partial["complete"]
    assert 0 < count < 200
    # The settings are other ones: nothing is mixed.
    other = run(command(server, "jevany-tiny", tmp_path, "--repeats", "3", "--rows", "5", "--resume"))
    assert other.returncode == 1
    assert "cannot be resumed: its protocol is another" in other.stderr
    done = run([*arguments, "--resume"])
    assert done.returncode == 0, done.stderr
    assert f"resumed after {count} samples" in done.stderr
    content = result(tmp_path)
    assert content["complete"]
    assert content["samples"]["row"][:count] == partial["samples"]["row"]
    assert np.bincount(content["samples"]["row"]).tolist() == [40] * 5


def test_open_loop_over_workers(server: TritonServer, tmp_path: Path) -> None:
    arguments = ("--mode", "open", "--rate", "10", "--seconds", "3", "--workers", "2", "--rows", "5")
    shapes = ("--stages", "warm-up", "steps", "spike", "soak")
    done = run(command(server, "jevany-tiny", tmp_path, *arguments, *shapes))
    assert done.returncode == 0, done.stderr
    content = result(tmp_path)
    stages = content["protocol"]["stages"]
    names = ["warm-up", "step 1", "step 2", "step 3", "step 4", "spike", "after spike", "soak"]
    assert [stage["name"] for stage in stages] == names
    table = content["samples"]
    # All samples of both workers are here, and the percentiles are those of all of them.
    due = [ms for ms, stage in zip(table["due_ms"], table["stage"], strict=True) if stage > 0]
    assert content["summary"]["due_ms"]["samples"] == len(due)
    assert content["summary"]["due_ms"]["p99"] == pytest.approx(np.quantile(due, 0.99))
    for client, since, late in zip(table["client_ms"], table["due_ms"], table["late_ms"], strict=True):
        assert since >= client + late - 0.01


def test_what_is_beyond_the_cap_is_counted_as_dropped(server: TritonServer, tmp_path: Path) -> None:
    arguments = ("--mode", "open", "--rate", "300", "--seconds", "1", "--in-flight", "2", "--stages", "soak")
    done = run(command(server, "jevany-tiny", tmp_path, *arguments))
    assert done.returncode == 1
    content = result(tmp_path)
    assert content["summary"]["dropped"] == content["errors"]["dropped"] > 0
    assert f"Errors: {content['errors']['dropped']} dropped" in done.stdout


def test_a_server_that_stands_still_for_two_seconds_shows_in_the_tail(repository: Path, tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        TritonServer(repository, ["small"], ports=FREE_PORTS, log=log) as server,
    ):
        server.wait_until_ready(120)
        arguments = ("--mode", "open", "--rate", "100", "--seconds", "5", "--stages", "soak", "--in-flight", "2000")
        process = subprocess.Popen(
            command(server, "small", tmp_path / "out", *arguments, "--rows", "3"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection = Connection(server.grpc_url, "small", 60)
        deadline = time.monotonic() + 60
        while connection.served()[0] < 50 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(2)  # This is what is tested.
        os.kill(server.process.pid, signal.SIGCONT)
        connection.close()
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    content = result(tmp_path / "out")
    assert content["summary"]["due_ms"]["p99"] >= 1800, output


def test_search_over_a_real_server(server: TritonServer, tmp_path: Path) -> None:
    # No rate keeps a p99 of a microsecond: the search says so instead of going on.
    arguments = ("--mode", "open", "--rate", "100", "--seconds", "0.5", "--search-p99", "0.001", "--rows", "2")
    process = subprocess.Popen(
        command(server, "jevany-tiny", tmp_path, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    content = result(tmp_path)
    assert not content["complete"]
    assert content["summary"]["stages"][0]["name"] == "warm-up"


def test_a_plain_client_measures_the_same(server: TritonServer, tmp_path: Path) -> None:
    """The run's own figure beside that of an asyncio loop, request by request in turn, so that both meet the same load.

    A machine that others use is no place for 5 %: here both must see the same answers, and neither be several times
    slower than the other. The figures are printed.
    """
    done = run(command(server, "jevany-tiny", tmp_path, "--rows", "8", "--repeats", "3", "--warm-up", "4"))
    assert done.returncode == 0, done.stderr
    content = result(tmp_path)
    requests = read_panel(PANELS["transfer-shape"]).requests[:8]

    async def loop() -> tuple[list[float], dict[str, list[float]]]:
        times, answers = [], {}
        async with AsyncClient(server.grpc_url, "jevany-tiny") as client:
            for row in [0, 1, 2, 3, *content["samples"]["row"]]:
                begin = time.perf_counter()
                decision = await client.decide(requests[row].state, requests[row].question)
                times.append((time.perf_counter() - begin) * 1e3)
                answers[str(row)] = [float(p) for p in decision.probabilities]
        return times[4:], answers

    times, answers = asyncio.run(loop())
    assert answers.keys() == content["probabilities"].keys()
    for row, values in answers.items():
        assert values == pytest.approx(content["probabilities"][row], abs=1e-5)
    ours, theirs = content["summary"]["client_ms"]["median"], float(np.median(times))
    print(f"median: Locust {ours:.2f} ms, asyncio {theirs:.2f} ms, {ours / theirs - 1:+.1%}")
    assert 1 / 5 < ours / theirs < 5


def test_what_is_sent_is_the_panel(server: TritonServer) -> None:
    requests = read_panel(PANELS["transfer-shape"]).requests
    for request, body in zip(requests, request_bodies(requests), strict=True):
        parsed = parse_request(body.encode())
        assert parsed.state == request.state
        assert list(parsed.questions.values()) == [request.question]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jevany-tiny", "--mode", "open"], "--mode open needs --rate"),
        (["jevany-tiny", "--panel", "nowhere.jsonl"], "'nowhere.jsonl' is no file"),
        (["jevany-tiny", "--rate", "-1"], "'-1' is not a positive number"),
        (["jevany-none", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"], "no model 'jevany-none'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "jevany_loadtest", *arguments, "--out", str(tmp_path)])
    assert done.returncode in (1, 2)
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_result_is_json_with_a_schema(server: TritonServer, tmp_path: Path) -> None:
    done = run(command(server, "jevany-tiny", tmp_path, "--rows", "1", "--repeats", "1", "--warm-up", "1"))
    assert done.returncode == 0
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["schema"] == 1


def test_a_worker_that_goes_ends_the_run_with_an_error(server: TritonServer, tmp_path: Path) -> None:
    arguments = ("--mode", "open", "--rate", "5", "--seconds", "60", "--workers", "2", "--rows", "2")
    process = subprocess.Popen(
        command(server, "jevany-tiny", tmp_path, *arguments, "--stages", "soak", "--master-port", "5667"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    generators = generators_of(process.pid)
    [worker, _] = [each for each in generators if b"--master-host" in (each / "cmdline").read_bytes()]
    os.kill(int(worker.name), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "loadtest: a worker has gone" in errors
    assert not any((each / "cmdline").exists() and (each / "cmdline").read_bytes() for each in generators)
    assert not result(tmp_path)["complete"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (["MODEL=jevany-27b", "WEIGHTS=random"], {"mode": "serial", "weights": "random", "rate": None}),
        (["MODE=open", "RATE=10"], {"mode": "open", "rate": 10, "search_p99": None, "model": "jevany-tiny"}),
        (["MODE=open", "RATE=4", "P99=400", "PANEL=transfer-shape"], {"search_p99": 400, "panel": "transfer-shape"}),
        (["PROTOCOL=http", "LOAD_FLAGS=--resume --rows 5"], {"transport": "http", "resume": True, "rows": 5}),
    ],
)
def test_make_passes_on_what_it_is_told(variables: list[str], expected: dict[str, Any]) -> None:
    printed = run(["make", "--dry-run", "loadtest", *variables]).stdout.replace("\\\n", " ")
    [line] = [line for line in printed.splitlines() if "-m jevany_loadtest" in line]
    options = vars(_parser().parse_args(line.partition("-m jevany_loadtest")[2].split()))
    assert expected.items() <= options.items()

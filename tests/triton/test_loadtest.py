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
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

from jevany_backend.protocol import parse_request
from jevany_bench.panel import read_panel
from jevany_bench.result import read
from jevany_loadtest import report
from jevany_loadtest.__main__ import PANELS, _parser
from jevany_loadtest.arrivals import Stage, poisson
from jevany_loadtest.connection import Connection
from jevany_loadtest.generator_process import GeneratorProcess
from jevany_loadtest.serial import request_bodies
from jevany_server.process import TritonServer
from tests.triton.conftest import FREE_PORTS, REPOSITORY

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


def scheduled(stages: Sequence[dict[str, Any]], rows: int, workers: int) -> Counter[tuple[int, int, float]]:
    """Stage, row and instant of what all workers are to send."""
    plan = [Stage(stage["name"], stage["rate"], stage["seconds"]) for stage in stages]
    arrivals = [a for worker in range(workers) for a in poisson(plan, rows, 0, worker, workers)]
    return Counter((a.stage, a.row, round(a.seconds, 4)) for a in arrivals)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


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
    assert content["server"]["origin"] == "not known"  # It may be a container, for all that its address says.
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
    assert content["server"]["origin"] == f"nvidia-pytriton {version('nvidia-pytriton')}"
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
    assert Counter(zip(table["stage"], table["row"], table["at"], strict=True)) == scheduled(stages, 5, workers=2)
    assert [stage["requests"] for stage in stages] == [table["stage"].count(number) for number in range(len(stages))]
    due = [ms for ms, stage in zip(table["due_ms"], table["stage"], strict=True) if stage > 0]
    assert content["summary"]["due_ms"]["samples"] == len(due)
    assert content["summary"]["due_ms"]["p99"] == pytest.approx(np.quantile(due, 0.99))
    for client, since, late in zip(table["client_ms"], table["due_ms"], table["late_ms"], strict=True):
        assert since >= client + late - 0.01


def test_a_worker_of_another_machine_makes_half_of_the_load(tmp_path: Path) -> None:
    host = "127.0.0.2"  # An address that workers are sent to, as that of this machine in its network would be.
    with (
        (tmp_path / "log").open("wb") as log,
        socket.socket() as holder,
        TritonServer(REPOSITORY, ["jevany-tiny"], host=host, ports=FREE_PORTS, log=log) as server,
    ):
        server.wait_until_ready(120)
        holder.bind(("", 0))
        port = str(holder.getsockname()[1])
        holder.close()
        arguments = ("--mode", "open", "--rate", "10", "--seconds", "3", "--rows", "5", "--host", host)
        workers = ("--workers", "1", "--remote-workers", "1", "--master-port", port)
        master = subprocess.Popen(
            command(server, "jevany-tiny", tmp_path / "out", *arguments, *workers),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert master.stderr is not None
        waiting = next(line for line in master.stderr if "waiting" in line)
        worker = subprocess.Popen(
            [sys.executable, "-m", "jevany_loadtest.generator", "open", "--master-host", host, "--master-port", port]
        )
        try:
            _, errors = master.communicate(timeout=120)
            assert master.returncode == 0, errors
            assert worker.wait(60) == 0
        finally:
            master.kill()
            worker.kill()
    assert (
        f"waiting for 1 workers of other machines: make load-worker MASTER=<this machine> MASTER_PORT={port}" in waiting
    )
    content = result(tmp_path / "out")
    stages, table = content["protocol"]["stages"], content["samples"]
    assert Counter(zip(table["stage"], table["row"], table["at"], strict=True)) == scheduled(stages, 5, workers=2)
    assert table["error"] == [None] * len(table["error"])


def test_an_open_run_that_was_cut_short_is_resumed_after_its_whole_stages(server: TritonServer, tmp_path: Path) -> None:
    arguments = (
        "--mode",
        "open",
        "--rate",
        "8",
        "--seconds",
        "8",
        "--rows",
        "5",
        "--stages",
        "warm-up",
        "spike",
        "soak",
    )
    line = command(server, "jevany-tiny", tmp_path, *arguments)
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [p for p in tmp_path.glob("*.json") if 3 in read(p)["samples"]["stage"]])
    process.kill()  # Nothing can be said any more: what there is was written before.
    process.communicate(timeout=60)
    partial = result(tmp_path)
    assert partial["summary"]["stages"][1]["due_ms"]["samples"] == partial["samples"]["stage"].count(1) > 0
    assert report.main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    other = run([*line, "--resume", "--in-flight", "5"])
    assert other.returncode == 1
    assert "cannot be resumed: its protocol is another" in other.stderr
    done = run([*line, "--resume"])
    assert done.returncode == 0, done.stderr
    assert "resumed after 3 stages" in done.stderr
    content = result(tmp_path)
    assert content["complete"]
    stages, table = content["protocol"]["stages"], content["samples"]
    assert [stage["name"] for stage in stages] == ["warm-up", "spike", "after spike", "soak"]
    for number, stage in enumerate(stages):
        assert table["stage"].count(number) == stage["requests"]
    kept = sum(stage["requests"] for stage in stages[:3])
    for name, column in table.items():
        earlier = [
            v for v, stage in zip(partial["samples"][name], partial["samples"]["stage"], strict=True) if stage < 3
        ]
        assert column[:kept] == earlier
    assert min(table["at"][kept:]) >= sum(stage["seconds"] for stage in stages[:3])


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


def test_search_over_a_real_server_finds_a_rate_and_is_resumed(server: TritonServer, tmp_path: Path) -> None:
    # Few requests at a time, so that little waits where the rate is too high.
    arguments = ("--mode", "open", "--rate", "20", "--seconds", "1", "--search-p99", "2000", "--rows", "2")
    line = command(server, "jevany-tiny", tmp_path, *arguments, "--in-flight", "32")
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [p for p in tmp_path.glob("*.json") if 3 in read(p)["samples"]["stage"]])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    first = result(tmp_path)["summary"]["stages"][1]
    done = run([*line, "--resume"])
    assert done.returncode == 0, done.stderr
    resumed = re.search(r"resumed after (\d+) stages", done.stderr)
    assert resumed
    assert int(resumed[1]) in range(2, 99, 2)  # A probe and its warm-up, or several.
    content = result(tmp_path)
    assert content["complete"]
    probes, found = content["search"]["probes"], content["search"]["highest_rate"]
    assert probes[0] == {"rate": 20, "p99": first["due_ms"]["p99"], "held": True}
    assert found == max(probe["rate"] for probe in probes if probe["held"])
    assert all(probe["held"] == (probe["rate"] <= found) for probe in probes)
    assert min(probe["rate"] for probe in probes if not probe["held"]) / found <= 1.05
    assert f"Highest rate with p99 within 2000 ms: {found:.2f} requests a second" in done.stdout
    names = [stage["name"] for stage in content["protocol"]["stages"]]
    assert names == ["warm-up", "probe"] * len(probes)


def test_a_search_that_finds_nothing_can_be_stopped(server: TritonServer, tmp_path: Path) -> None:
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


def test_a_plain_client_measures_the_same(server: TritonServer) -> None:
    """The load test's own generator beside an asyncio loop that shares no code with it: within 5 % on the median.

    They take turns, a block of the panel each, so that both meet the same load, and each request of the one is paired
    with the other's same request in the block beside it. What is compared is the median of the pairs' differences. It
    gets as many pairs as it takes to know it to 2.5 % (two standard errors), whatever it is: few on a quiet machine.
    """
    requests = read_panel(PANELS["transfer-shape"]).requests[:8]
    rows = [*range(len(requests))]
    bodies = request_bodies(requests)
    plan = {"url": f"grpc://{server.grpc_url}", "model": "jevany-tiny", "timeout": 60, "requests": bodies}
    plan |= {"warm_up": rows[:4], "order": rows}
    answers: dict[str, dict[int, list[float]]] = {"ours": {}, "theirs": {}}

    def block_of_generator(generator: GeneratorProcess) -> list[float]:
        times = []
        for event in generator.run(plan):
            if event["event"] == "warm":
                generator.go_on()
            elif not event.get("warm_up"):
                times.append(event["milliseconds"])
                answers["ours"][event["row"]] = event["probabilities"]
        return times

    async def block_of_loop(client: tritonclient.grpc.aio.InferenceServerClient) -> list[float]:
        times = []
        for row in [*rows[:4], *rows]:
            given = tritonclient.grpc.InferInput("REQUEST", [1, 1], "BYTES")
            given.set_data_from_numpy(np.array([[bodies[row].encode()]], dtype=object))
            begin = time.perf_counter()
            reply = await client.infer("jevany-tiny", [given])
            answers["theirs"][row] = reply.as_numpy("PROBABILITIES").ravel().tolist()
            times.append((time.perf_counter() - begin) * 1e3)
            # The load test asks for them between two requests: the server shall meet both at the same pace.
            await client.get_inference_statistics("jevany-tiny")
        return times[4:]

    async def pairs() -> tuple[np.ndarray, np.ndarray]:
        ours: list[float] = []
        theirs: list[float] = []
        error, until = 1.0, time.monotonic() + 200
        with GeneratorProcess("serial") as generator:
            async with tritonclient.grpc.aio.InferenceServerClient(server.grpc_url) as client:
                while (len(ours) < 160 or error > 0.0125) and time.monotonic() < until:
                    # Who comes first changes, so that neither always follows the other.
                    if len(ours) // len(rows) % 2:
                        theirs += await block_of_loop(client)
                        ours += block_of_generator(generator)
                    else:
                        ours += block_of_generator(generator)
                        theirs += await block_of_loop(client)
                    differences = np.array(ours) - theirs
                    # Of a median, for differences whose middle is that of a normal distribution. What slows one pair of
                    # a block slows its neighbours too, so that blocks count, not pairs.
                    blocks = np.median(differences.reshape(-1, len(rows)), axis=1)
                    spread = np.subtract(*np.quantile(blocks, (0.75, 0.25))) / 1.349
                    error = 1.2533 * spread / len(blocks) ** 0.5 / float(np.median(theirs))
        return np.array(ours), np.array(theirs)

    ours, theirs = asyncio.run(pairs())
    assert answers["ours"].keys() == answers["theirs"].keys() == set(rows)
    for row in rows:
        assert answers["ours"][row] == pytest.approx(answers["theirs"][row], abs=1e-5)
    apart = float(np.median(ours - theirs) / np.median(theirs))
    print(
        f"{len(ours)} pairs; median: Locust {np.median(ours):.2f} ms, asyncio {np.median(theirs):.2f} ms, {apart:+.1%}"
    )
    assert abs(apart) <= 0.05


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
    assert json.loads(path.read_text())["schema"] == 2


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
        (["MASTER_PORT=6000"], {"master_port": 6000}),
    ],
)
def test_make_passes_on_what_it_is_told(variables: list[str], expected: dict[str, Any]) -> None:
    printed = run(["make", "--dry-run", "loadtest", *variables]).stdout.replace("\\\n", " ")
    [line] = [line for line in printed.splitlines() if "-m jevany_loadtest" in line]
    options = vars(_parser().parse_args(line.partition("-m jevany_loadtest")[2].split()))
    assert expected.items() <= options.items()

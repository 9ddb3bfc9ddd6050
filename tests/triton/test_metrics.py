"""What the metrics endpoint of a real server says of our models."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jevany_backend.engine.graphs import OUR_GRID
from jevany_client import Client, Noul, TooLong
from jevany_loadtest.server import Server
from jevany_server.process import TritonServer
from tests.triton.conftest import FREE_PORTS

QUESTION = Noul("Is this about a payment?")
LABELS = {"model": "small", "version": "1", "instance": "small_0_0", "weights": "checkpoint"}


def configured(repository: Path, old: str, new: str) -> None:
    file = repository / "small" / "config.pbtxt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_endpoint_counts_what_the_graphs_did(repository: Path, tmp_path: Path) -> None:
    configured(repository, '"automatic"', '"engine"')
    with (
        (tmp_path / "log").open("wb") as log,
        TritonServer(repository, ["small"], ports=FREE_PORTS, log=log) as server,
    ):
        server.wait_until_ready(120)
        with Client(server.grpc_url, "small") as client:
            decisions = [client.decide("I was charged twice." + "!" * n, QUESTION) for n in range(5)]
        lengths = [decision.usage["input_tokens"] for decision in decisions]
        tokens, padded = sum(lengths), sum(map(OUR_GRID.length, lengths))
        deadline = time.monotonic() + 30
        endpoint = Server(server.host, server.ports, started_here=True)
        while (metrics := endpoint.metrics("small"))["jevany_tokens_total"][1] < tokens and time.monotonic() < deadline:
            time.sleep(0.1)
    assert metrics["jevany_model_info"] == ({**LABELS, "engine": "engine"}, 1)
    assert metrics["jevany_tokens_total"] == (LABELS, tokens)
    assert metrics["jevany_graph_replays_total"] == (LABELS, 5)
    assert metrics["jevany_eager_calls_total"] == (LABELS, 0)
    assert metrics["jevany_captures_after_ready_total"] == (LABELS, 0)
    assert metrics["jevany_padding_tokens_total"] == (LABELS, padded - tokens)
    assert padded > tokens


def failures(server: TritonServer) -> dict[str, float]:
    """Return the requests that ``small`` has answered with an error, by its code."""
    with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r'^jevany_failed_requests_total\{(?=.*model="small").*error="(\w+)".*\} (\S+)$', text, re.M)
    return {code: float(value) for code, value in found}


def test_refused_requests_are_counted_by_their_error(repository: Path, tmp_path: Path) -> None:
    configured(
        repository, '"max_state_tokens" value: { string_value: "8192"', '"max_state_tokens" value: { string_value: "40"'
    )
    none = dict.fromkeys(
        (
            "invalid_request",
            "context_length_exceeded",
            "unsupported",
            "not_ready",
            "out_of_memory",
            "internal",
            "cancelled",
            "deadline_exceeded",
        ),
        0,
    )
    with (
        (tmp_path / "log").open("wb") as log,
        TritonServer(repository, ["small"], ports=FREE_PORTS, log=log) as server,
    ):
        server.wait_until_ready(120)
        assert failures(server) == none
        with Client(server.grpc_url, "small") as client:
            client.decide("short", QUESTION)
            for state in ("long " * 40, "longer " * 40):
                with pytest.raises(TooLong):
                    client.decide(state, QUESTION)
        body = json.dumps({"REQUEST": "{}"}).encode()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"http://{server.http_url}/v2/models/small/generate", body, timeout=10)
        deadline = time.monotonic() + 30
        while sum((counted := failures(server)).values()) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert counted == none | {"context_length_exceeded": 2, "invalid_request": 1}


class WithoutMetrics(TritonServer):
    """A server that somebody started with its metrics off."""

    def _arguments(self, repository: Path, backends: Path) -> list[str]:
        return [*super()._arguments(repository, backends), "--allow-metrics=false"]


@pytest.mark.parametrize("engine", ["reference", "engine"])
def test_a_server_without_metrics_serves_all_the_same(repository: Path, tmp_path: Path, engine: str) -> None:
    configured(repository, '"automatic"', f'"{engine}"')
    with (
        (tmp_path / "log").open("wb") as log,
        WithoutMetrics(repository, ["small"], ports=FREE_PORTS, log=log) as server,
    ):
        server.wait_until_ready(120)
        with Client(server.grpc_url, "small") as client:
            assert client.decide("I was charged twice.", QUESTION).model == "small"

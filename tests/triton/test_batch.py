"""Requests that Triton hands over together: each gets its own answer or its own error."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from jevany_client import Choice, Client, DeadlineExceeded, Noul
from jevany_server.process import TritonServer
from tests.triton.conftest import FREE_PORTS

GOOD: dict[str, Any] = {"state": {"plan": "pro"}, "question": {"type": "noul", "instructions": "Is the plan pro?"}}
LONG: dict[str, Any] = GOOD | {"state": "word " * 5000}
UNKNOWN: dict[str, Any] = {"state": "text", "questions": {"team": {"type": "ranking"}}}


def _tensor(module: Any, body: bytes) -> Any:
    tensor = module.InferInput("REQUEST", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[body]], dtype=np.object_))
    return tensor


def _ask_together(url: str, model: str, bodies: list[bytes]) -> list[Any]:
    """Send the requests at once; return each one's result or error, in order."""
    done: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        for index, body in enumerate(bodies):
            client.async_infer(
                model, [_tensor(grpc, body)], lambda result, error, index=index: done.put((index, result, error))
            )
        outcomes = [done.get(timeout=60) for _ in bodies]
    return [result if error is None else error for _, result, error in sorted(outcomes, key=lambda item: item[0])]


def test_three_bad_requests_of_a_batch_leave_five_answers(repository: Path) -> None:
    config = repository / "small" / "config.pbtxt"
    waiting = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 30000000 }"
    config.write_text(config.read_text().replace("dynamic_batching { }", waiting))
    good = json.dumps(GOOD).encode()
    bodies = [good, b'{"state": ', good, json.dumps(LONG).encode(), good, json.dumps(UNKNOWN).encode(), good, good]
    with TritonServer(repository, ["small"], ports=FREE_PORTS) as server:
        server.wait_until_ready(60)
        outcomes = _ask_together(server.grpc_url, "small", bodies)
        with grpc.InferenceServerClient(server.grpc_url) as client:
            statistics = client.get_inference_statistics("small", as_json=True)["model_stats"][0]
    assert [entry["batch_size"] for entry in statistics["batch_stats"]] == ["8"]
    errors = [outcome.message() for outcome in outcomes if isinstance(outcome, InferenceServerException)]
    assert errors == [
        "invalid_request: request: not JSON: Expecting value at line 1 column 11",
        "context_length_exceeded: state: more than 8192 tokens; the limit is 4096",
        "invalid_request: questions.team.type: unknown type 'ranking'; needs one of noul, choice, score",
    ]
    answers = [
        json.loads(outcome.as_numpy("ANSWER")[0, 0]) for outcome in outcomes if isinstance(outcome, grpc.InferResult)
    ]
    assert len(answers) == 5
    assert {answer["answer"]["noul"] for answer in answers} == {answers[0]["answer"]["noul"]}
    assert all(outcomes[i].as_numpy("PROBABILITIES").shape == (1, 2) for i in (0, 2, 4, 6, 7))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("timeout", [0.1, 1.0], ids=["soon", "late"])
def test_what_nobody_waits_for_any_more_is_not_computed(server: TritonServer, protocol: str, timeout: float) -> None:
    # Of 32 that take most of a second each, nearly all wait, for longer than their callers do.
    slow = Choice("Which?", {f"{number:04}": "one of the many parcels" for number in range(400)})
    url = f"{protocol}://{server.grpc_url if protocol == 'grpc' else server.http_url}"
    outcomes: Counter[str] = Counter()
    with Client(url, "jevany-tiny") as client, ThreadPoolExecutor(32) as threads:
        handed_over, refused = _handed_over(server), _given_up(server)
        for call in [threads.submit(client.decide, "text", slow, timeout=timeout) for _ in range(32)]:
            try:
                call.result()
                outcomes["answered"] += 1
            except DeadlineExceeded:
                outcomes["too late"] += 1
        client.decide("text", Noul("Is it?"), timeout=60)
    assert outcomes["too late"] >= 28
    # The counters are at most a second old.
    end = time.monotonic() + 10
    while (computed := _handed_over(server) - handed_over - _given_up(server) + refused) > 6:
        assert time.monotonic() < end, f"{computed} were computed, {outcomes}"
        time.sleep(0.1)


def _handed_over(server: TritonServer) -> int:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        [statistics] = client.get_inference_statistics("jevany-tiny", as_json=True)["model_stats"]
    return int(statistics.get("inference_count", 0))  # protobuf's JSON leaves out what is 0.


def _given_up(server: TritonServer) -> int:
    with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics") as answer:
        text = answer.read().decode()
    lines = re.findall(r'^jevany_failed_requests_total{error="(?:cancelled|deadline_exceeded)".* (\d+)$', text, re.M)
    return sum(map(int, lines))


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b"null", b'{"state": "\\ud800", "question": {"type": "noul"}}'])
def test_errors_show_nothing_of_the_server(server: TritonServer, body: bytes) -> None:
    with grpc.InferenceServerClient(server.grpc_url) as over_grpc, pytest.raises(InferenceServerException) as raised:
        over_grpc.infer("jevany-tiny", [_tensor(grpc, body)])
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    with http.InferenceServerClient(server.http_url) as over_http, pytest.raises(InferenceServerException) as again:
        over_http.infer("jevany-tiny", [_tensor(http, body)])
    for message in (raised.value.message(), again.value.message()):
        assert message.startswith("invalid_request: ")
        assert not re.search(r"Traceback|\.py|/|\n", message)


def test_one_request_carries_one_element(server: TritonServer) -> None:
    tensor = grpc.InferInput("REQUEST", [2, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"{}"], [b"{}"]], dtype=np.object_))
    with grpc.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException) as raised:
        client.infer("jevany-tiny", [tensor])
    assert raised.value.message() == "invalid_request: REQUEST: 2 elements; one request carries one question"


def test_generate_endpoint_takes_the_request_as_plain_json(server: TritonServer) -> None:
    from urllib.request import Request, urlopen

    body = json.dumps({"REQUEST": json.dumps(GOOD)}).encode()
    with urlopen(Request(f"http://{server.http_url}/v2/models/jevany-tiny/generate", body)) as reply:
        content = json.load(reply)
    answer = json.loads(content["ANSWER"])
    assert answer["answer"]["noul"] == round(content["PROBABILITIES"][1], 2)

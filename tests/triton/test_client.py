"""Both clients, over both protocols, against a real Triton."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from jevany_client import (
    AsyncClient,
    Choice,
    Client,
    DeadlineExceeded,
    Decision,
    InvalidRequest,
    Noul,
    Question,
    Score,
    TooLong,
    Unavailable,
    UnknownModel,
)
from jevany_server.process import TritonServer
from tests.triton.conftest import FREE_PORTS

STATE: dict[str, Any] = {"subject": "Charged twice", "body": "I was charged twice this month. Please fix this today!"}
QUESTIONS: dict[str, Question] = {
    "team": Choice("Which team should handle this?", {"billing": "Charges and refunds", "shipping": None, "été": ""}),
    "urgent": Noul("Is it urgent?", {"true": "needs an answer today"}),
    "anger": Score("How angry is the customer?", ["calm", "annoyed", "furious"]),
}
Call = Callable[..., Any]


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return f"{request.param}://{server.grpc_url if request.param == 'grpc' else server.http_url}"


@pytest.fixture(params=[Client, AsyncClient])
def call(request: pytest.FixtureRequest, url: str) -> Call:
    """Open a client of either kind and pass it to a function that makes one call."""

    def call_with(use: Callable[[Any], Any], model: str = "jevany-tiny") -> Any:
        if request.param is Client:
            with Client(url, model) as client:
                return use(client)

        async def call_async() -> Any:
            async with AsyncClient(url, model) as client:
                return await use(client)

        return asyncio.run(call_async())

    return call_with


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> dict[str, Decision]:
    """The decisions as one client gives them, for the others to agree with."""
    with Client(server.grpc_url) as client:
        return {name: client.decide(STATE, question) for name, question in QUESTIONS.items()}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_decision(call: Call, expected: dict[str, Decision], name: str) -> None:
    decision = call(lambda client: client.decide(STATE, QUESTIONS[name]))
    assert decision.answer == expected[name].answer
    assert decision.answer["type"] == QUESTIONS[name].type
    assert decision.keys == tuple(QUESTIONS[name].keys)
    assert decision.probabilities.dtype == np.float32
    assert decision.probabilities.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(decision.probabilities, expected[name].probabilities)
    if "probabilities" in decision.answer:
        by_key = dict(zip(decision.keys, decision.probabilities.tolist(), strict=True))
        assert decision.answer["probabilities"] == pytest.approx(by_key)
    assert decision.model == "jevany-tiny"
    assert decision.usage["input_tokens"] > 10
    assert decision.latency_ms > 0


def test_several_questions_come_back_as_one_reply(call: Call, expected: dict[str, Decision]) -> None:
    reply = call(lambda client: client.decide_all(STATE, QUESTIONS))
    assert list(reply) == ["model", "answers", "usage", "latency_ms"]
    assert list(reply["answers"]) == list(QUESTIONS)
    assert reply["answers"] == {name: decision.answer for name, decision in expected.items()}
    assert reply["usage"]["input_tokens"] == sum(decision.usage["input_tokens"] for decision in expected.values())
    assert reply["model"] == "jevany-tiny"


def test_the_other_readout(server: TritonServer) -> None:
    with Client(f"http://{server.http_url}", "jevany-tiny-direct-token") as client:
        decision = client.decide(STATE, QUESTIONS["team"])
    assert decision.model == "jevany-tiny-direct-token"
    assert decision.probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_a_state_that_is_too_long_for_the_model(call: Call) -> None:
    with pytest.raises(TooLong, match=r"^state: more than \d+ tokens; the limit is \d+$"):
        call(lambda client: client.decide("word " * 50_000, QUESTIONS["urgent"]))
    with pytest.raises(TooLong, match=r"^question 'urgent': state: more than \d+ tokens"):
        call(lambda client: client.decide_all("word " * 50_000, {"urgent": QUESTIONS["urgent"]}))


def test_a_bad_state_never_leaves(call: Call) -> None:
    with pytest.raises(InvalidRequest, match=r"^state\.amount: nan is not a finite number$"):
        call(lambda client: client.decide({"amount": float("nan")}, QUESTIONS["urgent"]))


def test_an_unknown_model(call: Call) -> None:
    with pytest.raises(UnknownModel, match="has no model 'jevany-huge'"):
        call(lambda client: client.decide(STATE, QUESTIONS["urgent"]), model="jevany-huge")
    with pytest.raises(UnknownModel, match=r"^question '\w+': .* has no model"):
        call(lambda client: client.decide_all(STATE, QUESTIONS), model="jevany-huge")
    with pytest.raises(UnknownModel):
        call(lambda client: client.wait_until_ready(0.1), model="jevany-huge")
    assert call(lambda client: client.ready(), model="jevany-huge") is False


def test_readiness_and_models(call: Call) -> None:
    assert call(lambda client: client.ready()) is True
    call(lambda client: client.wait_until_ready(0.1))
    models = call(lambda client: client.models())
    assert [(model.name, model.ready) for model in models] == [
        ("jevany-tiny", True),
        ("jevany-tiny-direct-token", True),
    ]


def test_a_client_outlives_a_deadline(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(DeadlineExceeded, match=r"within 1e-05 s"):
            client.decide(STATE, QUESTIONS["urgent"], timeout=1e-5)
        assert client.decide(STATE, QUESTIONS["urgent"]).answer["type"] == "noul"


# A stand-in for a model, which takes as long as it is told and otherwise no time: decisions of a small model are over
# too soon to be interrupted, and too late for a test that needs hundreds.
_STAND_IN = """
import json, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        body = json.loads(pb_utils.get_input_tensor_by_name(request, "REQUEST").as_numpy().reshape(-1)[0])
        wish, directory = body["question"]["instructions"], pathlib.Path(body["state"])
        end = time.monotonic() + 60
        if wish == "wait":
            (directory / "begun").touch()
            while not request.is_cancelled() and time.monotonic() < end:
                time.sleep(0.005)
            (directory / "cancelled").touch()
        if wish == "refuse":
            while not (directory / "begun").exists() and time.monotonic() < end:
                time.sleep(0.005)
        if wish in ("wait", "refuse"):
            error = pb_utils.TritonError("unsupported: refused", pb_utils.TritonError.UNSUPPORTED)
            return pb_utils.InferenceResponse(error=error)
        keys = list(body["question"]["criteria"])
        numbers = np.full((1, len(keys)), 1 / len(keys), np.float32)
        answer = {"type": "choice", "probabilities": dict(zip(keys, numbers[0].tolist()))}
        usage = {"input_tokens": 1, "output_tokens": 1}
        reply = json.dumps({"model": "stand-in", "answer": answer, "usage": usage, "latency_ms": 0.1})
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("ANSWER", np.array([[reply.encode()]], dtype=np.object_)),
            pb_utils.Tensor("PROBABILITIES", numbers),
        ])
"""
_STAND_IN_CONFIG = """
name: "stand-in"
backend: "python"
max_batch_size: 8
input [ { name: "REQUEST" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ -1 ] }
]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
WAIT, REFUSE = Noul("wait"), Noul("refuse")


@pytest.fixture(scope="module")
def stand_in_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    (repository / "stand-in" / "1").mkdir(parents=True)
    (repository / "stand-in" / "config.pbtxt").write_text(_STAND_IN_CONFIG)
    (repository / "stand-in" / "1" / "model.py").write_text(_STAND_IN)
    return repository


@pytest.fixture(scope="module")
def stand_in(stand_in_repository: Path) -> Iterator[TritonServer]:
    with TritonServer(stand_in_repository, ["stand-in"], ports=FREE_PORTS, log=io.BytesIO()) as running:
        running.wait_until_ready(60)
        yield running


@pytest.fixture(params=["grpc", "http"])
def quick_url(request: pytest.FixtureRequest, stand_in: TritonServer) -> str:
    return f"{request.param}://{stand_in.grpc_url if request.param == 'grpc' else stand_in.http_url}"


def _questions_of(count: int) -> dict[str, Question]:
    return {f"q{i}": Choice("Which?", {f"{count} {i} {key}": None for key in range(count)}) for i in range(4)}


def test_threads_share_a_client(quick_url: str) -> None:
    def ask(count: int) -> None:
        questions = _questions_of(count)
        for _ in range(10):
            reply = client.decide_all("some text", questions)
            for name, question in questions.items():
                assert list(reply["answers"][name]["probabilities"]) == question.keys
            assert client.decide("some text", questions["q0"]).keys == tuple(questions["q0"].keys)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Threads meet everywhere, not only where they wait.
    try:
        with Client(quick_url, "stand-in") as client, concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(2, 10)))
    finally:
        sys.setswitchinterval(interval)


def test_tasks_share_a_client(quick_url: str) -> None:
    async def ask_all() -> None:
        async with AsyncClient(quick_url, "stand-in") as client:
            replies = await asyncio.gather(*(client.decide_all("text", _questions_of(count)) for count in range(2, 10)))
        for count, reply in zip(range(2, 10), replies, strict=True):
            for name, question in _questions_of(count).items():
                assert list(reply["answers"][name]["probabilities"]) == question.keys

    asyncio.run(ask_all())


def test_threads_that_end_leave_nothing_open(quick_url: str) -> None:
    with Client(quick_url, "stand-in") as client:

        def ask() -> None:
            client.decide("text", _questions_of(2)["q0"])

        for count in range(20):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            if count == 4:
                before = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jevany-")]


def test_a_client_that_is_not_closed_leaves_no_threads(quick_url: str) -> None:
    client = Client(quick_url, "stand-in")
    assert client.decide_all("text", _questions_of(2))["answers"]
    del client
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("jevany-"):
            thread.join(20)
            assert not thread.is_alive()


def test_both_sides_of_a_fork_use_the_client(quick_url: str) -> None:
    # In a process of its own: this one has threads that a fork would leave behind.
    script = """
        import os, sys
        from jevany_client import Choice, Client
        ask = {"a": Choice("?", {"x": None}), "b": Choice("?", {"y": None, "z": None})}
        client = Client(sys.argv[1], "stand-in")
        before = client.decide_all("text", ask)["answers"]
        assert client.decide("text", ask["a"]).answer == before["a"]
        for ending in ("close", "exit", "grandchild"):
            child = os.fork()
            if child == 0:
                assert client.decide("text", ask["a"], timeout=20).answer == before["a"]
                assert client.decide_all("text", ask, timeout=20)["answers"] == before
                if ending == "close":
                    client.close()
                if ending == "grandchild" and os.fork() == 0:
                    assert client.decide_all("text", ask, timeout=20)["answers"] == before
                    os._exit(0)
                if ending == "grandchild":
                    assert os.wait()[1] == 0
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0, ending
            assert client.decide_all("text", ask, timeout=20)["answers"] == before
        unused = os.fork()
        if unused == 0:
            del client
            sys.exit(0)
        assert os.waitpid(unused, 0)[1] == 0
        assert client.decide("text", ask["a"], timeout=20).answer == before["a"]
        print("all agree")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), quick_url], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "all agree\n"), done.stderr


def _until_exists(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.005)


def test_a_cancelled_task_stops_the_server(stand_in: TritonServer, tmp_path: Path) -> None:
    async def cancel() -> None:
        async with AsyncClient(stand_in.grpc_url, "stand-in") as client:
            task = asyncio.create_task(client.decide(str(tmp_path), WAIT))
            await asyncio.to_thread(_until_exists, tmp_path / "begun")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(_until_exists, tmp_path / "cancelled")

    asyncio.run(cancel())


def test_a_deadline_stops_the_server(stand_in: TritonServer, tmp_path: Path) -> None:
    with Client(stand_in.grpc_url, "stand-in") as client, pytest.raises(DeadlineExceeded):
        client.decide(str(tmp_path), WAIT, timeout=0.5)
    _until_exists(tmp_path / "cancelled")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_failed_question_stops_the_server_from_answering_the_others(
    stand_in: TritonServer, tmp_path: Path, kind: type[Client] | type[AsyncClient]
) -> None:
    async def ask_async() -> None:
        async with AsyncClient(stand_in.grpc_url, "stand-in") as client:
            await client.decide_all(str(tmp_path), {"slow": WAIT, "bad": REFUSE})

    def ask() -> None:
        with Client(stand_in.grpc_url, "stand-in") as client:
            client.decide_all(str(tmp_path), {"slow": WAIT, "bad": REFUSE})

    with pytest.raises(Exception, match=r"^question 'bad': refused$"):
        ask() if kind is Client else asyncio.run(ask_async())
    _until_exists(tmp_path / "cancelled")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_dies_is_unavailable(stand_in_repository: Path, tmp_path: Path, scheme: str) -> None:
    with TritonServer(stand_in_repository, ["stand-in"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        url = f"{scheme}://{server.grpc_url if scheme == 'grpc' else server.http_url}"
        with Client(url, "stand-in") as client, concurrent.futures.ThreadPoolExecutor(1) as thread:
            call = thread.submit(client.decide, str(tmp_path), WAIT)
            _until_exists(tmp_path / "begun")
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(Unavailable, match=f"cannot reach {scheme}://"):
                call.result(timeout=30)
            assert not client.ready()


def _until_it_is_exiting(triton: Any) -> None:
    with contextlib.suppress(InferenceServerException):  # It says so at first, and then no more.
        while triton.is_server_ready():
            time.sleep(0.01)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_is_ending_is_not_one_without_the_model(
    stand_in_repository: Path, tmp_path: Path, kind: type[Client] | type[AsyncClient]
) -> None:
    async def ask_async(url: str) -> None:
        async with AsyncClient(url, "stand-in") as client:
            await client.decide("text", Choice("?", {"x": None}))

    def ask(url: str) -> None:
        with Client(url, "stand-in") as client:
            client.decide("text", Choice("?", {"x": None}))

    with TritonServer(stand_in_repository, ["stand-in"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        with Client(server.grpc_url, "stand-in") as client, concurrent.futures.ThreadPoolExecutor(1) as thread:
            call = thread.submit(client.decide, str(tmp_path), WAIT, timeout=4)
            _until_exists(tmp_path / "begun")
            server.process.send_signal(signal.SIGTERM)
            # Until what it has begun is over it still listens, and says that it has no such model.
            with tritonclient.grpc.InferenceServerClient(server.grpc_url) as triton:
                _until_it_is_exiting(triton)
            with pytest.raises(Unavailable, match=f"^cannot reach grpc://{server.grpc_url}: "):
                ask(server.grpc_url) if kind is Client else asyncio.run(ask_async(server.grpc_url))
            with pytest.raises(DeadlineExceeded):
                call.result(timeout=30)

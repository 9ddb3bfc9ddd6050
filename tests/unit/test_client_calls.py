"""Retries, deadlines and cancellation, against endpoints in this process that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from jevany_backend.protocol import DecisionError, InternalError, InvalidRequest, NotReady, Noul, OutOfMemory, answer
from jevany_client import AsyncClient, Client, DeadlineExceeded, Decision, Overloaded, Unavailable, UnknownModel

QUESTION = Noul("Urgent?")
Ask = Callable[..., Any]


@pytest.fixture(params=[Client, AsyncClient])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Call a client's method by name, of either client."""

    def call(url: str, method: str, *arguments: Any, timeout: float = 20, **settings: Any) -> Any:
        if request.param is Client:
            with Client(url, **settings) as client:
                return getattr(client, method)(*arguments, timeout=timeout)

        async def call_async() -> Any:
            async with AsyncClient(url, **settings) as client:
                return await getattr(client, method)(*arguments, timeout=timeout)

        return asyncio.run(call_async())

    return call


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jevany_client.attempts.PAUSES", (0.001, 0.002, 0.003))


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers as its script says, one entry a request; at the script's end, with the answer."""

    def __init__(self) -> None:
        self.script: list[tuple[grpc.StatusCode, str]] = []
        self.states: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls = 0
        self.seconds_left = 0.0
        self.queue_timeout = 0

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.calls += 1
        self.seconds_left = context.time_remaining()
        self.queue_timeout = request.parameters["timeout"].int64_param
        asked = json.loads(request.raw_input_contents[0][4:])
        if asked["question"].get("instructions") == "wait":
            over = threading.Event()
            context.add_callback(over.set)
            self.states.put(asked)
            over.wait(20)
            self.cancelled.put(asked)
            context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        if asked["question"].get("instructions") == "refuse":
            self.states.get(timeout=20)  # Only once another question is under way.
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "invalid_request: question.criteria: refused")
        if self.script:
            context.abort(*self.script.pop(0))
        body = {
            "model": request.model_name,
            "answer": answer(QUESTION, [0.25, 0.75]),
            "usage": {"input_tokens": 3, "output_tokens": 1},
            "latency_ms": 0.5,
        }
        text = serialize_byte_tensor(np.array([[json.dumps(body).encode()]], dtype=object)).item()
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        response.outputs.add(name="ANSWER", datatype="BYTES", shape=[1, 1])
        response.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[1, 2])
        response.raw_output_contents.extend([text, np.array([0.25, 0.75], np.float32).tobytes()])
        return response


@pytest.fixture
def service() -> Iterator[tuple[Service, str]]:
    service = Service()
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "connection reset")
NOT_READY = (grpc.StatusCode.UNAVAILABLE, "not_ready: loading")


@pytest.mark.parametrize("script", [[UNAVAILABLE], [UNAVAILABLE, NOT_READY, UNAVAILABLE]])
def test_what_got_no_answer_is_asked_again(service: tuple[Service, str], ask: Ask, script: list[Any]) -> None:
    endpoint, url = service
    endpoint.script = list(script)
    decision = ask(url, "decide", "text", QUESTION)
    assert isinstance(decision, Decision)
    assert decision.probabilities.tolist() == [0.25, 0.75]
    assert endpoint.calls == len(script) + 1


@pytest.mark.parametrize(("failure", "kind"), [(UNAVAILABLE, Unavailable), (NOT_READY, NotReady)])
def test_but_three_times_at_most(service: tuple[Service, str], ask: Ask, failure: Any, kind: type[Exception]) -> None:
    endpoint, url = service
    endpoint.script = [failure] * 9
    with pytest.raises(kind):
        ask(url, "decide", "text", QUESTION)
    assert endpoint.calls == 4


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request: state: bad", InvalidRequest),
        (grpc.StatusCode.INTERNAL, "internal: reference 1f", InternalError),
        (grpc.StatusCode.UNAVAILABLE, "out_of_memory: try again", OutOfMemory),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", Overloaded),
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", DeadlineExceeded),
    ],
)
def test_refusals_and_faults_are_not_tried_again(
    service: tuple[Service, str], ask: Ask, status: grpc.StatusCode, text: str, kind: type[DecisionError]
) -> None:
    endpoint, url = service
    endpoint.script = [(status, text)] * 9
    with pytest.raises(kind):
        ask(url, "decide", "text", QUESTION)
    assert endpoint.calls == 1


def test_the_server_knows_the_deadline(service: tuple[Service, str], ask: Ask) -> None:
    endpoint, url = service
    ask(url, "decide", "text", QUESTION, timeout=7)
    assert 5 < endpoint.seconds_left < 7.1  # gRPC rounds what it sends.
    assert 5_000_000 < endpoint.queue_timeout <= 7_000_000


def test_a_deadline_ends_the_call_on_the_server_too(service: tuple[Service, str], ask: Ask) -> None:
    endpoint, url = service
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        ask(url, "decide", "text", Noul("wait"), timeout=0.2)
    assert endpoint.cancelled.get(timeout=20)
    assert endpoint.calls == 1


def test_retries_stay_within_the_deadline(
    service: tuple[Service, str], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jevany_client.attempts.PAUSES", (0.001, 300.0))
    endpoint, url = service
    endpoint.script = [UNAVAILABLE] * 9
    started = time.monotonic()
    with pytest.raises(Unavailable):
        ask(url, "decide", "text", QUESTION, timeout=5)
    assert time.monotonic() - started < 4
    assert endpoint.calls == 2


def test_one_failed_question_ends_the_others(service: tuple[Service, str], ask: Ask) -> None:
    endpoint, url = service
    questions = {"slow": Noul("wait"), "bad": Noul("refuse")} | {f"queued {i}": QUESTION for i in range(20)}
    with pytest.raises(InvalidRequest, match=r"^questions\.bad\.criteria: refused$"):
        ask(url, "decide_all", "text", questions, concurrency=2)
    assert endpoint.cancelled.get(timeout=20)["question"]["instructions"] == "wait"
    assert endpoint.calls < 20  # One of those in the queue may have begun in between.


def test_at_most_so_many_questions_at_a_time(service: tuple[Service, str], ask: Ask) -> None:
    endpoint, url = service
    with pytest.raises(DeadlineExceeded):
        ask(url, "decide_all", "text", {str(i): Noul("wait") for i in range(10)}, concurrency=3, timeout=0.3)
    assert endpoint.calls == 3


def test_a_cancelled_task_cancels_its_call(service: tuple[Service, str]) -> None:
    endpoint, url = service

    async def cancel() -> None:
        async with AsyncClient(url) as client:
            task = asyncio.create_task(client.decide("text", Noul("wait")))
            await asyncio.to_thread(endpoint.states.get, timeout=20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(endpoint.cancelled.get, timeout=20)
            assert (await client.decide("text", QUESTION)).answer["noul"] == 0.75

    asyncio.run(cancel())


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_closing_fails_calls_under_way(scheme: str, service: tuple[Service, str], silent: Endpoint) -> None:
    async def close() -> None:
        client = AsyncClient(service[1] if scheme == "grpc" else silent.url)
        task = asyncio.create_task(client.decide("text", Noul("wait")))
        await asyncio.to_thread(service[0].states.get if scheme == "grpc" else silent.asked.get, timeout=20)
        await client.close()
        with pytest.raises(InternalError, match="closed while"):
            await task
        with pytest.raises(RuntimeError, match="the client is closed"):
            await client.decide("text", QUESTION)

    asyncio.run(close())


class Endpoint(threading.Thread):
    """Reads the head of a request from each connection, then sends what it was given, or nothing, and no more."""

    def __init__(self, response: bytes | None) -> None:
        super().__init__(daemon=True)
        self._response = response
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self.asked.put(connection.recv(65536))
                if self._response is None:
                    self._connections.append(connection)
                    continue
                connection.sendall(self._response)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
                connection.close()
            except ConnectionError:
                pass
            except OSError:
                return

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    endpoint = Endpoint(None)
    yield endpoint
    endpoint.stop()


def test_a_silent_http_server_meets_the_deadline(silent: Endpoint, ask: Ask) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        ask(silent.url, "decide", "text", QUESTION, timeout=0.2)
    assert time.monotonic() - started < 5
    assert silent.asked.qsize() == 1


def test_the_deadline_covers_questions_that_wait_for_their_turn(silent: Endpoint, ask: Ask) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        ask(silent.url, "decide_all", "text", {"a": QUESTION, "b": QUESTION}, concurrency=1, timeout=0.2)
    assert time.monotonic() - started < 5
    assert silent.asked.qsize() == 1


@pytest.mark.parametrize(
    ("response", "kind", "attempts"),
    [
        (b"", Unavailable, 4),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", Unavailable, 4),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 12\r\n\r\n<html>down\r\n", Unavailable, 4),
        (b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n", DeadlineExceeded, 1),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", InternalError, 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", InternalError, 1),
        (b"\x00\x00\x18\x04\x00\x00", Unavailable, 4),
    ],
)
def test_http_servers_that_are_no_triton(response: bytes, kind: type[DecisionError], attempts: int, ask: Ask) -> None:
    endpoint = Endpoint(response)
    try:
        with pytest.raises(kind) as raised:
            ask(endpoint.url, "decide", "text", QUESTION)
        assert type(raised.value) is kind
        assert endpoint.asked.qsize() == attempts
    finally:
        endpoint.stop()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_nobody_there(scheme: str, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"cannot reach {scheme}://127.0.0.1:{port}: .*refused|failed"):
        ask(f"{scheme}://127.0.0.1:{port}", "decide", "text", QUESTION)
    with Client(f"{scheme}://127.0.0.1:{port}") as client:
        assert not client.ready()
        with pytest.raises(Unavailable):
            client.wait_until_ready(0)
        with pytest.raises(Unavailable):
            client.models()


@pytest.mark.parametrize("addresses", ["127.0.0.1:{http},127.0.0.2:{closed}", "127.0.0.2:{closed},127.0.0.1:{http}"])
def test_the_http_port_is_told_whichever_address_grpc_tried_last(
    addresses: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        closed = listener.getsockname()[1]
    http = endpoint.url.rpartition(":")[2]

    # Stands in for a name, such as localhost, that has an address on which nobody listens.
    for module in (triton, triton_aio):

        class ByName(module.InferenceServerClient):  # type: ignore[name-defined]
            def __init__(self, target: str, **settings: Any) -> None:
                super().__init__(f"ipv4:{addresses.format(http=http, closed=closed)}", **settings)

        monkeypatch.setattr(module, "InferenceServerClient", ByName)
    url = f"grpc://localhost:{http}"
    says = f"^cannot reach {url}: it answers in HTTP, not in gRPC; is it the HTTP port\\?$"
    try:
        with pytest.raises(Unavailable, match=says):
            ask(url, "decide", "text", QUESTION)
        with pytest.raises(Unavailable, match=says.replace("cannot", "question 'a': cannot")):
            ask(url, "decide_all", "text", {"a": QUESTION})
        with Client(url) as client:
            with pytest.raises(Unavailable, match=says):
                client.wait_until_ready(0)
            with pytest.raises(Unavailable, match=says):
                client.models()
    finally:
        endpoint.stop()


NO_TIMEOUTS = [-1, float("nan"), float("inf"), 86_401, 1e10, 10**400, True, "a", "1", [1]]


@pytest.mark.parametrize("timeout", [0, *NO_TIMEOUTS])
def test_a_timeout_is_a_number_of_seconds_up_to_a_day(timeout: Any, ask: Ask) -> None:
    says = r"^timeout: needs seconds above 0 to 86400 \(a day\), not .+$"
    with pytest.raises(ValueError, match=says):
        ask("localhost:1", "decide", "text", QUESTION, timeout=timeout)
    with pytest.raises(ValueError, match=says):
        ask("localhost:1", "decide_all", "text", {"a": QUESTION}, timeout=timeout)
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=says):
            kind(timeout=timeout)


@pytest.mark.parametrize("timeout", [None, *NO_TIMEOUTS])
def test_a_wait_is_a_number_of_seconds_from_0_to_a_day(timeout: Any, ask: Ask) -> None:
    says = r"^timeout: needs seconds from 0 to 86400 \(a day\), not .+$"
    with pytest.raises(ValueError, match=says):
        ask("localhost:1", "wait_until_ready", timeout=timeout)


@pytest.mark.parametrize("timeout", [86_400, 86_400.0, Fraction(1, 2) + 20, np.float32(20)])
def test_a_timeout_may_be_a_day_and_any_kind_of_number(timeout: Any, service: tuple[Service, str], ask: Ask) -> None:
    assert ask(service[1], "decide", "text", QUESTION, timeout=timeout).answer["noul"] == 0.75


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"concurrency": 0}, "concurrency: 0 is not a whole number of at least 1"),
        ({"concurrency": 2.5}, "concurrency: 2.5 is not"),
        ({"concurrency": True}, "concurrency: True is not"),
        ({"concurrency": "a"}, "concurrency: 'a' is not"),
        ({"url": None}, "url: None is not text"),
        ({"model": None}, "model: None is not text"),
        ({"model": b"jevany-tiny"}, "model: bytes is not text"),
    ],
)
def test_a_bad_setting_is_named(kind: Callable[..., Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**settings)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("model", ["", "..", "../x", "x/versions/1", "\udcff"])
def test_a_name_that_no_model_has_is_not_asked_for(
    scheme: str, model: str, ask: Ask, service: tuple[Service, str], silent: Endpoint
) -> None:
    url = service[1] if scheme == "grpc" else silent.url
    with pytest.raises(UnknownModel, match="has no model"):
        ask(url, "decide", "text", QUESTION, model=model)
    with pytest.raises(UnknownModel, match=r"^question 'a': .* has no model"):
        ask(url, "decide_all", "text", {"a": QUESTION}, model=model)
    with pytest.raises(UnknownModel, match="has no model"):
        ask(url, "wait_until_ready", model=model, timeout=0)
    assert service[0].calls == silent.asked.qsize() == 0


def test_an_async_client_stays_in_its_loop(service: tuple[Service, str]) -> None:
    client = AsyncClient(service[1])

    async def decide() -> float:
        return (await client.decide("text", QUESTION)).answer["noul"]

    async def decide_and_close() -> float:
        try:
            return await decide()
        finally:
            await client.close()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        assert first.run(decide()) == 0.75
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run(decide())
        assert first.run(decide_and_close()) == 0.75

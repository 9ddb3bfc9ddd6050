"""The blocking client."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from jevany_backend.protocol import JSON, DecisionError, InternalError, Question
from jevany_backend.protocol.json_content import shown
from jevany_client.address import Address, parse_address
from jevany_client.attempts import PROBE_PAUSE, PROBE_SECONDS, Attempts, Deadline, check_concurrency, check_seconds
from jevany_client.errors import Unavailable, UnknownModel, about_question, check_model, error_from, not_ready
from jevany_client.messages import (
    Decision,
    Reply,
    ServedModel,
    encode_request,
    encode_requests,
    encode_state,
    envelope,
    read_reply,
    served_models,
)
from jevany_client.transport import Stop, Transport, connect


class Client:
    """Asks a decision model, and waits for the answer.

    Threads: any number of threads may share one client. Over gRPC they share one channel; over HTTP each call that is
    under way has a connection of its own.

    Forks: a client may be made before `os.fork` and used on both sides. The child opens connections of its own, and
    what it closes leaves its parent's alone. Fork while no call is under way.

    Retries: a decision is a pure function, so a request that could not be delivered, whose connection was lost, or that
    met a model which is not ready, is sent again, at most three times, with growing and random pauses, within its
    timeout. Timeouts, refused requests, full queues and faults of the server are never tried again.

    Errors: every failed call raises a `DecisionError`: one of the protocol's own, or `Unavailable`, `Overloaded`,
    `DeadlineExceeded`, `UnknownModel`. What is wrong with a state or question is found before anything is sent. A
    timeout out of its range is a `ValueError`.

    Args:
        url: ``host:port`` or ``grpc://host:port`` for gRPC, ``http://host:port`` for HTTP, ``grpcs://`` or
            ``https://`` for TLS, with the certificate authorities that the system trusts.
        model: The model's name on the server.
        timeout: Seconds that a call may take, retries included, unless the call says otherwise; above 0, at most a day.
            The server is told.
        concurrency: How many questions of `decide_all` are asked at a time, over all of its calls.

    Raises:
        ValueError: A bad URL, model, timeout or concurrency.
    """

    def __init__(
        self, url: str = "localhost:8001", model: str = "jevany-tiny", *, timeout: float = 60.0, concurrency: int = 8
    ) -> None:
        self._address = parse_address(url)
        self._timeout = Deadline(timeout).seconds
        self._concurrency = check_concurrency(concurrency)
        if not isinstance(model, str):
            raise ValueError(f"model: {shown(model)} is not text")
        self.model = model
        self._closed = False
        self._connections = _Connections()
        _clients.add(self)

    def decide(self, state: JSON, question: Question, *, timeout: float | None = None) -> Decision:
        """Ask one question about a state.

        Args:
            state: Text, or any JSON value.
            question: A `Noul`, `Choice` or `Score`.
            timeout: Seconds; the client's own if None.

        Raises:
            DecisionError: No decision; see the class.
        """
        request = encode_request(encode_state(state), question)
        return read_reply(question, self._ask(request, self._deadline(timeout), None))

    def decide_all(
        self, state: JSON, questions: Mapping[str, Question], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Ask several questions about one state, each in a request of its own, several at a time.

        When one fails, those not yet begun are not sent, those under way are given up (over gRPC the server is told),
        and the error is raised under the question's id.

        Args:
            state: Text, or any JSON value.
            questions: The questions by id, 1 to 64.
            timeout: Seconds for all of them together; the client's own if None.

        Returns:
            The reply in the wire format: ``model``, ``answers`` by id in the order asked, ``usage`` and ``latency_ms``
            summed over the questions.

        Raises:
            DecisionError: A question got no decision; see the class.
        """
        requests = encode_requests(state, questions)
        deadline = self._deadline(timeout)
        self._check_open()
        threads = self._connections.threads(self._concurrency)
        stop = Stop()
        futures = {
            identifier: threads.submit(
                self._ask_one_of_many, identifier, questions[identifier], request, deadline, stop
            )
            for identifier, request in requests.items()
        }
        try:
            concurrent.futures.wait(futures.values(), return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in futures.values():
                if future.done():
                    future.result()  # Raises the first failure, in the order asked. Others may still be under way.
            return envelope({identifier: future.result() for identifier, future in futures.items()})
        finally:
            # Nothing is left to stop after a success. After a failure there is, and when the wait was interrupted.
            for future in futures.values():
                future.cancel()
            stop.set()

    def ready(self) -> bool:
        """Return whether the model answers now: False too when the server cannot be reached within 5 s."""
        return self._probe() is None

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the model answers.

        Args:
            timeout: Seconds, from 0 to a day. The server is asked at least once, and gets up to 5 s for its answer.

        Raises:
            ValueError: The timeout is out of its range.
            Unavailable: The server could not be reached.
            UnknownModel: The server has no such model.
            NotReady: The model did not get ready.
            DeadlineExceeded: The server did not answer.
        """
        end = time.monotonic() + check_seconds(timeout, least=0)
        while (reason := self._probe()) is not None:
            if time.monotonic() + PROBE_PAUSE > end:
                raise reason
            time.sleep(PROBE_PAUSE)

    def models(self) -> list[ServedModel]:
        """Return the models of the server, by name.

        Raises:
            Unsupported: The server keeps the list to itself.
            DecisionError: No list; see the class.
        """
        transport = self._transport()
        try:
            return served_models(transport.repository_index(self._timeout))
        except Exception as exception:
            raise self._error_from(exception, self._timeout) from exception

    def close(self) -> None:
        """Close the connections of all threads. Close when no call is under way; one that is may fail."""
        self._closed = True
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_one_of_many(
        self, identifier: str, question: Question, request: bytes, deadline: Deadline, stop: Stop
    ) -> Decision:
        try:
            return read_reply(question, self._ask(request, deadline, stop))
        except DecisionError as error:
            raise about_question(error, identifier) from error

    def _ask(self, request: bytes, deadline: Deadline, stop: Stop | None) -> Reply:
        check_model(self._address, self.model)
        attempts = Attempts(deadline)
        while True:
            transport = self._transport()
            if stop is not None and stop.is_set():
                raise Unavailable("given up together with the other questions")
            try:
                return transport.infer(self.model, request, deadline.remaining(), stop)
            except Exception as exception:
                error = self._error_from(exception, deadline.seconds)
                if isinstance(error, UnknownModel):
                    # A server that is ending, too, says so of the models that it has already let go.
                    error = self._probe(deadline.at_most(PROBE_SECONDS)) or error
                pause = attempts.pause_after(error)
            time.sleep(pause) if stop is None else stop.wait(pause)

    def _probe(self, seconds: float = PROBE_SECONDS) -> DecisionError | None:
        """Return why the model does not answer, None if it does."""
        transport = self._transport()
        try:
            check_model(self._address, self.model)
            if transport.model_ready(self.model, seconds):
                return None
        except Exception as exception:
            return self._error_from(exception, seconds)
        try:
            index = transport.repository_index(seconds)
        except Exception:
            index = None  # A server may keep it to itself.
        return not_ready(self._address, self.model, index)

    def _transport(self) -> Transport:
        self._check_open()
        return self._connections.transport(self._address)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _error_from(self, exception: Exception, timeout: float) -> DecisionError:
        if self._closed:
            return InternalError("the client was closed while the call was under way")
        return error_from(exception, self._address, self.model, timeout)


class _Connections:
    """What a client opens in one process, each when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._threads: ThreadPoolExecutor | None = None

    def transport(self, address: Address) -> Transport:
        with self._lock:
            if self._transport is None:
                self._transport = connect(address)
            return self._transport

    def threads(self, count: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="jevany-question")
            return self._threads

    def close(self) -> None:
        with self._lock:
            transport, self._transport = self._transport, None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        if transport is not None:
            transport.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()

# What a forked child inherits must not be closed there, not even by the garbage collector: the sockets are its
# parent's, and the threads exist in the parent alone.
_inherited: list[_Connections] = []


def _leave_connections_to_the_parent() -> None:
    for client in _clients:
        _inherited.append(client._connections)
        client._connections = _Connections()


os.register_at_fork(after_in_child=_leave_connections_to_the_parent)

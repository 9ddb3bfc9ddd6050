"""HTTP, on tritonclient: gevent's blocking client and aiohttp.

Triton does not see that an HTTP caller has gone: what it has begun it finishes, and throws away.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import aiohttp
import gevent
import gevent.ssl
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from geventhttpclient.response import HTTPConnectionClosed
from tritonclient.utils import InferenceServerException

from jevany_client.address import Address
from jevany_client.messages import Reply
from jevany_client.transport import Stop, microseconds, reply_from, request_inputs

T = TypeVar("T")


class HttpTransport:
    """Blocking calls from any thread.

    tritonclient's blocking client runs on gevent: a connection belongs to the thread that opened it, and each thread
    that ever used one keeps gevent's event loop, with four file descriptors, beyond its own end. So the calls run on
    threads of the transport, as many as there are calls at once, each with one connection.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def infer(self, model: str, request: bytes, seconds: float, stop: Stop | None) -> Reply:
        """See `Transport.infer`."""
        inputs = request_inputs(triton.InferInput, request)
        return self._run(
            lambda client: reply_from(client.infer(model, inputs, timeout=microseconds(seconds))), seconds, stop
        )

    def model_ready(self, model: str, seconds: float) -> bool:
        """See `Transport.model_ready`."""
        return self._run(lambda client: client.is_model_ready(model), seconds)

    def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `Transport.repository_index`."""
        return self._run(lambda client: client.get_model_repository_index(), seconds)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()

    def __del__(self) -> None:
        # A client that nobody closed leaves no threads behind.
        for worker in self._idle:
            worker.end()

    def _run(self, call: Callable[[Any], T], seconds: float, stop: Stop | None = None) -> T:
        with self._lock:
            worker = self._idle.pop() if self._idle else _Worker(self._address)
        future = worker.start_call(call, seconds)
        if stop is not None:
            stop.on_set(future.cancel)
        try:
            return future.result()
        finally:
            # The wait can end before the call does: given up, or interrupted by Ctrl-C. Then nobody else may use this
            # connection, and the call goes on for itself, until its deadline at the latest.
            with self._lock:
                reusable = future.done() and not future.cancelled() and not self._closed
                if reusable:
                    self._idle.append(worker)
            if not reusable:
                worker.end()


class _Worker(threading.Thread):
    """A thread with one connection, which makes one call at a time."""

    def __init__(self, address: Address) -> None:
        # A daemon, so that an interrupted program need not wait for a call that nobody waits for.
        super().__init__(name="jevany-http", daemon=True)
        self._address = address
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], float, Future[Any]] | None] = queue.SimpleQueue()
        self.start()

    def start_call(self, call: Callable[[Any], T], seconds: float) -> Future[T]:
        """Begin a call; it is over within so many seconds."""
        future: Future[T] = Future()
        self._calls.put((call, seconds, future))
        return future

    def end(self) -> None:
        """Close the connection and end the thread, after the call that is under way."""
        self._calls.put(None)

    def run(self) -> None:
        """Make calls until `end`."""
        client = None
        while job := self._calls.get():
            call, seconds, future = job
            timer = gevent.Timeout(seconds)
            try:
                with timer:
                    client = client or self._open()
                    outcome = call(client)
                failure = None
            except InferenceServerException as error:
                failure = error  # The server's answer, so the connection is fine.
            except BaseException as error:
                # It may have happened in the middle of an answer: the connection is of no more use.
                self._discard(client)
                client = None
                failure = self._plain(error, timer)
            # Nobody waits for a call that was given up.
            with contextlib.suppress(InvalidStateError):
                if failure is None:
                    future.set_result(outcome)
                else:
                    future.set_exception(failure)
        self._discard(client)
        gevent.get_hub().destroy(destroy_loop=True)

    @staticmethod
    def _discard(client: Any) -> None:
        # Whatever state the connection is in, the next call must not suffer from it.
        with contextlib.suppress(Exception):
            if client is not None:
                client.close()

    @staticmethod
    def _plain(error: BaseException, timer: gevent.Timeout) -> BaseException:
        if error is timer:
            return TimeoutError()
        if isinstance(error, HTTPConnectionClosed):
            return ConnectionResetError("the connection was closed before an answer")
        return error

    def _open(self) -> Any:
        # The timeouts are for each step of a call. The deadline is for all of it, and in `run`.
        return triton.InferenceServerClient(
            self._address.target,
            connection_timeout=None,
            network_timeout=None,
            ssl=self._address.encrypted,
            ssl_context_factory=gevent.ssl.create_default_context,
        )


class AsyncHttpTransport:
    """Calls from one event loop, at most 100 at a time; others wait for a connection.

    A call whose task is cancelled closes its connection.
    """

    def __init__(self, address: Address) -> None:
        # The deadline is the caller's. aiohttp checks certificates unless it is told otherwise.
        self._triton = triton_aio.InferenceServerClient(
            address.target, conn_timeout=None, ssl=address.encrypted, ssl_context=True
        )

    async def infer(self, model: str, request: bytes, seconds: float) -> Reply:
        """See `AsyncTransport.infer`."""
        inputs = request_inputs(triton.InferInput, request)
        return reply_from(await self._run(self._triton.infer(model, inputs, timeout=microseconds(seconds))))

    async def model_ready(self, model: str, seconds: float) -> bool:
        """See `AsyncTransport.model_ready`."""
        return await self._run(self._triton.is_model_ready(model))

    async def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `AsyncTransport.repository_index`."""
        return await self._run(self._triton.get_model_repository_index())

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._triton.close()

    @staticmethod
    async def _run(call: Any) -> Any:
        try:
            return await call
        except aiohttp.ClientResponseError as error:
            raise http.client.HTTPException(error.message) from error
        except aiohttp.ClientError as error:
            # Some of aiohttp's connection errors are no OSError.
            raise ConnectionError(str(error)) from error

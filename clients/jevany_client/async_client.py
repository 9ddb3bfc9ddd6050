"""The asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from jevany_backend.protocol import JSON, DecisionError, InternalError, Question
from jevany_backend.protocol.json_content import shown
from jevany_client.address import parse_address
from jevany_client.attempts import PROBE_PAUSE, PROBE_SECONDS, Attempts, Deadline, check_concurrency, check_seconds
from jevany_client.errors import UnknownModel, about_question, check_model, error_from, not_ready
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
from jevany_client.transport import AsyncTransport, connect_async


class AsyncClient:
    """Asks a decision model, from asyncio.

    Event loops: a client belongs to the event loop that first uses it. Make one in each loop, and after a fork one in
    the child.

    Cancellation: cancelling a task that awaits a call ends the call. Over gRPC the server is told, and does not begin
    what waits in its queue; over HTTP it finishes what it has.

    Retries and errors are those of `Client`.

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
        self._slots = asyncio.Semaphore(check_concurrency(concurrency))
        if not isinstance(model, str):
            raise ValueError(f"model: {shown(model)} is not text")
        self.model = model
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: AsyncTransport | None = None

    async def decide(self, state: JSON, question: Question, *, timeout: float | None = None) -> Decision:
        """Ask one question about a state; see `Client.decide`."""
        request = encode_request(encode_state(state), question)
        return read_reply(question, await self._ask(request, self._deadline(timeout)))

    async def decide_all(
        self, state: JSON, questions: Mapping[str, Question], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Ask several questions about one state, each in a request of its own, several at a time.

        When one fails, the others are cancelled. Otherwise see `Client.decide_all`.
        """
        requests = encode_requests(state, questions)
        deadline = self._deadline(timeout)
        try:
            # The questions keep the deadline themselves, except while they wait for their turn.
            async with asyncio.timeout(deadline.seconds), asyncio.TaskGroup() as group:
                tasks = {
                    identifier: group.create_task(
                        self._ask_one_of_many(identifier, questions[identifier], request, deadline)
                    )
                    for identifier, request in requests.items()
                }
        except TimeoutError as error:
            raise self._error_from(error, deadline.seconds) from error
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return envelope({identifier: task.result() for identifier, task in tasks.items()})

    async def ready(self) -> bool:
        """Return whether the model answers now: False too when the server cannot be reached within 5 s."""
        return await self._probe() is None

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait until the model answers; see `Client.wait_until_ready`."""
        end = time.monotonic() + check_seconds(timeout, least=0)
        while (reason := await self._probe()) is not None:
            if time.monotonic() + PROBE_PAUSE > end:
                raise reason
            await asyncio.sleep(PROBE_PAUSE)

    async def models(self) -> list[ServedModel]:
        """Return the models of the server, by name; see `Client.models`."""
        transport = self._transport()
        try:
            async with asyncio.timeout(self._timeout):
                return served_models(await transport.repository_index(self._timeout))
        except Exception as exception:
            raise self._error_from(exception, self._timeout) from exception

    async def close(self) -> None:
        """Close all connections; calls that are under way fail."""
        self._closed = True
        transport, self._opened = self._opened, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask_one_of_many(
        self, identifier: str, question: Question, request: bytes, deadline: Deadline
    ) -> Decision:
        try:
            async with self._slots:
                return read_reply(question, await self._ask(request, deadline))
        except DecisionError as error:
            raise about_question(error, identifier) from error

    async def _ask(self, request: bytes, deadline: Deadline) -> Reply:
        check_model(self._address, self.model)
        attempts = Attempts(deadline)
        while True:
            transport = self._transport()
            try:
                seconds = deadline.remaining()
                async with asyncio.timeout(seconds):
                    return await transport.infer(self.model, request, seconds)
            except asyncio.CancelledError:
                # gRPC ends the calls of a channel that is closed in the way of a cancelled task, which this one is not.
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise InternalError("the client was closed while the call was under way") from None
                raise
            except Exception as exception:
                error = self._error_from(exception, deadline.seconds)
                if isinstance(error, UnknownModel):
                    # A server that is ending, too, says so of the models that it has already let go.
                    error = await self._probe(deadline.at_most(PROBE_SECONDS)) or error
                pause = attempts.pause_after(error)
            await asyncio.sleep(pause)

    async def _probe(self, seconds: float = PROBE_SECONDS) -> DecisionError | None:
        """Return why the model does not answer, None if it does."""
        transport = self._transport()
        try:
            check_model(self._address, self.model)
            async with asyncio.timeout(seconds):
                if await transport.model_ready(self.model, seconds):
                    return None
        except Exception as exception:
            return self._error_from(exception, seconds)
        try:
            async with asyncio.timeout(seconds):
                index = await transport.repository_index(seconds)
        except Exception:
            index = None  # A server may keep it to itself.
        return not_ready(self._address, self.model, index)

    def _transport(self) -> AsyncTransport:
        if self._closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._opened, self._loop = connect_async(self._address), loop
        elif loop is not self._loop:
            raise RuntimeError("the client belongs to another event loop; make one in each")
        return self._opened

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _error_from(self, exception: Exception, timeout: float) -> DecisionError:
        if self._closed:
            return InternalError("the client was closed while the call was under way")
        return error_from(exception, self._address, self.model, timeout)

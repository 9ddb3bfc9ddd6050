"""gRPC, on tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from jevany_client.address import Address
from jevany_client.messages import Reply
from jevany_client.transport import Stop, microseconds, reply_from, request_inputs

# How long a port may take to show that it speaks HTTP.
_HTTP_SECONDS = 0.5

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", triton.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", triton.MAX_GRPC_MESSAGE_SIZE),
    # gRPC would wait a second and more before it tries a lost server again: longer than our own retries take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels of one process share sockets unless told otherwise, so after a fork the child would use its parent's.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcTransport:
    """Blocking calls over one channel, which all threads share."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._triton = triton.InferenceServerClient(
            address.target, ssl=address.encrypted, channel_args=_CHANNEL_OPTIONS
        )
        self._starting = threading.Lock()

    def infer(self, model: str, request: bytes, seconds: float, stop: Stop | None) -> Reply:
        """See `Transport.infer`."""
        arguments: dict[str, Any] = {
            "model_name": model,
            "inputs": request_inputs(triton.InferInput, request),
            "timeout": microseconds(seconds),
            "client_timeout": seconds,
        }
        if stop is None:
            with _explained(self._address):
                return reply_from(self._triton.infer(**arguments))
        outcome: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        # tritonclient keeps the call it starts in an attribute of its client, and reads it back: two threads at once
        # could get hold of each other's call.
        with self._starting:
            call = self._triton.async_infer(callback=lambda result, error: outcome.put((result, error)), **arguments)
        stop.on_set(call.cancel)
        # gRPC keeps the deadline: an outcome always comes.
        result, error = outcome.get()
        if error is not None:
            with _explained(self._address):
                raise error
        return reply_from(result)

    def model_ready(self, model: str, seconds: float) -> bool:
        """See `Transport.model_ready`."""
        with _explained(self._address):
            return self._triton.is_model_ready(model, client_timeout=seconds)

    def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `Transport.repository_index`."""
        with _explained(self._address):
            index = self._triton.get_model_repository_index(as_json=True, client_timeout=seconds)
        return index.get("models", [])

    def close(self) -> None:
        """See `Transport.close`."""
        self._triton.close()


class AsyncGrpcTransport:
    """Calls from one event loop over one channel. A call whose task is cancelled is cancelled on the server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._triton = triton_aio.InferenceServerClient(
            address.target, ssl=address.encrypted, channel_args=_CHANNEL_OPTIONS
        )

    async def infer(self, model: str, request: bytes, seconds: float) -> Reply:
        """See `AsyncTransport.infer`."""
        async with _explained_async(self._address):
            result = await self._triton.infer(
                model_name=model,
                inputs=request_inputs(triton.InferInput, request),
                timeout=microseconds(seconds),
                client_timeout=seconds,
            )
        return reply_from(result)

    async def model_ready(self, model: str, seconds: float) -> bool:
        """See `AsyncTransport.model_ready`."""
        async with _explained_async(self._address):
            return await self._triton.is_model_ready(model, client_timeout=seconds)

    async def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `AsyncTransport.repository_index`."""
        async with _explained_async(self._address):
            index = await self._triton.get_model_repository_index(as_json=True, client_timeout=seconds)
        return index.get("models", [])

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._triton.close()


# Of a name with several addresses, gRPC tells what went wrong with the last alone, such as "refused" over IPv6 where
# the server's HTTP port has closed the connection over IPv4. So the port itself is asked.


@contextlib.contextmanager
def _explained(address: Address) -> Iterator[None]:
    try:
        yield
    except InferenceServerException as error:
        if _found_no_grpc(error, address) and _speaks_http(address.target):
            raise _http_instead() from error
        raise


@contextlib.asynccontextmanager
async def _explained_async(address: Address) -> AsyncIterator[None]:
    try:
        yield
    except InferenceServerException as error:
        if _found_no_grpc(error, address) and await asyncio.to_thread(_speaks_http, address.target):
            raise _http_instead() from error
        raise


def _found_no_grpc(error: InferenceServerException, address: Address) -> bool:
    return not address.encrypted and (error.message() or "").startswith("failed to connect to all addresses")


def _speaks_http(target: str) -> bool:
    connection = http.client.HTTPConnection(target, timeout=_HTTP_SECONDS)
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    else:
        return True
    finally:
        connection.close()


def _http_instead() -> ConnectionError:
    return ConnectionError("it answers in HTTP, not in gRPC; is it the HTTP port?")

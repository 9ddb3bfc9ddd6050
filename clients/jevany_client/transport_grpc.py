"""gRPC, on tritonclient."""

from __future__ import annotations

import queue
import threading
from typing import Any

import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from jevany_client.address import Address
from jevany_client.messages import Reply
from jevany_client.transport import Stop, microseconds, reply_from, request_inputs

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
            raise error
        return reply_from(result)

    def model_ready(self, model: str, seconds: float) -> bool:
        """See `Transport.model_ready`."""
        return self._triton.is_model_ready(model, client_timeout=seconds)

    def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `Transport.repository_index`."""
        return self._triton.get_model_repository_index(as_json=True, client_timeout=seconds).get("models", [])

    def close(self) -> None:
        """See `Transport.close`."""
        self._triton.close()


class AsyncGrpcTransport:
    """Calls from one event loop over one channel. A call whose task is cancelled is cancelled on the server."""

    def __init__(self, address: Address) -> None:
        self._triton = triton_aio.InferenceServerClient(
            address.target, ssl=address.encrypted, channel_args=_CHANNEL_OPTIONS
        )

    async def infer(self, model: str, request: bytes, seconds: float) -> Reply:
        """See `AsyncTransport.infer`."""
        result = await self._triton.infer(
            model_name=model,
            inputs=request_inputs(triton.InferInput, request),
            timeout=microseconds(seconds),
            client_timeout=seconds,
        )
        return reply_from(result)

    async def model_ready(self, model: str, seconds: float) -> bool:
        """See `AsyncTransport.model_ready`."""
        return await self._triton.is_model_ready(model, client_timeout=seconds)

    async def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """See `AsyncTransport.repository_index`."""
        index = await self._triton.get_model_repository_index(as_json=True, client_timeout=seconds)
        return index.get("models", [])

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._triton.close()

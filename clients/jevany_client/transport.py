"""What a client needs of a protocol. `transport_grpc` and `transport_http` provide it on tritonclient.

Only the transport that an address asks for is imported: HTTP brings gevent or aiohttp, gRPC its own runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jevany_client.address import Address
from jevany_client.messages import Reply


class Stop:
    """Tells the calls that belong together to give up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._cancels: list[Callable[[], Any]] = []

    def is_set(self) -> bool:
        """Return whether the calls shall give up."""
        return self._event.is_set()

    def set(self) -> None:
        """Cancel every call that was begun, and all that are begun from now on."""
        with self._lock:
            self._event.set()
            cancels, self._cancels = self._cancels, []
        for cancel in cancels:
            cancel()

    def on_set(self, cancel: Callable[[], Any]) -> None:
        """Call ``cancel`` when the calls shall give up, at once if they already do."""
        with self._lock:
            if not self._event.is_set():
                self._cancels.append(cancel)
                return
        cancel()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the calls shall give up."""
        self._event.wait(seconds)


class Transport(Protocol):
    """A connection to a server for blocking calls; any thread may use it.

    Every call raises tritonclient's `InferenceServerException`, or an `OSError`, `TimeoutError` or
    `http.client.HTTPException`.
    """

    def infer(self, model: str, request: bytes, seconds: float, stop: Stop | None) -> Reply:
        """Ask one question, within so many seconds.

        ``stop`` ends the wait, with any exception, and cancels the call on the server where the protocol can.
        """
        ...

    def model_ready(self, model: str, seconds: float) -> bool:
        """Return whether the model answers now."""
        ...

    def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """Return Triton's list of models."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


class AsyncTransport(Protocol):
    """A connection to a server for one event loop; what its calls raise is as for `Transport`."""

    async def infer(self, model: str, request: bytes, seconds: float) -> Reply:
        """Ask one question, within so many seconds."""
        ...

    async def model_ready(self, model: str, seconds: float) -> bool:
        """Return whether the model answers now."""
        ...

    async def repository_index(self, seconds: float) -> list[dict[str, str]]:
        """Return Triton's list of models."""
        ...

    async def close(self) -> None:
        """Close every connection; calls that are under way fail."""
        ...


def connect(address: Address) -> Transport:
    """Return a transport for blocking calls. It connects when it is first used."""
    if address.protocol == "grpc":
        from jevany_client.transport_grpc import GrpcTransport

        return GrpcTransport(address)
    from jevany_client.transport_http import HttpTransport

    return HttpTransport(address)


def connect_async(address: Address) -> AsyncTransport:
    """Return a transport for the running event loop. It connects when it is first used."""
    if address.protocol == "grpc":
        from jevany_client.transport_grpc import AsyncGrpcTransport

        return AsyncGrpcTransport(address)
    from jevany_client.transport_http import AsyncHttpTransport

    return AsyncHttpTransport(address)


def request_inputs(infer_input: Any, request: bytes) -> list[Any]:
    """Return the model's one input.

    Args:
        infer_input: The protocol's ``InferInput`` class.
        request: The JSON of the request.
    """
    tensor = infer_input("REQUEST", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[request]], dtype=np.object_))
    return [tensor]


def reply_from(result: Any) -> Reply:
    """Return the model's two outputs from tritonclient's result."""
    return Reply(result.as_numpy("ANSWER"), result.as_numpy("PROBABILITIES"))


def microseconds(seconds: float) -> int:
    """Return a time as Triton's request parameter ``timeout`` wants it, which bounds the wait in its queue."""
    return max(1, int(seconds * 1_000_000))

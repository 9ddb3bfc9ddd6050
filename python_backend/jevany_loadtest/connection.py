"""How a simulated user reaches the server: one call that is timed, and Triton's statistics, which are not."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from jevany_backend.protocol import DecisionError
from jevany_client.address import Address, parse_address
from jevany_client.errors import error_from
from jevany_client.transport import microseconds, reply_from, request_inputs
from jevany_client.transport_grpc import GrpcTransport

_STATISTICS_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes:
        milliseconds: From the call to the answer, as the client sees it.
        error: The error's code where there is no answer; the other fields are then empty.
        message: What the error says.
        model_milliseconds: How long the model took, by its answer.
        tokens: Of the row.
        weights: ``random`` where the answer says that the model's weights are.
        probabilities: Of the options, in the request's order.
    """

    milliseconds: float
    error: str | None = None
    message: str | None = None
    model_milliseconds: float | None = None
    tokens: int | None = None
    weights: str | None = None
    probabilities: tuple[float, ...] = ()


class Connection:
    """A connection to one model, through tritonclient, without retries: what fails shall be seen.

    Under gevent many greenlets may share one; over HTTP that many connections are opened.

    Args:
        url: As `jevany_client.Client` takes it; its scheme chooses the protocol.
        model: The model's name.
        timeout: Seconds after which a request has failed.
        concurrency: How many calls there are at a time, at most.
    """

    def __init__(self, url: str, model: str, timeout: float, concurrency: int = 1) -> None:
        self._address: Address = parse_address(url)
        self.model = model
        self._timeout = timeout
        target, encrypted = self._address.target, self._address.encrypted
        self._grpc = GrpcTransport(self._address) if self._address.protocol == "grpc" else None
        # The client's own HTTP transport runs its calls on threads, for programs without gevent. This one has it.
        self._triton: Any = (
            tritonclient.grpc.InferenceServerClient(target, ssl=encrypted)
            if self._grpc
            else tritonclient.http.InferenceServerClient(
                target, ssl=encrypted, concurrency=concurrency, connection_timeout=timeout, network_timeout=timeout
            )
        )

    def ask(self, request: bytes) -> Outcome:
        """Send one request and wait for its answer.

        Args:
            request: The JSON of a request with one question.
        """
        begin = time.perf_counter()
        try:
            if self._grpc:
                reply = self._grpc.infer(self.model, request, self._timeout, None)
            else:
                inputs = request_inputs(tritonclient.http.InferInput, request)
                reply = reply_from(self._triton.infer(self.model, inputs, timeout=microseconds(self._timeout)))
            elapsed = (time.perf_counter() - begin) * 1e3
            if reply.answer is None or reply.probabilities is None:
                return Outcome(elapsed, "internal", "the reply lacks an output; is this a JevAny model?")
            body = json.loads(reply.answer.reshape(-1)[0])
            return Outcome(
                elapsed,
                model_milliseconds=float(body["latency_ms"]),
                tokens=int(body["usage"]["input_tokens"]),
                weights=body.get("weights"),
                probabilities=tuple(float(p) for p in reply.probabilities.reshape(-1)),
            )
        except Exception as exception:  # Whatever it is, it is counted by its kind.
            error: DecisionError = error_from(exception, self._address, self.model, self._timeout)
            return Outcome((time.perf_counter() - begin) * 1e3, error.code, str(error))

    def served(self) -> tuple[int, int]:
        """Return how many requests the model has answered so far, and the nanoseconds that all of them took.

        Raises:
            InferenceServerException: The server does not say.
        """
        arguments = {"as_json": True} if self._grpc else {}
        [statistics] = self._triton.get_inference_statistics(self.model, **arguments)["model_stats"]
        success = statistics["inference_stats"]["success"]
        # protobuf's JSON leaves out what is 0, and writes large integers as text.
        return int(success.get("count", 0)), int(success.get("ns", 0))

    def server_milliseconds(self, before: tuple[int, int]) -> tuple[float | None, tuple[int, int]]:
        """Return the server's own time of the one request since `before`, and the new statistics.

        Triton counts a request when it lets go of it, a little after it has sent the answer, so this asks until it has,
        and the time can be longer than the client's. It is None where others asked the model meanwhile, or the server
        does not say.
        """
        deadline = time.monotonic() + _STATISTICS_SECONDS
        try:
            while (now := self.served())[0] == before[0] and time.monotonic() < deadline:
                pass
        except InferenceServerException:
            return None, before
        return ((now[1] - before[1]) / 1e6 if now[0] == before[0] + 1 else None), now

    def close(self) -> None:
        """Close the connections."""
        if self._grpc:
            self._grpc.close()
        self._triton.close()

"""A loaded decision model: a request goes in, its reply comes out. It knows nothing of Triton."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jevany_backend.protocol import DecisionRequest, InvalidRequest, answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jevany_backend.encoding import Row, RowEncoder


class Engine(Protocol):
    """What runs rows; see `engine.reference.ReferenceEngine` and `engine.graphs.GraphEngine`."""

    def probabilities(self, row: Row) -> NDArray[np.float32]:
        """Return the options' probabilities, (K,) float32, in option order: forward pass, readout, copy to the CPU."""


@dataclass(frozen=True)
class Reply:
    """The reply to one single-question request.

    Attributes:
        body: The JSON object that goes to the caller.
        probabilities: (K,), float32, in option order.
    """

    body: dict[str, Any]
    probabilities: NDArray[np.float32]


def marked_name(name: str, *, random_weights: bool) -> str:
    """Return a model's name for a log line, with a mark where its weights are random."""
    return f"{name} (random weights)" if random_weights else name


class DecisionModel:
    """Answers single-question requests.

    Args:
        name: The name it is served under.
        encoder: Makes rows of its questions.
        engine: Runs the rows.
        random_weights: Whether the weights are random; then every reply says so.
    """

    def __init__(self, name: str, encoder: RowEncoder, engine: Engine, *, random_weights: bool = False) -> None:
        self.name = name
        self.encoder = encoder
        self.engine = engine
        self.random_weights = random_weights

    def decide(self, request: DecisionRequest) -> Reply:
        """Answer a request.

        Raises:
            InvalidRequest: More than one question, or another model is meant.
            TooLong: The state or the row exceeds a limit.
        """
        if request.model not in (None, self.name):
            raise InvalidRequest("model", f"{request.model!r} is not served here; this is {self.name!r}")
        if len(request.questions) != 1:
            raise InvalidRequest("questions", f"{len(request.questions)} questions; one request carries one question")
        [(identifier, question)] = request.questions.items()
        row = self.encoder.encode(request.state, question, "question" if request.single else f"questions.{identifier}")
        started = time.perf_counter()
        probabilities = self.engine.probabilities(row)
        latency = time.perf_counter() - started
        result = answer(question, probabilities.tolist())
        answers = {identifier: result}
        body = {
            "model": self.name,
            **({"weights": "random"} if self.random_weights else {}),
            **({"answer": result} if request.single else {"answers": answers}),
            "usage": {
                "input_tokens": len(row.ids),
                "output_tokens": self.encoder.count_tokens(json.dumps(answers)),
            },
            "latency_ms": round(latency * 1000, 3),
        }
        return Reply(body, probabilities)

"""A loaded decision model: a request goes in, its reply comes out. It knows nothing of Triton."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from jevany_backend.protocol import DecisionRequest, InvalidRequest, answer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jevany_backend.encoding import Row, RowEncoder
    from jevany_backend.readout import Readout


class Engine(Protocol):
    """What a forward pass must offer; see `engine.reference.ReferenceEngine`."""

    def hidden_states(self, row: Row) -> torch.Tensor:
        """Return (1 + K, hidden): the decide token's state, then each end-option token's."""


@dataclass(frozen=True)
class Reply:
    """The reply to one single-question request.

    Attributes:
        body: The JSON object that goes to the caller.
        probabilities: (K,), float32, in option order.
    """

    body: dict[str, Any]
    probabilities: NDArray[np.float32]


class DecisionModel:
    """Answers single-question requests.

    Args:
        name: The name it is served under.
        encoder: Makes rows of its questions.
        engine: Runs the rows.
        readout: Reads the options' probabilities off the hidden states.
        random_weights: Whether the weights are random; then every reply says so.
    """

    def __init__(
        self, name: str, encoder: RowEncoder, engine: Engine, readout: Readout, *, random_weights: bool = False
    ) -> None:
        self.name = name
        self.encoder = encoder
        self.engine = engine
        self.readout = readout
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
        probabilities = self.probabilities(row)
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

    @torch.inference_mode()
    def probabilities(self, row: Row) -> NDArray[np.float32]:
        """Return the options' probabilities, (K,) float32, in option order: forward pass, readout, copy to the CPU."""
        return self.readout(self.engine.hidden_states(row)).cpu().numpy()

"""What goes over the wire and what comes back, as both clients need it: pure functions and dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jevany_backend.protocol import (
    JSON,
    MAX_QUESTIONS,
    MAX_REQUEST_BYTES,
    Choice,
    DecisionError,
    InternalError,
    InvalidRequest,
    Noul,
    Question,
    Score,
    TooLong,
    question_to_json,
)
from jevany_backend.protocol.json_content import check_content, check_keys, counted
from jevany_client.errors import about_question


@dataclass(frozen=True)
class Reply:
    """The two outputs of the model as they arrived, None where one is missing."""

    answer: NDArray[Any] | None
    probabilities: NDArray[Any] | None


@dataclass(frozen=True, eq=False)
class Decision:
    """The answer to one question.

    Attributes:
        answer: The answer in the wire format, with ``type`` and ``noul``, ``choice`` or ``score``.
        keys: The options' names, in the order of the question.
        probabilities: The probability of each option, float32, in the order of `keys`, not rounded.
        usage: ``input_tokens`` and ``output_tokens``.
        latency_ms: How long the model took, without the way to it and back.
        model: The model that answered.
        weights: ``random`` where the model's weights are, so that the answer means nothing; else None.
    """

    answer: dict[str, Any]
    keys: tuple[str, ...]
    probabilities: NDArray[np.float32]
    usage: dict[str, int]
    latency_ms: float
    model: str
    weights: str | None = None


@dataclass(frozen=True)
class ServedModel:
    """One version of a model as the server lists it.

    Attributes:
        name: The model's name.
        version: Its version; empty when it has none.
        state: Triton's word for it: ``READY``, ``UNAVAILABLE``, ``LOADING`` or ``UNLOADING``; empty when not loaded.
        reason: Why it is not ready, where Triton says so.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Whether it answers now."""
        return self.state == "READY"


def encode_state(state: JSON) -> bytes:
    """Return a state's JSON; the requests of several questions share it.

    Raises:
        InvalidRequest: The state is not JSON content; the error names the bad value's path.
    """
    check_content(state, "state")
    return _encode(state)


def encode_request(state: bytes, question: Question) -> bytes:
    """Return the request that asks one question.

    Args:
        state: The state's JSON, from `encode_state`.
        question: The question; its constructor has checked it.

    Raises:
        InvalidRequest: It is no question.
        TooLong: The request has more bytes than a server reads.
    """
    if not isinstance(question, (Noul, Choice, Score)):
        raise InvalidRequest("question", f"needs a Noul, Choice or Score, not {type(question).__name__}")
    body = b'{"state": %b, "question": %b}' % (state, _encode(question_to_json(question)))
    if len(body) > MAX_REQUEST_BYTES:
        raise TooLong(f"request: {len(body)} bytes; the limit is {MAX_REQUEST_BYTES}")
    return body


def encode_requests(state: JSON, questions: Mapping[str, Question]) -> dict[str, bytes]:
    """Return the request of each question, by its id, in the order of ``questions``.

    Raises:
        InvalidRequest: Names the path of the first bad value.
        TooLong: A request has more bytes than a server reads.
    """
    if not isinstance(questions, Mapping):
        raise InvalidRequest("questions", f"needs questions by id, not {type(questions).__name__}")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise InvalidRequest("questions", f"{counted(len(questions), 'question')}; needs 1 to {MAX_QUESTIONS}")
    shared = encode_state(state)
    check_keys(questions, "questions")
    return {identifier: _encode_one_of_many(shared, identifier, question) for identifier, question in questions.items()}


def _encode_one_of_many(state: bytes, identifier: str, question: Question) -> bytes:
    try:
        return encode_request(state, question)
    except DecisionError as error:
        raise about_question(error, identifier) from None


def _encode(value: JSON) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def read_reply(question: Question, reply: Reply) -> Decision:
    """Return the decision that a reply holds.

    Raises:
        InternalError: The reply is not one to this question.
    """
    if reply.answer is None or reply.answer.size != 1 or reply.probabilities is None:
        raise InternalError("the reply lacks ANSWER or PROBABILITIES; is this a JevAny model?")
    keys = tuple(question.keys)
    # A copy, so that the decision does not keep the whole reply alive.
    probabilities = np.array(reply.probabilities, dtype=np.float32).reshape(-1)
    if len(probabilities) != len(keys):
        raise InternalError(f"the reply has {len(probabilities)} probabilities for {len(keys)} options")
    try:
        body = json.loads(reply.answer.reshape(-1)[0])
        return Decision(
            answer=body["answer"],
            keys=keys,
            probabilities=probabilities,
            usage=body["usage"],
            latency_ms=body["latency_ms"],
            model=body["model"],
            weights=body.get("weights"),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InternalError(f"the reply's ANSWER cannot be read: {type(error).__name__}: {error}") from error


def single_envelope(decision: Decision) -> dict[str, Any]:
    """Return the reply to a request with one ``question``."""
    return {
        **_origin(decision),
        "answer": decision.answer,
        "usage": decision.usage,
        "latency_ms": decision.latency_ms,
    }


def envelope(decisions: Mapping[str, Decision]) -> dict[str, Any]:
    """Return the one reply to a request with ``questions``.

    Args:
        decisions: The decisions by question id, in the order they were asked; at least one.

    Returns:
        ``model``, ``weights`` where they are random, ``answers`` by id in the same order, ``usage`` summed, and
        ``latency_ms`` summed over the calls of the model.
    """
    parts = list(decisions.values())
    return {
        **_origin(parts[0]),
        "answers": {identifier: decision.answer for identifier, decision in decisions.items()},
        "usage": {name: sum(part.usage[name] for part in parts) for name in parts[0].usage},
        # Times are measured to the microsecond at best; summing floats must not pretend otherwise.
        "latency_ms": round(sum(part.latency_ms for part in parts), 3),
    }


def _origin(decision: Decision) -> dict[str, str]:
    return {"model": decision.model, **({"weights": decision.weights} if decision.weights else {})}


def served_models(index: list[dict[str, str]]) -> list[ServedModel]:
    """Return the models of Triton's repository index, by name and version."""
    fields = ("name", "version", "state", "reason")
    models = [ServedModel(**{field: entry.get(field, "") for field in fields}) for entry in index]
    return sorted(models, key=lambda model: (model.name, model.version))

"""Requests out, replies in, and the one envelope of several questions."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jevany_backend.protocol import (
    MAX_REQUEST_BYTES,
    Choice,
    InternalError,
    InvalidRequest,
    Noul,
    Question,
    Score,
    TooLong,
    answer,
    parse_request,
)
from jevany_client.messages import (
    Decision,
    Reply,
    encode_request,
    encode_requests,
    encode_state,
    envelope,
    read_reply,
    served_models,
    single_envelope,
)

TEAM = Choice("Which team?", {"billing": "Charges", "été": None})

states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
states = states.filter(lambda value: "\\ud" not in json.dumps(value))  # Lone surrogates are no text.


@given(states)
def test_the_server_reads_what_was_asked(state: Any) -> None:
    for question in (TEAM, Noul(state), Score(None, ["low", {"high": 1}])):
        request = parse_request(encode_request(encode_state(state), question))
        assert request.single
        assert request.state == state
        assert request.questions == {"question": question}


def test_several_questions_are_several_requests() -> None:
    requests = encode_requests({"plan": "pro"}, {"team": TEAM, "upset": Noul("Upset?")})
    assert list(requests) == ["team", "upset"]
    assert parse_request(requests["upset"]).questions["question"] == Noul("Upset?")


@pytest.mark.parametrize("bad", [math.nan, math.inf, {1: 2}, ("tuple",), {"a": [b"bytes"]}, "\ud800"])
def test_a_bad_state_is_not_sent(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^state"):
        encode_state(bad)


def test_a_question_must_be_one() -> None:
    with pytest.raises(InvalidRequest, match="question: needs a Noul, Choice or Score, not dict"):
        encode_request(b"1", {"type": "noul"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("questions", "problem"),
    [
        ({}, "0 questions; needs 1 to 64"),
        ({str(i): Noul() for i in range(65)}, "65 questions"),
        ({1: Noul()}, "1 is not a string"),
        ([Noul()], "needs questions by id, not list"),
        ({"a": Noul(), "b": "x"}, r"^questions\.b: needs a Noul, Choice or Score, not str$"),
    ],
)
def test_questions_come_by_id(questions: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        encode_requests("text", questions)


def test_a_request_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(TooLong, match=f"the limit is {MAX_REQUEST_BYTES}"):
        encode_request(encode_state("x" * MAX_REQUEST_BYTES), Noul())
    with pytest.raises(TooLong, match=r"^question 'long': request: \d+ bytes"):
        encode_requests("text", {"short": Noul(), "long": Noul("x" * MAX_REQUEST_BYTES)})


def _reply(question: Question, probabilities: list[float], latency: float = 1.5) -> Reply:
    body = {
        "model": "m",
        "answer": answer(question, probabilities),
        "usage": {"input_tokens": 5, "output_tokens": 2},
        "latency_ms": latency,
    }
    return Reply(np.array([[json.dumps(body).encode()]], dtype=object), np.array([probabilities], dtype=np.float32))


def test_a_reply_is_read() -> None:
    decision = read_reply(TEAM, _reply(TEAM, [0.25, 0.75]))
    assert decision.answer["choice"] == "été"
    assert decision.keys == ("billing", "été")
    assert decision.probabilities.dtype == np.float32
    assert decision.probabilities.tolist() == [0.25, 0.75]
    assert single_envelope(decision) == {
        "model": "m",
        "answer": decision.answer,
        "usage": {"input_tokens": 5, "output_tokens": 2},
        "latency_ms": 1.5,
    }


def test_random_weights_are_passed_on() -> None:
    reply = _reply(TEAM, [0.25, 0.75])
    assert reply.answer is not None
    body = json.loads(reply.answer[0, 0]) | {"weights": "random"}
    decision = read_reply(TEAM, Reply(np.array([[json.dumps(body).encode()]], dtype=object), reply.probabilities))
    assert decision.weights == "random"
    assert list(single_envelope(decision)) == ["model", "weights", "answer", "usage", "latency_ms"]
    assert list(envelope({"a": decision})) == ["model", "weights", "answers", "usage", "latency_ms"]
    assert envelope({"a": decision})["weights"] == "random"


def test_a_decision_outlives_its_reply() -> None:
    reply = _reply(TEAM, [0.25, 0.75])
    decision = read_reply(TEAM, reply)
    assert reply.probabilities is not None
    reply.probabilities[:] = 0
    assert decision.probabilities.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(None, np.zeros((1, 2), np.float32)), "lacks ANSWER or PROBABILITIES"),
        (Reply(np.array([[b"{}"]], dtype=object), None), "lacks ANSWER or PROBABILITIES"),
        (Reply(np.array([[b"{}"]], dtype=object), np.zeros((1, 0), np.float32)), "0 probabilities for 2 options"),
        (Reply(np.array([[b"{"]], dtype=object), np.zeros((1, 2), np.float32)), "cannot be read"),
        (Reply(np.array([[b"{}"]], dtype=object), np.zeros((1, 2), np.float32)), "KeyError"),
        (Reply(np.array([[b"[]"]], dtype=object), np.zeros((1, 2), np.float32)), "TypeError"),
    ],
)
def test_a_broken_reply_is_the_servers_fault(reply: Reply, problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        read_reply(TEAM, reply)


def test_the_envelope_sums_and_keeps_the_order() -> None:
    asked: dict[str, Question] = {"z": TEAM, "a": Noul("?"), "m": Score(None, ["low", "high"])}
    decisions: dict[str, Decision] = {
        name: read_reply(question, _reply(question, [0.5, 0.5], latency))
        for (name, question), latency in zip(asked.items(), (0.1, 0.2, 0.4), strict=True)
    }
    merged = envelope(decisions)
    assert list(merged) == ["model", "answers", "usage", "latency_ms"]
    assert list(merged["answers"]) == ["z", "a", "m"]
    assert [a["type"] for a in merged["answers"].values()] == ["choice", "noul", "score"]
    assert merged["usage"] == {"input_tokens": 15, "output_tokens": 6}
    assert merged["latency_ms"] == 0.7


def test_models_are_sorted_and_may_be_unloaded() -> None:
    index = [{"name": "b", "version": "1", "state": "READY"}, {"name": "a"}]
    assert [(model.name, model.ready) for model in served_models(index)] == [("a", False), ("b", True)]

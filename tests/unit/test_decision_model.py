"""From a request to its reply, on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from jevany_backend.checkpoint import load_readout, load_text_model, open_checkpoint
from jevany_backend.decision_model import DecisionModel
from jevany_backend.encoding import Limits, RowEncoder
from jevany_backend.engine.reference import ReferenceEngine
from jevany_backend.protocol import InvalidRequest, TooLong, parse_request
from tests.checkpoint_factory import make_checkpoint


@pytest.fixture(scope="module", params=["pointer", "lm_token"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecisionModel:
    directory: Path = tmp_path_factory.mktemp(request.param)
    made = make_checkpoint(directory, decision_mode=request.param)
    files = open_checkpoint(str(made.adapter), str(made.base))
    cpu = torch.device("cpu")
    encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels, Limits(200, 300))
    text_model, readout = load_text_model(files, cpu, torch.float32), load_readout(files, cpu, torch.float32)
    return DecisionModel("small", encoder, ReferenceEngine(text_model, readout))


CHOICE = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "Charges", "shipping": None}}


def test_reply_to_one_question(model: DecisionModel) -> None:
    body = {"state": "I was charged twice.", "question": CHOICE}
    reply = model.decide(parse_request(json.dumps(body).encode()))
    assert list(reply.body) == ["model", "answer", "usage", "latency_ms"]
    assert reply.body["model"] == "small"
    answer = reply.body["answer"]
    assert answer["choice"] == ["billing", "shipping"][int(reply.probabilities.argmax())]
    assert list(answer["probabilities"].values()) == reply.probabilities.tolist()
    assert reply.probabilities.dtype == np.float32
    assert reply.probabilities.sum() == pytest.approx(1)
    # Bytes are tokens here: 20 of state, 11 of instructions, the options, and 2 + 2 * 2 + 1 delimiters.
    labels = 6 if model.encoder.labels else 0
    assert reply.body["usage"]["input_tokens"] == 20 + 11 + 16 + 8 + labels + 7
    assert reply.body["usage"]["output_tokens"] == len(json.dumps({"question": answer}))
    assert reply.body["latency_ms"] > 0


def test_reply_keeps_the_question_id(model: DecisionModel) -> None:
    body = {"state": None, "questions": {"team": CHOICE}, "model": "small"}
    reply = model.decide(parse_request(json.dumps(body).encode()))
    assert list(reply.body["answers"]) == ["team"]


def test_hidden_states_are_those_of_the_whole_row(model: DecisionModel) -> None:
    [question] = parse_request(json.dumps({"state": "s", "question": CHOICE}).encode()).questions.values()
    row = model.encoder.encode("s", question)
    assert isinstance(model.engine, ReferenceEngine)
    states = model.engine.model(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(model.engine.hidden_states(row), states[[row.decide, *row.option_ends]])


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"state": "", "questions": {"a": CHOICE, "b": CHOICE}}, InvalidRequest, "questions: 2 questions; one request"),
        ({"state": "", "question": CHOICE, "model": "big"}, InvalidRequest, "model: 'big' is not served here; this is"),
        ({"state": "x" * 200, "question": CHOICE}, TooLong, "state: 201 tokens; the limit is 200"),
        ({"state": "x" * 199, "question": CHOICE | {"instructions": "y" * 99}}, TooLong, "question: .* limit is 300"),
    ],
)
def test_refusals(model: DecisionModel, body: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        model.decide(parse_request(json.dumps(body).encode()))

"""What tritonclient and the operating system raise, as errors of ours."""

from __future__ import annotations

import errno
import http.client
import socket

import pytest
from tritonclient.utils import InferenceServerException

from jevany_backend.protocol import (
    ERRORS_BY_CODE,
    DecisionError,
    InternalError,
    InvalidRequest,
    NotReady,
    OutOfMemory,
    TooLong,
    Unsupported,
)
from jevany_client.address import parse_address
from jevany_client.attempts import RETRIED
from jevany_client.errors import (
    DeadlineExceeded,
    Overloaded,
    Unavailable,
    UnknownModel,
    about_question,
    check_model,
    error_from,
    not_ready,
)

ADDRESS = parse_address("localhost:8001")


def _error(exception: Exception) -> DecisionError:
    return error_from(exception, ADDRESS, "jevany-tiny", 2.5)


@pytest.mark.parametrize("kind", ERRORS_BY_CODE.values())
@pytest.mark.parametrize("before", ["", "[request id: 7] "])
@pytest.mark.parametrize("status", ["StatusCode.INVALID_ARGUMENT", "StatusCode.UNAVAILABLE", "400", "503"])
def test_the_code_of_the_server_decides(kind: type[DecisionError], before: str, status: str) -> None:
    error = _error(InferenceServerException(f"{before}{kind.code}: state.a: 9000: too many", status))
    assert type(error) is kind
    assert error.message == "state.a: 9000: too many"


def test_an_invalid_request_keeps_its_path() -> None:
    error = _error(InferenceServerException("invalid_request: question.criteria: missing: all", "400"))
    assert isinstance(error, InvalidRequest)
    assert (error.path, error.problem) == ("question.criteria", "missing: all")


# The texts are those of Triton 2.51 and gRPC 1.8x.
@pytest.mark.parametrize(
    ("text", "status", "kind", "says"),
    [
        ("Request for unknown model: 'x' is not found", "StatusCode.NOT_FOUND", UnknownModel, "has no model"),
        ("Request for unknown model: 'x' is not found", "404", UnknownModel, "has no model 'jevany-tiny'"),
        (
            "Request for unknown model: 'x' version 1 is not at ready state",
            "StatusCode.UNAVAILABLE",
            NotReady,
            "not at ready state",
        ),
        ("Request timeout expired", "StatusCode.UNAVAILABLE", DeadlineExceeded, "within 2.5 s"),
        ("Request timeout expired", "503", DeadlineExceeded, "within 2.5 s"),
        ("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED", DeadlineExceeded, "grpc://localhost:8001 within 2.5 s"),
        ("gateway timed out", "504", DeadlineExceeded, "within 2.5 s"),
        (
            "[request id: <id_unknown>] Exceeds maximum queue size",
            "StatusCode.UNAVAILABLE",
            Overloaded,
            "Exceeds maximum queue size",
        ),
        ("[request id: <id_unknown>] Exceeds maximum queue size", "503", Overloaded, "queue size"),
        ("slow down", "429", Overloaded, "slow down"),
        (
            "This protocol is restricted, expecting header 'triton-grpc-protocol-k'",
            "StatusCode.UNAVAILABLE",
            Unsupported,
            "keeps this to itself",
        ),
        ("This API is restricted, expecting header 'k'", "403", Unsupported, "keeps this to itself"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Connection refused",
            "StatusCode.UNAVAILABLE",
            Unavailable,
            "cannot reach grpc://localhost:8001: ipv4:127.0.0.1:8001: Connection refused",
        ),
        ("Socket closed", "StatusCode.UNAVAILABLE", Unavailable, "Socket closed"),
        ("bad gateway", "502", Unavailable, "answers 502"),
        ("Stub process 'x' is not healthy.", "StatusCode.INTERNAL", InternalError, "answers INTERNAL"),
        ("no", None, InternalError, "no"),
    ],
)
def test_tritons_own_errors(text: str, status: str | None, kind: type[DecisionError], says: str) -> None:
    error = _error(InferenceServerException(text, status))
    assert type(error) is kind
    assert says in error.message


@pytest.mark.parametrize(
    ("exception", "kind", "says"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), Unavailable, "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), Unavailable, "Name or service not known"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), Unavailable, "Connection timed out"),
        (TimeoutError(), DeadlineExceeded, "no answer from grpc://localhost:8001 within 2.5 s"),
        (http.client.HTTPException("Expected HTTP/"), Unavailable, "is it the gRPC port?"),
        (KeyError("outputs"), InternalError, "cannot be read: KeyError"),
        (TooLong("state: 9"), TooLong, "state: 9"),
    ],
)
def test_errors_of_the_way(exception: Exception, kind: type[DecisionError], says: str) -> None:
    error = _error(exception)
    assert type(error) is kind
    assert says in error.message


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/versions/1", "\udcff"])
def test_a_name_that_no_model_has(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"^grpc://localhost:8001 has no model '"):
        check_model(ADDRESS, name)


@pytest.mark.parametrize("name", ["jevany-tiny", "a b", "été", "..x", "%2e%2e"])
def test_a_name_that_a_model_may_have(name: str) -> None:
    check_model(ADDRESS, name)


def test_what_may_be_tried_again() -> None:
    kinds: list[type[DecisionError]] = [
        *ERRORS_BY_CODE.values(),
        Unavailable,
        Overloaded,
        DeadlineExceeded,
        UnknownModel,
    ]
    assert {kind for kind in kinds if issubclass(kind, RETRIED)} == {Unavailable, NotReady}
    assert all(issubclass(kind, DecisionError) for kind in kinds)
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_an_error_is_told_by_its_question() -> None:
    assert about_question(InvalidRequest("question.criteria", "bad"), "team").message == "questions.team.criteria: bad"
    assert about_question(InvalidRequest("question", "bad"), "team").message == "questions.team: bad"
    assert about_question(InvalidRequest("state.x", "bad"), "team").message == "state.x: bad"
    error = about_question(OutOfMemory("no memory"), "team")
    assert (type(error), error.message) == (OutOfMemory, "question 'team': no memory")


def test_why_a_model_is_not_ready() -> None:
    assert isinstance(not_ready(ADDRESS, "a", [{"name": "b"}]), UnknownModel)
    assert isinstance(not_ready(ADDRESS, "a", [{"name": "a"}]), NotReady)
    assert isinstance(not_ready(ADDRESS, "a", None), NotReady)

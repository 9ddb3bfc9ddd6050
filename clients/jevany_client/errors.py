"""What can go wrong between a client and a server, under the protocol's own base class `DecisionError`.

What the server says about a request arrives as the protocol's own error class. The classes here are for what only a
client can see. `error_from` is the one place that turns an exception of a transport into either.
"""

from __future__ import annotations

import http.client
import re

from tritonclient.utils import InferenceServerException

from jevany_backend.protocol import (
    ERRORS_BY_CODE,
    DecisionError,
    InternalError,
    InvalidRequest,
    NotReady,
    Unsupported,
)
from jevany_client.address import Address


class Unavailable(DecisionError):
    """The server cannot be reached, or the connection was lost before it answered."""

    code = "unavailable"


class Overloaded(DecisionError):
    """The server's queue is full. Asking again at once would only keep it so."""

    code = "overloaded"


class DeadlineExceeded(DecisionError):
    """No answer within the time that the caller gave."""

    code = "deadline_exceeded"


class UnknownModel(DecisionError):
    """The server has no model of this name."""

    code = "unknown_model"


# Triton sometimes puts text of its own, in brackets, in front of what the model said.
_CODED = re.compile(rf"(?:^|\] )({'|'.join(ERRORS_BY_CODE)}): (.*)", re.DOTALL)

# gRPC's way of saying it, where the second half alone tells the story.
_CANNOT_CONNECT = re.compile(r"^failed to connect to all addresses; last error: \w+: ")


def error_from(exception: Exception, address: Address, model: str, timeout: float) -> DecisionError:
    """Return the error that an exception out of a transport means.

    Args:
        exception: tritonclient's exception, or an `OSError`, `TimeoutError` or `http.client.HTTPException`.
        address: The server that was asked.
        model: The model that was asked.
        timeout: The seconds that the caller gave.
    """
    if isinstance(exception, DecisionError):
        return exception
    if isinstance(exception, InferenceServerException):
        return _error_from_reply(exception.message() or "", exception.status(), address, model, timeout)
    # A connection attempt that the network gave up is a TimeoutError too, one with an errno.
    if isinstance(exception, TimeoutError) and exception.errno is None:
        return _too_late(address, timeout)
    if isinstance(exception, OSError):
        return Unavailable(f"cannot reach {address}: {exception.strerror or exception}")
    if isinstance(exception, http.client.HTTPException):
        return Unavailable(f"{address} does not answer in HTTP; is it the gRPC port?")
    return InternalError(f"{address}: the reply cannot be read: {type(exception).__name__}: {exception}")


def _error_from_reply(text: str, status: str | None, address: Address, model: str, timeout: float) -> DecisionError:
    if match := _CODED.search(text):
        return _coded_error(match[1], match[2])
    # Triton's own errors have a status that several causes share; its text tells them apart.
    if "unknown model" in text:
        return NotReady(f"{model} on {address}: {text}") if "not at ready state" in text else _unknown(address, model)
    if "maximum queue size" in text or status in ("429", "StatusCode.RESOURCE_EXHAUSTED"):
        return Overloaded(f"{address}: {text}")
    if "timeout expired" in text or status in ("504", "StatusCode.DEADLINE_EXCEEDED"):
        return _too_late(address, timeout)
    if "is restricted" in text:
        return Unsupported(f"{address} keeps this to itself: {text}")
    if status in ("502", "503"):
        return Unavailable(f"{address} answers {status}: {text}")
    if status in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"):
        return Unavailable(f"cannot reach {address}: {_CANNOT_CONNECT.sub('', text)}")
    return InternalError(f"{address} answers {(status or 'nothing').removeprefix('StatusCode.')}: {text}")


def _coded_error(code: str, message: str) -> DecisionError:
    kind = ERRORS_BY_CODE[code]
    if kind is InvalidRequest:
        path, _, problem = message.partition(": ")
        return InvalidRequest(path, problem)
    return kind(message)


def check_model(address: Address, model: str) -> None:
    """Refuse a name that no model has and that, as a part of an HTTP path, would ask for something else.

    Raises:
        UnknownModel: The name is empty, a step of a path, has a slash or is not text.
    """
    if model in ("", ".", "..") or "/" in model or model != model.encode(errors="replace").decode():
        raise _unknown(address, model)


def _unknown(address: Address, model: str) -> UnknownModel:
    return UnknownModel(f"{address} has no model {model!r}")


def _too_late(address: Address, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer from {address} within {timeout:g} s")


def not_ready(address: Address, model: str, index: list[dict[str, str]] | None) -> DecisionError:
    """Return why a model that is not ready is not.

    Args:
        address: The server that was asked.
        model: The model that was asked for.
        index: The models that the server lists, None when it does not list them.
    """
    if index is not None and all(entry["name"] != model for entry in index):
        return _unknown(address, model)
    return NotReady(f"{model} on {address} is not ready")


def about_question(error: DecisionError, identifier: str) -> DecisionError:
    """Return the error of a single-question request as its caller knows it: by the question's id."""
    if not isinstance(error, InvalidRequest):
        return type(error)(f"question {identifier!r}: {error.message}")
    if error.path.partition(".")[0] != "question":
        return error
    return InvalidRequest(f"questions.{identifier}{error.path.removeprefix('question')}", error.problem)

"""Every way a decision can fail, by one short table of codes.

An error travels as the text ``code: message``. Triton, HTTP and the client each turn the code into their own
kind of failure in one place, and nothing else in the message is meant for machines.
"""

from __future__ import annotations


class DecisionError(Exception):
    """A decision that could not be made, with a reason fit for the caller's eyes.

    Args:
        message: What is wrong and with which value. It never holds a server path or a traceback.
    """

    code = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def wire_text(self) -> str:
        """Return ``code: message``, the form in which the error leaves the server."""
        return f"{self.code}: {self.message}"


class InvalidRequest(DecisionError):
    """The request breaks the wire format; ``path`` names the bad value, as in ``questions.team.criteria``."""

    code = "invalid_request"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def within(self, parent: str) -> InvalidRequest:
        """Return the same error as seen from ``parent``, one level further out."""
        return InvalidRequest(f"{parent}.{self.path}", self.problem)


class TooLong(DecisionError):
    """A valid request that is longer than a limit of the server. Nothing is ever truncated to fit."""

    code = "context_length_exceeded"


class Unsupported(DecisionError):
    """A valid request or checkpoint that asks for something this server does not do."""

    code = "unsupported"


class NotReady(DecisionError):
    """The model cannot answer now: it is loading, draining or has lost its device."""

    code = "not_ready"


class OutOfMemory(DecisionError):
    """The device ran out of memory for this request."""

    code = "out_of_memory"


class InternalError(DecisionError):
    """A fault of the server. Its details are in the server's log, under the reference the message gives."""

    code = "internal"


ERRORS_BY_CODE: dict[str, type[DecisionError]] = {
    error.code: error for error in (InvalidRequest, TooLong, Unsupported, NotReady, OutOfMemory, InternalError)
}

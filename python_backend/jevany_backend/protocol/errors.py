"""Every way a decision can fail, by one short table of codes.

An error travels as the text ``code: message``. Triton, HTTP and the client each turn the code into their own
kind of failure in one place, and nothing else in the message is meant for machines.
"""

from __future__ import annotations

MAX_MESSAGE = 500


class DecisionError(Exception):
    """A decision that could not be made, with a reason fit for the caller's eyes.

    Args:
        message: What is wrong and with which value. It never holds a server path or a traceback. What it quotes from
            the caller may be anything, so it is kept as one line of at most `MAX_MESSAGE` characters.
    """

    code = "internal"

    def __init__(self, message: str) -> None:
        self.message = _one_line(message)
        super().__init__(self.message)

    def wire_text(self) -> str:
        """Return ``code: message``, the form in which the error leaves the server."""
        return f"{self.code}: {self.message}"


class InvalidRequest(DecisionError):
    """The request breaks the wire format; ``path`` names the bad value, as in ``questions.team.criteria``."""

    code = "invalid_request"

    def __init__(self, path: str, problem: str) -> None:
        self.path = _one_line(path)
        self.problem = _one_line(problem)
        super().__init__(f"{self.path}: {self.problem}")

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


def _one_line(text: str) -> str:
    # Cut before the escapes, which may have to run over megabytes, and after them, as they make text longer.
    printable = (c if c.isprintable() else ascii(c)[1:-1] for c in _cut_in_the_middle(text))
    return _cut_in_the_middle("".join(printable))


def _cut_in_the_middle(text: str) -> str:
    half = (MAX_MESSAGE - 3) // 2  # A path begins and a problem ends a message; what is long stands between them.
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]}...{text[-half:]}"


ERRORS_BY_CODE: dict[str, type[DecisionError]] = {
    error.code: error for error in (InvalidRequest, TooLong, Unsupported, NotReady, OutOfMemory, InternalError)
}

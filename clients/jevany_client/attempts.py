"""How long a call may take, and when it is tried again."""

from __future__ import annotations

import random
import time
from numbers import Real
from typing import Any

from jevany_backend.protocol import DecisionError, NotReady
from jevany_backend.protocol.json_content import shown
from jevany_client.errors import Unavailable

# Pauses before the second, third and fourth attempt, in seconds, before jitter.
PAUSES = (0.1, 0.3, 0.9)

# How long a server may take to say whether a model is ready, and the pause before it is asked again.
PROBE_SECONDS = 5.0
PROBE_PAUSE = 0.2

# A decision is a pure function, so asking twice harms nobody. Still only these are tried again: the request did not
# get an answer, and the next attempt may. A deadline, a full queue, a refusal or a fault would only be met again.
RETRIED = (Unavailable, NotReady)


# The longest that a call may take. Beyond some years gRPC's arithmetic overflows, and the call would be over at once.
MAX_SECONDS = 86_400


def check_seconds(seconds: Any, *, least: float | None = None) -> float:
    """Return a timeout, in seconds, as a float.

    Args:
        seconds: Any value.
        least: The smallest that is allowed; None: anything above 0.

    Raises:
        ValueError: Not a number, or outside the range.
    """
    # A bool is a number to Python, and a mistake here. NaN is a number too, but within no bounds.
    number: Any = None if isinstance(seconds, bool) or not isinstance(seconds, Real) else seconds
    if number is not None and (number > 0 if least is None else number >= least) and number <= MAX_SECONDS:
        return float(number)
    bounds = f"{'above 0' if least is None else f'from {least:g}'} to {MAX_SECONDS} (a day)"
    raise ValueError(f"timeout: needs seconds {bounds}, not {shown(seconds)}")


def check_concurrency(concurrency: Any) -> int:
    """Return how many questions are asked at a time.

    Raises:
        ValueError: Not a whole number of at least 1.
    """
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ValueError(f"concurrency: {shown(concurrency)} is not a whole number of at least 1")
    return concurrency


class Deadline:
    """The moment by which a call has to be over.

    Args:
        seconds: From now.

    Raises:
        ValueError: Not a number above 0 and at most `MAX_SECONDS`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = check_seconds(seconds)
        self._end = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Return the seconds left.

        Raises:
            TimeoutError: None are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def at_most(self, seconds: float) -> float:
        """Return so many seconds, or those left where they are fewer, but never none: for a question on the side."""
        return max(min(self._end - time.monotonic(), seconds), 0.01)


class Attempts:
    """The attempts of one request within a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._pauses = iter(PAUSES)

    def pause_after(self, error: DecisionError) -> float:
        """Return how many seconds to wait before the next attempt.

        Args:
            error: What the attempt came to.

        Raises:
            DecisionError: The error itself: it is not one to try again, or no attempt or no time is left.
        """
        pause = next(self._pauses, None) if isinstance(error, RETRIED) else None
        if pause is None:
            raise error
        # Jitter keeps clients that failed together from coming back together.
        pause *= random.uniform(0.5, 1.5)
        try:
            enough = self._deadline.remaining() > pause
        except TimeoutError:
            enough = False
        if not enough:
            raise error
        return pause

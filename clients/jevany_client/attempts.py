"""How long a call may take, and when it is tried again."""

from __future__ import annotations

import math
import random
import time

from jevany_backend.protocol import DecisionError, NotReady
from jevany_client.errors import Unavailable

# Pauses before the second, third and fourth attempt, in seconds, before jitter.
PAUSES = (0.1, 0.3, 0.9)

# How long a server may take to say whether a model is ready, and the pause before it is asked again.
PROBE_SECONDS = 5.0
PROBE_PAUSE = 0.2

# A decision is a pure function, so asking twice harms nobody. Still only these are tried again: the request did not
# get an answer, and the next attempt may. A deadline, a full queue, a refusal or a fault would only be met again.
RETRIED = (Unavailable, NotReady)


class Deadline:
    """The moment by which a call has to be over.

    Args:
        seconds: From now.

    Raises:
        ValueError: Not a positive, finite number.
    """

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"timeout: {seconds} is not a positive number of seconds")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left.

        Raises:
            TimeoutError: None are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


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

"""One line that says how far the benchmark is."""

from __future__ import annotations

import sys
import time

_WIDTH = 30


class Progress:
    """A bar on standard error that redraws itself on a terminal, and else writes a line where a step ends.

    Args:
        label: What is done.
        total: How many pieces of work there are.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self._started = time.monotonic()
        self._drawn = 0.0
        self._done = 0

    def to(self, done: int) -> None:
        """Say how many pieces are done."""
        self._done = done
        now = time.monotonic()
        if sys.stderr.isatty() and (now - self._drawn > 0.1 or done == self.total):
            self._drawn = now
            bar = "#" * (_WIDTH * done // max(self.total, 1))
            print(f"\r{self.label:32} [{bar:{_WIDTH}}] {done} of {self.total}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line as it is."""
        seconds = time.monotonic() - self._started
        start = "\n" if sys.stderr.isatty() else f"{self.label}: {self._done} of {self.total}"
        print(f"{start} ({seconds:.1f} s)", file=sys.stderr, flush=True)

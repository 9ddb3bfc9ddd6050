"""How many threads compute a row on the CPU, by measurement."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jevany_backend.engine.measured import median_seconds

_RUNS = 5


def choose_threads(run: Callable[[], object]) -> int:
    """Set PyTorch's number of threads to one, or leave it, whichever runs faster.

    The products of a small model are over sooner than several threads have handed each other the work: on two
    processors, one thread answers with `jevany-tiny` in half the time.

    Args:
        run: Computes one row; it has run before.

    Returns:
        The number of threads from now on.
    """
    usual = torch.get_num_threads()
    times = {}
    for threads in {usual, 1}:
        torch.set_num_threads(threads)
        run()
        times[threads] = median_seconds(run, _RUNS)
    best = min(times, key=times.__getitem__)
    torch.set_num_threads(best)
    return best

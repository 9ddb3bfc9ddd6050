"""The number of threads that is faster stays."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from jevany_backend.engine.cpu_threads import choose_threads


@pytest.fixture(autouse=True)
def usual_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("faster", [1, 2])
def test_the_faster_number_of_threads_stays(faster: int) -> None:
    def run() -> None:
        time.sleep(0.001 if torch.get_num_threads() == faster else 0.02)

    assert choose_threads(run) == torch.get_num_threads() == faster

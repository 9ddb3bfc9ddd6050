"""From files to a device: many reads at once, through a few buffers that are used again and again.

Each lane is a thread with two buffers of host memory. While the device still takes in what is in one, the lane reads
the next block of the file into the other. Host memory is bounded by the lanes' buffers, however large a file is, and
no tensor exists twice: a block goes to its place in the weight itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.shards import StoredTensor

BLOCK_BYTES = 8 << 20
MAX_LANES = 8
ROW_STEP = 64


class Destination(Protocol):
    """Where a stored tensor goes; see `weights.Weight`."""

    @property
    def stored(self) -> StoredTensor:
        """What is read."""
        ...

    def write(self, raw: torch.Tensor, first_row: int, rows: int) -> None:
        """Take in whole rows.

        Args:
            raw: Their bytes as stored, uint8, in host memory. It is not used again before the device's current
                stream has done what this call leaves it to do.
            first_row: The first row's number.
            rows: How many there are.
        """


@dataclass(frozen=True)
class _Block:
    destination: Destination
    first_row: int
    rows: int

    @property
    def begin(self) -> int:
        return self.destination.stored.offset + self.first_row * self._row_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        stored = self.destination.stored
        return stored.nbytes // max(stored.rows, 1)


def _blocks(destinations: Iterable[Destination]) -> Iterator[_Block]:
    for destination in destinations:
        stored = destination.stored
        if not stored.nbytes:
            continue
        first = 0
        for rows in _block_rows(stored.rows, max(1, BLOCK_BYTES // (stored.nbytes // stored.rows))):
            yield _Block(destination, first, rows)
            first += rows


def _block_rows(rows: int, at_once: int) -> Iterator[int]:
    """Split rows into blocks of a multiple of `ROW_STEP`; the last has a multiple and what is over.

    A matrix library computes a few rows alone in another order than as part of a large product, so with a short last
    block the merged weights would depend on the block size.
    """
    if at_once >= ROW_STEP:
        at_once -= at_once % ROW_STEP
    while rows:
        block = min(at_once, rows)
        if at_once >= ROW_STEP and 0 < rows - block < ROW_STEP:
            block = block - ROW_STEP if block > ROW_STEP else rows
        yield block
        rows -= block


class WeightStream:
    """Reads tensors from files onto one device, as a context manager.

    Args:
        device: Where the weights are.
        lanes: How many reads are under way at once; what the machine has processors for if None.
    """

    def __init__(self, device: torch.device, lanes: int | None = None) -> None:
        count = lanes or min(MAX_LANES, os.cpu_count() or 1)
        self._device = device
        self._lanes = [_Lane(device) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weights")

    def read(self, path: Path, destinations: Sequence[Destination]) -> int:
        """Read tensors of one file; when this returns, the device has them.

        Args:
            path: The file.
            destinations: What to read and where it goes.

        Returns:
            How many bytes were read.

        Raises:
            CheckpointError: Names the file and the tensor that could not be read or taken in.
            torch.cuda.OutOfMemoryError: The device has no memory left; the message names both as well.
        """
        if self._device.type == "cuda":
            # The lanes' streams must not overtake what the caller has begun on its own, such as making the weights.
            torch.cuda.current_stream(self._device).synchronize()
        ordered = sorted(destinations, key=lambda destination: destination.stored.offset)
        feed = _Feed(_blocks(ordered))
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        try:
            work = [self._pool.submit(lane.run, file, feed) for lane in self._lanes]
            total = sum([part.result() for part in work])
        finally:
            os.close(file)
        if feed.failure is not None:
            raise feed.failure
        return total

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._lanes.clear()


class _Feed:
    """Hands out blocks to lanes until there are none or one has failed."""

    def __init__(self, blocks: Iterator[_Block]) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self.failure: Exception | None = None

    def next(self) -> _Block | None:
        with self._lock:
            return None if self.failure else next(self._blocks, None)

    def fail(self, failure: Exception) -> None:
        with self._lock:
            self.failure = self.failure or failure


class _Lane:
    """Reads blocks one after another; a CUDA device works at the last one meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []

    def run(self, file: int, feed: _Feed) -> int:
        """Take blocks off the feed until it is dry; return how many bytes there were."""
        total = 0
        turn = 0
        # Streams are per thread: what a block's destination launches goes to this lane's.
        with self._current_stream(), torch.no_grad():
            while (block := feed.next()) is not None:
                try:
                    self._take(file, block, turn)
                except Exception as error:
                    feed.fail(_named(error, block.destination.stored))
                    break
                total += block.nbytes
                turn ^= 1
            if self._stream is not None:
                self._stream.synchronize()
        return total

    def _current_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _take(self, file: int, block: _Block, turn: int) -> None:
        buffer, taken = self._buffer(turn, block.nbytes)
        if taken is not None:
            taken.synchronize()
        raw = buffer[: block.nbytes]
        _read_fully(file, raw.numpy().data, block.begin)
        block.destination.write(raw, block.first_row, block.rows)
        if taken is not None:
            taken.record(self._stream)

    def _buffer(self, turn: int, nbytes: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if len(self._buffers) <= turn:
            self._buffers.append(self._make_buffer(BLOCK_BYTES))
        if len(self._buffers[turn][0]) < nbytes:  # A single row is larger than a block.
            self._buffers[turn] = self._make_buffer(nbytes)
        return self._buffers[turn]

    def _make_buffer(self, nbytes: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        # Only from pinned memory does a copy to a CUDA device run beside the thread that starts it.
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        return buffer, torch.cuda.Event() if self._cuda else None


def _read_fully(file: int, target: memoryview, begin: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], begin + done)
        if count == 0:
            raise OSError(f"the file ends at byte {begin + done}")
        done += count


def _named(error: Exception, stored: StoredTensor) -> Exception:
    """Return an error that names the file and the tensor, and holds on to nothing."""
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error))
    kind: Callable[[str], Exception] = CheckpointError
    if isinstance(error, torch.cuda.OutOfMemoryError):
        kind = torch.cuda.OutOfMemoryError
    text = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return kind(f"{stored.path}: {stored.name}: {text}")


def read_rows(stored: StoredTensor, rows: Sequence[int]) -> torch.Tensor:
    """Read some rows of a stored tensor into host memory.

    Args:
        stored: The tensor, (N, ...).
        rows: Numbers under N, R of them.

    Returns:
        (R, ...), as stored.

    Raises:
        CheckpointError: Names the file and the tensor that could not be read.
    """
    result = torch.empty(len(rows), *stored.shape[1:], dtype=stored.dtype)
    raw = result.view(torch.uint8).reshape(len(rows), -1)
    try:
        with stored.path.open("rb", buffering=0) as file:
            for row, target in zip(rows, raw, strict=True):
                _read_fully(file.fileno(), target.numpy().data, stored.offset + row * len(target))
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {stored.name}: {error.strerror or error}") from None
    return result

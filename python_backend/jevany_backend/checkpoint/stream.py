"""From files to a device: several threads read ahead through a ring of buffers, the caller's hands each block on.

While the device still takes in some blocks, the next ones are read from the files. Host memory is bounded by the ring,
however large a file is, and no tensor exists twice: a block goes to its place in the weight itself.

One thread alone gives the device its work. The readers would wait for each other there, and cuBLAS keeps a workspace
for each pair of a thread and a stream that it is called from.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import mmap
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.shards import StoredTensor

# So large that what Python does for a block takes a fraction of the time in which a fast link moves it.
BLOCK_BYTES = 16 << 20
MAX_READERS = 8
# One that is being read and one that waits for the device or is on its way there.
BLOCKS_A_READER = 2
# With two, a block is merged while the next one is copied to the device.
STREAMS = 2
ROW_STEP = 64

log = logging.getLogger(__name__)


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
    def stored(self) -> StoredTensor:
        return self.destination.stored

    @property
    def begin(self) -> int:
        return self.stored.offset + self.first_row * self._row_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.stored.nbytes // max(self.stored.rows, 1)


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
        readers: How many threads read; what the machine has processors for if None.
    """

    def __init__(self, device: torch.device, readers: int | None = None) -> None:
        count = readers or min(MAX_READERS, os.cpu_count() or 1)
        self._device = device
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weights")
        self._ring = [_Buffer(device) for _ in range(BLOCKS_A_READER * count)]
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if device.type == "cuda" else []

    def read(self, destinations: Sequence[Destination]) -> int:
        """Read tensors, file after file with a log line for each; when this returns, the device has them.

        Args:
            destinations: What to read and where it goes, in any order.

        Returns:
            How many bytes were read.

        Raises:
            CheckpointError: Names the file and the tensor that could not be read or taken in.
            torch.cuda.OutOfMemoryError: The device has no memory left; the message names both as well.
        """
        if self._streams:
            # They must not overtake what the caller has begun on its own stream, such as moving the adapter.
            torch.cuda.current_stream(self._device).synchronize()
        ordered = sorted(destinations, key=lambda destination: (destination.stored.path, destination.stored.offset))
        shards = _ShardLog(ordered)
        intake = _Intake(self._streams)
        pending: deque[tuple[_Block, _Buffer, Future[torch.Tensor]]] = deque()

        def take_in() -> None:
            block, buffer, content = pending.popleft()
            intake.take(block, buffer, content)
            shards.taken(block)

        with contextlib.ExitStack() as files:
            try:
                buffers = itertools.cycle(self._ring)
                for path, its_own in itertools.groupby(ordered, key=lambda destination: destination.stored.path):
                    file = files.enter_context(_open(path))
                    for block in _blocks(its_own):
                        if len(pending) == len(self._ring):
                            take_in()  # The oldest, which has the buffer that is next.
                        buffer = next(buffers)
                        content = self._pool.submit(buffer.read, file.fileno(), block.begin, block.nbytes)
                        pending.append((block, buffer, content))
                while pending:
                    take_in()
            finally:
                # Neither a file nor a buffer goes while a thread or the device is still at it.
                for _, _, content in pending:
                    content.cancel()
                wait([content for _, _, content in pending])
                for stream in self._streams:
                    stream.synchronize()
        return shards.total

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        while self._ring:
            self._ring.pop().free()


class _Intake:
    """Hands blocks to their destinations, in turns on several streams."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = itertools.cycle(streams or [None])

    def take(self, block: _Block, buffer: _Buffer, content: Future[torch.Tensor]) -> None:
        """Wait for a block's bytes and give them to the device."""
        try:
            raw = content.result()
            stream = next(self._streams)
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                block.destination.write(raw, block.first_row, block.rows)
                buffer.busy_until_now()
        except Exception as error:
            raise _named(error, block.stored) from None


class _Buffer:
    """Host memory that blocks are read into, one after another; for a CUDA device it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        # A reader that waits leaves its processor to the others.
        self._taken = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def read(self, file: int, begin: int, nbytes: int) -> torch.Tensor:
        """Read some bytes of a file, once the device has taken in what was here before.

        Returns:
            (nbytes), uint8: this buffer's memory.
        """
        if self._taken is not None:
            self._taken.synchronize()
        if len(self._bytes) < nbytes:
            self._allocate(max(nbytes, BLOCK_BYTES))  # A single row may be larger than a block.
        raw = self._bytes[:nbytes]
        _read_fully(file, raw.numpy().data, begin)
        return raw

    def busy_until_now(self) -> None:
        """Keep `read` waiting until the current stream has done what it has been given so far."""
        if self._taken is not None:
            self._taken.record()

    def _allocate(self, nbytes: int) -> None:
        self.free()
        # Pages of its own, which is what can be pinned. PyTorch's pinned memory would never be given back.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fresh = torch.frombuffer(memory, dtype=torch.uint8)
        if self._taken is not None:
            # Only from pinned memory does a copy to the device run beside the thread that starts it.
            with torch.cuda.device(self._device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(fresh.data_ptr(), nbytes, 0))
        self._bytes = fresh

    def free(self) -> None:
        """Give the memory back; the device must be done with it."""
        if self._taken is not None and len(self._bytes):
            with torch.cuda.device(self._device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))
        self._bytes = self._bytes.new_empty(0)


class _ShardLog:
    """Logs a line for each file that has been taken in.

    Attributes:
        total: How many bytes have been.
    """

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._sizes: Counter[Path] = Counter()
        for destination in destinations:
            self._sizes[destination.stored.path] += destination.stored.nbytes
        self._left = self._sizes.copy()
        self._done = 0
        self._since = time.perf_counter()
        self.total = 0

    def taken(self, block: _Block) -> None:
        """Count a block, and end its file's line with the time since the line before."""
        path = block.stored.path
        self.total += block.nbytes
        self._left[path] -= block.nbytes
        if self._left[path]:
            return
        self._done += 1
        now = time.perf_counter()
        rate = rate_text(self._sizes[path], now - self._since)
        log.info("shard %d of %d, %s: %s", self._done, len(self._sizes), path.name, rate)
        self._since = now


def rate_text(nbytes: int, seconds: float) -> str:
    """Return a size, a time and their ratio in words."""
    return f"{nbytes / 1e9:.2f} GB in {seconds:.2f} s, {nbytes / 1e9 / seconds:.1f} GB/s"


def _open(path: Path) -> io.FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


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
    _read_parts(stored, ((stored.offset + row * len(target), target) for row, target in zip(rows, raw, strict=True)))
    return result


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Read a stored tensor of at least one dimension into host memory.

    Returns:
        Its values, as stored.

    Raises:
        CheckpointError: Names the file and the tensor that could not be read.
    """
    result = torch.empty(stored.shape, dtype=stored.dtype)
    _read_parts(stored, [(stored.offset, result.view(torch.uint8).reshape(-1))])
    return result


def _read_parts(stored: StoredTensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
    try:
        with stored.path.open("rb", buffering=0) as file:
            for begin, target in parts:
                _read_fully(file.fileno(), target.numpy().data, begin)
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {stored.name}: {error.strerror or error}") from None

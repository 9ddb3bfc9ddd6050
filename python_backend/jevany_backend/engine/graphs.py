"""Rows through captured graphs: buckets, static buffers, capture, replay, counters.

A row is padded on the right to the next bucket, whose whole forward pass and readout are one CUDA graph. Everything
that a call changes lies in static buffers: the token ids and the positions that are read go in, the options' logits
come out. All graphs share one pool of memory. Capture and replay belong to one thread.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from jevany_backend.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jevany_backend.encoding import Row
    from jevany_backend.readout import Readout

log = logging.getLogger(__name__)

GB = 1e9


def _octaves() -> tuple[int, ...]:
    # Half the rows of a decision panel are under 105 tokens, and those take a time that hardly depends on the length:
    # steps of 8 up to 128 cost no more than graphs. From there on the step is an eighth of the length and less, so that
    # padding is under 5% in the mean; it ends at 128, since long rows take a product's tiles of 128 rows whole.
    steps = ((32, 128, 8), (128, 256, 16), (256, 512, 32), (512, 1024, 64), (1024, 4096, 128))
    return tuple(sorted({length for first, last, step in steps for length in range(first, last + 1, step)}))


@dataclass(frozen=True)
class Grid:
    """The lengths that rows are padded to.

    Attributes:
        buckets: Those with a graph, ascending.
        beyond: A row longer than the last is padded to a multiple of this and runs without a graph.
        reads: Positions that a graph reads: the decide token's and those of one option fewer.
    """

    buckets: tuple[int, ...] = _octaves()
    beyond: int = 128
    reads: int = 64

    def up_to(self, longest: int) -> Grid:
        """Return the grid for rows of a limited length: no bucket beyond the first that holds the longest."""
        last = bisect.bisect_left(self.buckets, longest)
        return Grid(self.buckets[: last + 1], self.beyond, self.reads)

    def length(self, tokens: int) -> int:
        """Return what a row of so many tokens is padded to."""
        if tokens <= self.buckets[-1]:
            return self.buckets[bisect.bisect_left(self.buckets, tokens)]
        return _round_up(tokens, self.beyond)

    def has_graph(self, tokens: int, reads: int) -> bool:
        """Return whether there is a graph for a row of so many tokens, of which so many are read."""
        return tokens <= self.buckets[-1] and reads <= min(self.reads, self.length(tokens))


OUR_GRID = Grid()
# The published recipe's: coarse, up to 2,048 tokens, and longer rows as they are.
PUBLISHED_GRID = Grid(
    buckets=(128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048), beyond=1
)


@dataclass
class Counters:
    """What an engine has done since it was ready.

    Attributes:
        replays: Rows that replayed a graph.
        eager_calls: Rows that ran without one.
        tokens: Tokens of all rows.
        padding_tokens: Tokens that were computed beside them.
        captures: Graphs captured before it was ready.
        captures_after_ready: Graphs captured since; 0, or something is wrong.
    """

    replays: int = 0
    eager_calls: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    captures: int = 0
    captures_after_ready: int = 0


class Forward(Protocol):
    """A forward pass: see `families.decoder.Decoder.__call__`."""

    def __call__(self, ids: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        """Return (R, hidden) for (n,) token ids and (R,) positions."""


class Executor(Protocol):
    """Where functions over static buffers run."""

    device: torch.device

    def warm(self, function: Callable[[], None]) -> None:
        """Run a function once, so that nothing is left to compile, to time or to load."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return what does the same again, on whatever the buffers then hold."""

    def run(self, function: Callable[[], None]) -> None:
        """Run a function, and return when its results are there."""


class CudaGraphs:
    """Runs on a stream of its own and captures into graphs that share one pool.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is broken for the next capture when the first of its graphs is gone: all live as long as this does.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm(self, function: Callable[[], None]) -> None:
        """Run a function on the stream, behind whatever has been begun elsewhere: making the weights, for one."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self.run(function)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function; it must have been warmed."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):
            # Not by torch.cuda.graph, which collects garbage and empties the cache around each of many captures.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return graph.replay

    def run(self, function: Callable[[], None]) -> None:
        """Run a function on the stream and wait."""
        with torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()


class NoGraphs:
    """Runs everything as it is written, on any device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm(self, function: Callable[[], None]) -> None:
        """Do nothing: what is compiled at first sight is compiled then."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return the function."""
        return function

    def run(self, function: Callable[[], None]) -> None:
        """Run a function, and wait where a GPU runs it."""
        function()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Buffers:
    """Where rows of one padded length go in and their logits come out.

    ``ids`` and ``reads`` lie one behind the other, so that one copy takes both to the device.
    """

    def __init__(self, length: int, reads: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.length, self.reads = length, reads
        self.host_in = torch.zeros(length + reads, dtype=torch.int32, pin_memory=pinned)
        self.view_in = self.host_in.numpy()
        # Not filled here: that would be work on another stream, which nothing waits for.
        self.device_in = torch.empty(length + reads, dtype=torch.int32, device=device)
        self.host_out = torch.zeros(max(reads - 1, 1), dtype=torch.float32, pin_memory=pinned)
        self.hidden: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None

    def fill(self, row: Row, pad: int) -> None:
        tokens = len(row.ids)
        self.view_in[:tokens] = np.asarray(row.ids, dtype=np.int32)
        self.view_in[tokens : self.length] = pad
        reads = self.view_in[self.length :]
        reads[0] = row.decide
        reads[1 : 1 + len(row.option_ends)] = row.option_ends
        # What is left reads the decide token again, and is not looked at.
        reads[1 + len(row.option_ends) :] = row.decide


class GraphEngine:
    """Answers rows through graphs, and those that have none by the same forward pass without.

    Args:
        forward: The forward pass.
        readout: Makes logits of its states.
        executor: Where it runs.
        grid: The lengths.
        longest: The longest row.
        pad: The token id that rows are padded with; which one changes nothing.

    Attributes:
        counters: What it has done.
        capture_seconds: How long warming and capturing took.
        graph_bytes: GPU memory that graphs and buffers take.
    """

    def __init__(
        self, forward: Forward, readout: Readout, executor: Executor, grid: Grid, longest: int, pad: int = 0
    ) -> None:
        self.forward = forward
        self.readout = readout
        self.executor = executor
        self.grid = grid.up_to(longest)
        self.longest = longest
        self.pad = pad
        self.counters = Counters()
        self.ready = False
        self.capture_seconds = 0.0
        self.graph_bytes = 0
        self._buffers: dict[int, _Buffers] = {}
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm everything up and capture every bucket, the longest first, so that the others fit into its memory.

        Args:
            progress: Called with the number of graphs captured and of all.

        Raises:
            CheckpointError: The device has not the memory for it.
        """
        started, before = time.perf_counter(), _used(self.executor.device)
        # The longest row, and the shortest that has no graph.
        for length in {self.grid.length(self.longest), self.grid.length(self.grid.buckets[-1] + 1)}:
            if length > self.grid.buckets[-1]:
                self._warm_eager(min(length, self.longest))
        descending = self.grid.buckets[::-1]
        for number, length in enumerate(descending, 1):
            buffers = self._buffers[length] = _Buffers(length, min(self.grid.reads, length), self.executor.device)
            step = self._step(buffers)
            if number == 1:
                self._preflight(self._whole(buffers, step))
            self.executor.warm(self._whole(buffers, step))
            self._replays[length] = self._capture(step)
            if progress:
                progress(number, len(descending))
        self.capture_seconds = time.perf_counter() - started
        self.graph_bytes = _used(self.executor.device) - before
        self.ready = True
        self.counters = Counters(captures=self.counters.captures)
        log.info(
            "%d lengths from %d to %d tokens: %.1f s, %.2f GB",
            len(descending),
            descending[-1],
            descending[0],
            self.capture_seconds,
            self.graph_bytes / GB,
        )

    @torch.inference_mode()
    def probabilities(self, row: Row) -> NDArray[np.float32]:
        """Return the options' probabilities, (K,) float32, in option order.

        Args:
            row: n token ids, at most the longest row's, and K options.
        """
        buffers = self._run(row)
        return torch.softmax(buffers.host_out[: len(row.option_ends)], dim=-1).numpy()

    @torch.inference_mode()
    def hidden_states(self, row: Row) -> torch.Tensor:
        """Return (1 + K, hidden): the decide token's state, then each end-option token's; a copy, on the device."""
        hidden = self._run(row).hidden
        assert hidden is not None  # Every run leaves it.
        return hidden[: 1 + len(row.option_ends)].clone()

    @torch.inference_mode()
    def replay(self, tokens: int) -> None:
        """Replay the graph for a row of so many tokens, on what was last put in: a call without the host's part."""
        self.executor.run(self._replays[self.grid.length(tokens)])

    def _run(self, row: Row) -> _Buffers:
        tokens, reads = len(row.ids), 1 + len(row.option_ends)
        length = self.grid.length(tokens)
        self.counters.tokens += tokens
        self.counters.padding_tokens += length - tokens
        if self.grid.has_graph(tokens, reads):
            buffers, work = self._buffers[length], self._replays[length]
            self.counters.replays += 1
        else:
            buffers = _Buffers(length, _round_up(reads, self.grid.reads), self.executor.device)
            work = self._step(buffers)
            self.counters.eager_calls += 1
        buffers.fill(row, self.pad)
        self.executor.run(self._whole(buffers, work))
        return buffers

    def _whole(self, buffers: _Buffers, work: Callable[[], None]) -> Callable[[], None]:
        """Return the work with the two copies around it."""

        def whole() -> None:
            buffers.device_in.copy_(buffers.host_in, non_blocking=True)
            work()
            assert buffers.logits is not None  # Both kinds of work leave it.
            count = min(len(buffers.logits), len(buffers.host_out))
            buffers.host_out[:count].copy_(buffers.logits[:count], non_blocking=True)

        return whole

    def _step(self, buffers: _Buffers) -> Callable[[], None]:
        """Return the work between the two copies."""

        def step() -> None:
            ids, reads = buffers.device_in[: buffers.length], buffers.device_in[buffers.length :]
            buffers.hidden = self.forward(ids, reads)
            buffers.logits = self.readout.logits(buffers.hidden)

        return step

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.ready:
            self.counters.captures_after_ready += 1
        self.counters.captures += 1
        return self.executor.capture(step)

    def _warm_eager(self, tokens: int) -> None:
        buffers = _Buffers(self.grid.length(tokens), self.grid.reads, self.executor.device)
        self.executor.warm(self._whole(buffers, self._step(buffers)))

    def _preflight(self, call: Callable[[], None]) -> None:
        """Check that the pool will fit before it is made: it takes what the longest bucket takes at its height."""
        device = self.executor.device
        if device.type != "cuda":
            return
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        self.executor.warm(call)
        need = torch.cuda.max_memory_allocated(device) - start
        torch.cuda.empty_cache()  # Memory cached for ordinary use is of no use to the pool.
        free, _ = torch.cuda.mem_get_info(device)
        if need > free:
            raise CheckpointError(
                f"not enough memory: the graphs need {need / GB:.1f} GB beside the weights, but {free / GB:.1f} GB are "
                "free; what helps: a lower max_row_tokens, or ending what else uses this GPU"
            )


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _used(device: torch.device) -> int:
    """Return how much of a GPU is in use, by whomever; what the allocator only keeps for later is given back first."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def padding_share(grid: Grid, lengths: Sequence[int]) -> float:
    """Return how many tokens are computed for nothing, over those that are not.

    Args:
        grid: The lengths that rows are padded to.
        lengths: The rows' own.
    """
    return sum(grid.length(tokens) for tokens in lengths) / sum(lengths) - 1

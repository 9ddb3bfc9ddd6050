"""Batches of encoded decisions, made by worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, Literal

import numpy as np

from jevany_backend.encoding import Row, RowEncoder, build_labels, find_delimiters
from jevany_backend.protocol import question_from_json
from jevany_tiny.decisions import Example, lessons
from jevany_tiny.tokenizer import SplitText

Readout = Literal["pointer", "direct-token"]
READOUTS: tuple[Readout, ...] = ("pointer", "direct-token")

_LENGTH_STEP = 32
_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one readout, padded on the right to one length.

    Attributes:
        readout: How the rows are encoded.
        ids: (B, L) int16, token ids; the padding is the tokenizer's first special token.
        decide: (B,) position of the decide token.
        option_ends: (B, K) positions of the end-option tokens; -1 where a row has fewer options.
        labels: (B,) index of the right option.
    """

    readout: Readout
    ids: np.ndarray
    decide: np.ndarray
    option_ends: np.ndarray
    labels: np.ndarray


class Encoders:
    """The row encoders of both readouts over one tokenizer."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self.tokenizer = SplitText.from_folder(tokenizer_folder)
        vocabulary = self.tokenizer.get_vocab()
        self.pad = vocabulary["<|endoftext|>"]
        self.size = max(vocabulary.values()) + 1
        self.labels = build_labels(self.tokenizer)  # type: ignore[arg-type]
        self.label_ids = [self.tokenizer(label)["input_ids"][0] for label in self.labels]
        delimiters = find_delimiters(self.tokenizer)  # type: ignore[arg-type]
        self._encoders = {
            "pointer": RowEncoder(self.tokenizer, delimiters),  # type: ignore[arg-type]
            "direct-token": RowEncoder(self.tokenizer, delimiters, self.labels),  # type: ignore[arg-type]
        }

    def encode(self, example: Example, readout: Readout) -> Row:
        """Encodes one decision as it is served."""
        return self._encoders[readout].encode(example.state, question_from_json(example.question, "question"))


def collate(rows: Sequence[Row], labels: Sequence[int], readout: Readout, pad: int) -> Batch:
    """Pads rows to a common length, a multiple of 32."""
    longest = max(len(row.ids) for row in rows)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    ids = np.full((len(rows), length), pad, np.int16)
    option_ends = np.full((len(rows), max(len(row.option_ends) for row in rows)), -1, np.int16)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        option_ends[index, : len(row.option_ends)] = row.option_ends
    decide = np.array([row.decide for row in rows], np.int16)
    return Batch(readout, ids, decide, option_ends, np.array(labels, np.int16))


def batches_of(examples: Iterable[Example], encoders: Encoders, readout: Readout, size: int) -> Iterator[Batch]:
    """Yields a fixed set of decisions in batches, in order."""
    for part in _batched(examples, size):
        yield collate(
            [encoders.encode(example, readout) for example in part],
            [example.label for example in part],
            readout,
            encoders.pad,
        )


def _batched(items: Iterable[Example], size: int) -> Iterator[tuple[Example, ...]]:
    iterator = iter(items)
    while part := tuple(itertools.islice(iterator, size)):
        yield part


def training_batches(
    encoders: Encoders, readouts: Sequence[Readout], seed: str, size: int, ramp: int
) -> Iterator[Batch]:
    """Yields training batches without end: rows of like length together, batches in random order.

    Args:
        encoders: Encode the rows.
        readouts: Which encodings the batches have, in equal shares.
        seed: Seed of the stream.
        size: Rows in a batch.
        ramp: Rows until the full hardness.
    """
    rng = random.Random(f"order/{seed}")
    stream = lessons(seed, ramp)
    while True:
        chunk: list[Batch] = []
        for readout in readouts:
            examples = list(itertools.islice(stream, _CHUNK * size))
            encoded = sorted(
                ((encoders.encode(example, readout), example.label) for example in examples),
                key=lambda pair: len(pair[0].ids),
            )
            for start in range(0, len(encoded), size):
                rows, labels = zip(*encoded[start : start + size], strict=True)
                chunk.append(collate(rows, labels, readout, encoders.pad))
        rng.shuffle(chunk)
        yield from chunk


def _work(queue: Any, folder: Path, readouts: Sequence[Readout], seed: str, size: int, ramp: int) -> None:
    for batch in training_batches(Encoders(folder), readouts, seed, size, ramp):
        queue.put(batch)


class Feed:
    """An endless stream of training batches.

    Workers are read in turn, so that the stream depends on the seed and on the number of workers only.

    Args:
        tokenizer_folder: Where `tokenizer.json` is.
        readouts: Which encodings the batches have.
        seed: Seed of the stream.
        size: Rows in a batch.
        workers: How many processes make batches; 0 makes them in this process.
        ramp: Rows, of all workers together, until the full hardness; 0 for hard rows from the start.
    """

    def __init__(
        self, tokenizer_folder: Path, readouts: Sequence[Readout], seed: str, size: int, workers: int, ramp: int = 0
    ) -> None:
        self._processes: list[Any] = []
        if workers == 0:
            self._batches = training_batches(Encoders(tokenizer_folder), readouts, seed, size, ramp)
            return
        # Each worker is one thread; it must not start a pool of its own for every text it splits.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = multiprocessing.get_context("spawn")
        queues = [context.Queue(maxsize=_CHUNK) for _ in range(workers)]
        for index, queue in enumerate(queues):
            arguments = (queue, tokenizer_folder, tuple(readouts), f"{seed}/{index}", size, ramp // workers)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
        self._batches = self._in_turn(queues)

    def _in_turn(self, queues: Sequence[Any]) -> Iterator[Batch]:
        for index, queue in itertools.cycle(enumerate(queues)):
            while True:
                try:
                    yield queue.get(timeout=5)
                    break
                except Empty:
                    if not self._processes[index].is_alive():
                        raise RuntimeError(f"batch worker {index} ended; its error stands above") from None

    def __next__(self) -> Batch:
        """Returns the next batch."""
        return next(self._batches)

    def __iter__(self) -> Feed:
        """Returns itself."""
        return self

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

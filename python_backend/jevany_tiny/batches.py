"""Batches of encoded decisions, made by worker processes."""

from __future__ import annotations

import itertools
import math
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
from jevany_backend.protocol import question_from_json, render
from jevany_tiny.decisions import Example, Recital, lessons, recitals
from jevany_tiny.tokenizer import SplitText

Readout = Literal["pointer", "direct-token"]
READOUTS: tuple[Readout, ...] = ("pointer", "direct-token")

NO_DECISION = -100

_LENGTH_STEP = 32
_CHUNK = 8
_MOST_TOLD = 48
_TOLD_OF_A_DECISION = 12
# A long answer is cut. Of each one, the first tokens are learnt: the first has to be looked up, the rest follows.
_LONGEST_ANSWER = 12
_TOLD_OF_AN_ANSWER = 3
_LONGEST_RECITAL = 160


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one readout, padded on the right to one length.

    Attributes:
        readout: How the rows are encoded.
        ids: (B, L) int16, token ids; the padding is the tokenizer's first special token.
        decide: (B,) position of the decide token.
        option_ends: (B, K) positions of the end-option tokens; -1 where a row has fewer options.
        labels: (B,) index of the right option; `NO_DECISION` in a row that recites.
        told: (B, T) positions whose next token shall be predicted; -1 where a row has fewer.
    """

    readout: Readout
    ids: np.ndarray
    decide: np.ndarray
    option_ends: np.ndarray
    labels: np.ndarray
    told: np.ndarray


@dataclass(frozen=True, slots=True)
class Told:
    """A row with the positions whose next token is learnt, and with the right option, or `NO_DECISION`."""

    row: Row
    label: int
    told: list[int]


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
        self._delimiter_ids = delimiters.ids
        self._encoders = {
            "pointer": RowEncoder(self.tokenizer, delimiters),  # type: ignore[arg-type]
            "direct-token": RowEncoder(self.tokenizer, delimiters, self.labels),  # type: ignore[arg-type]
        }

    def encode(self, example: Example, readout: Readout) -> Row:
        """Encodes one decision as it is served."""
        return self._encoders[readout].encode(example.state, question_from_json(example.question, "question"))

    def recite(self, recital: Recital) -> Told:
        """Encodes a recital: after the state, every question with its answer as the only option."""
        state, question, option, end_option, _ = self._delimiter_ids
        ids = [state, *self._ids(render(recital.state))]
        told: list[int] = []
        for asked, answer in recital.told:
            ids += [question, *self._ids(asked), option]
            answer_ids = [*self._ids(answer), end_option][:_LONGEST_ANSWER]
            told += range(len(ids) - 1, len(ids) - 1 + min(len(answer_ids), _TOLD_OF_AN_ANSWER))
            ids += answer_ids
        return Told(Row(ids, len(ids) - 1, []), NO_DECISION, told[:_MOST_TOLD])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]


def collate(rows: Sequence[Told], readout: Readout, pad: int) -> Batch:
    """Pads rows to a common length, a multiple of 32."""
    longest = max(len(told.row.ids) for told in rows)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    ids = np.full((len(rows), length), pad, np.int16)
    option_ends = np.full((len(rows), max(len(told.row.option_ends) for told in rows)), -1, np.int16)
    positions = np.full((len(rows), _MOST_TOLD), -1, np.int16)
    for index, told in enumerate(rows):
        ids[index, : len(told.row.ids)] = told.row.ids
        option_ends[index, : len(told.row.option_ends)] = told.row.option_ends
        positions[index, : len(told.told)] = told.told
    decide = np.array([told.row.decide for told in rows], np.int16)
    return Batch(readout, ids, decide, option_ends, np.array([told.label for told in rows], np.int16), positions)


def batches_of(examples: Iterable[Example], encoders: Encoders, readout: Readout, size: int) -> Iterator[Batch]:
    """Yields a fixed set of decisions in batches, in order."""
    for part in _batched(examples, size):
        rows = [Told(encoders.encode(example, readout), example.label, []) for example in part]
        yield collate(rows, readout, encoders.pad)


def _batched(items: Iterable[Example], size: int) -> Iterator[tuple[Example, ...]]:
    iterator = iter(items)
    while part := tuple(itertools.islice(iterator, size)):
        yield part


@dataclass(frozen=True, slots=True)
class Course:
    """What training shows, and when; counted in rows of all workers together.

    Attributes:
        primer: How long nearly all rows recite, beside the easiest decisions.
        ramp: When the decisions reach their full hardness; 0 for hard ones from the start.
        reciting: Share of rows that recite after the primer.
    """

    primer: int = 0
    ramp: int = 0
    reciting: float = 0.0

    def part(self, workers: int) -> Course:
        """Returns the course of one of several workers."""
        return Course(self.primer // workers, self.ramp // workers, self.reciting)


_PRIMER_RECITING = 0.75


def training_batches(
    encoders: Encoders, readouts: Sequence[Readout], seed: str, size: int, course: Course
) -> Iterator[Batch]:
    """Yields training batches without end: rows of like length together, batches in random order.

    Args:
        encoders: Encode the rows.
        readouts: Which encodings the batches have, in equal shares.
        seed: Seed of the stream.
        size: Rows in a batch.
        course: What is shown when.
    """
    rng = random.Random(f"order/{seed}")
    # A ramp that ends before the primer does leaves none.
    decisions = lessons(seed, max(0, course.ramp - course.primer))
    # Few decisions are shown in the primer: what counts there is that they stay easy.
    easy = lessons(f"{seed}/primer", math.inf)
    recited = (row for row in map(encoders.recite, recitals(seed)) if len(row.row.ids) <= _LONGEST_RECITAL)
    shown = 0
    while True:
        chunk: list[Batch] = []
        for readout in readouts:
            priming = shown < course.primer
            count = _CHUNK * size
            shown += count
            reciting = round(count * (_PRIMER_RECITING if priming else course.reciting))
            rows = list(itertools.islice(recited, reciting))
            for example in itertools.islice(easy if priming else decisions, count - reciting):
                row = encoders.encode(example, readout)
                positions = rng.sample(range(row.decide), min(_TOLD_OF_A_DECISION, row.decide))
                rows.append(Told(row, example.label, positions))
            rows.sort(key=lambda one: len(one.row.ids))
            chunk += [collate(rows[start : start + size], readout, encoders.pad) for start in range(0, count, size)]
        rng.shuffle(chunk)
        yield from chunk


def _work(queue: Any, folder: Path, readouts: Sequence[Readout], seed: str, size: int, course: Course) -> None:
    for batch in training_batches(Encoders(folder), readouts, seed, size, course):
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
        course: What is shown when.
    """

    def __init__(
        self, tokenizer_folder: Path, readouts: Sequence[Readout], seed: str, size: int, workers: int, course: Course
    ) -> None:
        self._processes: list[Any] = []
        if workers == 0:
            self._batches = training_batches(Encoders(tokenizer_folder), readouts, seed, size, course)
            return
        # Each worker is one thread; it must not start a pool of its own for every text it splits.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = multiprocessing.get_context("spawn")
        queues = [context.Queue(maxsize=_CHUNK) for _ in range(workers)]
        for index, queue in enumerate(queues):
            arguments = (queue, tokenizer_folder, tuple(readouts), f"{seed}/{index}", size, course.part(workers))
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

"""The panel: requests to time, and the rows that a model makes of them."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jevany_backend.encoding import Row, RowEncoder
from jevany_backend.protocol import Question, parse_request


@dataclass(frozen=True)
class Request:
    """One request of a panel.

    Attributes:
        id: Its name.
        state: JSON content.
        question: Its only question.
        tokens: The tokens of its row under the Qwen tokenizer; None where the panel does not say.
        label: The number of the right option; None where the panel does not say.
    """

    id: str
    state: Any
    question: Question
    tokens: int | None
    label: int | None = None


@dataclass(frozen=True)
class Panel:
    """A panel as it lies on disk.

    Attributes:
        name: The file's name.
        sha256: Of its bytes.
        requests: In order.
    """

    name: str
    sha256: str
    requests: list[Request]

    def row_lengths(self) -> list[int]:
        """Return the tokens of each request's row, under the tokenizer that random weights do not have.

        Raises:
            ValueError: A request does not say.
        """
        lengths = []
        for request in self.requests:
            if request.tokens is None:
                raise ValueError(f"{self.name}: {request.id}: no row_tokens_qwen, which random weights need")
            lengths.append(request.tokens)
        return lengths


def read_panel(path: Path) -> Panel:
    """Read a panel.

    Args:
        path: JSON lines with ``id``, ``state``, ``questions`` of one entry, and perhaps ``row_tokens_qwen`` and
            ``label``, the number of the right option.

    Raises:
        OSError: There is no such file.
        ValueError: A line is something else.
    """
    content = path.read_bytes()
    requests = []
    for number, line in enumerate(content.decode().splitlines(), 1):
        try:
            entry = json.loads(line)
            body = json.dumps({"state": entry["state"], "questions": entry["questions"]}).encode()
            [question] = parse_request(body).questions.values()
            tokens, label = (None if entry.get(n) is None else int(entry[n]) for n in ("row_tokens_qwen", "label"))
            if label is not None and not 0 <= label < len(question.keys):
                raise ValueError(f"label: there is no option {label}")
            requests.append(Request(entry["id"], entry["state"], question, tokens, label))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error!r}") from None
    return Panel(path.name, hashlib.sha256(content).hexdigest(), requests)


def synthetic_row(name: str, tokens: int, options: int, delimiters: tuple[int, ...], vocabulary: int) -> Row:
    """Make a row of a request's length from random tokens, for a model that has no tokenizer of its own.

    Args:
        name: What the tokens are drawn by: the same ones for the same name.
        tokens: Its length.
        options: How many options it has.
        delimiters: The five structure tokens: state, question, option, end-option, decide.
        vocabulary: How many tokens there are to draw from.
    """
    state, question, option, end_option, decide = delimiters
    draw = random.Random(name)
    # The text tokens that are left are dealt out: 6 to each option, 16 to the question, the others to the state.
    text = max(tokens - 3 - 2 * options, options + 2)
    of_option = max(1, min(6, (text - 2) // (options + 1)))
    of_question = max(1, min(16, text - options * of_option - 1))

    def words(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    ids = [state, *words(text - options * of_option - of_question), question, *words(of_question)]
    ends = []
    for _ in range(options):
        ids += [option, *words(of_option), end_option]
        ends.append(len(ids) - 1)
    ids.append(decide)
    return Row(ids, len(ids) - 1, ends)


def encoded_row(request: Request, encoder: RowEncoder) -> Row:
    """Make the row that a model's own tokenizer makes of a request."""
    return encoder.encode(request.state, request.question)

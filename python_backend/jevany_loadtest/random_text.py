"""Requests of a panel's row lengths for a model with random weights, whose tokenizer stands in for the trained one.

The stand-in has one token a byte, some four times as many as the panel's own text has under the trained tokenizer: with
that text a run would measure other rows than the published ones, and the longest would be refused.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import replace

from jevany_backend.protocol import Choice
from jevany_bench.panel import Panel, Request
from jevany_loadtest.connection import Outcome

_INSTRUCTIONS = "?"  # The shortest rows have not room for more.
# The state, question and decide delimiters of every row.
_DELIMITERS = 3


def in_random_text(panel: Panel, ask: Callable[[Request], Outcome]) -> list[Request]:
    """Return choices among as many options in random letters, whose rows have as many tokens as the panel says.

    Args:
        panel: The panel.
        ask: Asks the model; once, to see how many tokens it sets around an option.

    Raises:
        ValueError: A request does not say how long its row is, or the model does not answer.
    """
    lengths = panel.row_lengths()
    probe = Request("probe", "a", Choice(_INSTRUCTIONS, {"0": None}), None)
    outcome = ask(probe)
    if outcome.tokens is None:
        raise ValueError(f"no answer to a first question: {outcome.message}")
    around_option = outcome.tokens - _DELIMITERS - len("a" + _INSTRUCTIONS + "0")
    return [
        _in_random_text(request, tokens, around_option) for request, tokens in zip(panel.requests, lengths, strict=True)
    ]


def _in_random_text(request: Request, tokens: int, around_option: int) -> Request:
    names = [str(number) for number in range(len(request.question.option_texts))]
    around_state = _DELIMITERS + len(_INSTRUCTIONS) + sum(around_option + len(name) for name in names)
    letters = max(tokens - around_state, 1)
    state = "".join(random.Random(request.id).choices(string.ascii_lowercase, k=letters))
    return replace(request, state=state, question=Choice(_INSTRUCTIONS, dict.fromkeys(names)), label=None)

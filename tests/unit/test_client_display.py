"""Answers as people see them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from jevany_backend.protocol import Choice, Noul, Question, Score, answer
from jevany_client.display import plain, print_reply


def _printed(answers: dict[str, Any], **settings: Any) -> list[str]:
    file = io.StringIO()
    usage = {"input_tokens": 5, "output_tokens": 2}
    reply = {"model": "m", "answers": answers, "usage": usage, "latency_ms": 1.25}
    print_reply(Console(file=file, **settings), reply, "ticket [bold]7[/bold]")
    return file.getvalue().splitlines()


def test_every_type_of_answer() -> None:
    asked: dict[str, tuple[Question, list[float]]] = {
        "upset": (Noul("?"), [0.25, 0.75]),
        "team": (Choice("?", {"billing": None, "shipping": None}), [0.9, 0.1]),
        "urgency": (Score("?", ["can wait", {"now": True}]), [0.5, 0.5]),
    }
    lines = _printed({name: answer(*question) for name, question in asked.items()})
    assert lines == [
        "ticket [bold]7[/bold]",
        "upset    noul    yes  (yes 0.75)  ###############.....",
        "team     choice  billing  confidence 0.80",
        "    billing   0.90  ##################..",
        "    shipping  0.10  ##..................",
        "urgency  score   0.50  confidence 0.50",
        "    0 can wait       0.50  ##########..........",
        "    1 {'now': True}  0.50  ##########..........",
        "m: 5 tokens in, 2 out, 1.2 ms",
    ]


@pytest.mark.parametrize(
    ("probability", "line"),
    [
        (0.01, "a  noul    no   (yes 0.01)  ...................."),
        (0.49, "a  noul    no   (yes 0.49)  ##########.........."),
        (0.5, "a  noul    even (yes 0.50)  ##########.........."),
        (0.51, "a  noul    yes  (yes 0.51)  ##########.........."),
        (0.99, "a  noul    yes  (yes 0.99)  ####################"),
    ],
)
def test_a_noul_says_what_is_more_probable(probability: float, line: str) -> None:
    assert _printed({"a": answer(Noul("?"), [1 - probability, probability])})[1] == line


def test_random_weights_are_shown() -> None:
    file = io.StringIO()
    usage = {"input_tokens": 5, "output_tokens": 2}
    reply = {"model": "m", "weights": "random", "answer": answer(Noul("?"), [0.5, 0.5]), "usage": usage}
    print_reply(Console(file=file), reply | {"latency_ms": 1.0})
    assert file.getvalue().splitlines()[-1] == "m (random weights): 5 tokens in, 2 out, 1.0 ms"


def test_many_options_are_cut_to_the_likely_ones() -> None:
    probabilities = [0.001] * 95 + [0.905 / 5] * 5
    question = Choice("?", {f"option {i}": None for i in range(100)})
    lines = _printed({"a": answer(question, probabilities)})
    assert [line.split()[1] for line in lines[2:12]] == ["0", "1", "2", "3", "4", "95", "96", "97", "98", "99"]
    assert lines[12].strip() == "and 90 less likely options"


def test_a_terminal_gets_colours_and_nothing_that_steers_it() -> None:
    name = "red\x1b[31m\nnext"
    lines = _printed({"a": answer(Choice("?", {name: None}), [1.0])}, force_terminal=True, width=20)
    assert len(lines) == 4
    assert "\x1b[31m" not in "".join(lines)
    assert plain(name) == "red\\x1b[31m\\nnext"
    assert plain("日本 é") == "日本 é"

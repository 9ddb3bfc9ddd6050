"""Answers for people: one line an answer, and a bar for every option."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

_BAR_CELLS = 20
_NAME_CELLS = 32
_MOST_OPTIONS = 10


def print_reply(console: Console, reply: dict[str, Any], title: str = "") -> None:
    """Print a reply.

    Args:
        console: Where to. What is not a terminal gets neither colours nor anything beyond ASCII but the caller's words.
        reply: The reply in the wire format, with ``answers`` or one ``answer``.
        title: What to print above it.
    """
    if title:
        _print(console, Text(plain(title), style="bold"))
    answers = reply["answers"] if "answers" in reply else {"answer": reply["answer"]}
    width = min(_NAME_CELLS, max(cell_len(plain(name)) for name in answers))
    for name, answer in answers.items():
        _print_answer(console, _fit(name, width), answer)
    usage = reply["usage"]
    origin = f"{reply['model']} ({plain(reply['weights'])} weights)" if "weights" in reply else reply["model"]
    _print(
        console,
        Text(
            f"{origin}: {usage['input_tokens']} tokens in, {usage['output_tokens']} out, {reply['latency_ms']:.1f} ms",
            style="dim",
        ),
    )


def _print_answer(console: Console, name: str, answer: dict[str, Any]) -> None:
    head = Text(f"{name}  {answer['type']:<6}  ")
    if answer["type"] == "noul":
        head.append(f"{_likelier(answer['noul']):<4}", style="bold").append(f" (yes {answer['noul']:.2f})  ")
        head.append(_bar(console, answer["noul"]), style="cyan")
        _print(console, head)
        return
    result = answer["choice"] if answer["type"] == "choice" else f"{answer['score']:.2f}"
    head.append(plain(result), style="bold").append(f"  confidence {answer['confidence']:.2f}", style="dim")
    _print(console, head)
    names = answer["probabilities"] if answer["type"] == "choice" else _level_names(answer["legend"])
    _print_options(console, names, answer["probabilities"])


def _likelier(noul: float) -> str:
    if noul == 0.5:
        return "even"
    return "yes" if noul > 0.5 else "no"


def _level_names(legend: dict[str, Any]) -> dict[str, str]:
    return {key: f"{key} {level}" for key, level in legend.items()}


def _print_options(console: Console, names: Any, probabilities: dict[str, float]) -> None:
    likely = set(sorted(probabilities, key=lambda key: -probabilities[key])[:_MOST_OPTIONS])
    labels = {key: names[key] if isinstance(names[key], str) else key for key in probabilities if key in likely}
    width = min(_NAME_CELLS, max(cell_len(plain(label)) for label in labels.values()))
    for key, label in labels.items():
        line = Text(f"    {_fit(label, width)}  {probabilities[key]:.2f}  ")
        line.append(_bar(console, probabilities[key]), style="cyan")
        _print(console, line)
    if len(probabilities) > len(labels):
        _print(console, Text(f"    and {len(probabilities) - len(labels)} less likely options", style="dim"))


def _bar(console: Console, share: float) -> str:
    full, empty = ("█", "░") if console.is_terminal and console.encoding.startswith("utf") else ("#", ".")
    filled = round(share * _BAR_CELLS)
    return full * filled + empty * (_BAR_CELLS - filled)


def _fit(text: str, width: int) -> str:
    text = plain(text)
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 3) + "..."


def plain(text: str) -> str:
    """Return text that prints as one line and cannot steer a terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _print(console: Console, text: Text) -> None:
    # Whole lines, also to a file or a narrow window.
    console.print(text, soft_wrap=True, highlight=False, emoji=False)

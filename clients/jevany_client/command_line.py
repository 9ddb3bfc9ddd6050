"""The command line ``jevany``."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from jevany_backend.protocol import Choice, DecisionError, DecisionRequest, InvalidRequest, Noul, Question, Score
from jevany_client.async_client import AsyncClient
from jevany_client.client import Client
from jevany_client.display import plain, print_reply
from jevany_client.errors import Unavailable, UnknownModel
from jevany_client.messages import single_envelope
from jevany_client.records import Record, Source, ignored_note, read_record, split

C = TypeVar("C", Client, AsyncClient)

FAILED = 1
USAGE = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141

_DESCRIPTION = "Ask a JevAny decision model that a Triton Inference Server serves."

_DECIDE = """\
Ask the questions of a request, or of many, and print the answers.

A request is a JSON object with "state" and "question", or "questions" by id. A file holds one, or one a line (JSONL).
Fields that a request does not know, such as the labels of a data set, are passed over, with a note that names them.

  jevany decide request.json
  jevany decide tickets.jsonl --json --concurrency 16 > answers.jsonl
  jevany decide --state "I was charged twice." --noul "Is the customer upset?"
  jevany decide --state "I was charged twice." --choice "Which team?" --option billing="Charges" --option shipping
  jevany decide --state "I was charged twice." --score "How urgent?" --level "can wait" --level "today" --level "now"

Exit code: 0 when all were answered, 1 when one or more failed, 2 for a wrong command line or unusable file.
"""


class UsageError(Exception):
    """The command line, or the file it names, cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit code.
    """
    # Whatever the terminal's encoding, an answer must not fail to print.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # gRPC would log what it does about a lost connection between our own lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = _parser().parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        _say(str(error))
        return USAGE
    except DecisionError as error:
        _say(error.wire_text())
        return FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough. Python would complain when it flushes on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED


def _parser() -> argparse.ArgumentParser:
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--url",
        default=os.environ.get("JEVANY_URL", "localhost:8001"),
        help="the server: host:port or grpc://host:port, http://host:port, grpcs:// or https:// "
        "(default: %(default)s; environment: JEVANY_URL)",
    )
    server.add_argument(
        "--model",
        default=os.environ.get("JEVANY_MODEL", "jevany-tiny"),
        help="the model (default: %(default)s; environment: JEVANY_MODEL)",
    )
    parser = argparse.ArgumentParser(prog="jevany", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_decide(commands, server)
    models = commands.add_parser("models", parents=[server], help="list the server's models")
    models.set_defaults(run=_models)
    ready = commands.add_parser(
        "ready", parents=[server], help="say whether the model answers now", description="Exit code: 0 if so, 1 if not."
    )
    ready.add_argument("--wait", type=_positive(float), default=0.0, metavar="SECONDS", help="wait until it does")
    ready.set_defaults(run=_ready)
    return parser


def _add_decide(commands: Any, server: argparse.ArgumentParser) -> None:
    decide = commands.add_parser(
        "decide",
        parents=[server],
        help="ask the questions of a request, or of many",
        description=_DECIDE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    decide.add_argument("file", nargs="?", metavar="FILE", help="JSON or JSONL; - or nothing: standard input")
    decide.add_argument("--json", action="store_true", help="print each reply as one line of JSON")
    decide.add_argument(
        "--concurrency",
        type=_positive(int),
        default=8,
        metavar="N",
        help="how many questions are asked at a time (default: %(default)s)",
    )
    typed = decide.add_argument_group("a request without a file")
    typed.add_argument("--state", metavar="TEXT", help="what the question is about")
    kind = typed.add_mutually_exclusive_group()
    kind.add_argument("--noul", metavar="QUESTION", help="ask a yes/no question")
    kind.add_argument("--choice", metavar="QUESTION", help="ask for one of the options")
    kind.add_argument("--score", metavar="QUESTION", help="ask for a level")
    typed.add_argument(
        "--option", action="append", default=[], metavar="NAME[=DESCRIPTION]", help="an option of --choice"
    )
    typed.add_argument("--level", action="append", default=[], metavar="TEXT", help="a level of --score, lowest first")
    decide.set_defaults(run=_decide)


def _positive(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> int | float:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise ValueError
        return number

    read.__name__ = "positive number"  # argparse puts it into its message.
    return read


def _models(options: argparse.Namespace) -> int:
    with _opened(Client, options) as client:
        models = client.models()
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        state = model.state or "NOT LOADED"
        print(plain(f"{model.name:<{width}}  {model.version:<3}  {state}  {model.reason}").rstrip())
    if not models:
        _say(f"{options.url} has no models")
    return 0


def _ready(options: argparse.Namespace) -> int:
    with _opened(Client, options) as client:
        client.wait_until_ready(options.wait)
    print(f"{options.model} on {options.url} is ready")
    return 0


def _decide(options: argparse.Namespace) -> int:
    try:
        typed = _typed_question(options)
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    if typed is not None:
        if options.file is not None:
            raise UsageError("a FILE and --state exclude each other")
        request = DecisionRequest(options.state, {"question": typed}, single=True)
        return asyncio.run(_decide_one(options, Record(request)))
    source = _read_source(options.file)
    if source.many:
        return asyncio.run(_decide_many(options, source))
    record = read_record(source.texts[0][1])
    if record.ignored:
        _say(ignored_note(record.ignored))
    return asyncio.run(_decide_one(options, record))


def _typed_question(options: argparse.Namespace) -> Question | None:
    """Return the question that the command line asks, None if it asks none."""
    asked = [text for text in (options.noul, options.choice, options.score) if text is not None]
    if options.state is None and not asked and not options.option and not options.level:
        return None
    if options.state is None or not asked:
        raise UsageError("a request without a file needs --state and one of --noul, --choice, --score")
    if options.option and options.choice is None:
        raise UsageError("--option goes with --choice")
    if options.level and options.score is None:
        raise UsageError("--level goes with --score")
    if options.noul is not None:
        return Noul(options.noul)
    if options.score is not None:
        return Score(options.score, options.level)
    criteria: dict[str, Any] = {}
    for option in options.option:
        name, separator, description = option.partition("=")
        if name in criteria:
            raise UsageError(f"--option {name!r} is given twice")
        criteria[name] = description if separator else None
    return Choice(options.choice, criteria)


def _read_source(name: str | None) -> Source:
    if name is None and sys.stdin.isatty():
        raise UsageError("give a FILE, - for standard input, or --state and a question; see jevany decide --help")
    if name is None or name == "-":
        shown, data = "standard input", sys.stdin.buffer.read()
    else:
        shown = name
        try:
            with open(name, "rb") as file:
                data = file.read()
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror or error}") from None
    source = split(data, shown)
    if not source.texts:
        raise UsageError(f"{shown}: holds no request")
    return source


async def _decide_one(options: argparse.Namespace, record: Record) -> int:
    async with _opened(AsyncClient, options, concurrency=options.concurrency) as client:
        _Output(options.json).print(record, await _reply(client, record.request))
    return 0


async def _decide_many(options: argparse.Namespace, source: Source) -> int:
    tally = _Tally(len(source.texts))
    output = _Output(options.json)
    errors = Console(stderr=True)
    # Where the answers go to the terminal too, they are the progress.
    hidden = not errors.is_terminal or sys.stdout.isatty()
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # Rich would print the answers to the bar's stream, which is standard error.
    bar = Progress(*columns, console=errors, transient=True, disable=hidden, redirect_stdout=False)
    try:
        async with _opened(AsyncClient, options, concurrency=options.concurrency) as client:
            with bar:
                task = bar.add_task("", total=tally.total)
                async with contextlib.aclosing(_answers(client, source, options.concurrency)) as answers:
                    async for answer in answers:
                        tally.count(answer)
                        if answer.record is not None and answer.reply is not None:
                            output.print(answer.record, answer.reply, title=f"line {answer.line}")
                        elif answer.error is not None:
                            # A parser that sees one line at a time calls each of them line 1.
                            text = answer.error.wire_text().replace(" at line 1 column ", " at column ")
                            _say(f"line {answer.line}: {text}", errors)
                        bar.advance(task)
                        if tally.hopeless(answer):
                            _say(f"stopped at line {answer.line}: every other would fail alike", errors)
                            break
    except asyncio.CancelledError:
        tally.report()
        raise
    tally.report()
    return FAILED if tally.failures else 0


@dataclass(frozen=True)
class _Answer:
    """What became of one record."""

    line: int
    record: Record | None
    reply: dict[str, Any] | None = None
    error: DecisionError | None = None


async def _answers(client: AsyncClient, source: Source, concurrency: int) -> AsyncGenerator[_Answer, None]:
    """Yield what becomes of every record, in the order of the file."""
    # A slow record holds up the printing of those behind it, not their answers: more are begun than can be asked.
    begun: collections.deque[asyncio.Task[_Answer]] = collections.deque()
    try:
        for line, text in source.texts:
            begun.append(asyncio.create_task(_answer(client, line, text)))
            if len(begun) == 4 * concurrency:
                yield await begun.popleft()
        while begun:
            yield await begun.popleft()
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _answer(client: AsyncClient, line: int, text: bytes) -> _Answer:
    record = None
    try:
        record = read_record(text)
        return _Answer(line, record, reply=await _reply(client, record.request))
    except DecisionError as error:
        return _Answer(line, record, error=error)


async def _reply(client: AsyncClient, request: DecisionRequest) -> dict[str, Any]:
    if request.model not in (None, client.model):
        raise InvalidRequest(
            "model", f"the request names {request.model!r}, but {client.model!r} is asked; see --model"
        )
    if request.single:
        return single_envelope(await client.decide(request.state, request.questions["question"]))
    return await client.decide_all(request.state, request.questions)


class _Tally:
    """Counts what became of the records of a file."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.answered = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self._ignored: set[str] = set()
        self._started = time.monotonic()

    def count(self, answer: _Answer) -> None:
        if answer.record is not None:
            self._ignored |= answer.record.ignored
        if answer.error is None:
            self.answered += 1
        else:
            self.failures[answer.error.code] += 1

    def hopeless(self, answer: _Answer) -> bool:
        """Return whether to give up: nothing was answered yet, and what is wrong is not wrong with this record."""
        return not self.answered and isinstance(answer.error, (Unavailable, UnknownModel))

    def report(self) -> None:
        if self._ignored:
            _say(ignored_note(self._ignored))
        failed = ", ".join(f"{code} {count}" for code, count in sorted(self.failures.items()))
        seconds = time.monotonic() - self._started
        _say(f"{self.answered} of {self.total} answered in {seconds:.1f} s{failed and f'; failed: {failed}'}")


class _Output:
    """Standard output, as JSON or for people."""

    def __init__(self, as_json: bool) -> None:
        self._console = None if as_json else _Console()

    def print(self, record: Record, reply: dict[str, Any], title: str = "") -> None:
        if self._console is not None:
            print_reply(self._console, reply, str(record.labels.get("id", title)))
            return
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(record.labels | reply, ensure_ascii=ascii_only), flush=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process here; see `main`.
        raise BrokenPipeError


def _opened(kind: type[C], options: argparse.Namespace, **settings: Any) -> C:
    try:
        return kind(options.url, options.model, **settings)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _say(message: str, console: Console | None = None) -> None:
    # While a progress bar is shown, only its console knows where a line can go.
    console = console or Console(stderr=True)
    console.print(plain(f"jevany: {message}"), soft_wrap=True, markup=False, highlight=False, emoji=False)

"""The command line ``jevany``."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from jevany_backend.protocol import (
    JSON,
    Choice,
    DecisionError,
    DecisionRequest,
    InvalidRequest,
    Noul,
    Question,
    Score,
    question_to_json,
)
from jevany_client.async_client import AsyncClient
from jevany_client.attempts import MAX_SECONDS
from jevany_client.client import Client
from jevany_client.display import plain, print_reply
from jevany_client.errors import Unavailable, UnknownModel
from jevany_client.lines import lines_of
from jevany_client.messages import single_envelope
from jevany_client.records import Source, follow, ignored_note, is_json, read_labels, read_record, split

C = TypeVar("C", Client, AsyncClient)

FAILED = 1
USAGE = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141

_DESCRIPTION = "Ask a JevAny decision model that a Triton Inference Server serves."

_DECIDE = """\
Ask the questions of a request, or of many, and print the answers.

A request is a JSON object with "state" and "question", or "questions" by id. A file holds one, or one a line (JSONL).
JSONL from standard input is answered line by line, as it comes in.

A request may have an "id", any JSON value: it comes back in its line of --json, stands above its answer otherwise, and
names it in error messages. Other fields beside those of a request, such as a data set's, are passed over, with a note
that names them, and so is the "label" of a question. A question with any other unknown field is refused.

With --json, every request leaves one line, in the order of the input: its reply, or, when it failed, for example
{"id": 7, "error": {"code": "invalid_request", "message": "state: missing"}, "line": 3}; "line" is that of the JSONL.

  jevany decide request.json
  jevany decide tickets.jsonl --json --concurrency 16 > answers.jsonl
  jevany decide --state "I was charged twice." --noul "Is the customer upset?"
  jevany decide --state "I was charged twice." --choice "Which team?" --option billing="Charges" --option shipping
  jevany decide --state "I was charged twice." --score "How urgent?" --level "can wait" --level "today" --level "now"

Exit code: 0 when all were answered; 1 when one or more failed, or the answers could not be written; 2 for a wrong
command line, or input that cannot be read or is not JSON.
"""


class UsageError(Exception):
    """The command line, or the file it names, cannot be used."""


class OutputError(Exception):
    """Standard output takes no more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit code.
    """
    # Whatever the terminal's encoding, an answer must not fail to print.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # gRPC would log what it does about a lost connection between our own lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        with _flushed():
            options = _parser().parse_args(arguments)
        return options.run(options)
    except UsageError as error:
        _say(str(error))
        return USAGE
    except DecisionError as error:
        _say(error.wire_text())
        return FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except OutputError as error:
        _say(f"standard output: {error}")
        _abandon(sys.stdout)
        return FAILED
    except BrokenPipeError:
        # Whoever read the output has enough.
        _abandon(sys.stdout)
        return OUTPUT_CLOSED


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Bring what is printed to where it goes, also when the command line ends with it, as for ``--help``."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from None


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Print what was asked for."""
    if sys.stdout is None:
        raise OutputError("it is closed")
    with _flushed():
        yield


def _abandon(stream: Any) -> None:
    # Python would complain when it flushes on its way out.
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--url",
        default=os.environ.get("JEVANY_URL", "localhost:8001"),
        help="the server: host:port or grpc://host:port, http://host:port, grpcs:// or https:// "
        "(default: %(default)s; environment: JEVANY_URL)",
    )
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model",
        default=os.environ.get("JEVANY_MODEL", "jevany-tiny"),
        help="the model (default: %(default)s; environment: JEVANY_MODEL)",
    )
    parser = argparse.ArgumentParser(prog="jevany", description=_DESCRIPTION)
    version = importlib.metadata.version("jevany-triton")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_decide(commands, [server, model])
    models = commands.add_parser("models", parents=[server], help="list the server's models")
    models.set_defaults(run=_models)
    ready = commands.add_parser(
        "ready",
        parents=[server, model],
        help="say whether the model answers now",
        description="Exit code: 0 if so, 1 if not.",
    )
    ready.add_argument(
        "--wait",
        type=_positive(float, MAX_SECONDS),
        default=0.0,
        metavar="SECONDS",
        help="wait until it does, a day at most",
    )
    ready.set_defaults(run=_ready)
    return parser


def _add_decide(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    decide = commands.add_parser(
        "decide",
        parents=parents,
        help="ask the questions of a request, or of many",
        description=_DECIDE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    decide.add_argument("file", nargs="?", metavar="FILE", help="JSON or JSONL; - or nothing: standard input")
    decide.add_argument("--json", action="store_true", help="print each reply, and each failure, as one line of JSON")
    decide.add_argument(
        "--concurrency",
        type=_positive(int),
        default=8,
        metavar="N",
        help="how many questions are asked at a time (default: %(default)s)",
    )
    typed = decide.add_argument_group("a request without a file")
    typed.add_argument("--state", metavar="TEXT", help="what the question is about")
    # Appended, so that a second question of the same type is seen and not the only one to be asked.
    asks = {"action": "append", "default": [], "metavar": "QUESTION"}
    typed.add_argument("--noul", **asks, help="ask a yes/no question")
    typed.add_argument("--choice", **asks, help="ask for one of the options")
    typed.add_argument("--score", **asks, help="ask for a level")
    typed.add_argument(
        "--option", action="append", default=[], metavar="NAME[=DESCRIPTION]", help="an option of --choice"
    )
    typed.add_argument("--level", action="append", default=[], metavar="TEXT", help="a level of --score, lowest first")
    decide.set_defaults(run=_decide)


def _positive(kind: type[int] | type[float], most: float | None = None) -> Any:
    def read(text: str) -> int | float:
        number = kind(text)
        if not 0 < number <= (sys.float_info.max if most is None else most):
            raise ValueError
        return number

    # argparse puts it into its message.
    read.__name__ = "positive number" if most is None else f"number above 0 to {most:g}"
    return read


def _models(options: argparse.Namespace) -> int:
    with _opened(Client, options.url) as client:
        models = client.models()
    width = max((len(model.name) for model in models), default=0)
    with _answering():
        for model in models:
            state = model.state or "NOT LOADED"
            print(plain(f"{model.name:<{width}}  {model.version:<3}  {state}  {model.reason}").rstrip())
    if not models:
        _say(f"{options.url} has no models")
    return 0


def _ready(options: argparse.Namespace) -> int:
    with _opened(Client, options.url, options.model) as client:
        client.wait_until_ready(options.wait)
    with _answering():
        print(plain(f"{options.model} on {options.url} is ready"))
    return 0


def _decide(options: argparse.Namespace) -> int:
    try:
        typed = _typed_question(options)
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    if typed is None:
        return asyncio.run(_decide_input(options))
    if options.file is not None:
        raise UsageError("a FILE and --state exclude each other")
    request = json.dumps({"state": options.state, "question": question_to_json(typed)}).encode()
    return asyncio.run(_decide_all(options, Source(many=False, texts=[(1, request)])))


def _typed_question(options: argparse.Namespace) -> Question | None:
    """Return the question that the command line asks, None if it asks none."""
    asked = [*options.noul, *options.choice, *options.score]
    if options.state is None and not asked and not options.option and not options.level:
        return None
    if not asked:
        raise UsageError("a request without a file needs one of --noul, --choice, --score")
    if len(asked) > 1:
        raise UsageError(f"{len(asked)} questions; a request without a file has one, a file has any number")
    if options.state is None:
        raise UsageError("a request without a file needs --state")
    if options.option and not options.choice:
        raise UsageError("--option goes with --choice")
    if options.level and not options.score:
        raise UsageError("--level goes with --score")
    if options.noul:
        return Noul(asked[0])
    if options.score:
        if len(options.level) < 2:
            raise UsageError("--score needs two --level or more, the lowest first")
        return Score(asked[0], options.level)
    if not options.option:
        raise UsageError("--choice needs an --option or more")
    criteria: dict[str, Any] = {}
    for option in options.option:
        name, separator, description = option.partition("=")
        if name in criteria:
            raise UsageError(f"--option {name!r} is given twice")
        criteria[name] = description if separator else None
    return Choice(asked[0], criteria)


async def _decide_input(options: argparse.Namespace) -> int:
    name = options.file
    if name is not None and name != "-":
        try:
            with open(name, "rb") as file:
                source = split(file.read(), name)
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror or error}") from None
    elif sys.stdin is None:
        raise UsageError("standard input is closed; give a FILE, or --state and a question")
    elif name is None and sys.stdin.isatty():
        raise UsageError("give a FILE, - for standard input, or --state and a question; see jevany decide --help")
    else:
        name = "standard input"
        source = await follow(_standard_input())
    if not source.texts:
        raise UsageError(f"{name}: holds no request")
    return await _decide_all(options, source)


async def _standard_input() -> AsyncIterator[bytes]:
    try:
        async for line in lines_of(sys.stdin.fileno()):
            yield line
    except OSError as error:
        raise UsageError(f"standard input: {error.strerror or error}") from None


async def _decide_all(options: argparse.Namespace, source: Source) -> int:
    tally = _Tally(0 if source.more else len(source.texts))
    output = _Output(options.json, source)
    errors = _Console(stderr=True)
    # Where the answers go to the terminal too, they are the progress.
    hidden = not source.many or not errors.is_terminal or (sys.stdout is not None and sys.stdout.isatty())
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # Rich would print the answers to the bar's stream, which is standard error.
    bar = Progress(*columns, console=errors, transient=True, disable=hidden, redirect_stdout=False)
    stopped = False
    try:
        async with _opened(AsyncClient, options.url, options.model, concurrency=options.concurrency) as client:
            with bar:
                task = bar.add_task("", total=tally.total or None)
                async with contextlib.aclosing(_answers(client, source, options.concurrency, tally)) as answers:
                    async for answer in answers:
                        if tally.given_up is not None and not stopped:
                            stopped = True
                            _say(f"stopped at line {tally.given_up.line}: every other would fail alike", errors)
                        if stopped and not options.json:
                            break
                        tally.count(answer)
                        output.print(answer)
                        if answer.error is not None and not stopped:
                            _say(output.failure(answer), errors)
                        bar.advance(task)
    except asyncio.CancelledError:
        tally.report()
        raise
    tally.report()
    if tally.failures and not source.many and not is_json(source.texts[0][1]):
        return USAGE
    return FAILED if tally.failures else 0


@dataclass(frozen=True)
class _Answer:
    """What became of one request: a reply or an error."""

    line: int
    reply: dict[str, Any] = field(default_factory=dict)
    error: DecisionError | None = None
    labels: dict[str, JSON] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


async def _answers(
    client: AsyncClient, source: Source, concurrency: int, tally: _Tally
) -> AsyncGenerator[_Answer, None]:
    """Yield what becomes of every request, in the order of the source."""
    texts = source.each()
    reading: asyncio.Task[tuple[int, bytes] | None] | None = asyncio.create_task(_next(texts))
    # A slow request holds up the printing of those behind it, not their answers: more are begun than can be asked.
    begun: collections.deque[asyncio.Task[_Answer]] = collections.deque()
    try:
        while reading is not None or begun:
            more = [reading] if reading is not None and len(begun) < 4 * concurrency else []
            await asyncio.wait([*more, *([begun[0]] if begun else [])], return_when=asyncio.FIRST_COMPLETED)
            if more and reading is not None and reading.done():
                text = reading.result()
                reading = None
                if text is not None:
                    tally.begin()
                    begun.append(asyncio.create_task(_answer(client, *text, tally)))
                    reading = asyncio.create_task(_next(texts))
            while begun and begun[0].done():
                yield begun.popleft().result()
    finally:
        left = [*begun, *([reading] if reading is not None else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _next(texts: AsyncIterator[tuple[int, bytes]]) -> tuple[int, bytes] | None:
    return await anext(texts, None)


async def _answer(client: AsyncClient, line: int, text: bytes, tally: _Tally) -> _Answer:
    try:
        record = read_record(text)
    except DecisionError as error:
        return _Answer(line, error=error, labels=read_labels(text))
    known: dict[str, Any] = {"labels": record.labels, "ignored": record.ignored}
    if tally.given_up is not None:
        return _Answer(line, error=tally.given_up.error, **known)
    try:
        return _Answer(line, reply=await _reply(client, record.request), **known)
    except DecisionError as error:
        return _Answer(line, error=error, **known)


async def _reply(client: AsyncClient, request: DecisionRequest) -> dict[str, Any]:
    if request.model not in (None, client.model):
        raise InvalidRequest(
            "model", f"the request names {request.model!r}, but {client.model!r} is asked; see --model"
        )
    if request.single:
        return single_envelope(await client.decide(request.state, request.questions["question"]))
    return await client.decide_all(request.state, request.questions)


class _Tally:
    """Counts what became of the requests.

    Args:
        total: How many there are; 0 where that is not known.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.failures: collections.Counter[str] = collections.Counter()
        self.given_up: _Answer | None = None
        self._begun = 0
        self._answered = 0
        self._ignored: set[str] = set()
        self._started = time.monotonic()

    def begin(self) -> None:
        self._begun += 1

    def count(self, answer: _Answer) -> None:
        self._ignored |= answer.ignored
        if answer.error is None:
            self._answered += 1
            return
        self.failures[answer.error.code] += 1
        # Nothing was answered yet, and what is wrong is not wrong with this request.
        if not self._answered and self.given_up is None and isinstance(answer.error, (Unavailable, UnknownModel)):
            self.given_up = answer

    def report(self) -> None:
        if self._ignored:
            _say(ignored_note(self._ignored))
        total = self.total or self._begun
        if total > 1:
            failed = ", ".join(f"{code} {count}" for code, count in sorted(self.failures.items()))
            seconds = time.monotonic() - self._started
            _say(f"{self._answered} of {total} answered in {seconds:.1f} s{failed and f'; failed: {failed}'}")


class _Output:
    """Standard output, as JSON or for people."""

    def __init__(self, as_json: bool, source: Source) -> None:
        self._console = None if as_json else _Console()
        self._many = source.many
        # The first line that comes in may be the only one, and then needs no heading.
        self._alone = source.texts[0][0] if source.more is not None else None

    def print(self, answer: _Answer) -> None:
        """Print a reply, and as JSON an error too, so that every request leaves a line."""
        if self._console is None:
            with _answering():
                print(_json_line(answer.labels | (answer.reply or self._error(answer))))
        elif answer.error is None:
            title = f"line {answer.line}" if self._many and answer.line != self._alone else ""
            with _answering():
                print_reply(self._console, answer.reply, str(answer.labels.get("id", title)))

    def failure(self, answer: _Answer) -> str:
        """Return the one line that says what failed and why."""
        error = self._error(answer)["error"]
        where = f"line {answer.line}{_shown_id(answer.labels)}: " if self._many else ""
        return f"{where}{error['code']}: {error['message']}"

    def _error(self, answer: _Answer) -> dict[str, Any]:
        assert answer.error is not None
        message = answer.error.message
        if not self._many:
            return {"error": {"code": answer.error.code, "message": message}}
        # A parser that sees one line at a time calls each of them line 1.
        message = message.replace(" at line 1 column ", " at column ")
        return {"error": {"code": answer.error.code, "message": message}, "line": answer.line}


def _json_line(value: dict[str, Any]) -> str:
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=ascii_only)


def _shown_id(labels: dict[str, JSON]) -> str:
    if "id" not in labels:
        return ""
    identifier = labels["id"]
    text = identifier if isinstance(identifier, str) else json.dumps(identifier, ensure_ascii=False)
    return f" (id {text if len(text) <= 60 else f'{text[:57]}...'})"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process here; see `main`.
        raise BrokenPipeError


def _opened(kind: type[C], *arguments: str, **settings: Any) -> C:
    try:
        return kind(*arguments, **settings)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _say(message: str, console: Console | None = None) -> None:
    # While a progress bar is shown, only its console knows where a line can go.
    console = console or _Console(stderr=True)
    try:
        console.print(plain(f"jevany: {message}"), soft_wrap=True, markup=False, highlight=False, emoji=False)
    except OSError:  # Nobody can be told.
        _abandon(sys.stderr)

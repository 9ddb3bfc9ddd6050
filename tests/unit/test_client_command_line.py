"""The command line as far as it goes without a server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jevany_backend.protocol import InvalidRequest, parse_request
from jevany_client.command_line import main

COMMAND = [sys.executable, "-c", "import sys; from jevany_client.command_line import main; sys.exit(main())"]

NOUL = ["decide", "--state", "text", "--noul", "Urgent?"]


def _usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command line says before it ends with exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    return output.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["decide", "nowhere.json"], "jevany: nowhere.json: No such file or directory"),
        (["decide", "."], "jevany: .: Is a directory"),
        (["decide", "--state", "text"], "needs one of --noul, --choice, --score"),
        (["decide", "--option", "a"], "needs one of --noul, --choice, --score"),
        (["decide", "--noul", "Urgent?"], "a request without a file needs --state"),
        ([*NOUL, "--choice", "Which?"], "2 questions; a request without a file has one"),
        ([*NOUL, "--noul", "Late?", "--noul", "Paid?"], "3 questions; a request without a file has one"),
        ([*NOUL, "--option", "a"], "--option goes with --choice"),
        ([*NOUL, "--level", "a"], "--level goes with --score"),
        ([*NOUL, "request.json"], "exclude each other"),
        (["decide", "--state", "x", "--choice", "?"], "--choice needs an --option or more"),
        (["decide", "--state", "x", "--choice", "?", "--option", "a", "--option", "a=b"], "given twice"),
        (["decide", "--state", "x", "--score", "?"], "--score needs two --level or more"),
        (["decide", "--state", "x", "--score", "?", "--level", "a"], "--score needs two --level or more"),
        ([*NOUL, "--concurrency", "0"], "invalid positive number value: '0'"),
        ([*NOUL, "--concurrency", "1.5"], "invalid positive number value: '1.5'"),
        (["ready", "--wait", "inf"], "invalid number above 0 to 86400 value: 'inf'"),
        (["ready", "--wait", "1e10"], "invalid number above 0 to 86400 value: '1e10'"),
        (["ready", "--wait", "nan"], "invalid number above 0 to 86400 value: 'nan'"),
        (["models", "--model", "jevany-tiny"], "unrecognized arguments: --model jevany-tiny"),
        ([*NOUL, "--url", "ftp://host"], "unknown scheme 'ftp'"),
        (["models", "--url", "host:port"], "'host:port'"),
    ],
)
def test_a_wrong_command_line_says_why(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in _usage_error(arguments, capsys)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_a_request_is_not_usable(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    assert _usage_error(["decide", str(path)], capsys) == f"jevany: {path}: holds no request"


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b'{"state": 1', 2, "request: not JSON: Expecting ',' delimiter at line 1 column 12"),
        (b"some text", 2, "request: not JSON: Expecting value at line 1 column 1"),
        (b"\xff\xfe", 2, "request: not UTF-8 at byte 0"),
        (b"[1]", 1, "request: needs an object, not a list"),
        (
            b'{"state": 1, "question": {"type": "noul"}, "model": "other"}',
            1,
            "model: the request names 'other', but 'jevany-tiny' is asked; see --model",
        ),
        (b'{"state": NaN, "question": {"type": "noul"}}', 1, "state: nan is not a finite number"),
        (b'{"state": 1}', 1, "question: missing; a request has 'question', or 'questions' by id"),
        (
            b'{"state": 1, "question": {"type": "noul", "instruction": "Urgent?"}}',
            1,
            "question.instruction: unknown field 'instruction'",
        ),
    ],
)
def test_a_bad_request_is_one_line(
    content: bytes, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_bytes(content)
    for as_json in ([], ["--json"]):
        assert main(["decide", str(path), "--model", "jevany-tiny", *as_json]) == code
        output = capsys.readouterr()
        assert output.err == f"jevany: invalid_request: {says}\n"
        if as_json:
            assert json.loads(output.out) == {"error": {"code": "invalid_request", "message": says}}
        else:
            assert output.out == ""


def test_a_field_that_a_question_does_not_know_is_refused_as_by_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"type": "choice", "instruction": "Which?", "criteria": {"a": None}}
    request = json.dumps({"state": "text", "questions": {"team": question}})
    path = tmp_path / "request.json"
    path.write_text(request)
    assert main(["decide", str(path)]) == 1
    with pytest.raises(InvalidRequest) as refused:
        parse_request(request.encode())
    assert capsys.readouterr().err == f"jevany: {refused.value.wire_text()}\n"


def test_every_line_leaves_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"id": 7, "question": {"type": "noul"}}\n\n{"id": \n{"id": {"a": "é"}, "state": 1, "state": 2}\n'
        '{"id": NaN, "state": 1}\n[1]\n{"id": null, "state": 1}\n'
    )
    assert main(["decide", str(path), "--json"]) == 1
    output = capsys.readouterr()
    assert [json.loads(line) for line in output.out.splitlines()] == [
        {"id": 7, "error": {"code": "invalid_request", "message": "state: missing"}, "line": 1},
        {"error": {"code": "invalid_request", "message": "request: not JSON: Expecting value at column 8"}, "line": 3},
        {
            "id": {"a": "é"},
            "error": {
                "code": "invalid_request",
                "message": "request: the key 'state' stands twice in one object",
            },
            "line": 4,
        },
        {"error": {"code": "invalid_request", "message": "id: nan is not a finite number"}, "line": 5},
        {"error": {"code": "invalid_request", "message": "request: needs an object, not a list"}, "line": 6},
        {
            "id": None,
            "error": {
                "code": "invalid_request",
                "message": "question: missing; a request has 'question', or 'questions' by id",
            },
            "line": 7,
        },
    ]
    assert [line.partition(": invalid")[0] for line in output.err.splitlines()[:-1]] == [
        "jevany: line 1 (id 7)",
        "jevany: line 3",
        'jevany: line 4 (id {"a": "é"})',
        "jevany: line 5",
        "jevany: line 6",
        "jevany: line 7 (id null)",
    ]


@pytest.mark.parametrize("arguments", [["--version"], ["models", "--help"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    # Where Python does not buffer, argparse meets the error itself, and keeps it to itself.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, env=buffered, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"jevany: standard output: No space left on device\n")


def test_errors_that_cannot_be_written_leave_the_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "decide", "nowhere.json"], stdout=full, stderr=full, timeout=60)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("closed", "arguments", "says"),
    [
        (0, ["decide"], b"jevany: standard input is closed; give a FILE, or --state and a question\n"),
        (1, ["decide", "nowhere.json"], b"jevany: nowhere.json: No such file or directory\n"),
    ],
)
def test_streams_may_be_closed(closed: int, arguments: list[str], says: bytes) -> None:
    command = shlex.join([*COMMAND, *arguments])
    done = subprocess.run(["bash", "-c", f"{command} {closed}>&-"], stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (2, says)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jevany {importlib.metadata.version('jevany-triton')}\n"


def test_defaults_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JEVANY_URL", "nonsense://here")
    assert "nonsense://here" in _usage_error(["ready"], capsys)


def test_help_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decide", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "jevany decide tickets.jsonl --json" in shown
    assert 'A request may have an "id"' in shown

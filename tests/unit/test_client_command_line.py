"""The command line as far as it goes without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from jevany_client.command_line import main

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
        (["decide", "--state", "text"], "needs --state and one of --noul"),
        (["decide", "--noul", "Urgent?"], "needs --state and one of --noul"),
        ([*NOUL, "--choice", "Which?"], "not allowed with argument --noul"),
        ([*NOUL, "--option", "a"], "--option goes with --choice"),
        ([*NOUL, "--level", "a"], "--level goes with --score"),
        ([*NOUL, "request.json"], "exclude each other"),
        (["decide", "--state", "x", "--choice", "?"], "criteria: 0 options"),
        (["decide", "--state", "x", "--choice", "?", "--option", "a", "--option", "a=b"], "given twice"),
        (["decide", "--state", "x", "--score", "?", "--level", "a"], "criteria: 1 levels; needs 2"),
        ([*NOUL, "--concurrency", "0"], "invalid positive number value: '0'"),
        (["ready", "--wait", "inf"], "invalid positive number value: 'inf'"),
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
    ("content", "says"),
    [
        (b'{"state": 1', "jevany: invalid_request: request: not JSON"),
        (b'{"state": 1, "question": {"type": "noul"}, "model": "other"}', "names 'other', but 'jevany-tiny' is asked"),
        (b'{"state": NaN, "question": {"type": "noul"}}', "state: nan is not a finite number"),
    ],
)
def test_a_bad_request_is_one_line(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_bytes(content)
    assert main(["decide", str(path), "--model", "jevany-tiny"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert says in output.err
    assert output.err.count("\n") == 1


def test_defaults_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JEVANY_URL", "nonsense://here")
    assert "nonsense://here" in _usage_error(["ready"], capsys)


def test_help_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decide", "--help"])
    assert ended.value.code == 0
    assert "jevany decide tickets.jsonl --json" in capsys.readouterr().out

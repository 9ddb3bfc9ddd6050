"""The command line against a real Triton, as people run it."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jevany_server.process import TritonServer

COMMAND = [sys.executable, "-c", "import sys; from jevany_client.command_line import main; sys.exit(main())"]
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is it urgent?"}
TEAM: dict[str, Any] = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None, "été": "Summer"}}


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return f"{request.param}://{server.grpc_url if request.param == 'grpc' else server.http_url}"


def _run(url: str, *arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        env=os.environ | {"JEVANY_URL": url} | environment,
        timeout=60,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def _lines(*records: Any) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def test_one_request_as_json(url: str, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"state": "Now!", "questions": {"team": TEAM, "urgent": NOUL}}, indent=1))
    done = _run(url, "decide", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    reply = json.loads(done.stdout)
    assert list(reply["answers"]) == ["team", "urgent"]
    assert list(reply["answers"]["team"]["probabilities"]) == ["billing", "été"]
    assert "été" in done.stdout


def test_one_request_for_people(url: str) -> None:
    done = _run(url, "decide", "--state", "Now!", "--choice", "Which?", "--option", "a=First", "--option", "b")
    assert (done.returncode, done.stderr) == (0, "")
    head, a, b, foot = done.stdout.splitlines()
    assert head.startswith("answer  choice  ")
    assert (a.split()[0], b.split()[0]) == ("a", "b")
    assert foot.startswith("jevany-tiny: ")
    assert done.stdout.isascii()


def test_records_keep_their_order_and_id_and_fail_alone(url: str) -> None:
    data = _lines(
        {"id": "a", "state": "one", "question": NOUL, "label": 1},
        {"id": "long", "state": "word " * 50_000, "question": NOUL},
        {"state": "three", "questions": {"team": TEAM}, "tier": "easy"},
        {"id": 4, "state": "four", "question": {"type": "choice"}},
        {"id": "é", "state": "five", "question": NOUL},
    ).replace(b'{"id": "long"', b'\n{"state": \n\n{"id": "long"')
    done = _run(url, "decide", "-", "--json", "--concurrency", "2", stdin=b"\xef\xbb\xbf" + data)
    assert done.returncode == 1
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply.get("id") for reply in replies] == ["a", None, "long", None, 4, "é"]
    assert [list(reply) for reply in replies] == [
        ["id", "model", "answer", "usage", "latency_ms"],
        ["error", "line"],
        ["id", "error", "line"],
        ["model", "answers", "usage", "latency_ms"],
        ["id", "error", "line"],
        ["id", "model", "answer", "usage", "latency_ms"],
    ]
    assert [(reply["line"], reply["error"]["code"]) for reply in replies if "error" in reply] == [
        (3, "invalid_request"),
        (5, "context_length_exceeded"),
        (7, "invalid_request"),
    ]
    errors = done.stderr.splitlines()
    assert errors[0] == "jevany: line 3: invalid_request: request: not JSON: Expecting value at column 11"
    assert errors[1].startswith("jevany: line 5 (id long): context_length_exceeded: state: ")
    assert errors[2].startswith("jevany: line 7 (id 4): invalid_request: question.criteria: missing")
    assert errors[3] == "jevany: unknown fields ignored: label, tier"
    assert errors[4].startswith("jevany: 3 of 6 answered in ")
    assert errors[4].endswith("; failed: context_length_exceeded 1, invalid_request 2")
    assert len(errors) == 5


def test_many_records(url: str) -> None:
    records = [{"id": i, "state": f"ticket {i}", "questions": {"team": TEAM, "urgent": NOUL}} for i in range(20)]
    done = _run(url, "decide", "--json", stdin=_lines(*records))
    assert done.returncode == 0
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(range(20))
    assert done.stderr.startswith("jevany: 20 of 20 answered in ")


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_pipe_is_answered_line_by_line(url: str, options: list[str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "decide", "--url", url, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for identifier in ("first", "second"):
        process.stdin.write(_lines({"id": identifier, "state": "Now!", "question": NOUL}))
        process.stdin.flush()
        # The next request is written only after this answer.
        assert identifier.encode() in process.stdout.readline()
        if not options:
            assert process.stdout.readline().startswith(b"answer  noul  ")
            assert process.stdout.readline().startswith(b"jevany-tiny: ")
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, b"")
    assert errors.startswith(b"jevany: 2 of 2 answered in ")


def test_one_line_from_a_pipe_is_like_one_request(server: TritonServer) -> None:
    done = _run(server.grpc_url, "decide", stdin=_lines({"state": "Now!", "question": NOUL}))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["answer", "jevany-tiny:"]


@pytest.mark.parametrize(
    "arguments", [["decide", "--state", "x", "--noul", "?"], ["decide", "-", "--json"], ["models"], ["ready"]]
)
def test_a_full_disk_is_one_line(server: TritonServer, arguments: list[str]) -> None:
    for output, says in (("> /dev/full", "No space left on device"), (">&-", "it is closed")):
        done = subprocess.run(
            ["bash", "-c", f"{shlex.join([*COMMAND, *arguments])} {output}"],
            input=_lines({"state": "x", "question": NOUL}),
            stderr=subprocess.PIPE,
            env=os.environ | {"JEVANY_URL": server.grpc_url},
            timeout=60,
        )
        assert (done.returncode, done.stderr.decode()) == (1, f"jevany: standard output: {says}\n")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_stays_json_in_any_encoding(server: TritonServer, encoding: str) -> None:
    request = _lines({"id": "日本", "state": "x", "question": TEAM})
    for options in (["--json"], []):
        done = _run(server.grpc_url, "decide", *options, stdin=request, PYTHONIOENCODING=encoding)
        assert done.returncode == 0
    done = _run(server.grpc_url, "decide", "--json", stdin=request, PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout)["id"] == "日本"


def test_a_terminal_gets_bars(server: TritonServer) -> None:
    parent, child = pty.openpty()
    arguments = ["decide", "--url", server.grpc_url, "--state", "x", "--noul", "Urgent?"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=child, stderr=child, env=os.environ | {"TERM": "xterm", "PYTHONUTF8": "1"}
    )
    os.close(child)
    output = b""
    try:
        while chunk := os.read(parent, 4096):
            output += chunk
    except OSError:  # How Linux says that the other side is closed.
        pass
    os.close(parent)
    assert process.wait(30) == 0
    assert b"\x1b[" in output
    assert "░".encode() in output or "█".encode() in output


def test_ready_and_models(url: str) -> None:
    done = _run(url, "ready")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jevany-tiny on {url} is ready\n", "")
    done = _run(url, "models")
    assert done.returncode == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["jevany-tiny", "1", "READY"],
        ["jevany-tiny-direct-token", "1", "READY"],
    ]


def test_an_unknown_model_is_one_line(url: str) -> None:
    for model in ("jevany-huge", "", "../jevany-tiny", "jevany-tiny/versions/1"):
        for command in (["ready", "--wait", "0.3"], ["decide", "--state", "x", "--noul", "?"]):
            done = _run(url, *command, "--model", model)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"jevany: unknown_model: {url} has no model {model!r}\n"


def test_a_run_that_cannot_work_stops_at_once(url: str) -> None:
    done = _run(url, "decide", stdin=_lines(*[{"state": i, "question": NOUL} for i in range(50)]), JEVANY_MODEL="no")
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        f"jevany: line 1: unknown_model: {url} has no model 'no'",
        "jevany: stopped at line 1: every other would fail alike",
    ]
    assert len(done.stderr.splitlines()) == 3
    assert done.stdout == ""


def test_but_leaves_a_line_for_every_request_as_json(url: str) -> None:
    records = [{"id": i, "state": i, "question": NOUL} for i in range(50)]
    done = _run(url, "decide", "--json", stdin=_lines(*records), JEVANY_MODEL="no")
    assert done.returncode == 1
    error = {"code": "unknown_model", "message": f"{url} has no model 'no'"}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"id": i, "error": error, "line": i + 1} for i in range(50)
    ]
    first, stopped, summary = done.stderr.splitlines()
    assert first == f"jevany: line 1 (id 0): unknown_model: {url} has no model 'no'"
    assert stopped == "jevany: stopped at line 1: every other would fail alike"
    assert summary.startswith("jevany: 0 of 50 answered in ")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_no_server_is_one_line(scheme: str) -> None:
    done = _run(f"{scheme}://127.0.0.1:9", "ready")
    assert done.returncode == 1
    assert done.stderr.startswith(f"jevany: unavailable: cannot reach {scheme}://127.0.0.1:9: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_has_enough_ends_the_run_quietly(
    server: TritonServer, tmp_path: Path, options: list[str]
) -> None:
    path = tmp_path / "many.jsonl"
    path.write_bytes(_lines(*[{"state": i, "question": TEAM} for i in range(200)]))
    process = subprocess.Popen(
        [*COMMAND, "decide", str(path), "--url", server.grpc_url, "--concurrency", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(30) == 141
    assert errors == b""


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_ctrl_c_ends_the_run_at_once(server: TritonServer, scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_bytes(_lines(*[{"state": i, "question": NOUL} for i in range(20_000)]))
    url = f"{scheme}://{server.grpc_url if scheme == 'grpc' else server.http_url}"
    process = subprocess.Popen(
        [*COMMAND, "decide", str(path), "--url", url, "--json", "--concurrency", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    summary, last = errors.decode().splitlines()
    assert summary.startswith("jevany: ")
    assert " of 20000 answered in " in summary
    assert last == "jevany: interrupted"
    for line in output.splitlines():
        json.loads(line)

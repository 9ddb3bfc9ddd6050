"""What a server is asked for, before any Triton starts; and the words for how one ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jevany_server.backend_processes import how_it_ended
from jevany_server.installation import ServerError
from jevany_server.process import Ports, TritonServer

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["jevany-tiny", "jevany-tiny"], r"model 'jevany-tiny' is named twice"),
        (
            ["../model_repository/jevany-tiny"],
            r"no model '../model_repository/jevany-tiny' in .*; there are jevany-27b, ",
        ),
        ([""], r"no model '' in .*; there are jevany-27b, "),
        (["jevany-tiny/"], r"no model 'jevany-tiny/' in "),
    ],
)
def test_a_model_that_cannot_be_served_is_named(models: list[str], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        TritonServer(REPOSITORY, models, ports=Ports(0, 0, 0))


def test_a_gpu_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ServerError, match=r"^jevany-4b runs on GPU 0, and PyTorch sees 0 GPUs here; instance_group in "
    ):
        TritonServer(REPOSITORY, ["jevany-tiny", "jevany-4b"], ports=Ports(0, 0, 0))


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        (Ports(8000, 8000, 8000), "port 8000 is asked for twice, for http and for grpc"),
        (Ports(0, 8001, 8001), "port 8001 is asked for twice, for grpc and for metrics"),
    ],
)
def test_equal_ports_are_refused(ports: Ports, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        ports.chosen("127.0.0.1")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "has ended with exit code 0"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


@pytest.mark.parametrize(
    ("words", "status", "last"),
    [
        (["jevany_server.demo", "--help"], 0, "  -h, --help  show this help message and exit"),
        (["jevany_server.demo", "x"], 2, "jevany_server.demo: error: unrecognized arguments: x"),
        (
            ["jevany_server", "jevany-tiny", "--weights", "foo"],
            2,
            "jevany_server: error: argument --weights: invalid choice: 'foo' (choose from 'random', 'checkpoint')",
        ),
        (
            ["jevany_server.ready", "m", "--http-port", "99999"],
            2,
            "jevany_server.ready: error: argument --http-port: '99999' is not a port from 0 to 65535",
        ),
    ],
)
def test_a_command_line_starts_nothing_that_it_was_not_asked_for(words: list[str], status: int, last: str) -> None:
    run = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == status
    # Python 3.12 writes the choices without quotes.
    assert (run.stdout + run.stderr).splitlines()[-1].replace("'", "") == last.replace("'", "")

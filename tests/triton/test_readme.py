"""Every command of the README is run: here, or by the continuous-integration script where it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jevany_server.process import TritonServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines() if line]
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.S)

# What cannot run inside the suite, and what runs it instead.
RUN_BY_CI = {"make setup", "make test", "make lint", "make demo"}
_NO_ENGINE = "needs a Docker engine; test_docker.py and test_entrypoint.py check what it would run"
RUN_ELSEWHERE = {
    **dict.fromkeys((command for command in COMMANDS if "docker compose" in command), _NO_ENGINE),
    "make fetch MODEL=jevany-4b": "test_fetch.py runs the same command against a Hub on this machine",
    "make serve MODEL=jevany-4b": "needs a GPU and the Hub; test_lifecycle.py starts the same command",
    ".venv/bin/jevany-admin add model_repository/jevany-tiny/1/checkpoint --base model_repository/jevany-tiny/1/base "
    "--name my-jev --cpu": "test_families.py adds checkpoints to a repository of its own with the same command",
    "make serve MODEL=jevany-tiny": "test_lifecycle.py starts the same command and stops it",
    "make bench MODEL=jevany-tiny": "test_bench.py runs the same command on a few requests",
    'make bench MODEL="jevany-4b jevany-27b" WEIGHTS=random MODES="graphs engine"': "needs a GPU; likewise",
    "make loadtest MODEL=jevany-tiny": "test_loadtest.py runs the same command on a few requests",
    "make loadtest MODEL=jevany-27b WEIGHTS=random": "needs a GPU; likewise",
    "make loadtest MODEL=jevany-tiny MODE=open RATE=10": "likewise",
    "make loadtest MODEL=jevany-tiny MODE=open RATE=4 P99=400 PANEL=transfer-shape": "likewise",
    "make load-worker MASTER=10.0.0.5": "needs another machine; test_loadtest.py starts the same command on this one",
    'make convert-panel FORMAT=jevbench FILES="easy.jsonl original.jsonl hard.jsonl"': "test_loadtest.py of the unit "
    "tests makes panels with the same command; the files are not ours to keep",
    "make convert-panel FORMAT=transfer FILES=development.jsonl": "likewise",
    "make report": "test_loadtest.py of the unit tests writes a report with the same command",
    ".venv/bin/python -m jevany_loadtest.changes build/loadtest/one.json build/loadtest/other.json": "likewise",
    "python3 -m pip install git+https://github.com/jevany-triton/jevany-triton.git": "where it comes from is not known "
    "here; test_client_install.py checks that what it needs is enough",
    ".venv/bin/python -m tests.docker_steps ~/.pyenv/versions/3.12.1": "downloads gigabytes and compiles for minutes; "
    "test_docker.py checks that its record is of this Dockerfile",
    "make train-tiny": "test_jevany_tiny.py runs every stage of it, a few steps long",
}


def _here(command: str, server: TritonServer) -> str:
    """Point a command at the suite's server and at this interpreter's environment."""
    command = command.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    return command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")


def test_there_are_commands_and_scripts() -> None:
    assert len(COMMANDS) > 5
    assert SCRIPTS


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in RUN_ELSEWHERE])
def test_command(command: str, server: TritonServer) -> None:
    if command.startswith("git clone"):
        assert "&& cd" in command  # Where a clone comes from is not known here; that it suffices, CI shows.
    elif command in RUN_BY_CI:
        assert f"step {command}\n" in (ROOT / ".ci" / "run").read_text()
    else:
        environment = {"JEVANY_URL": server.grpc_url, "PATH": "/usr/bin:/bin"}
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", _here(command, server)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert "error" not in result.stdout.lower()


@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script: str, server: TritonServer) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _here(script, server)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
    # The examples are ones that the small model is sure of.
    assert all(float(confidence) > 0.9 for confidence in re.findall(r"'confidence': ([\d.]+)", result.stdout))


def test_every_target_is_in_the_help_and_the_help_in_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"make ([a-z-]+)", listed)) == targets
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets

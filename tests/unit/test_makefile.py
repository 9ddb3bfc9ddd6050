"""The Makefile: what its settings become, and that it takes no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    # A .venv that was touched later than what it is made from would be printed as well.
    command = ["make", "--dry-run", "--old-file=.venv/.ready", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "MODLE=jevany-tiny"], "no setting MODLE; there are PYTHON MODEL HOST "),
        (["bench", "MODEL=nope jevany-tiny"], "bench: no model nope; there are jevany-27b jevany-30b "),
    ],
)
def test_what_is_unknown_is_named_in_one_line(words: list[str], message: str) -> None:
    refused = _make(*words)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["serve", "WEIGHTS=foo"], "jevany_server jevany-tiny --host 127.0.0.1 --weights foo "),
        (["loadtest", "WEIGHTS=foo"], " --weights foo "),
        (["load-worker", "MASTER=h", "MASTER_PORT=6000"], "generator open --master-host h --master-port 6000 "),
        (["bench", "WEIGHTS=foo"], " --weights foo "),
        (["serve", "MODEL=a b", "HF_HUB_OFFLINE=1"], "jevany_server a b --host 127.0.0.1 "),
        (["convert-panel", "FORMAT=transfer", "FILES=f.jsonl", "PANEL=p.jsonl"], "transfer f.jsonl --out p.jsonl"),
    ],
)
def test_a_setting_is_passed_on_for_the_command_to_judge(words: list[str], command: str) -> None:
    printed = _make(*words)
    assert printed.returncode == 0
    assert command in " ".join(printed.stdout.replace("\\\n", " ").split()) + " "


def test_a_panel_gets_its_own_name_unless_another_is_given() -> None:
    assert "--out" not in _make("convert-panel", "FORMAT=transfer", "FILES=f.jsonl").stdout

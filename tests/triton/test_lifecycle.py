"""Starting and stopping a real Triton: nothing is left behind, and what goes wrong is said in one line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jevany_client import Client, Noul
from jevany_server.backend_processes import find_backend_processes
from jevany_server.installation import ServerError
from jevany_server.process import Ports, TritonServer
from tests.triton.conftest import FREE_PORTS


def _processes(text: str) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and str(os.getpid()) != directory.name:
            found.append(command)
    return found


def _until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _ours_in_shared_memory(pid: int, port: int | str = "") -> list[str]:
    """Return the regions of the servers that a process has started, or of the one at a gRPC port."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"jevany-{pid}-{port}")]


def test_a_stopped_server_leaves_no_process_and_no_shared_memory(repository: Path) -> None:
    with TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        assert server.workspace.is_dir()
        assert len(_processes(str(server.workspace))) == 2  # The server and the backend's process.
        assert _ours_in_shared_memory(os.getpid(), server.ports.grpc)
    assert server.process.returncode == 0
    assert not server.workspace.exists()
    assert not _processes(str(server.workspace))
    assert not _ours_in_shared_memory(os.getpid(), server.ports.grpc)


def test_a_start_on_the_cpu_alarms_nobody(repository: Path) -> None:
    log = io.BytesIO()
    with TritonServer(repository, ["small"], ports=FREE_PORTS, log=log) as server:
        server.wait_until_ready(60)
    lines = log.getvalue().decode().splitlines()
    assert any("loading: small:1" in line for line in lines)
    assert not [line for line in lines if re.match(r"[EW]\d{4} |Error", line)]


def test_a_killed_server_leaves_no_process_and_no_shared_memory(repository: Path) -> None:
    with TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        server.process.kill()
        server.process.wait()
    assert not _processes(str(server.workspace))
    assert not _ours_in_shared_memory(os.getpid(), server.ports.grpc)


def _serve(repository: Path, *under: str) -> subprocess.Popen[str]:
    free_ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    command = [*under, sys.executable, "-m", "jevany_server", "small", "--repository", str(repository), *free_ports]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_until_serving(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert any("Ctrl-C stops the server" in line for line in process.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_stops_the_command_and_its_server(
    repository: Path, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = _serve(repository)
    _wait_until_serving(process)
    assert len(list(temporary.glob("jevany-triton-*"))) == 1
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # A second one, while the server ends, is not heeded.
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.splitlines()[-1] == "jevany_server: stopped"
    assert not list(temporary.iterdir())
    assert not _processes(str(temporary))
    assert not _ours_in_shared_memory(process.pid)


def test_nohup_keeps_a_server_when_its_terminal_goes(repository: Path) -> None:
    process = _serve(repository, "nohup")
    _wait_until_serving(process)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_an_interrupted_start_leaves_nothing(repository: Path) -> None:
    process = _serve(repository)
    assert _until(lambda: bool(_ours_in_shared_memory(process.pid)))  # The backend's process has begun to load.
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert not _ours_in_shared_memory(process.pid)


def test_the_server_ends_when_its_parent_is_killed(repository: Path) -> None:
    process = _serve(repository)
    _wait_until_serving(process)
    assert _processes(f"jevany-{process.pid}-")
    process.kill()
    process.communicate(timeout=60)  # Its output closes once the server, which writes to it as well, has ended.
    assert _until(lambda: not _processes(f"jevany-{process.pid}-"))
    assert not _ours_in_shared_memory(process.pid)


def test_idle_threads_of_a_model_sleep(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        [backend] = find_backend_processes(server.process.pid)
        environment = Path(f"/proc/{backend.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_WAIT_POLICY=PASSIVE" in environment


_COUNTING = """
import gc, pathlib
from jevany_backend.triton_model import TritonPythonModel as Model

class TritonPythonModel(Model):
    def execute(self, requests):
        pathlib.Path({path!r}).write_text(f"{{gc.get_freeze_count()}} {{len(gc.get_objects())}}")
        return super().execute(requests)
"""


def test_the_collector_leaves_what_is_loaded_alone(repository: Path, tmp_path: Path) -> None:
    (repository / "small" / "1" / "model.py").write_text(_COUNTING.format(path=str(tmp_path / "counts")))
    with TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        server.wait_until_ready(60)
        with Client(server.grpc_url, "small") as client:
            client.decide("text", Noul("Is it?"))
    kept, looked_at = map(int, (tmp_path / "counts").read_text().split())
    assert kept > 100_000
    assert looked_at < 10_000


def test_a_port_in_use_is_named(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = rf"port {port} \(grpc\) on 127.0.0.1 cannot be used: address already in use"
        with pytest.raises(ServerError, match=f"(?i){message}"):
            TritonServer(repository, ["small"], ports=Ports(0, port, 0))


def test_an_unknown_model_is_named(repository: Path) -> None:
    with pytest.raises(ServerError, match=r"no model 'large' in .*; there are small"):
        TritonServer(repository, ["large"], ports=FREE_PORTS)


def _reason_for_not_loading(repository: Path) -> str:
    """Start a server that cannot load its model; return what it says of it."""
    log = io.BytesIO()
    server = TritonServer(repository, ["small"], ports=FREE_PORTS, log=log)
    with server, pytest.raises(ServerError) as raised:
        server.wait_until_ready(60)
    assert b"Traceback" not in log.getvalue()
    return str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"float32"', '"float8"', r"small: parameter dtype: 'float8' is not one of float32, bfloat16"),
        ('"max_state_tokens"', '"max_states"', r"small: parameter max_states: unknown; there are adapter, base, .*"),
        ('"8192"', '"-1"', r"small: parameter max_state_tokens: '-1' is not a positive whole number"),
        ('1/checkpoint"', '1/nowhere"', r"small: adapter: no directory '1/nowhere', and that is not a Hub name .*"),
        ('"1/base"', '"/data/base"', r"small: parameter base: '/data/base' starts outside the model's folder, .*"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(repository: Path, old: str, new: str, reason: str) -> None:
    config = repository / "small" / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    assert re.fullmatch(reason, _reason_for_not_loading(repository))


def test_callers_are_not_let_in_before_every_model_is_loaded(repository: Path) -> None:
    # The reason why a model did not load has paths in it, and Triton's index of the models would show it to them.
    broken = repository / "broken"
    shutil.copytree(repository / "small", broken, symlinks=True)
    text = (broken / "config.pbtxt").read_text()
    (broken / "config.pbtxt").write_text(text.replace('"small"', '"broken"').replace('"float32"', '"float8"'))
    with TritonServer(repository, ["small", "broken"], ports=FREE_PORTS, log=io.BytesIO()) as server:
        while server.process.poll() is None:
            with socket.socket() as caller:
                assert caller.connect_ex((server.host, server.ports.http)) != 0
            time.sleep(0.02)
        with pytest.raises(ServerError, match=r"broken: parameter dtype: 'float8' is not one of float32, bfloat16"):
            server.wait_until_ready(60)


def test_fields_of_a_base_that_do_not_go_together_are_named(repository: Path) -> None:
    path = repository.parent / "files" / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 5}))
    reason = _reason_for_not_loading(repository)
    assert reason.startswith(f"small: {path}: ")
    assert "`num_hidden_layers` (5) must be equal to the number of `layer_types` (4)" in reason


def test_a_broken_weight_file_stops_the_load(repository: Path) -> None:
    (repository.parent / "files" / "base" / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors: not a safetensors file" in _reason_for_not_loading(repository)


def test_weights_that_are_no_numbers_are_named(repository: Path) -> None:
    path = repository.parent / "files" / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, path, {"format": "pt"})
    reason = f"small: {path}: model.norm.weight holds NaN or infinite values"
    assert _reason_for_not_loading(repository) == reason


def test_a_head_file_with_code_in_it_does_not_run(repository: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {trace}",)

    torch.save({"base": Payload()}, repository.parent / "files" / "adapter" / "head.pt")
    assert "head.pt: refused: it holds objects other than tensors" in _reason_for_not_loading(repository)
    assert not trace.exists()

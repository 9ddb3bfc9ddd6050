"""What docker/Dockerfile and docker/compose.yaml run, run here: the entry point and the health check.

And what comes with them: the container image's own Triton, and what a caller from outside may not do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from jevany_server import installation
from jevany_server.backend_processes import BackendProcess, find_backend_processes
from jevany_server.installation import STUB_NAME, Installation, find_installation
from jevany_server.process import TritonServer
from tests.docker_files import read_compose, read_dockerfile
from tests.triton.conftest import FREE_PORTS


@dataclass
class Entrypoint:
    """The entry point of the image, serving.

    Attributes:
        process: Its process.
        triton: The process id of its Triton.
        http_port: Its Triton's port for HTTP.
    """

    process: subprocess.Popen[str]
    triton: int
    http_port: int

    def end(self) -> list[str]:
        """Wait for its end and return its own last lines, without Triton's log."""
        _, errors = self.process.communicate(timeout=60)
        return [line for line in errors.splitlines() if line.startswith("jevany_server: ")]


def _start(repository: Path, *models: str) -> subprocess.Popen[str]:
    python, *arguments = read_dockerfile()["runtime"].words("ENTRYPOINT")
    assert python == "python3"
    arguments[arguments.index("/models")] = str(repository)
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    command = [sys.executable, *arguments, *models, *ports]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def entrypoint(repository: Path) -> Iterator[Entrypoint]:
    process = _start(repository, "small")
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        port = next(int(match[1]) for line in lines if (match := re.search(r"HTTP [\d.]+:(\d+)", line)))
        assert any("Ctrl-C stops the server" in line for line in lines)
        [triton] = _children(process.pid)
        yield Entrypoint(process, triton, port)
    finally:
        process.kill()
        process.communicate(timeout=60)


def _children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _healthcheck(http_port: int, models: str) -> subprocess.CompletedProcess[str]:
    check = read_compose(MODEL=models)["services"]["server"]["healthcheck"]["test"]
    assert check.startswith("python3 ")
    command = f"{sys.executable} {check.removeprefix('python3 ')} --http-port {http_port}"
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(entrypoint: Entrypoint, number: signal.Signals) -> None:
    entrypoint.process.send_signal(number)
    assert entrypoint.end() == ["jevany_server: stopped"]
    assert entrypoint.process.returncode == 0
    assert not Path(f"/proc/{entrypoint.triton}").exists()


def test_it_ends_when_a_backend_process_dies(entrypoint: Entrypoint) -> None:
    [backend] = find_backend_processes(entrypoint.triton)
    assert backend.end() is None
    os.kill(backend.pid, signal.SIGKILL)
    end = "the backend process of small_0_0 was killed by SIGKILL (out of memory?)"
    assert entrypoint.end() == [f"jevany_server: {end}"]
    assert entrypoint.process.returncode == 1
    assert not Path(f"/proc/{entrypoint.triton}").exists()


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("kill -SEGV $$", "the backend process of small_0_0 was killed by SIGSEGV"),
        ("exit 3", "the backend process of small_0_0 has ended with exit code 3"),
    ],
)
def test_how_a_process_ended_is_said(command: str, end: str) -> None:
    process = subprocess.Popen(["/bin/sh", "-c", command])
    backend = BackendProcess(os.getpid(), process.pid, "small_0_0")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # It has ended, and nobody has asked how.
    assert backend.end() == end
    process.wait()
    assert backend.end() == "the backend process of small_0_0 has ended"


def test_it_ends_when_triton_dies(entrypoint: Entrypoint) -> None:
    os.kill(entrypoint.triton, signal.SIGKILL)
    [line] = entrypoint.end()
    assert line == "jevany_server: Triton was killed by SIGKILL (out of memory?)"
    assert entrypoint.process.returncode == 1


def test_a_missing_model_is_named(repository: Path) -> None:
    process = _start(repository, "large")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == f"jevany_server: no model 'large' in {repository}; there are small\n"


def test_a_model_that_fails_to_load_is_named(repository: Path) -> None:
    config = repository / "small" / "config.pbtxt"
    config.write_text(config.read_text().replace('"float32"', '"float8"', 1))
    process = _start(repository, "small")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("jevany_server: small: parameter dtype: 'float8' is not one of ")


def test_the_health_check_passes_while_the_model_answers(entrypoint: Entrypoint) -> None:
    passed = _healthcheck(entrypoint.http_port, "small")
    assert (passed.returncode, passed.stdout) == (0, "ready\n")
    failed = _healthcheck(entrypoint.http_port, "small large")
    assert (failed.returncode, failed.stdout) == (1, "large is not ready\n")


def test_the_health_check_fails_where_no_server_is() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # Bound and not listening: connections are refused.
        failed = _healthcheck(unused.getsockname()[1], "small")
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "small is not ready\n", "")


def _post(server: TritonServer, path: str, body: object = None) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(server.host, server.ports.http, timeout=30)) as connection:
        connection.request("POST", path, json.dumps(body or {}))
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/systemsharedmemory/region/any/register", {"key": "/any", "offset": 0, "byte_size": 64}),
        ("/v2/systemsharedmemory/unregister", {}),
        ("/v2/cudasharedmemory/unregister", {}),
        ("/v2/logging", {"log_verbose_level": 9}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        ("/v2/models/jevany-tiny/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ],
)
def test_what_reaches_into_a_server_is_refused_over_http(server: TritonServer, path: str, body: object) -> None:
    status, text = _post(server, path, body)
    assert status == http.HTTPStatus.FORBIDDEN
    assert "restricted" in text


def test_what_reaches_into_a_server_is_refused_over_grpc(server: TritonServer) -> None:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        for call in (
            lambda: client.register_system_shared_memory("any", "/any", 64),
            client.unregister_system_shared_memory,
            client.unregister_cuda_shared_memory,
            lambda: client.update_log_settings({"log_verbose_level": 9}),
            lambda: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()


def test_the_models_can_be_listed_and_not_changed(server: TritonServer) -> None:
    for action in ("load", "unload"):
        status, text = _post(server, f"/v2/repository/models/jevany-tiny/{action}")
        assert status >= http.HTTPStatus.BAD_REQUEST
        assert "explicit model load / unload is not allowed" in text
    status, text = _post(server, "/v2/repository/index")
    assert status == http.HTTPStatus.OK
    assert {model["name"] for model in json.loads(text)} == set(server.models)
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
                change("jevany-tiny")
        assert {model.name for model in client.get_model_repository_index().models} == set(server.models)
        assert all(client.is_model_ready(model) for model in server.models)


def _image(directory: Path, stub: Path) -> Path:
    """Lay the installed Triton out as NVIDIA's image has it, with ``stub`` as its stub."""
    found = find_installation(directory / "nowhere")
    backend = directory / "tritonserver" / "backends" / "python"
    backend.mkdir(parents=True)
    for file in found.python_backend.iterdir():
        (backend / file.name).symlink_to(file)
    (backend / STUB_NAME).symlink_to(stub)
    (directory / "tritonserver" / "bin").mkdir()
    (directory / "tritonserver" / "bin" / "tritonserver").symlink_to(found.binary)
    return directory / "tritonserver"


def test_a_container_image_is_found_and_serves(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = find_installation(tmp_path / "nowhere")
    # The image's linker finds its libraries; the wheel's are told to it here.
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(map(str, wheel.libraries)))
    directory = _image(tmp_path, wheel.stub)
    image = find_installation(directory)
    assert image == Installation(
        directory / "bin" / "tritonserver",
        directory / "backends" / "python",
        directory / "backends" / "python" / STUB_NAME,
        libraries=(),
    )
    with (
        open(os.devnull, "wb") as log,
        TritonServer(repository, ["small"], ports=FREE_PORTS, log=log, installation=image) as server,
    ):
        server.wait_until_ready(60)


def test_an_image_of_another_python_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = find_installation(tmp_path / "nowhere")
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    directory = _image(tmp_path, wheel.stub.parents[1] / other / STUB_NAME)
    assert find_installation(directory) == wheel

    def no_distribution(name: str) -> None:
        raise installation.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.metadata, "distribution", no_distribution)
    with pytest.raises(installation.ServerError, match=rf"runs Python {other} models, and this is Python 3\.\d+"):
        find_installation(directory)
    with pytest.raises(installation.ServerError, match=r"no Triton Server here: pip install"):
        find_installation(tmp_path / "nowhere")

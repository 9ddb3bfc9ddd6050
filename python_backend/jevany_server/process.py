"""One Triton Server process, from its start to the last trace of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn, Self

from jevany_admin.model_folder import AdminError, parameters, read_config
from jevany_backend.decision_model import marked_name
from jevany_server.backend_processes import BackendProcess, find_backend_processes, how_it_ended
from jevany_server.installation import Installation, ServerError, find_installation
from jevany_server.ready import is_ready

STOP_SECONDS = 30
# A model whose process is gone cannot be unloaded, and Triton waits for that in vain.
BROKEN_STOP_SECONDS = 3
WATCH_SECONDS = 1
# What nobody outside may do: hand over memory regions, change the log's settings or write traces to files. The group
# "model-repository" stays open for its index, which lists the models; --model-control-mode=none refuses its loading and
# unloading, and Triton cannot restrict the one without the other.
RESTRICTED_APIS = ("shared-memory", "logging", "trace")
# An error of Triton's that is none where no model runs on a GPU; no option of Triton's silences it.
_NO_DRIVER = b'"CudaDriverHelper has not been initialized."'
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ports:
    """The TCP ports of a server; 0 takes any that is free."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def chosen(self, host: str) -> Ports:
        """Return the same ports with every 0 replaced, after checking that all of them differ and are free.

        Raises:
            ServerError: Names a port that is in use or asked for twice.
        """
        named: dict[int, str] = {}
        for name, port in vars(self).items():
            if port and port in named:
                raise ServerError(f"port {port} is asked for twice, for {named[port]} and for {name}")
            named[port] = name
        with contextlib.ExitStack() as held:
            return Ports(*(_free_port(host, name, port, held) for name, port in vars(self).items()))


def _free_port(host: str, name: str, port: int, held: contextlib.ExitStack) -> int:
    listener = held.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ServerError(f"port {port} ({name}) on {host} cannot be used: {error.strerror or error}") from None
    return listener.getsockname()[1]


def _lay_out_with_weights(model: Path, served: Path, weights: str) -> None:
    """Make a model's folder anew, with its own code and versions, and with these weights in its configuration."""
    served.mkdir()
    for part in model.iterdir():
        if part.name != "config.pbtxt":
            (served / part.name).symlink_to(part.resolve())
    # Of two values of one parameter, the later one counts.
    parameter = f'parameters {{ key: "weights" value: {{ string_value: "{weights}" }} }}\n'
    (served / "config.pbtxt").write_text((model / "config.pbtxt").read_text("utf-8") + "\n" + parameter, "utf-8")


def end_on_signals() -> None:
    """Have every signal that asks a program to end do what Ctrl-C does: raise KeyboardInterrupt, once.

    The first one ends the program in good order. Those that come while it does so change nothing: the end of a terminal
    or of a service often brings several.
    """
    # Whoever started this with one of them ignored, as nohup does, means it.
    asking = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if _is_heeded(n)]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in asking:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in asking:
        signal.signal(number, end)


def _is_heeded(number: signal.Signals) -> bool:
    return signal.getsignal(number) != signal.SIG_IGN


def _runs_on_cpu(folder: Path) -> bool:
    """Return whether a model runs on the CPU alone, by its ``config.pbtxt``; where it does not, check its GPUs.

    Triton or the model would miss them only after they have begun to load.

    Raises:
        ServerError: A GPU is not here.
    """
    try:
        groups = read_config(folder).get("instance_group", [])
    except AdminError:
        return False  # Unknown. What Triton cannot read either, it refuses itself, with the line.
    gpus = [gpu for group in groups if group.get("kind") == "KIND_GPU" for gpu in group.get("gpus", [0])]
    if not gpus:
        return all(group.get("kind") == "KIND_CPU" for group in groups)
    # It takes seconds to import, which only a model for a GPU needs.
    import torch

    count = torch.cuda.device_count()
    if max(gpus) >= count:
        raise ServerError(
            f"{folder.name} runs on GPU {max(gpus)}, and PyTorch sees {count} GPUs here; "
            "instance_group in its config.pbtxt says where it runs"
        )
    return False


def _has_random_weights(folder: Path, weights: str | None) -> bool:
    """Return whether a model is served with random weights: by what is served in place of its own, else by its file."""
    try:
        return (weights or parameters(read_config(folder)).get("weights")) == "random"
    except AdminError:
        return False


class TritonServer:
    """A running Triton Server, as a context manager.

    Args:
        repository: The directory with the models' folders.
        models: Which of them are served.
        host: The address to listen on.
        ports: The ports to listen on.
        log: A binary stream that the server's log goes to; this process's standard error if None.
        weights: ``random`` or ``checkpoint`` in the place of what the models' ``config.pbtxt`` say. Random ones have a
            release's true shapes, and every answer says so.
        installation: The Triton to run; the one that `find_installation` finds if None.

    Attributes:
        process: The server's process.
        workspace: A temporary directory of links that the server runs from.

    Raises:
        ServerError: A model or port cannot be had, or the server stopped while loading.
    """

    def __init__(
        self,
        repository: Path,
        models: Sequence[str],
        *,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        log: IO[bytes] | None = None,
        weights: str | None = None,
        installation: Installation | None = None,
    ) -> None:
        self.models = list(models)
        self.host = host
        self._check_models(repository)
        self._random = {name for name in self.models if _has_random_weights(repository / name, weights)}
        self._on_cpu = {_runs_on_cpu(repository / name) for name in self.models} == {True}
        installation = installation or find_installation()
        self.ports = (ports or Ports()).chosen(host)
        self._temporary = tempfile.TemporaryDirectory(prefix="jevany-triton-")
        self.workspace = Path(self._temporary.name)
        self._memory_prefix = f"jevany-{os.getpid()}-{self.ports.grpc}-"
        served = self.workspace / "models"
        served.mkdir()
        for name in self.models:
            if weights is None:
                (served / name).symlink_to((repository / name).resolve(), target_is_directory=True)
            else:
                _lay_out_with_weights(repository / name, served / name, weights)
        # The embedded interpreter puts its working directory first on sys.path, so that must be an empty one.
        empty = self.workspace / "empty"
        empty.mkdir()
        self.process = subprocess.Popen(
            [installation.binary, *self._arguments(served, installation.lay_out(self.workspace))],
            cwd=empty,
            env=installation.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=stop_when_parent_dies,
        )
        self._backends: list[BackendProcess] = []
        self._stop_seconds = STOP_SECONDS
        self._log = _LogPump(self.process, log or sys.stderr.buffer, without=_NO_DRIVER if self._on_cpu else None)

    def _check_models(self, repository: Path) -> None:
        have = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
        for number, name in enumerate(self.models):
            if name not in have:
                raise ServerError(f"no model {name!r} in {repository}; there are {', '.join(have) or 'none'}")
            if name in self.models[:number]:
                raise ServerError(f"model {name!r} is named twice")

    def _arguments(self, repository: Path, backends: Path) -> list[str]:
        # Triton opens a restricted API to callers who know a key. Nobody is told this one, though who may list this
        # machine's processes can read it there: Triton takes it no other way.
        restricted = f"{','.join(RESTRICTED_APIS)}:key={secrets.token_hex(16)}"
        return [
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._memory_prefix}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            # It would look for a driver, to measure and serve GPUs that no model uses, and warn that there is none.
            *(["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"] if self._on_cpu else []),
        ]

    @property
    def http_url(self) -> str:
        """``host:port`` of the HTTP endpoint."""
        return f"{self.host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint."""
        return f"{self.host}:{self.ports.grpc}"

    def log_name(self, model: str) -> str:
        """Return what log lines call a model: its name, marked where its weights are random."""
        return marked_name(model, random_weights=model in self._random)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until every model answers.

        Args:
            timeout: Seconds.

        Raises:
            ServerError: The server stopped, or the time is over.
        """
        deadline = time.monotonic() + timeout
        waiting = list(self.models)
        while waiting:
            if self.process.poll() is not None:
                raise ServerError(self._log.failure() or self._end())
            if is_ready(self.host, self.ports.http, waiting[0]):
                waiting.pop(0)
            elif time.monotonic() > deadline:
                raise ServerError(f"{self.log_name(waiting[0])} was not ready after {timeout:g} s")
            else:
                time.sleep(0.1)
        # Now, while all of them live: of one that has died, the kernel no longer knows which model it ran.
        self._backends = find_backend_processes(self.process.pid)

    def watch(self) -> NoReturn:
        """Wait until the server ends, or the process of a model does; call it once all are ready.

        Raises:
            ServerError: One has; it says which.
        """
        while True:
            if self.process.poll() is not None:
                raise ServerError(self._end())
            for process in self._backends:
                if end := process.end():
                    self._stop_seconds = BROKEN_STOP_SECONDS
                    raise ServerError(end.replace(process.instance, self._marked_instance(process.instance)))
            time.sleep(WATCH_SECONDS)

    def _marked_instance(self, instance: str) -> str:
        # Its name is the model's, the group's number and its own.
        return marked_name(instance, random_weights=instance.rsplit("_", 2)[0] in self._random)

    def _end(self) -> str:
        return f"Triton {how_it_ended(self.process.returncode)}"

    def stop(self) -> None:
        """Stop the server and remove what it leaves.

        It finishes what it has begun, for `STOP_SECONDS` at most; for `BROKEN_STOP_SECONDS` once `watch` has found the
        process of a model dead.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self._stop_seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # Stubs live in the server's session. Those of a server that died at once are still there.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._log.finish()
        # A server that ended in good order has removed its shared memory; one that was killed has not.
        for region in Path("/dev/shm").glob(f"{self._memory_prefix}*"):
            region.unlink(missing_ok=True)
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stop_when_parent_dies() -> None:
    """Have this process, a child that is about to start its program, get SIGTERM when its parent dies."""
    # Linux only, as the server is: without this, a killed parent would leave the server holding its ports.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _LogPump:
    """Copies a server's log to a stream, without the lines that end in one text, and keeps why a model did not load."""

    _REASON = re.compile(rb"failed to load '.*?' version .*?: (?:\w+: )?(?:TritonModelException: )?(.*?)(?:\\n|\"?$)")

    def __init__(self, process: subprocess.Popen[bytes], stream: IO[bytes], without: bytes | None) -> None:
        self._source = process.stdout
        self._stream = stream
        self._without = without
        self._failure: bytes | None = None
        self._thread = threading.Thread(target=self._copy, name="triton-log", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        assert self._source is not None  # The process was started with a pipe.
        for line in self._source:
            if self._failure is None and (match := self._REASON.search(line)):
                self._failure = match[1]
            if self._without is not None and line.rstrip().endswith(self._without):
                continue
            # A log that can no longer be written must not stop the server.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line)
                self._stream.flush()

    def failure(self) -> str | None:
        """Return why a model failed to load, once the server has stopped; None if its log does not say."""
        self.finish()
        return None if self._failure is None else self._failure.decode(errors="replace")

    def finish(self) -> None:
        """Wait for the rest of the log."""
        self._thread.join(timeout=5)

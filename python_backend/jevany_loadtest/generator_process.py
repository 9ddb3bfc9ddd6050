"""The load generator as its parent sees it: a child process that takes plans and gives events."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from jevany_server.process import stop_when_parent_dies

_STOP_SECONDS = 10


class GeneratorError(Exception):
    """The generator ended before its plan did."""


class GeneratorProcess:
    """A generator, as a context manager; with workers on this machine, it is Locust's master and they its children.

    Args:
        users: ``serial`` or ``open``.
        local_workers: How many workers to start here.
        remote_workers: How many others to wait for, which are started on other machines.
        master_port: Where workers find the master.
    """

    def __init__(self, users: str, *, local_workers: int = 0, remote_workers: int = 0, master_port: int = 5557) -> None:
        self._children: list[subprocess.Popen[str]] = []
        workers = local_workers + remote_workers
        port = f"--master-port={master_port}"
        self._main = self._start(users, *((f"--workers={workers}", port) if workers else ()))
        try:
            for _ in range(local_workers):
                self._start(users, "--master-host=127.0.0.1", port)
            if remote_workers:
                print(
                    f"loadtest: waiting for {remote_workers} workers of other machines: "
                    f"make load-worker MASTER=<this machine> MASTER_PORT={master_port}",
                    file=sys.stderr,
                    flush=True,
                )
            self._expect("ready")
        except BaseException:
            self.stop()
            raise

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "jevany_loadtest.generator", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A terminal's Ctrl-C is for this process, which then stops the generator in good order.
            start_new_session=True,
            preexec_fn=stop_when_parent_dies,
        )
        self._children.append(process)
        return process

    def run(self, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Carry out a plan and yield its events, without the last.

        Raises:
            GeneratorError: The generator, or one of its workers, has ended.
        """
        self._say(plan)
        for event in self._events():
            if event["event"] == "done":
                return
            if event["event"] == "failed":
                raise GeneratorError(event["message"])
            yield event

    def go_on(self) -> None:
        """Let the plan go on after its warm-up."""
        self._say({"go": True})

    def _say(self, message: dict[str, Any]) -> None:
        assert self._main.stdin is not None
        try:
            self._main.stdin.write(json.dumps(message) + "\n")
            self._main.stdin.flush()
        except OSError:
            raise GeneratorError(self._ending()) from None

    def _events(self) -> Iterator[dict[str, Any]]:
        assert self._main.stdout is not None
        for line in self._main.stdout:
            yield json.loads(line)
        raise GeneratorError(self._ending())

    def _expect(self, name: str) -> None:
        event = next(self._events())
        assert event["event"] == name

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._main.wait(_STOP_SECONDS)
        return f"the load generator stopped with exit code {self._main.returncode}"

    def stop(self) -> None:
        """End the generator and its workers here."""
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        for child in self._children:
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

"""The processes in which a server's Python models run, one for each model instance.

When one of them dies, Triton neither starts another nor stops: it goes on and fails every request. Before 26.01 it even
goes on calling the model ready. So whoever runs a server has to watch them.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from jevany_server.installation import STUB_NAME

# What the kernel calls a process of the stub: 15 characters, which stay when the process has died.
_NAME = STUB_NAME[:15]
# Where the backend puts the instance's name among the arguments of its stub.
_INSTANCE_ARGUMENT = 8


@dataclass(frozen=True)
class BackendProcess:
    """The process of one model instance.

    Attributes:
        server: The process id of its server.
        pid: Its own process id.
        instance: What Triton calls the instance: model, instance group and number, such as ``jevany-4b_0_0``.
    """

    server: int
    pid: int
    instance: str

    def end(self) -> str | None:
        """Say how this process has ended; None if it has not."""
        now = _read_state(self.pid)
        if now is None or now.parent != self.server:
            return f"the backend process of {self.instance} has ended"
        if now.letter not in "ZX":
            return None
        # The server has not asked for the exit status of its child, so the kernel still has it.
        return f"the backend process of {self.instance} {how_it_ended(os.waitstatus_to_exitcode(now.exit_status))}"


def how_it_ended(code: int) -> str:
    """Return in words how a process has ended.

    Args:
        code: Its exit code; the negative number of the signal that killed it, if one did.
    """
    if code >= 0:
        return f"has ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # A real-time signal has no name.
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def find_backend_processes(server: int) -> list[BackendProcess]:
    """Return the backend processes of the server with process id ``server``, the dead ones that it keeps included."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        state = _read_state(pid)
        if state is not None and state.parent == server and state.name == _NAME:
            found.append(BackendProcess(server, pid, _instance(directory)))
    return found


def _instance(directory: Path) -> str:
    try:
        return (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")[_INSTANCE_ARGUMENT]
    except (OSError, IndexError):
        return "a model"


@dataclass(frozen=True)
class _State:
    name: str
    letter: str
    parent: int
    exit_status: int


def _read_state(pid: int) -> _State | None:
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    return _State(head.partition("(")[2], letter=fields[0], parent=int(fields[1]), exit_status=int(fields[49]))

"""Lines of a pipe, each as soon as it is there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

_CHUNK = 65_536

# How many lines are read before somebody asks for them.
_AHEAD = 64


async def lines_of(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the lines that arrive at a file descriptor, without their ends.

    Raises:
        OSError: It cannot be read.
    """
    # An event loop cannot wait for every kind of file, so a thread reads. It is a daemon that holds no lock of
    # Python's own standard input: a program that is interrupted need not wait for a line that never comes.
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def hand_over(line: bytes | OSError | None) -> None:
        room.acquire()
        loop.call_soon_threadsafe(arrived.put_nowait, line)

    def read() -> None:
        try:
            rest: list[bytes] = []
            while chunk := os.read(descriptor, _CHUNK):
                *ended, last = chunk.split(b"\n")
                for line in ended:
                    hand_over(b"".join((*rest, line)))
                    rest = []
                if last:
                    rest.append(last)
            if rest:
                hand_over(b"".join(rest))
            hand_over(None)
        except OSError as error:
            hand_over(error)

    def read_until_closed() -> None:
        try:
            read()
        except RuntimeError:  # The loop is closed: nobody waits any more.
            return

    threading.Thread(target=read_until_closed, name="jevany-lines", daemon=True).start()
    while (line := await arrived.get()) is not None:
        if isinstance(line, OSError):
            raise line
        room.release()
        yield line

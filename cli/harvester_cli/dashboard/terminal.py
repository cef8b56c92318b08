"""Writing to a terminal that may be stopped (Ctrl-S), slow or gone, without ever waiting for it for long."""

from __future__ import annotations

import io
import os
import select
import time
from contextlib import suppress

PATIENCE_S = 0.5  # a terminal that takes nothing for so long is not waited for
_PIPE_BUF_BYTES = 4096  # what a pipe that polls as writable takes without waiting (pipe(7))


def opened_anew(fd: int) -> int:
    """A descriptor for the same terminal or file that does not block, where that can be had.

    The flag belongs to the open file, which `os.dup` would share with the shell: so a terminal is opened again.
    Where that is not allowed (after `su`), and for anything else, it is a plain copy.
    """
    if os.isatty(fd):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.dup(fd)


def send(fd: int, data: bytes) -> bool:
    """Write `data`; false when it was given up because nothing was taken for PATIENCE_S. Raises OSError."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    at_once_bytes = _PIPE_BUF_BYTES if os.get_blocking(fd) else len(data)
    left = memoryview(data)
    give_up_deadline = time.monotonic() + PATIENCE_S
    while left:
        wait_s = give_up_deadline - time.monotonic()
        if wait_s <= 0 or not poller.poll(wait_s * 1_000):
            return False
        try:
            left = left[os.write(fd, left[:at_once_bytes]) :]
        except BlockingIOError:
            continue  # a place for less than the next character: ask again, until the deadline
        give_up_deadline = time.monotonic() + PATIENCE_S
    return True


class Terminal(io.TextIOBase):
    """A text stream over `fd`, for rich: a frame is collected and goes out whole with `flush`.

    What a stopped terminal does not take is dropped; the next frame draws every cell again anyway.
    """

    def __init__(self, fd: int, encoding: str) -> None:
        super().__init__()
        self._fd = fd
        self._encoding = encoding
        self._pending: list[str] = []

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._pending.append(text)
        return len(text)

    def flush(self) -> None:
        data = "".join(self._pending).encode(self._encoding, errors="replace")
        self._pending.clear()
        if data:
            send(self._fd, data)

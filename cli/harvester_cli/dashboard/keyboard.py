"""Single keys from a terminal, without echo and without a line's end; the terminal's settings come back at the end."""

from __future__ import annotations

import os
import select
import termios
import tty
from contextlib import suppress
from types import TracebackType

from harvester_cli.dashboard.keys import split

_READ_BYTES = 64


class Keyboard:
    """A context manager around a terminal's descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._wake_read, self._wake_write = os.pipe()

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(termios.error, OSError):  # it has gone
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def read(self) -> list[str] | None:
        """The next keys, as soon as there are any; None once the terminal has gone or `wake` was called."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        ready = [fd for fd, _ in poller.poll()]
        if self._wake_read in ready:
            return None
        try:
            data = os.read(self._fd, _READ_BYTES)
        except OSError:
            return None
        return split(data) if data else None

    def wake(self) -> None:
        """End a `read` that waits, and every later one."""
        os.write(self._wake_write, b"x")

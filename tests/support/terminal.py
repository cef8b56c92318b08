"""A command on a pseudo-terminal, which is read all the time until the process has ended, as a terminal window does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from types import TracebackType

from .cli import COMMAND, cli_environment
from .wait import eventually

# The first terminal that a session's leader opens is the one whose Ctrl-C and hang-up reach it.
_OPENS = 'tty=$1; shift; exec "$@" <"$tty" >"$tty" 2>&1'
_LAST = b"\x1c all has been read \x1c"
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class OnTerminal:
    """`harvester ARGS` on a terminal of its own. As a context manager it kills what is left of it at the end."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None, size: tuple[int, int] = (80, 24)) -> None:
        """`size`: columns and lines."""
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("4H", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(self._slave)
        self._seen = bytearray()
        self._from = 0
        self.process = subprocess.Popen(
            ["sh", "-c", _OPENS, "sh", os.ttyname(self._slave), *COMMAND, *args],
            env=cli_environment({"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self._seen += data

    @property
    def raw(self) -> bytes:
        """All that was written so far."""
        return bytes(self._seen)

    def text(self, since: int = 0) -> str:
        """What was written from there on, without what moves the cursor."""
        return _ESCAPES.sub(b"", bytes(self._seen[since:])).decode(errors="replace").replace("\r", "")

    def settings(self) -> list[object]:
        """The terminal's, now."""
        return termios.tcgetattr(self._slave)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> None:
        """Until it has written this (a regular expression) since the last key that was pressed."""

        def found() -> bool:
            return re.search(pattern, self.text(self._from)) is not None

        try:
            eventually(found, timeout_s, f"{pattern!r} on the terminal")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-4000:]}") from None

    def press(self, keys: str) -> None:
        """Send keys."""
        self._from = len(self._seen)
        os.write(self._master, keys.encode())

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, when all that it wrote has been read."""
        code = self.process.wait(timeout_s)
        os.write(self._slave, _LAST)  # what comes out of a terminal comes in the order in which it went in
        eventually(lambda: _LAST in self._seen, timeout_s, "what was left in the terminal")
        del self._seen[self._seen.index(_LAST) :]
        return code

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        self._reader.join(30)  # it ends when nobody holds the other end any more
        os.close(self._master)

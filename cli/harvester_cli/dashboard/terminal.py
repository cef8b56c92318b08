"""Controls the terminal while a dashboard uses it: non-blocking writes, single keys, no other output on the screen.

`Keyboard` reads keys without echo or line buffering, and restores the terminal's settings. `KeptOutput` keeps
everything else off the screen and prints it afterwards. Log lines come from Python, from librdkafka's C code and from
shard processes, so replacing `sys.stderr` is not enough: the file descriptors themselves are redirected to a file,
which shards started in the meantime inherit. Standard error that goes to a log file is unchanged.
"""

from __future__ import annotations

import io
import os
import select
import sys
import tempfile
import termios
import time
import tty
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from harvester_cli.dashboard.render import OffScreenOutput
from harvester_cli.dashboard.watching import split

PATIENCE_S = 0.5  # a terminal that accepts nothing for this long is not waited for
_PIPE_BUF_BYTES = 4096  # how much a pipe that polls as writable accepts without waiting (pipe(7))


def opened_anew(fd: int) -> int:
    """A non-blocking descriptor for the same terminal or file, if possible.

    The flag belongs to the open file, which `os.dup` would share with the shell: so a terminal is opened again. If that
    is not allowed (after `su`), and for anything else, it is a plain copy.
    """
    if os.isatty(fd):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.dup(fd)


def send(fd: int, data: bytes) -> bool:
    """Write `data`; False if it was given up because nothing was accepted for PATIENCE_S. Raises OSError."""
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
            continue  # room for less than the next character: try again, until the deadline
        give_up_deadline = time.monotonic() + PATIENCE_S
    return True


class Terminal(io.TextIOBase):
    """A text stream on `fd`, for rich: a frame is collected and written as a whole by `flush`.

    What a stopped terminal does not accept is dropped; the next frame draws every cell again anyway.
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

    def __exit__(self, *_error: object) -> None:
        with suppress(termios.error, OSError):  # it is gone
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def read(self) -> list[str] | None:
        """The next keys, as soon as there are any; None once the terminal is gone or `wake` was called."""
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
        """End a waiting `read`, and every later one."""
        os.write(self._wake_write, b"x")


REPLAY_BYTES = 1 << 16  # what precedes these is left in the file
_STDOUT, _STDERR = 1, 2
_CAPTURE_READ_BYTES = 1 << 16
_LEAVE_SCREEN = b"\x1b[?25h\x1b[?1049l\x1b[0m"  # show the cursor, leave the alternate screen, plain colours


class KeptOutput:
    """A context manager; inside it, `terminal` writes to the original destination of `stream`.

    On leaving, the kept lines are printed and their file is removed. If there are more than REPLAY_BYTES, or nobody is
    left to read them, the file stays, and the last printed line names it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._saved: dict[int, int] = {}  # descriptor -> a copy of the original
        self._held = False
        self._counted_bytes = 0
        self._counted_lines = 0

    def __enter__(self) -> KeptOutput:
        _flush()
        created_fd, self.path = tempfile.mkstemp(prefix="harvester-", suffix=".log")
        os.close(created_fd)
        # Appending: several processes write to it, without overwriting each other's lines.
        self._file_fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._terminal_fd = opened_anew(self._stream.fileno())
        self.terminal = Terminal(self._terminal_fd, self._stream.encoding or "utf-8")
        for fd in (_STDOUT, _STDERR):
            if fd == self._stream.fileno() or os.isatty(fd):
                self._saved[fd] = os.dup(fd)
                os.dup2(self._file_fd, fd)
        self._held = True
        return self

    def __exit__(self, *_error: object) -> None:
        _flush()
        self.release()

    def kept(self) -> OffScreenOutput:
        """The output kept so far."""
        while chunk := os.pread(self._file_fd, _CAPTURE_READ_BYTES, self._counted_bytes):
            self._counted_bytes += len(chunk)
            self._counted_lines += chunk.count(b"\n")
        return OffScreenOutput(lines=self._counted_lines, path=self.path)

    def abandon(self) -> None:
        """Release the screen and the output, using system calls only: safe in a signal handler before `os._exit`."""
        if self._held:
            with suppress(OSError):
                send(self._terminal_fd, _LEAVE_SCREEN)
        self.release()

    def release(self) -> None:
        """Restore the descriptors and print what was kept; a second call does nothing."""
        if not self._held:
            return
        self._held = False
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        out = opened_anew(_STDERR) if _STDERR in self._saved else os.dup(self._terminal_fd)
        text, complete = self._replay()
        with suppress(OSError):
            # If nobody accepts the text, the file is the only copy and stays.
            if send(out, text) and complete:
                Path(self.path).unlink()
        for fd in (out, self._terminal_fd, self._file_fd):
            os.close(fd)

    def _replay(self) -> tuple[bytes, bool]:
        """The text to print, and whether it is complete."""
        start = max(0, os.fstat(self._file_fd).st_size - REPLAY_BYTES)
        text = os.pread(self._file_fd, REPLAY_BYTES, start)
        if text and not text.endswith(b"\n"):
            text += b"\n"
        if not start:
            return text, True
        kept = self.kept()
        note = f"harvester: these were the last of {kept.lines:,} log lines; all of them are in {kept.path}\n"
        return text.partition(b"\n")[2] + note.encode(), False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it is no longer read, or closed
            stream.flush()

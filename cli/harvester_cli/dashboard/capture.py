"""Keeps everything else off the screen while a dashboard has it, and gives it back afterwards.

Log lines come from Python, from librdkafka's C code and from shard processes, so replacing `sys.stderr` would
not do: the file descriptors themselves are pointed at a file. Shards started meanwhile inherit that. Only what
would have gone to a terminal is kept; standard error that goes to a log file already stays as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from harvester_cli.dashboard.render import Kept
from harvester_cli.dashboard.terminal import Terminal, opened_anew, send

REPLAY_BYTES = 1 << 16  # what stands before these is left in the file
_STDOUT, _STDERR = 1, 2
_READ_BYTES = 1 << 16
_LEAVE_SCREEN = b"\x1b[?25h\x1b[?1049l\x1b[0m"  # show the cursor, leave the alternate screen, plain colours


class KeptOutput:
    """A context manager; inside, `terminal` writes to where `stream` wrote before.

    On leaving, the kept lines are printed and their file is removed. Where there are more than REPLAY_BYTES of
    them, or nobody is left to read them, the file stays; the last line printed then names it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._saved: dict[int, int] = {}  # descriptor -> a copy of what it was
        self._held = False
        self._counted_bytes = 0
        self._counted_lines = 0

    def __enter__(self) -> KeptOutput:
        _flush()
        created_fd, self.path = tempfile.mkstemp(prefix="harvester-", suffix=".log")
        os.close(created_fd)
        # Appending: several processes write to it, none over another's lines.
        self._file_fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._terminal_fd = opened_anew(self._stream.fileno())
        self.terminal = Terminal(self._terminal_fd, self._stream.encoding or "utf-8")
        for fd in (_STDOUT, _STDERR):
            if fd == self._stream.fileno() or os.isatty(fd):
                self._saved[fd] = os.dup(fd)
                os.dup2(self._file_fd, fd)
        self._held = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _flush()
        self.release()

    def kept(self) -> Kept:
        """What was kept so far."""
        while chunk := os.pread(self._file_fd, _READ_BYTES, self._counted_bytes):
            self._counted_bytes += len(chunk)
            self._counted_lines += chunk.count(b"\n")
        return Kept(lines=self._counted_lines, path=self.path)

    def abandon(self) -> None:
        """Free the screen and release, by system calls alone: safe in a signal handler before `os._exit`."""
        if self._held:
            with suppress(OSError):
                send(self._terminal_fd, _LEAVE_SCREEN)
        self.release()

    def release(self) -> None:
        """Point the descriptors back and print what was kept; a second call does nothing."""
        if not self._held:
            return
        self._held = False
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        out = opened_anew(_STDERR) if _STDERR in self._saved else os.dup(self._terminal_fd)
        text, complete = self._replay()
        with suppress(OSError):
            # Where nobody takes the text, the file is the only copy and stays.
            if send(out, text) and complete:
                Path(self.path).unlink()
        for fd in (out, self._terminal_fd, self._file_fd):
            os.close(fd)

    def _replay(self) -> tuple[bytes, bool]:
        """What to print, and whether that is everything."""
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
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()

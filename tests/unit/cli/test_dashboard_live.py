"""The live loop on pseudo-terminals that misbehave."""

from __future__ import annotations

import os
import pty
import select
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest
from harvester_cli.dashboard import live

from harvester.status import Status
from tests.support.statuses import leading


class Terminal:
    """The master's end, read all the time, as a terminal window does."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.seen = b""
        self._stop_reading, self._stopping = os.pipe()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._master, self._stop_reading], [], [])
            if self._stop_reading in ready:
                return
            try:
                self.seen += os.read(self._master, 1 << 16)
            except OSError:
                return

    def vanish(self) -> None:
        """As when its window is closed."""
        if self._master >= 0:
            os.write(self._stopping, b"x")
            self._reader.join()
            os.close(self._master)
            self._master = -1

    def everything(self) -> bytes:
        """All that was written; the reader's end of file comes when nobody holds the slave any more."""
        self.stream.close()
        self._reader.join(30)
        assert not self._reader.is_alive(), "a descriptor of the terminal was left open"
        return self.seen

    def close(self) -> None:
        self.vanish()
        self.stream.close()
        os.close(self._stop_reading)
        os.close(self._stopping)


class Run:
    """`live.run` on a thread; `frames(n)` waits until it has asked for n more."""

    def __init__(self, stream: TextIO) -> None:
        self.until = threading.Event()
        self._asked = threading.Semaphore(0)
        self.thread = threading.Thread(
            target=live.run,
            args=(self._status,),
            kwargs={"refresh_per_second": 200, "until": self.until, "stream": stream},
        )
        self.thread.start()

    def _status(self) -> Status:
        self._asked.release()
        return leading()

    def frames(self, count: int) -> None:
        for _ in range(count):
            assert self._asked.acquire(timeout=30)

    def stop(self) -> None:
        self.until.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_it_draws_on_the_alternate_screen_and_leaves_it(terminal: Terminal) -> None:
    run = Run(terminal.stream)
    run.frames(5)
    run.stop()
    seen = terminal.everything()
    assert seen.startswith(b"\x1b[?1049h")
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"billing-1")
    assert seen.rindex(b"\x1b[?1049l") > seen.rindex(b"billing-1")
    assert b"\x1b[2J" not in seen  # clearing between frames is what flickers


def test_the_locale_c_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though Python itself writes UTF-8 in it."""
    monkeypatch.setenv("LC_ALL", "C")
    run = Run(terminal.stream)
    run.frames(3)
    run.stop()
    seen = terminal.everything()
    assert b"billing-1" in seen
    assert b"-- throughput" in seen
    assert seen.isascii(), seen


def test_no_color_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run = Run(terminal.stream)
    run.frames(5)
    run.stop()
    seen = terminal.everything()
    assert b"LEADING" in seen
    assert b"32m" not in seen


def test_a_terminal_that_goes_away_does_not_end_the_run(terminal: Terminal) -> None:
    run = Run(terminal.stream)
    run.frames(3)
    terminal.vanish()
    run.frames(10)
    assert run.thread.is_alive()
    run.stop()


def test_a_stopped_terminal_holds_nothing_up(terminal: Terminal) -> None:
    run = Run(terminal.stream)
    run.frames(3)
    termios.tcflow(terminal.stream.fileno(), termios.TCOOFF)  # as Ctrl-S does
    run.frames(2)
    run.stop()
    termios.tcflow(terminal.stream.fileno(), termios.TCOON)


def test_an_exception_of_the_source_comes_out_with_the_terminal_restored(terminal: Terminal) -> None:
    def status() -> Status:
        raise LookupError("no status")

    with pytest.raises(LookupError, match="no status"):
        live.run(status, until=threading.Event(), stream=terminal.stream)
    assert b"\x1b[?1049l" in terminal.everything()


def test_restoring_without_a_dashboard_is_harmless() -> None:
    live.restore_terminal()

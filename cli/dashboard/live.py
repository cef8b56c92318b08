"""The dashboard on a terminal: draws a Status a few times a second until told to stop.

It has the terminal's alternate screen, so nothing of the scroll-back is overwritten and what stood there comes
back. Each frame begins at the top left and covers every cell, in a single write: nothing flickers, and a
resized terminal is right again with the next frame. All other output is kept meanwhile (capture.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Literal, NoReturn, TextIO, cast

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from harvester.status import Status

from .capture import KeptOutput
from .render import render

_FALLBACK = ConsoleDimensions(80, 24)
_active: list[KeptOutput] = []


def should_show(mode: Literal["auto", "on", "off"], stream: TextIO) -> bool:
    """Whether `stream` gets a dashboard: in mode `auto` when it is a terminal that can move its cursor."""
    if mode != "auto":
        return mode == "on"
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def run(
    get_status: Callable[[], Status],
    *,
    refresh_per_second: float = 4,
    until: threading.Event,
    stream: TextIO | None = None,
) -> None:
    """Draw what `get_status` gives, on `stream` (default: standard output), until `until` is set.

    Enter before the first shard is started and leave after the last has ended, so that none of them writes
    over the screen. A terminal that goes away ends the drawing, not the run, and one that is stopped (Ctrl-S)
    holds nothing up. The terminal is restored and what was kept is printed however this ends, an exception of
    `get_status` and Ctrl-C included.
    """
    with KeptOutput(sys.stdout if stream is None else stream) as output:
        _active.append(output)
        screen = _Screen(output)
        try:
            screen.start()
            while True:
                screen.draw(get_status())
                if until.wait(1 / refresh_per_second):
                    return
        finally:
            screen.stop()
            _active.remove(output)


def restore_terminal() -> None:
    """Give the terminal back at once, for a handler about to leave by `os._exit`; harmless where none is up."""
    for output in _active:
        output.abandon()


class _Screen:
    """rich's Live, on a terminal that may go away at any time (EIO); from then on every method does nothing."""

    def __init__(self, output: KeptOutput) -> None:
        self._output = output
        self._console = _Console(
            file=cast(TextIO, output.terminal), force_terminal=True, force_interactive=True, legacy_windows=False
        )
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._gone = False

    def start(self) -> None:
        self._attempt(self._live.start)

    def draw(self, status: Status) -> None:
        if self._gone:
            return
        # Asked of the terminal itself: COLUMNS and LINES of the environment do not follow a resize.
        width, height = self._console.size = self._terminal_size()
        frame = render(
            status,
            width,
            height,
            kept=self._output.kept(),
            ascii_only=self._console.options.ascii_only,
        )
        self._attempt(lambda: self._live.update(frame, refresh=True))

    def stop(self) -> None:
        self._attempt(self._live.stop)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError:
            self._gone = True

    def _terminal_size(self) -> ConsoleDimensions:
        try:
            width, height = os.get_terminal_size(self._output.terminal.fileno())
        except OSError:
            return _FALLBACK
        return ConsoleDimensions(width, height) if width and height else _FALLBACK


class _Console(Console):
    """rich ends the process when its reader has gone; here the relay goes on."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # noqa: PLE0704 - called while BrokenPipeError is being handled

"""Draws the dashboard on a terminal a few times a second; without a terminal, prints a line every few seconds.

It uses the terminal's alternate screen, so the scroll-back is not overwritten and the previous contents come back. Each
frame begins at the top left and covers every cell, in a single write: nothing flickers, and a resized terminal is right
again with the next frame. All other output is kept in the meantime (`KeptOutput`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, NoReturn, TextIO, cast

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from harvester.status import Backlog, ShardState, Status
from harvester_cli.dashboard.figures import one_line
from harvester_cli.dashboard.lines import in_ascii
from harvester_cli.dashboard.render import OffScreenOutput, render
from harvester_cli.dashboard.terminal import KeptOutput
from harvester_cli.output import discard, is_ascii


def status_line(status: Status) -> str:
    """Time, name and state, then `name=value` pairs in a fixed order; unknown values are omitted. Pure."""
    words = [f"{status.at:%Y-%m-%dT%H:%M:%SZ}", one_line(status.name), status.state.value]
    texts = ("problem", "waits_for")
    pairs = {
        name: json.dumps(value, ensure_ascii=False) if name in texts else value
        for name, value in figures_of(status).items()
    }
    return " ".join(words + [f"{name}={value}" for name, value in pairs.items()])


def figures_of(status: Status) -> dict[str, object]:
    """The values of a status line, without unknown ones."""
    ready = sum(shard.state is ShardState.READY for shard in status.shards)
    pairs: dict[str, object] = {
        "term": status.term,
        "paused_since": None if status.paused_since_at is None else f"{status.paused_since_at:%Y-%m-%dT%H:%M:%SZ}",
        "rate_per_s": round(status.rate_per_s),
        "delivered": status.delivered,
        "queued": status.queued,
        "in_flight": f"{status.in_flight}/{status.max_in_flight}",
        **_backlog(status.backlog),
        "quarantined": status.quarantined,
        "p50_ms": _rounded(status.p50_ms),
        "p99_ms": _rounded(status.p99_ms),
        "shards": f"{ready}/{len(status.shards)}",
        "waits_for": one_line(status.waits_for) if status.waits_for else None,
        "waits_until": None if status.waits_until_at is None else f"{status.waits_until_at:%Y-%m-%dT%H:%M:%SZ}",
        "problem": one_line(status.problem) if status.problem else None,
    }
    return {name: value for name, value in pairs.items() if value is not None}


def run_plain(
    get_status: Callable[[], Status],
    *,
    every_s: float = 10,
    until: threading.Event,
    stream: TextIO | None = None,
    log: logging.LoggerAdapter[logging.Logger] | None = None,
) -> None:
    """Print a status line like `run_lines`; or write it to `log`, if given."""
    out = sys.stdout if stream is None else stream

    def show() -> None:
        status = get_status()
        if log is not None:
            log.info("status: %s", status.state.value, extra=figures_of(status))
        else:
            print(status_line(status), file=out, flush=True)

    run_lines(show, out, every_s=every_s, until=until)


def run_lines(show: Callable[[], None], out: TextIO, *, every_s: float, until: threading.Event) -> None:
    """Call `show`, which writes to `out`, now, every `every_s` seconds and when `until` is set.

    If they cannot be written, because the reader has gone away or the disk is full, only the lines end; the run
    continues.
    """
    while True:
        stopped = until.is_set()
        try:
            show()
        except OSError:
            discard(out)
            until.wait()
            return
        if stopped:
            return
        until.wait(every_s)


def _backlog(backlog: Backlog | None) -> dict[str, object]:
    if backlog is None:
        return {}
    return {
        "backlog": f"{backlog.records}{'+' if backlog.capped else ''}",
        "oldest_s": _rounded(backlog.oldest_age_s),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def one_output() -> bool:
    """Whether printed output and the log go to the same place, as under a service manager; then everything is
    logged.
    """
    if "NOTIFY_SOCKET" in os.environ:
        return True
    try:
        printed, logged = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or missing
        return False
    return os.path.samestat(printed, logged) and not os.isatty(sys.stderr.fileno())


_FALLBACK = ConsoleDimensions(80, 24)
_active: list[KeptOutput] = []


Frame = Callable[[int, int, OffScreenOutput | None], Text]
"""Draws one moment for a terminal of this width and height, and mentions output kept off the screen."""


def should_show(mode: Literal["auto", "on", "off"], stream: TextIO) -> bool:
    """Whether `stream` gets a dashboard: in mode `auto` if it is a terminal that can move its cursor."""
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
    """`show` the dashboard of the status from `get_status`."""
    show(lambda: partial(render, get_status()), refresh_per_second=refresh_per_second, until=until, stream=stream)


def show(
    get_frame: Callable[[], Frame],
    *,
    refresh_per_second: float = 4,
    until: threading.Event,
    stream: TextIO | None = None,
    rest: Callable[[float], bool] | None = None,
) -> None:
    """Draw the frames from `get_frame` on `stream` (default: standard output), until `until` is set.

    Enter before the first shard is started and leave after the last has ended, so that none of them writes over the
    screen. A terminal that goes away ends the drawing, not the run, and a stopped one (Ctrl-S) holds nothing up.
    However this ends, including by an exception of `get_frame` or Ctrl-C, the terminal is restored and kept output is
    printed. `rest` waits between two frames, for at most the given seconds, and returns whether that was the last one;
    it may return sooner if there is something to show.
    """
    rest = until.wait if rest is None else rest
    with KeptOutput(sys.stdout if stream is None else stream) as output:
        _active.append(output)
        screen = _Screen(output)
        try:
            screen.start()
            while True:
                screen.draw(get_frame())
                if rest(1 / refresh_per_second):
                    return
        finally:
            screen.stop()
            _active.remove(output)


def restore_terminal() -> None:
    """Restore the terminal at once, for a handler about to leave by `os._exit`; harmless if there is none."""
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

    def draw(self, frame: Frame) -> None:
        if self._gone:
            return
        # Asks the terminal itself: COLUMNS and LINES of the environment do not follow a resize.
        width, height = self._console.size = self._terminal_size()
        drawn = frame(width, height, self._output.kept())
        drawn = in_ascii(drawn) if self._console.options.ascii_only or is_ascii() else drawn
        self._attempt(lambda: self._live.update(drawn, refresh=True))

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
    """rich ends the process when its reader is gone; here the relay continues."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # noqa: PLE0704 - called while BrokenPipeError is being handled

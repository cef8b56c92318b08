"""Runs `harvester watch` on a terminal: the screen, the keys, and the requests caused by keys."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harvester.control.client import ANSWERS_S, Connection, Feeds
from harvester.control.protocol import ControlError, Glimpse
from harvester_cli.dashboard import live
from harvester_cli.dashboard.lines import OneKey
from harvester_cli.dashboard.terminal import Keyboard
from harvester_cli.dashboard.watching import Ask, Quit, View, chosen, press, screen
from harvester_cli.signals import aside

_EVERY_S = 0.25
_REFRESH_PER_SECOND = 4.0
_SCALES_S = 30.0
_KEY_EVERY_S = 1.0
_SAID_S = 5.0


def watch_live(find: Callable[[], Sequence[Path]], key: str | None = None) -> None:
    """Draw until `q`, Ctrl-C or a signal; initially one record key, if given."""
    watch = _Watch(find, View() if key is None else View(detail=OneKey(key)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, watch.interrupted)
    with ExitStack() as stack:
        stack.callback(watch.close)
        threading.Thread(target=watch.look, name="key", daemon=True).start()
        if sys.stdin.isatty():
            keyboard = stack.enter_context(Keyboard(sys.stdin.fileno()))
            reader = threading.Thread(target=watch.hear, args=(keyboard,), name="keys", daemon=True)
            reader.start()
            stack.callback(reader.join, 5.0)
            stack.callback(keyboard.wake)
        live.show(watch.frame, refresh_per_second=_REFRESH_PER_SECOND, until=watch.ended, rest=watch.rest)


class _Watch:
    def __init__(self, find: Callable[[], Sequence[Path]], view: View) -> None:
        self.ended = threading.Event()
        self._news = threading.Event()
        self._feeds = Feeds(find, _EVERY_S, self._news.set)
        self._seen: list[Glimpse] = []
        self._view = view
        self._looks = threading.Event()  # asks for the key's status ahead of time
        self._lock = threading.Lock()
        self._has_keys = False
        self._asking: threading.Thread | None = None
        self._said_until = 0.0

    def frame(self) -> live.Frame:
        """The next frame."""
        seen = self._feeds.latest()
        with self._lock:
            self._seen = seen
            if time.monotonic() >= self._said_until and not self._is_asking():
                self._view = replace(self._view, message="")
            view, keys = self._view, self._has_keys
        return lambda width, height, kept: screen(view, seen, width, height, keys=keys, kept=kept)

    def rest(self, at_most_s: float) -> bool:
        """Wait until there is something new to show; returns whether the watch has ended."""
        self._news.wait(at_most_s)
        self._news.clear()
        return self.ended.is_set()

    def interrupted(self, _number: int, _frame: object) -> None:
        """End it on a signal."""
        aside(self.end)

    def end(self) -> None:
        """Draw no further frame."""
        self.ended.set()
        self._news.set()
        self._looks.set()

    def close(self) -> None:
        """Stop following."""
        self._feeds.stop()

    def hear(self, keyboard: Keyboard) -> None:
        """The thread that reads keys."""
        self._has_keys = True
        while (keys := keyboard.read()) is not None:
            for key in keys:
                self._press(key)
            self._news.set()
        self.end()  # the terminal is gone, unless the watch has already ended

    def _press(self, key: str) -> None:
        with self._lock:
            self._view, action = press(self._view, key, self._seen)
            self._said_until = time.monotonic() + _SAID_S
            if isinstance(self._view.detail, OneKey):
                self._looks.set()
        if isinstance(action, Quit):
            self.end()
        elif isinstance(action, Ask):
            self._begin(action)

    def look(self) -> None:
        """The thread that asks about the displayed key, if any."""
        while not self.ended.is_set():
            with self._lock:
                one, detail = chosen(self._view, self._seen), self._view.detail
            if one is not None and isinstance(detail, OneKey):
                self._show(one.path, self._ask_key(one.path, detail))
            self._looks.wait(_KEY_EVERY_S)
            self._looks.clear()

    def _ask_key(self, socket: Path, detail: OneKey) -> OneKey:
        try:
            with Connection(socket) as connection:
                return OneKey(detail.key, connection.key(detail.key))
        except ControlError as error:
            return replace(detail, trouble=error.message)

    def _show(self, socket: Path, told: OneKey) -> None:
        """Show it, unless something else is displayed by now."""
        with self._lock:
            one, detail = chosen(self._view, self._seen), self._view.detail
            if one is not None and one.path == socket and isinstance(detail, OneKey) and detail.key == told.key:
                self._view = replace(self._view, detail=told)
        self._news.set()

    def _begin(self, ask: Ask) -> None:
        """One request at a time: the meaning of the next key depends on the result."""
        if self._is_asking():
            self._say("the last key is still being processed")
            return
        self._say(f"{ask.words} …")
        self._asking = threading.Thread(target=self._ask, args=(ask,), name="ask", daemon=True)
        self._asking.start()

    def _ask(self, ask: Ask) -> None:
        try:
            with Connection(ask.socket) as connection:
                answers_s = _SCALES_S if ask.command == "scale" else ANSWERS_S
                connection.ask(ask.command, answers_s=answers_s, **ask.arguments)
        except ControlError as error:
            self._say(f"{ask.words}: {error.message}")
        else:
            self._say(f"{ask.words}: done")

    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _say(self, text: str) -> None:
        """The result of a key; shown for a while only, since the state it describes changes."""
        with self._lock:
            self._view = replace(self._view, message=text)
            self._said_until = time.monotonic() + _SAID_S
        self._news.set()

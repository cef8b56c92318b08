"""`harvester watch`: the dashboard of harvesters on this machine, attached to their control sockets.

`harvester watch` on a terminal: the screen, the keys, and the requests that keys make.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from harvester.control.client import ANSWERS_S, Connection, Feeds
from harvester.control.protocol import ControlError
from harvester_cli.dashboard import live
from harvester_cli.dashboard.figures import OneKey
from harvester_cli.dashboard.render import Kept
from harvester_cli.dashboard.terminal import Keyboard
from harvester_cli.dashboard.watching import Ask, Quit, Seen, View, chosen, press, screen

if TYPE_CHECKING:
    from harvester.status import KeyStatus, Status

_EVERY_S = 0.25
_REFRESH_PER_SECOND = 4.0
_SCALES_S = 30.0
_KEY_EVERY_S = 1.0


def watch_live(find: Callable[[], Sequence[Path]], key: str | None = None) -> None:
    """Draw until `q`, Ctrl-C or a signal; at first one record key, if given."""
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
        self._seen: list[Seen] = []
        self._view = view
        self._looks = threading.Event()  # for a key, before its time
        self._lock = threading.Lock()
        self._has_keys = False
        self._asking: threading.Thread | None = None

    def frame(self) -> live.Frame:
        """What is to be seen now."""
        seen = [Seen(str(glimpse.path), glimpse.status, glimpse.trouble) for glimpse in self._feeds.latest()]
        with self._lock:
            self._seen = seen
            view, keys = self._view, self._has_keys

        def draw(width: int, height: int, /, *, kept: Kept | None, ascii_only: bool) -> Text:
            return screen(view, seen, width, height, keys=keys, kept=kept, ascii_only=ascii_only)

        return draw

    def rest(self, at_most_s: float) -> bool:
        """Until there is something to see; whether it has ended."""
        self._news.wait(at_most_s)
        self._news.clear()
        return self.ended.is_set()

    def interrupted(self, _number: int, _frame: object) -> None:
        """A signal: the thread that it came to may hold the lock that `end` needs."""
        threading.Thread(target=self.end, daemon=True).start()

    def end(self) -> None:
        """No further frame."""
        self.ended.set()
        self._news.set()
        self._looks.set()

    def close(self) -> None:
        """Ask nobody any more."""
        self._feeds.stop()

    def hear(self, keyboard: Keyboard) -> None:
        """The thread that reads keys."""
        self._has_keys = True
        while (keys := keyboard.read()) is not None:
            for key in keys:
                self._press(key)
            self._news.set()
        self.end()  # the terminal has gone, if it has not ended already

    def _press(self, key: str) -> None:
        with self._lock:
            self._view, action = press(self._view, key, self._seen)
            if isinstance(self._view.detail, OneKey):
                self._looks.set()
        if isinstance(action, Quit):
            self.end()
        elif isinstance(action, Ask):
            self._begin(action)

    def look(self) -> None:
        """The thread that asks about the key that is looked at, while one is."""
        while not self.ended.is_set():
            with self._lock:
                one, detail = chosen(self._view, self._seen), self._view.detail
            if one is not None and isinstance(detail, OneKey):
                self._show(one.socket, self._ask_key(one.socket, detail))
            self._looks.wait(_KEY_EVERY_S)
            self._looks.clear()

    def _ask_key(self, socket: str, detail: OneKey) -> OneKey:
        try:
            with Connection(Path(socket)) as connection:
                return OneKey(detail.key, connection.key(detail.key))
        except ControlError as error:
            return replace(detail, trouble=error.message)

    def _show(self, socket: str, told: OneKey) -> None:
        """Unless something else is looked at by now."""
        with self._lock:
            one, detail = chosen(self._view, self._seen), self._view.detail
            if one is not None and one.socket == socket and isinstance(detail, OneKey) and detail.key == told.key:
                self._view = replace(self._view, detail=told)
        self._news.set()

    def _begin(self, ask: Ask) -> None:
        """One request at a time: what the next key means depends on what became of it."""
        if self._asking is not None and self._asking.is_alive():
            self._say("the last key is still being seen to")
            return
        self._say(f"{ask.words} …")
        self._asking = threading.Thread(target=self._ask, args=(ask,), name="ask", daemon=True)
        self._asking.start()

    def _ask(self, ask: Ask) -> None:
        try:
            with Connection(Path(ask.socket)) as connection:
                answers_s = _SCALES_S if ask.command == "scale" else ANSWERS_S
                connection.ask(ask.command, answers_s=answers_s, **ask.arguments)
        except ControlError as error:
            self._say(f"{ask.words}: {error.message}")
        else:
            self._say(f"{ask.words}: done")

    def _say(self, text: str) -> None:
        with self._lock:
            self._view = replace(self._view, message=text)
        self._news.set()


_LINES_EVERY_S = 10.0
_JSON_EVERY_S = 1.0

NamesOption = Annotated[
    list[str] | None,
    typer.Option("--name", help="The harvester of this name; may be given several times.", show_default=False),
]
SocketsOption = Annotated[
    list[Path] | None,
    typer.Option("--socket", help="The harvester on this Unix socket; may be given several times.", show_default=False),
]


def watch(
    name: NamesOption = None,
    socket: SocketsOption = None,
    key: Annotated[
        str | None,
        typer.Option("--key", help="Show what is known of the records of this key.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how they fare now, and end.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON, a line for each harvester: once, or every second.")
    ] = False,
) -> None:
    """Show how running harvesters fare, all that are found or those that are named; on a terminal with keys.

    Exits with 69 when none runs.
    """
    from harvester_cli.dashboard import live

    meant = _Meant(name or [], socket or [])
    if once:
        for path in meant.find():
            _print(path, _ask(path, key), as_json=json_)
    elif not json_ and live.should_show("auto", sys.stdout):
        # moved

        meant.find()  # says so where none runs
        watch_live(meant.find_any, key)
    else:
        _follow(meant.find(), key, as_json=json_)


class _Meant:
    """Which harvesters are meant: those that were named, else all that run."""

    def __init__(self, names: list[str], sockets: list[Path]) -> None:
        self._names, self._sockets = names, sockets

    def find(self) -> list[Path]:
        """Their sockets, at least one; raises NoHarvester."""
        from harvester.control import client
        from harvester.control.protocol import SeveralHarvesters

        named = [*self._sockets, *(client.find(name, None) for name in self._names)]
        if named:
            return list(dict.fromkeys(named))
        try:
            return [client.find(None, None)]
        except SeveralHarvesters:
            return client.running()

    def find_any(self) -> list[Path]:
        """The same, none included."""
        from harvester.control.protocol import ControlError

        try:
            return self.find()
        except ControlError:
            return []


def _ask(path: Path, key: str | None) -> Status | KeyStatus:
    from harvester.control.client import Connection

    with Connection(path) as connection:
        return connection.status() if key is None else connection.key(key)


def _print(path: Path, told: Status | KeyStatus, *, as_json: bool) -> None:
    import json

    from harvester.control.protocol import key_to_json, to_json
    from harvester.status import KeyStatus

    if isinstance(told, KeyStatus):
        from harvester_cli.dashboard.figures import key_words, one_line

        plain = [f"key {one_line(told.key)}", *(f"  {one_line(line)}" for line in key_words(told))]
        values = key_to_json(told)
    else:
        from harvester_cli.dashboard.live import status_line

        plain, values = [status_line(told)], to_json(told)
    typer.echo(json.dumps({"socket": str(path), **values}) if as_json else "\n".join(plain))


def _follow(paths: list[Path], key: str | None, *, as_json: bool) -> None:
    """Lines now and again, until the last of them has ended."""
    import time

    from harvester.control.client import Connection
    from harvester.control.protocol import NoHarvester

    connections = {path: Connection(path) for path in paths}
    while connections:
        for path, connection in list(connections.items()):
            try:
                _print(path, connection.status() if key is None else connection.key(key), as_json=as_json)
            except NoHarvester as error:
                typer.echo(f"harvester: {error.message}", err=True)
                connections.pop(path).close()
        if connections:
            time.sleep(_JSON_EVERY_S if as_json else _LINES_EVERY_S)

"""The latest snapshots of running harvesters; a thread asks each of them, so that nobody waits for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harvester.control.client import Connection
from harvester.control.errors import ControlError
from harvester.status import Status

_ANSWERS_S = 3.0
_AGAIN_S = 0.5  # after it could not be asked
_LOOK_S = 2.0  # how often to look for others
_FORGOTTEN_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What is known of one: `status` is the last one, `trouble` why there is none now, `at` (monotonic) since when."""

    path: Path
    status: Status | None = None
    trouble: str | None = None
    at: float = 0.0


class Feed(threading.Thread):
    """Asks one harvester again and again."""

    def __init__(self, path: Path, every_s: float, news: Callable[[], None]) -> None:
        super().__init__(name=f"feed {path.name}", daemon=True)
        self._every_s, self._news = every_s, news
        self._ended = threading.Event()
        self.latest = Glimpse(path)

    def run(self) -> None:
        """The thread."""
        connection: Connection | None = None
        while not self._ended.is_set():
            before = self.latest
            try:
                if connection is None:
                    connection = Connection(before.path, _ANSWERS_S)
                self.latest = Glimpse(before.path, connection.status(_ANSWERS_S), None, time.monotonic())
                wait_s = self._every_s
            except ControlError as error:
                if connection is not None:
                    connection.close()
                connection, wait_s = None, _AGAIN_S
                since = time.monotonic() if before.trouble is None else before.at
                self.latest = Glimpse(before.path, before.status, error.message, since)
            self._news()
            self._ended.wait(wait_s)
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        """End it; it is not waited for."""
        self._ended.set()


class Feeds:
    """All harvesters that `find` names, looked for again now and then. One thread only, but for `news`."""

    def __init__(self, find: Callable[[], Sequence[Path]], every_s: float, news: Callable[[], None]) -> None:
        """`news` is called from any thread when there is something to see."""
        self._find, self._every_s, self._news = find, every_s, news
        self._feeds: dict[Path, Feed] = {}
        self._looked_at = -_LOOK_S

    def latest(self) -> list[Glimpse]:
        """What is known of each, by path."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            for path in self._find():
                if path not in self._feeds:
                    self._feeds[path] = Feed(path, self._every_s, self._news)
                    self._feeds[path].start()
        self._forget(now)
        return [self._feeds[path].latest for path in sorted(self._feeds)]

    def stop(self) -> None:
        """End all of them."""
        for feed in self._feeds.values():
            feed.stop()

    def _forget(self, now: float) -> None:
        """Those that have been gone for a while, as long as another one is there."""
        known = [feed.latest for feed in self._feeds.values()]
        gone = [glimpse for glimpse in known if glimpse.trouble is not None and now - glimpse.at > _FORGOTTEN_AFTER_S]
        if len(gone) < len(known):
            for glimpse in gone:
                if not glimpse.path.exists():
                    self._feeds.pop(glimpse.path).stop()

"""What the fields of all campaigns have in common: processes that may end, links and servers that may be struck."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from harvester import stack
from harvester.stack.state import SERVERS
from tests.support.proxy import Proxy

STARTS_WITHIN_S = 120.0


class Process(Protocol):
    """One life of a process, in a place of its own."""

    name: str
    slot: int
    asked: bool  # we ended it

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""

    @property
    def last_words(self) -> str:
        """The end of its log."""

    def note_end(self) -> bool:
        """It has ended by itself, as of now; false if that was known."""


P = TypeVar("P", bound=Process)


class Field(ABC, Generic[P]):
    """Servers and processes. Use it in a `with`: everything is taken down at the end, but for the directory.

    `accidents` collects what must not happen at all.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[P] = []
        self.accidents: list[str] = []
        self.ending = False

    @abstractmethod
    def __enter__(self) -> object: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def start(self, slot: int) -> P:
        """A new process in this place."""

    def bury(self) -> None:
        """Note processes that ended by themselves, and start others in their places."""
        for process in list(self.processes):
            if not process.asked and process.exit_code is not None and process.note_end():
                self.accidents.append(
                    f"{process.name} ended by itself with code {process.exit_code}: {process.last_words}"
                )
                if not self.ending:
                    self.start(process.slot)


class Striker(ABC):
    """Performs faults. Each call may run in a thread of its own; a server or a link is struck by one at a time."""

    def __init__(self) -> None:
        self._servers = {name: threading.Lock() for name in SERVERS}
        self._links: defaultdict[Proxy, threading.Lock] = defaultdict(threading.Lock)

    @abstractmethod
    def strike(self, kind: str, hold_s: float, rng: random.Random) -> str | None:
        """Do it, hold it, heal it; returns what was struck, None if there was nothing to strike."""

    def restart(self, place: Path, name: stack.ServerName, hold_s: float, *, kill: bool) -> str | None:
        """Stop or kill a server of the stack, and start it again."""
        with alone(self._servers[name]) as free:
            if not free:
                return None
            stack.stop(place, name, kill=kill)
            time.sleep(hold_s)
            stack.start(place, name, timeout_s=STARTS_WITHIN_S)
            return name

    def disturb(self, link: Proxy, what: str, hold_s: float, rng: random.Random) -> bool:
        """Cut a link, freeze it, slow it down, leave it half open, or name no broker; false if another fault has it."""
        begin: Mapping[str, Callable[[], None]] = {
            "cut": lambda: link.cut(reset=rng.random() < 0.5),
            "half-open": link.deafen,
            "freeze": link.freeze,
            "slow": lambda: link.delay(0.3, 0.3),
            "nameless": link.name_no_broker,
        }
        end: Mapping[str, Callable[[], None]] = {
            "cut": link.open,
            "half-open": link.hear,
            "freeze": link.thaw,
            "slow": link.delay,
            "nameless": link.name_brokers,
        }
        with alone(self._links[link]) as free:
            if free:
                begin[what]()
                time.sleep(hold_s)
                end[what]()
            return free


@contextmanager
def alone(lock: threading.Lock) -> Iterator[bool]:
    """Hold the lock if it is free; yields whether it was."""
    free = lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            lock.release()

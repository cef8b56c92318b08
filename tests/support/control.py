"""Control sockets for tests: a directory of their own, and a harvester that is none."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harvester.control.server import ControlServer
from harvester.control.sockets import listen
from harvester.errors import HarvesterError
from harvester.status import KeyStatus, State, Status

from .statuses import AT, KEY, leading


@contextmanager
def short_folder() -> Iterator[Path]:
    """A directory of ours with a short path: that of a Unix socket may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/tmp") as folder:
        yield Path(folder)


def at(folder: Path) -> Mapping[str, str]:
    """The environment of processes that meet in this directory alone, as those of a service do."""
    return {"RUNTIME_DIRECTORY": str(folder)}


class Dummy:
    """Takes requests as a harvester does; `gate` holds up `scale` while it is clear."""

    def __init__(self) -> None:
        self.now: Status = replace(leading(4), in_flight=3)
        self.asked: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.scaling = threading.Event()
        self.refuses = False
        self.stopped = threading.Event()

    def status(self) -> Status:
        return self.now

    def key(self, key: str) -> KeyStatus:
        self.asked.append(("key", key))
        if self.refuses:
            raise HarvesterError("the relay does not answer", hint="see its log")
        return replace(KEY, key=key)

    def pause(self) -> bool:
        self.asked.append("pause")
        changed = self.now.paused_since_at is None
        self.now = replace(self.now, state=State.PAUSED, paused_since_at=AT)
        return changed

    def resume(self) -> bool:
        self.asked.append("resume")
        changed = self.now.paused_since_at is not None
        self.now = replace(self.now, state=State.LEADING, paused_since_at=None)
        return changed

    def remark(self) -> None:
        self.asked.append("remark")
        if self.refuses:
            raise HarvesterError("it is standby: only a leader marks", hint="ask the leader")

    def scale(self, shards: int, within_s: float) -> bool:
        self.asked.append(("scale", shards, within_s))
        self.scaling.set()
        assert self.gate.wait(60)
        if not self.refuses:
            self.now = replace(self.now, shards=leading(shards).shards)
        return not self.refuses

    def set_log_level(self, level: str) -> None:
        self.asked.append(("loglevel", level))
        if self.refuses:
            raise LookupError("a bug")

    def stop_soon(self) -> None:
        self.asked.append("stop")
        self.stopped.set()


@contextmanager
def serving(path: Path, dummy: Dummy | None = None, own_uid: int | None = None) -> Iterator[ControlServer]:
    """A server on this socket."""
    log = logging.getLogger("test.control")
    server = ControlServer(listen(path, os.geteuid()), dummy or Dummy(), log, own_uid)
    server.start()
    try:
        yield server
    finally:
        server.stop()

"""Prints the way of `harvester pause` through the code, from the command line to the relay and back.

The functions and the Unix socket are the real ones. The harvester has a fake group and does not lead, and this script
stands in for the thread of its supervisor, so that nothing but the command's own way is recorded.

What counts as a file, an object and a call across files is told by `scripts/walk --help`.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from harvester_cli.main import app

from harvester import FakeGroup, Harvester
from harvester.announcer import Announcer
from harvester.config import Config
from harvester.control.server import ControlServer
from harvester.wiring import assemble
from scripts.walking import Host, Way, show

STEPS = {
    "command": "the command asks over the socket, and prints the answer",
    "harvester-control": "the control server hears it, asks the relay, and answers",
    "MainThread": "the supervisor does it",
}


class WayOfThreads(Way):
    """Each thread's calls are a step of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [(name, []) for name in STEPS.values()]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        for thread, step in zip(STEPS, self.steps, strict=True):
            if threading.current_thread().name.startswith(thread):
                own = Way()
                own.steps, own.objects, own._kept, own._seen = [step], self.objects, self._kept, self._seen
                Way._profile(own, frame, event, argument)


def record(folder: Path) -> Way:
    """The way of `pause` when nothing leads."""
    config = Config(control={"socket": str(folder / "walk.sock")}, limits={"shards": 1})  # type: ignore[arg-type]
    log, group = logging.getLogger("walk"), FakeGroup()
    harvester = Harvester(config, group=group, logger=log)
    harvester._life.parts = assemble(
        config,
        group=group,
        announcer=Announcer(None, log),
        recorder=harvester._recorder,
        host=Host(),
        log_of=lambda _shard: log,
    )
    supervisor = harvester._life.parts.supervisor
    server = ControlServer.of(config, harvester, log)
    assert server is not None
    server.start()
    way = WayOfThreads()
    command = threading.Thread(
        target=lambda: app(["pause", "--socket", str(folder / "walk.sock")], standalone_mode=False), name="command"
    )
    threading.setprofile(way._profile)  # the command's thread, and the one in which the server hears it
    command.start()
    while command.is_alive():
        if supervisor._inbox:
            sys.setprofile(way._profile)
            supervisor._inbox.popleft()(0.0)
            sys.setprofile(None)
        command.join(0.01)
    threading.setprofile(None)  # type: ignore[arg-type]
    server.stop()
    assert supervisor.machine.paused
    return way


def main() -> int:
    """The command."""
    with tempfile.TemporaryDirectory(prefix="harvester-walk-") as folder:
        return show("command", __doc__ or "", lambda: record(Path(folder)))


if __name__ == "__main__":
    sys.exit(main())

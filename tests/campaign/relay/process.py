"""A harvester of a campaign, from its start to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import SIGCONT, SIGSTOP

from harvester.stack.processes import ProcessId, identify, send
from tests.support.cli import RunningCli
from tests.support.harvesting import family_of, shards_of

from . import logs
from .setup import Setup


@dataclass
class Process:
    """A harvester's process. `asked`: we ended it. `ended`: when it was killed, told to stop, found gone."""

    name: str
    slot: int
    running: RunningCli
    identity: ProcessId
    setup: Setup
    began: float
    asked: bool = False
    ended: float | None = None
    frozen: list[tuple[float, float]] = field(default_factory=list)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.running.process.poll()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.exit_code is None

    @property
    def last_words(self) -> str:
        """The error that it said last."""
        return logs.last_error(self.log())

    def note_end(self) -> bool:
        """It has ended by itself, as of now; false if that was known."""
        known, self.ended = self.ended is not None, self.ended or time.time()
        return not known

    def shards(self) -> list[ProcessId]:
        """Its shards, now."""
        found = (identify(pid) for pid in shards_of(self.identity.pid))
        return [each for each in found if each is not None]

    def family(self) -> list[ProcessId]:
        """All of its processes that were forked, now: its shards, and its elector."""
        found = (identify(pid) for pid in family_of(self.identity.pid)[1:])
        return [each for each in found if each is not None]

    def log(self) -> list[str]:
        """What it has said."""
        return list(self.running.stderr)

    @contextmanager
    def standing_still(self, members: Sequence[ProcessId]) -> Iterator[None]:
        """These of its processes are stopped for the length of the block; noted if the supervisor is among them."""
        began = time.time()
        for each in members:
            send(each, SIGSTOP)
        try:
            yield
        finally:
            for each in reversed(members):
                send(each, SIGCONT)
            if self.identity in members:
                self.frozen.append((began, time.time()))

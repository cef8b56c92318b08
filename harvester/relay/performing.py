"""Performing what the relay machine decides: on the shards, the mark loop, the trust of this process, the group.

Core thread only. What takes a while, a drain or another number of shards, leaves an event with it that is set when that
is over, however it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from harvester.announcer import Announcer
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay import commands as c
from harvester.relay import leadership
from harvester.relay.fleet import Fleet
from harvester.relay.machine import Phase, Relay
from harvester.relay.marking import MarkLoop
from harvester.relay.shared import TrustCell
from harvester.telemetry.latency import Histogram

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where the supervisor reports to. All are quick."""

    announcer: Announcer
    settled: Callable[[int, float], None]  # records, monotonic time
    latencies: Callable[[Histogram, float], None]
    emptied: Callable[[], None]
    failed: Callable[[BaseException], None]
    trouble: Callable[[str, str | None], None]  # of what, what
    log: Callable[[int | None], Log]  # by shard
    note: Callable[[str], None]  # a line for the last events


class Performer:
    """See the module's text."""

    def __init__(self, relay: Relay, trust: TrustCell, fleet: Fleet, group: Group, outlets: Outlets) -> None:
        self.relay, self.trust = relay, trust
        self.marker: MarkLoop | None = None
        self.renounced = False  # never lead again
        self._fleet, self._group, self._out = fleet, group, outlets
        self._log = outlets.log(None)
        self._drained: list[threading.Event] = []
        self._wanted = False  # to lead again when the drain is over
        self._scaling: tuple[threading.Event, list[bool]] | None = None

    def perform(self, commands: Sequence[c.Command]) -> None:
        """All of them, in order."""
        for command in commands:
            match command:
                case c.Send(shard, frame):
                    self._fleet.send(shard, frame)
                    if self._fleet.congested(shard):
                        self.relay.congested(shard)
                    elif self.relay.is_congested(shard):
                        self.perform(self.relay.uncongested(shard, time.monotonic()))
                case c.Mark() | c.Fetch() | c.Look() | c.SaveBookmark() | c.TakeTerm() | c.Release():
                    if self.marker is not None:
                        self.marker.perform(command)
                case c.OpenTrust():
                    self.trust.open()
                case c.CloseTrust():
                    self.trust.close()
                case c.Kill(shard, reason, own_fault):
                    self._out.log(shard).error("is killed: %s", reason)
                    self._fleet.kill(shard, asked=not own_fault)
                case c.Resize(shards):
                    self._fleet.resize(shards)
                    self._say(logging.INFO, f"changed to {shards} shards")
                    if self._scaling is not None:
                        self._scaling[1][0] = True
                case c.Announce(event):
                    self._announce(event)
                case c.Drained():
                    drained, self._drained = self._drained, []
                    for done in drained:
                        done.set()
                    if self._wanted:
                        self.acquire(time.monotonic())
                case c.Emptied():
                    self._out.emptied()

    def _announce(self, event: Event) -> None:
        match event:
            case LeaderAcquired(leader_id, term):
                self._group.lead(leader_id, term)
                self._say(logging.INFO, f"leads as {leader_id} under term {term}")
            case LeaderRefreshed(leader_id, term, reason):
                self._say(logging.WARNING, f"marks again as {leader_id} under term {term}: {reason}")
            case LeaderFenced(reason):
                self._say(logging.WARNING, f"fenced: {reason}")
        self._out.announcer.announce(event)

    def _say(self, level: int, text: str) -> None:
        self._log.log(level, "%s", text)
        self._out.note(text)

    # -- leadership

    def acquire(self, now: float) -> None:
        """The group made us leader."""
        if self.renounced:
            return
        self._wanted = self.relay.phase is Phase.DRAINING  # then it is done when the drain is
        self.perform(leadership.acquire(self.relay, now))

    def fence(self, reason: str, now: float) -> None:
        """The group no longer vouches for us."""
        self._wanted = False
        self.perform(leadership.fence(self.relay, reason, now))

    def drain(self, done: threading.Event, now: float) -> None:
        """Begin to finish what is on the wire."""
        self._wanted = False  # whatever a loan of the term was to be followed by
        self._drained.append(done)
        self.perform(leadership.drain(self.relay, now))

    def lend(self, holder: UUID, by: str, now: float) -> None:
        """Give up the term in good order, and take it again, which waits until it is free (P32)."""
        relay = self.relay
        if holder != relay.tenure.holder or relay.phase not in (Phase.LEADING, Phase.REMARKING):
            return
        self._wanted = True
        self.perform(leadership.drain(relay, now, trusted=True))
        self._announce(LeaderFenced(f"the term is lent to {by}"))

    def lose_term(self, now: float) -> None:
        """The database says that the term is another's."""
        trusted = self.trust.trusted
        self.perform(leadership.term_lost(self.relay, trusted, now))
        if not trusted:  # only a new election, on fresh proofs, may try again
            self._group.step_down("the term could not be kept")

    def change_server(self, reason: str, now: float) -> None:
        """The database is another one than before (P9)."""
        self._say(logging.ERROR, f"the database is another one than before: {reason}; shards start anew")
        if self.marker is not None:
            self.marker.doubt()
        self.perform(leadership.server_changed(self.relay, f"the database has changed: {reason}", now))

    # -- another number of shards

    def scale(self, shards: int, deadline: float, done: threading.Event, changed: list[bool], now: float) -> None:
        """Begin to change to so many (P17); `changed` becomes true if it comes to that. One change at a time."""
        if self._scaling is not None:
            done.set()
            return
        self._scaling = (done, changed)
        self.perform(self.relay.scale(shards, deadline, now))

    def end_scaling(self) -> None:
        """Once a turn: let whoever asked for the change know that it is over, done or refused."""
        if self._scaling is not None and self.relay.phase is not Phase.SCALING:
            self._scaling[0].set()
            self._scaling = None

    def let_all_go(self) -> None:
        """Nothing is performed any more: nobody is to wait for it."""
        for done in self._drained:
            done.set()
        if self._scaling is not None:
            self._scaling[0].set()

"""Performs what the state machine decides, and tells it what shards and the marker say. The supervisor's thread only.

A frame of a shard (`hear`) and a report of the marker (`heed`) become an event of the state machine, a line of the
log, a trouble or a figure. `Performer` performs the commands that follow: on the shards, the marker, the trust of this
process and the group. What takes a while, a drain or another number of shards, leaves an event that is set when it is
over, however it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from harvester.announcer import Announcer, Log
from harvester.errors import PoisonRecord, WireError
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core import state_machine
from harvester.relay.core.messages import (
    Command,
    DatabaseTrouble,
    Fetched,
    Looked,
    LoopDied,
    Marked,
    Report,
    ServerChanged,
    StatementFailed,
    TermGone,
    TermTaken,
    TermWanted,
)
from harvester.relay.core.state_machine import Phase, Relay
from harvester.relay.ipc import TrustCell
from harvester.relay.marker import MarkLoop
from harvester.relay.shard_pool import Fleet, Slot
from harvester.telemetry.latency import Histogram


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
        self.perform(state_machine.acquire(self.relay, now))

    def fence(self, reason: str, now: float) -> None:
        """The group no longer vouches for us."""
        self._wanted = False
        self.perform(state_machine.fence(self.relay, reason, now))

    def drain(self, done: threading.Event, now: float) -> None:
        """Begin to finish what is on the wire."""
        self._wanted = False  # whatever a loan of the term was to be followed by
        self._drained.append(done)
        self.perform(state_machine.drain(self.relay, now))

    def lend(self, holder: UUID, by: str, now: float) -> None:
        """Give up the term in good order, and take it again, which waits until it is free (P32)."""
        relay = self.relay
        if holder != relay.tenure.holder or relay.phase not in (Phase.LEADING, Phase.REMARKING):
            return
        self._wanted = True
        self.perform(state_machine.drain(relay, now, trusted=True))
        self._announce(LeaderFenced(f"the term is lent to {by}"))

    def lose_term(self, now: float) -> None:
        """The database says that the term is another's."""
        trusted = self.trust.trusted
        self.perform(state_machine.term_lost(self.relay, trusted, now))
        if not trusted:  # only a new election, on fresh proofs, may try again
            self._group.step_down("the term could not be kept")

    def change_server(self, reason: str, now: float) -> None:
        """The database is another one than before (P9)."""
        self._say(logging.ERROR, f"the database is another one than before: {reason}; shards start anew")
        if self.marker is not None:
            self.marker.doubt()
        self.perform(state_machine.server_changed(self.relay, f"the database has changed: {reason}", now))

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


@dataclass(frozen=True, slots=True)
class Tidings:
    """Where news of the shards go besides the machine. All are quick."""

    settled: Callable[[int, float], None]  # records, monotonic time
    latencies: Callable[[Histogram, float], None]
    trouble: Callable[[str, str | None], None]  # of what, what
    failed: Callable[[BaseException], None]
    log: Callable[[int | None], Log]  # by shard
    ready: Callable[[], None]
    session: Callable[[], None]  # a shard has a new database session
    server_changed: Callable[[str, float], None]


def hear(relay: Relay, slot: Slot, index: int, frame: f.Frame, now: float, to: Tidings) -> Sequence[Command]:
    """One frame of one shard; returns what the machine commands. Raises WireError for what no shard says."""
    match frame:
        case f.Settled(ids):
            count, commands = state_machine.settled(relay, index, ids, now)
            slot.settled += count
            to.settled(count, now)
            return commands
        case f.Stats():
            relay.heard(index, now)
            slot.stats = frame
            if frame.latency:
                to.latencies(_latencies(frame.latency), now)
        case f.Remarked(epoch, ids, in_doubt):
            return relay.remarked(index, epoch, ids, now, in_doubt)
        case f.Parked(epoch, record_id, given_back, error, wait_s, attempts, held):
            what = "holds its key" if held else "will be retried"
            to.log(index).warning("record %d failed (attempts %d) and %s: %s", record_id, attempts, what, error)
            return state_machine.parked(relay, index, epoch, record_id, given_back, wait_s, held, now)
        case f.InDoubt(record_id):
            state_machine.in_doubt(relay, index, record_id, now)
        case f.Refused(epoch, ids):
            return state_machine.refused(relay, index, epoch, ids, now)
        case f.Dropped(ids):
            return state_machine.dropped(relay, index, ids, now)
        case f.FateUnknown(epoch, ids, reason):
            to.log(index).error("the fate of records %s is unknown: %s", list(ids), reason)
            slot.suspected += len(ids)
            return state_machine.fate_unknown(relay, index, epoch, ids, f"fate unknown: {reason}", now)
        case f.QueueTimedOut(epoch, record_id, waited_s):
            return state_machine.queue_timed_out(relay, index, epoch, record_id, waited_s, now)
        case f.Ready(pid):
            slot.ready = True
            to.ready()
            to.log(index).debug("ready (pid %d)", pid)
            return relay.shard_ready(index, now)
        case f.Session(pid, started):
            slot.session = (pid, started)
            to.session()
        case f.ServerChanged(reason):
            to.server_changed(reason, now)
        case f.Quarantined(record_id, error):
            slot.quarantined += 1
            to.log(index).error("record %d went to quarantine: %s", record_id, error)
        case f.Poisoned(record_id, error):
            to.failed(PoisonRecord(record_id, error))
        case f.Log(level, text):
            to.log(index).log(level, "%s", text)
        case f.Trouble(text):
            to.trouble(f"shard {index}", text)
        case _:
            raise WireError(f"shard {index} sent {type(frame).__name__}, which only a supervisor sends")
    return ()


def _latencies(text: str) -> Histogram:
    try:
        return Histogram.unpack(bytes.fromhex(text))
    except ValueError as error:
        raise WireError("a shard's latencies are no histogram") from error


def heed(performer: Performer, report: Report, now: float, to: Outlets) -> None:
    """One report, with all that follows from it."""
    relay, perform = performer.relay, performer.perform
    match report:
        case Marked(number, rows, floor, bookmark):
            perform(state_machine.marked(relay, number, rows, now, floor, bookmark))
        case Fetched(number, rows):
            perform(state_machine.fetched(relay, number, rows, now))
        case Looked(number, ids):
            missed, commands = state_machine.looked(relay, number, ids, now)
            if missed:
                to.log(None).warning("a look at the whole table found %d rows that marks had not shown", missed)
            perform(commands)
        case StatementFailed(number, error):
            perform(state_machine.statement_failed(relay, number, error, now))
        case ServerChanged(reason):
            performer.change_server(reason, now)
        case TermTaken(holder, term, server, went_back, incarnation, lanes, in_doubt):
            relay.tenure.lanes = lanes
            perform(state_machine.term_taken(relay, holder, term, server, now, went_back, incarnation, in_doubt))
        case TermGone(holder):
            if holder == relay.tenure.holder:
                performer.lose_term(now)
        case TermWanted(holder, by):
            performer.lend(holder, by, now)
        case DatabaseTrouble(text):
            to.trouble("database", text)
        case LoopDied(error):
            to.failed(error)

"""Performs what the state machine decides, and tells it what shards and the marker say. The supervisor's thread only.

A frame of a shard and a report of the marker become an event of the state machine, a line of the log, a trouble or a
figure. `Performer` performs the commands that follow: on the shards, the marker, the trust of this process and the
group. What takes a while, a drain or another number of shards, leaves an event that is set when it is over, however it
ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import UUID

from harvester.announcer import Announcer, Log
from harvester.errors import PoisonRecord, WireError
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
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
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from harvester.relay.ipc import TrustCell
from harvester.relay.marker import Marker
from harvester.relay.shard_pool import ShardPool, Slot
from harvester.telemetry.latency import Histogram


class Recorder(Protocol):
    """Remembers what people are shown of a harvester: `harvester.status_recorder`. Every method is quick."""

    def settled(self, count: int, now: float) -> None: ...

    def latencies(self, latencies: Histogram, now: float) -> None: ...

    def trouble(self, source: str, text: str | None) -> None: ...

    def note(self, text: str) -> None: ...


class Host(Protocol):
    """Is told what may end the harvester: `harvester.lifecycle`. Every method is quick."""

    def emptied(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Performer:
    """See the module's text."""

    def __init__(
        self,
        machine: StateMachine,
        trust: TrustCell,
        pool: ShardPool,
        group: Group,
        host: Host,
        recorder: Recorder,
        announcer: Announcer,
        log_of: Callable[[int | None], Log],
    ) -> None:
        """`log_of`: the log of a shard, or of the supervisor for None."""
        self.machine, self.trust = machine, trust
        self.marker: Marker | None = None
        self.renounced = False  # never lead again
        self.shards_ready = threading.Event()  # every shard has been ready at once
        self._pool, self._group = pool, group
        self._host, self._recorder, self._announcer = host, recorder, announcer
        self._log_of, self._log = log_of, log_of(None)
        self._drained: list[threading.Event] = []
        self._wanted = False  # to lead again when the drain is over
        self._scaling: tuple[threading.Event, list[bool]] | None = None

    def perform(self, commands: Sequence[c.Command]) -> None:
        """All of them, in order."""
        for command in commands:
            match command:
                case c.Send(shard, frame):
                    self._pool.send(shard, frame)
                    if self._pool.congested(shard):
                        self.machine.congested(shard)
                    elif self.machine.is_congested(shard):
                        self.perform(self.machine.uncongested(shard, time.monotonic()))
                case c.Mark() | c.Fetch() | c.Look() | c.SaveBookmark() | c.TakeTerm() | c.ReleaseTerm():
                    if self.marker is not None:
                        self.marker.perform(command)
                case c.OpenTrust():
                    self.trust.open()
                case c.CloseTrust():
                    self.trust.close()
                case c.Kill(shard, reason, own_fault):
                    self._log_of(shard).error("is killed: %s", reason)
                    self._pool.kill(shard, asked=not own_fault)
                case c.Resize(shards):
                    self._pool.resize(shards)
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
                    self._host.emptied()

    def _announce(self, event: Event) -> None:
        match event:
            case LeaderAcquired(leader_id, term):
                self._group.lead(leader_id, term)
                self._say(logging.INFO, f"leads as {leader_id} under term {term}")
            case LeaderRefreshed(leader_id, term, reason):
                self._say(logging.WARNING, f"marks again as {leader_id} under term {term}: {reason}")
            case LeaderFenced(reason):
                self._say(logging.WARNING, f"fenced: {reason}")
        self._announcer.announce(event)

    def _say(self, level: int, text: str) -> None:
        self._log.log(level, "%s", text)
        self._recorder.note(text)

    # -- leadership

    def acquire(self, now: float) -> None:
        """The group made us leader."""
        if self.renounced:
            return
        self._wanted = self.machine.phase is LeadershipPhase.DRAINING  # then it is done when the drain is
        self.perform(self.machine.acquire(now))

    def fence(self, reason: str, now: float) -> None:
        """The group no longer vouches for us."""
        self._wanted = False
        self.perform(self.machine.fence(reason, now))

    def drain(self, done: threading.Event, now: float) -> None:
        """Begin to finish what is on the wire."""
        self._wanted = False  # whatever a loan of the term was to be followed by
        self._drained.append(done)
        self.perform(self.machine.drain(now))

    def lend(self, holder: UUID, by: str, now: float) -> None:
        """Give up the term in good order, and take it again, which waits until it is free (P32)."""
        machine = self.machine
        if holder != machine.tenure.holder or machine.phase not in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
            return
        self._wanted = True
        self.perform(machine.drain(now, trusted=True))
        self._announce(LeaderFenced(f"the term is lent to {by}"))

    def lose_term(self, now: float) -> None:
        """The database says that the term is another's."""
        trusted = self.trust.trusted
        self.perform(self.machine.term_lost(trusted, now))
        if not trusted:  # only a new election, on fresh proofs, may try again
            self._group.step_down("the term could not be kept")

    def change_server(self, reason: str, now: float) -> None:
        """The database is another one than before (P9)."""
        self._say(logging.ERROR, f"the database is another one than before: {reason}; shards start anew")
        if self.marker is not None:
            self.marker.doubt()
        self.perform(self.machine.server_changed(f"the database has changed: {reason}", now))

    # -- another number of shards

    def scale(self, shards: int, deadline: float, done: threading.Event, changed: list[bool], now: float) -> None:
        """Begin to change to so many (P17); `changed` becomes true if it comes to that. One change at a time."""
        if self._scaling is not None:
            done.set()
            return
        self._scaling = (done, changed)
        self.perform(self.machine.scale(shards, deadline, now))

    def end_scaling(self) -> None:
        """Once a turn: let whoever asked for the change know that it is over, done or refused."""
        if self._scaling is not None and self.machine.phase is not LeadershipPhase.SCALING:
            self._scaling[0].set()
            self._scaling = None

    def let_all_go(self) -> None:
        """Nothing is performed any more: nobody is to wait for it."""
        for done in self._drained:
            done.set()
        if self._scaling is not None:
            self._scaling[0].set()

    # -- what shards and the marker say

    def on_frame(self, index: int, frame: f.Frame, now: float) -> None:
        """A frame of a shard, with all that follows from it. Raises WireError for what no shard says."""
        slot = self._pool.slots[index]
        if not slot.retired:
            self.perform(self._after(slot, index, frame, now))

    def _after(self, slot: Slot, index: int, frame: f.Frame, now: float) -> Sequence[Command]:
        machine = self.machine
        match frame:
            case f.Settled(ids):
                count, commands = machine.settled(index, ids, now)
                slot.settled += count
                self._recorder.settled(count, now)
                return commands
            case f.Stats():
                machine.heard(index, now)
                slot.stats = frame
                if frame.latency:
                    self._recorder.latencies(_latencies(frame.latency), now)
            case f.Remarked(epoch, ids, in_doubt):
                return machine.remarked(index, epoch, ids, now, in_doubt)
            case f.Parked(epoch, record_id, given_back, error, wait_s, attempts, held):
                what = "holds its key" if held else "will be retried"
                self._log_of(index).warning(
                    "record %d failed (attempts %d) and %s: %s", record_id, attempts, what, error
                )
                return machine.parked(index, epoch, record_id, given_back, wait_s, held, now)
            case f.InDoubt(record_id):
                machine.in_doubt(index, record_id, now)
            case f.Refused(epoch, ids):
                return machine.refused(index, epoch, ids, now)
            case f.Dropped(ids):
                return machine.dropped(index, ids, now)
            case f.FateUnknown(epoch, ids, reason):
                self._log_of(index).error("the fate of records %s is unknown: %s", list(ids), reason)
                slot.suspected += len(ids)
                return machine.fate_unknown(index, epoch, ids, f"fate unknown: {reason}", now)
            case f.QueueTimedOut(epoch, record_id, waited_s):
                return machine.queue_timed_out(index, epoch, record_id, waited_s, now)
            case f.Ready(pid):
                slot.ready = True
                if all(each.ready for each in self._pool.in_use):
                    self.shards_ready.set()
                self._log_of(index).debug("ready (pid %d)", pid)
                return machine.shard_ready(index, now)
            case f.ShardSession(pid, started):
                slot.session = (pid, started)
                self._register()
            case f.ShardServerChanged(reason):
                self.change_server(reason, now)
            case f.Quarantined(record_id, error):
                slot.quarantined += 1
                self._log_of(index).error("record %d went to quarantine: %s", record_id, error)
            case f.Poisoned(record_id, error):
                self._host.fail(PoisonRecord(record_id, error))
            case f.Log(level, text):
                self._log_of(index).log(level, "%s", text)
            case f.Trouble(text):
                self._recorder.trouble(f"shard {index}", text)
            case _:
                raise WireError(f"shard {index} sent {type(frame).__name__}, which only a supervisor sends")
        return ()

    def _register(self) -> None:
        """Name the shards' sessions in the term row, so that a successor can end them (P7)."""
        if self.marker is not None:
            self.marker.register([slot.session for slot in self._pool.in_use if slot.session is not None])

    def on_report(self, report: Report, now: float) -> None:
        """A report of the marker, with all that follows from it."""
        machine, perform = self.machine, self.perform
        match report:
            case Marked(number, rows, floor, bookmark):
                perform(machine.marked(number, rows, now, floor, bookmark))
            case Fetched(number, rows):
                perform(machine.fetched(number, rows, now))
            case Looked(number, ids):
                missed, commands = machine.looked(number, ids, now)
                if missed:
                    self._log.warning("a look at the whole table found %d rows that marks had not shown", missed)
                perform(commands)
            case StatementFailed(number, error):
                perform(machine.statement_failed(number, error, now))
            case ServerChanged(reason):
                self.change_server(reason, now)
            case TermTaken(holder, term, server, went_back, incarnation, lanes, in_doubt):
                machine.lanes_known(lanes)
                perform(machine.term_taken(holder, term, server, now, went_back, incarnation, in_doubt))
            case TermGone(holder):
                if holder == machine.tenure.holder:
                    self.lose_term(now)
            case TermWanted(holder, by):
                self.lend(holder, by, now)
            case DatabaseTrouble(text):
                self._recorder.trouble("database", text)
            case LoopDied(error):
                self._host.fail(error)


def _latencies(text: str) -> Histogram:
    try:
        return Histogram.unpack(bytes.fromhex(text))
    except ValueError as error:
        raise WireError("a shard's latencies are no histogram") from error

"""The supervisor: one thread that performs what the relay machine decides.

It owns the machine and the shards' pipes and never blocks on a server or on a shard: the mark loop, the member of the
group and the host's event handler have threads of their own, and reach it through an inbox. All it waits for is one
epoll. Everything a shard says before its death is heard before the death is.

Stopping is done by whoever asks for it (`Supervisor.drain`, then `end`), so that a drain can be part of a rebalance
callback as well as of a signal.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from harvester.announcer import Announcer
from harvester.errors import CrashLoop, WireError
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay import commands as c
from harvester.relay.fleet import Fleet
from harvester.relay.frames import Login
from harvester.relay.hearing import Tidings, hear
from harvester.relay.machine import Phase, Relay, Settings
from harvester.relay.marking import MarkLoop
from harvester.relay.onekey import KeyUnderWay, look_up
from harvester.relay.reports import (
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
from harvester.relay.shard import ShardSpec
from harvester.relay.shared import Shared, TrustCell, set_in_flight
from harvester.relay.supervision import HandOver, RestartBudget
from harvester.relay.waking import Waker
from harvester.telemetry.latency import Histogram

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

TICK_S = 0.1
_GAP_S = 1.0  # a turn that took longer means that this process did not run


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


class Supervisor(threading.Thread):
    """See the module's text."""

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[ShardSpec],
        shared: Shared,
        group: Group,
        outlets: Outlets,
        budget: RestartBudget,
        hand_over: HandOver,
    ) -> None:
        super().__init__(name="harvester-relay", daemon=True)
        self.relay = Relay(settings, uuid4)
        self.trust = TrustCell(shared)
        self._shared, self._group, self._out = shared, group, outlets
        self._budget, self._hand_over = budget, hand_over
        self._log = outlets.log(None)
        self._poller = select.epoll()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._waker = Waker()
        self._poller.register(self._waker.fd, select.EPOLLIN)
        self.fleet = Fleet(list(specs), shared, self._poller)
        self._drained: list[threading.Event] = []
        self._ending_deadline: float | None = None
        self._over = False
        self._broken = False
        self.shards_ready = threading.Event()  # every shard has been ready at once
        self._wanted = False
        self.renounced = False
        self._scaling: tuple[threading.Event, list[bool]] | None = None
        self.marker: MarkLoop | None = None
        self._tidings = Tidings(
            settled=outlets.settled,
            latencies=outlets.latencies,
            trouble=outlets.trouble,
            failed=outlets.failed,
            log=outlets.log,
            ready=self._all_ready,
            session=self._register,
            server_changed=self._server_changed,
        )
        self._turned_at = time.monotonic()

    # -- from other threads

    def post(self, action: Callable[[float], None]) -> None:
        """Run this on the supervisor's thread soon; it is given the monotonic time."""
        self._inbox.append(action)
        self._waker.set()

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        now = time.monotonic()
        marker = self.marker
        return now - self._turned_at < 5.0 and marker is not None and marker.is_working(now)

    def acquire(self) -> None:
        """The group made us leader."""
        self.post(self._acquire)

    def fence(self, reason: str) -> None:
        """The group no longer vouches for us. Trust ends here, before the thread gets to it."""
        self.trust.revoke()

        def fence(now: float) -> None:
            self._wanted = False
            self._perform(self.relay.fence(reason, now))

        self.post(fence)

    def renounce(self) -> None:
        """Never lead again: the harvester stops."""
        self.renounced = True

    def report(self, report: Report) -> None:
        """The mark loop has something to say."""
        self.post(lambda now: self._marker_said(report, now))

    def drain(self, within_s: float) -> bool:
        """Finish what is on the wire. At the bound the shards are killed (P13). Returns whether we had led."""
        done, led = threading.Event(), []
        self.trust.close()
        if self._broken:
            return False

        def begin(now: float) -> None:
            self._wanted = False  # whatever a loan of the term was to be followed by
            led.append(self.relay.term is not None)
            self._drained.append(done)
            self._perform(self.relay.drain(now))

        def cut(_now: float) -> None:
            late = [index for index in self.fleet.alive if self.relay.ledger.unsettled_of(index)]
            if late:
                self._log.warning("what was on the wire did not settle within %.1f s: it may be repeated", within_s)
            for index in late:
                self.fleet.kill(index, asked=True)

        self.post(begin)
        if not done.wait(within_s):
            self.post(cut)
            done.wait(5.0)
        return bool(led and led[0])

    def kill_shards(self) -> None:
        """End all shards at once, for good: what is on the wire may be repeated by the next leader."""

        def kill(_now: float) -> None:
            self.trust.revoke()
            self.fleet.closed = True
            for index in self.fleet.alive:
                self.fleet.kill(index, asked=True)

        self.post(kill)

    def scale(self, shards: int, within_s: float) -> bool:
        """Change the number of shards (P17); False when it was refused, as it is while another change is under way."""
        done, changed = threading.Event(), [False]
        if self._broken:
            return False

        def begin(now: float) -> None:
            if self._scaling is not None:
                done.set()
                return
            self._scaling = (done, changed)
            self._perform(self.relay.scale(shards, now + within_s, now))

        self.post(begin)
        done.wait(within_s + 5.0)
        return changed[0]

    def pause(self, within_s: float, then: Callable[[], None]) -> bool:
        """Mark nothing until `resume`. True as soon as that holds, whatever is still on the wire by then.

        `then` is called when it holds, on the supervisor's thread, however late that is.
        """
        return self._do(self.relay.pause, within_s, then)

    def resume(self, within_s: float, then: Callable[[], None]) -> bool:
        """The end of `pause`; True when it has begun. `then` as there."""
        return self._do(self.relay.resume, within_s, then)

    def remark(self, reason: str, within_s: float) -> bool:
        """Drop what is queued and mark again, if this one leads; True when it has begun."""
        return self._do(lambda now: self.relay.remark(reason, now), within_s)

    def look_up(self, key: bytes, within_s: float) -> KeyUnderWay | None:
        """What the relay knows of this key; None when it does not answer in time."""
        found: list[KeyUnderWay] = []
        self._do(lambda _now: (), within_s, lambda: found.append(look_up(self.relay, key, time.monotonic())))
        return found[0] if found else None

    def _do(
        self,
        decide: Callable[[float], Sequence[c.Command]],
        within_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        done = threading.Event()

        def act(now: float) -> None:
            self._perform(decide(now))
            then()
            done.set()

        self.post(act)
        return done.wait(within_s)

    def log_in(self, spec: ShardSpec, login: Login) -> None:
        """Shards log in with this from now on, new ones and those that there are."""
        self.post(lambda _now: self.fleet.log_in(spec, login))

    def end(self, within_s: float) -> None:
        """End the shards (killing those that take longer) and this thread. Nothing may be leading any more."""

        def begin(now: float) -> None:
            self._ending_deadline = now + within_s
            self.fleet.stop(within_s)

        self.post(begin)

    # -- the thread

    def _acquire(self, now: float) -> None:
        if self.renounced:
            return
        self._wanted = self.relay.phase is Phase.DRAINING  # then it is done when the drain is
        self._perform(self.relay.acquire(now))

    def run(self) -> None:
        """The thread."""
        next_tick = 0.0
        try:
            while not self._over:
                now = time.monotonic()
                if now - self._turned_at > _GAP_S:
                    self.relay.forgive(now - self._turned_at)
                self._turned_at = now
                for fd, _ in self._poller.poll(max(0.0, next_tick - now)):
                    self._serve(fd, time.monotonic())
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
                if self._scaling is not None and self.relay.phase is not Phase.SCALING:
                    self._scaling[0].set()  # done, or refused
                    self._scaling = None
                set_in_flight(self._shared, self.relay.ledger.in_flight, self.relay.settings.max_in_flight_records)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread: report it, leave nothing behind
            self._broken = True  # nobody reads the inbox any more
            self._out.failed(error)
        finally:
            self.trust.revoke()
            self.fleet.kill_all()
            if self.marker is not None:
                self.marker.stop()
            for done in self._drained:
                done.set()
            if self._scaling is not None:
                self._scaling[0].set()
            self.shards_ready.set()
            self._waker.close()
            self._poller.close()

    def _serve(self, fd: int, now: float) -> None:
        if fd == self._waker.fd:
            self._waker.clear()
            while self._inbox:
                self._inbox.popleft()(now)
            return
        index = self.fleet.owner(fd)
        if index is None:
            return
        if self.fleet.has_ended(index, fd):
            self._shard_ended(index, now)
        elif self.fleet.slots[index].watched_for_room and self.fleet.flush(index):
            if not self.fleet.slots[index].retired:
                self._perform(self.relay.uncongested(index, now))
        else:
            self._hear(index, now)

    def _tick(self, now: float) -> None:
        self.fleet.start_due(now)
        self._perform(self.relay.tick(now))
        parked = self.relay.intake.waiting.parked
        for index, slot in enumerate(self.fleet.slots):
            slot.parked = parked[index]
        if self._ending_deadline is not None:
            if now >= self._ending_deadline:
                for index in self.fleet.alive:
                    self.fleet.kill(index, asked=True)
            self._over = not self.fleet.alive
        elif self.marker is not None and self.relay.phase is not Phase.IDLE:
            unreachable_s = self.marker.unreachable_s(now)
            if self._hand_over.due(unreachable_s):
                wait_s = self._hand_over.first_s
                self._group.step_down(f"the database has been out of reach for {unreachable_s:.0f} s", wait_s)

    # -- shards

    def _hear(self, index: int, now: float) -> None:
        try:
            for frame in self.fleet.receive(index):
                slot = self.fleet.slots[index]
                if not slot.retired:
                    self._perform(hear(self.relay, slot, index, frame, now, self._tidings))
        except WireError as error:
            self._out.log(index).error("%s", error)
            self.fleet.kill(index, asked=False)

    def _all_ready(self) -> None:
        if all(slot.ready for slot in self.fleet.in_use):
            self.shards_ready.set()

    def _server_changed(self, reason: str, now: float) -> None:
        self._say(logging.ERROR, f"the database is another one than before: {reason}; shards start anew")
        if self.marker is not None:
            self.marker.doubt()
        self._perform(self.relay.server_changed(f"the database has changed: {reason}", now))

    def _register(self) -> None:
        """Name the shards' sessions in the term row, so that a successor can end them (P7)."""
        if self.marker is not None:
            self.marker.register([slot.session for slot in self.fleet.in_use if slot.session is not None])

    def _shard_ended(self, index: int, now: float) -> None:
        self._hear(index, now)  # all it said before its end
        slot = self.fleet.slots[index]
        asked = slot.asked_to_end
        if not self.relay.settings.exactly_once:
            slot.suspected += self.relay.ledger.in_flight_of(index)
        code = self.fleet.bury(index)
        self._out.trouble(f"shard {index}", None)
        if index < len(self.relay.intake.slices):
            self._perform(self.relay.shard_died(index, now))
        if self._ending_deadline is not None or (slot.retired and asked):
            return
        if not asked:
            self._out.log(index).error("ended unasked (exit code %s)", code)
            if not self._budget.spend(now):
                raise CrashLoop(
                    f"shards died {self._budget.budget + 1} times within {self._budget.window_s:g} s",
                    hint="the log names what each died of; limits.restart_budget bounds how often this is tried",
                )
        slot.restarts += 1
        slot.start_at = now + (0.0 if asked else self._budget.pause_s())

    # -- the machine's commands

    def _perform(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            match command:
                case c.Send(shard, frame):
                    self.fleet.send(shard, frame)
                    if self.fleet.congested(shard):
                        self.relay.congested(shard)
                    elif self.relay.is_congested(shard):
                        self._perform(self.relay.uncongested(shard, time.monotonic()))
                case c.Mark() | c.Fetch() | c.Look() | c.TakeTerm() | c.Release():
                    if self.marker is not None:
                        self.marker.perform(command)
                case c.OpenTrust():
                    self.trust.open()
                case c.CloseTrust():
                    self.trust.close()
                case c.Kill(shard, reason, own_fault):
                    self._out.log(shard).error("is killed: %s", reason)
                    self.fleet.kill(shard, asked=not own_fault)
                case c.Resize(shards):
                    self.fleet.resize(shards)
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
                        self._acquire(time.monotonic())
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

    # -- the mark loop's reports

    def _marker_said(self, report: Report, now: float) -> None:
        relay = self.relay
        match report:
            case Marked(number, rows, floor):
                self._perform(relay.marked(number, rows, now, floor))
            case Fetched(number, rows):
                self._perform(relay.fetched(number, rows, now))
            case Looked(number, ids):
                missed, commands = relay.looked(number, ids, now)
                if missed:
                    self._log.warning("a look at the whole table found %d rows that marks had not shown", missed)
                self._perform(commands)
            case StatementFailed(number, error):
                self._perform(relay.statement_failed(number, error, now))
            case ServerChanged(reason):
                self._server_changed(reason, now)
            case TermTaken(holder, term, server, went_back, incarnation, lanes, in_doubt):
                relay.lanes = lanes
                self._perform(relay.term_taken(holder, term, server, now, went_back, incarnation, in_doubt))
            case TermGone(holder):
                if holder == relay.holder:
                    trusted = self.trust.trusted
                    self._perform(relay.term_lost(trusted, now))
                    if not trusted:  # only a new election, on fresh proofs, may try again
                        self._group.step_down("the term could not be kept")
            case TermWanted(holder, by):
                self._lend(holder, by, now)
            case DatabaseTrouble(text):
                self._out.trouble("database", text)
            case LoopDied(error):
                self._out.failed(error)

    def _lend(self, holder: UUID, by: str, now: float) -> None:
        """Give up the term in good order, and take it again, which waits until it is free (P32)."""
        relay = self.relay
        if holder != relay.holder or relay.phase not in (Phase.LEADING, Phase.REMARKING):
            return
        self._wanted = True
        self._perform(relay.drain(now, trusted=True))
        self._announce(LeaderFenced(f"the term is lent to {by}"))

    @property
    def lent_to(self) -> str | None:
        """Who has the term that this process would take (P32)."""
        return self.marker.lent_to if self.marker is not None else None

    @property
    def leadership(self) -> tuple[UUID | None, int | None]:
        """(leader id, term); (None, None) while not leading. The id shows only with its term."""
        relay = self.relay
        term = relay.term
        return (relay.leader_id, term) if term is not None else (None, None)

"""The supervisor: one thread that performs what the state machine decides, and the way for others to talk to it.

`Core` is that thread. It owns the state machine and the shards' pipes and never blocks on a server or on a shard: the
marker, the group member and the host's event handler have threads of their own and reach it through an inbox. All it
waits for is one epoll. Everything a shard said before its death is heard before the death is.

A frame of a shard (`hear`) and a report of the marker (`heed`) become an event of the state machine, a line of the
log, a trouble or a figure. `Performer` performs the commands that follow: on the shards, the marker, the trust of
this process and the group. What takes a while, a drain or another number of shards, leaves an event that is set when
it is over, however it ends.

`Supervisor` is what the rest of the process sees. Whoever wants to stop does the waiting (`Supervisor.drain`, then
`end`), so that a drain can be part of a rebalance callback as well as of a signal.
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
from harvester.errors import CrashLoop, PoisonRecord, WireError
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core import state_machine
from harvester.relay.core.frames import Login
from harvester.relay.core.leadership import Settings
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
from harvester.relay.core.supervision import HandOver, RestartBudget
from harvester.relay.ipc import Shared, TrustCell, Waker, set_in_flight, trust_check
from harvester.relay.marker import MarkLoop
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import Fleet, Slot
from harvester.telemetry.latency import Histogram

_LEADING = (Phase.LEADING, Phase.REMARKING, Phase.SCALING)


@dataclass(frozen=True, slots=True)
class KeyUnderWay:
    """As in `harvester.status.KeyStatus`."""

    leads: bool
    shard: int
    under_way: int
    waiting: int
    retry_in_s: float | None
    held: bool


def look_up(relay: Relay, key: bytes, now: float) -> KeyUnderWay:
    """Where this key stands at `now`, the time of the machine's clock. Only on the thread of the relay."""
    lane = relay.intake.waiting.lanes.get(key)
    return KeyUnderWay(
        leads=relay.phase in _LEADING,
        shard=relay.intake.shard_of(key),
        under_way=relay.ledger.count_of(key),
        waiting=len(lane) + lane.fetching if lane is not None else 0,
        retry_in_s=max(0.0, lane.not_before - now) if lane is not None and lane.parked else None,
        held=lane is not None and lane.held,
    )


TICK_S = 0.1
_GAP_S = 1.0  # a turn that took longer means that this process did not run


class Core:
    """See the module's text. All but `post` and `is_working` is for its own thread, which is in `run`."""

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
        self.relay = Relay(settings, uuid4)
        self.trust = TrustCell(shared)
        self._trusted = trust_check(shared)  # as shards see it
        self._shared, self._group, self._out = shared, group, outlets
        self._budget, self._hand_over = budget, hand_over
        self._poller = select.epoll()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._waker = Waker()
        self._poller.register(self._waker.fd, select.EPOLLIN)
        self.fleet = Fleet(list(specs), shared, self._poller)
        self.performer = Performer(self.relay, self.trust, self.fleet, group, outlets)
        self._ending_deadline: float | None = None
        self._over = False
        self.broken = False  # nobody reads the inbox any more
        self.shards_ready = threading.Event()  # every shard has been ready at once
        self._tidings = Tidings(
            settled=outlets.settled,
            latencies=outlets.latencies,
            trouble=outlets.trouble,
            failed=outlets.failed,
            log=outlets.log,
            ready=self._all_ready,
            session=self._register,
            server_changed=self.performer.change_server,
        )
        self._turned_at = time.monotonic()

    # -- from other threads

    def post(self, action: Callable[[float], None]) -> None:
        """Run this on the core's thread soon; it is given the monotonic time."""
        self._inbox.append(action)
        self._waker.set()

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        now = time.monotonic()
        marker = self.performer.marker
        return now - self._turned_at < 5.0 and marker is not None and marker.is_working(now)

    # -- the thread

    def end(self, within_s: float, now: float) -> None:
        """End the shards, killing those that take longer, and then this thread."""
        self._ending_deadline = now + within_s
        self.fleet.stop(within_s)

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
                self.performer.end_scaling()
                set_in_flight(self._shared, self.relay.ledger.in_flight, self.relay.settings.max_in_flight_records)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread: report it, leave nothing behind
            self.broken = True
            self._out.failed(error)
        finally:
            self.trust.revoke()
            self.fleet.kill_all()
            if self.performer.marker is not None:
                self.performer.marker.stop()
            self.performer.let_all_go()
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
                self.performer.perform(self.relay.uncongested(index, now))
        else:
            self._hear(index, now)

    def _tick(self, now: float) -> None:
        self.fleet.start_due(now)
        self.performer.perform(self.relay.tick(now, self._trusted()))
        parked = self.relay.intake.waiting.parked
        for index, slot in enumerate(self.fleet.slots):
            slot.parked = parked[index]
        marker = self.performer.marker
        if self._ending_deadline is not None:
            if now >= self._ending_deadline:
                for index in self.fleet.alive:
                    self.fleet.kill(index, asked=True)
            self._over = not self.fleet.alive
        elif marker is not None and self.relay.phase is not Phase.IDLE:
            unreachable_s = marker.unreachable_s(now)
            if self._hand_over.due(unreachable_s):
                wait_s = self._hand_over.first_s
                self._group.step_down(f"the database has been out of reach for {unreachable_s:.0f} s", wait_s)

    # -- shards

    def _hear(self, index: int, now: float) -> None:
        try:
            for frame in self.fleet.receive(index):
                slot = self.fleet.slots[index]
                if not slot.retired:
                    self.performer.perform(hear(self.relay, slot, index, frame, now, self._tidings))
        except WireError as error:
            self._out.log(index).error("%s", error)
            self.fleet.kill(index, asked=False)

    def _all_ready(self) -> None:
        if all(slot.ready for slot in self.fleet.in_use):
            self.shards_ready.set()

    def _register(self) -> None:
        """Name the shards' sessions in the term row, so that a successor can end them (P7)."""
        if self.performer.marker is not None:
            sessions = [slot.session for slot in self.fleet.in_use if slot.session is not None]
            self.performer.marker.register(sessions)

    def _shard_ended(self, index: int, now: float) -> None:
        self._hear(index, now)  # all it said before its end
        slot = self.fleet.slots[index]
        asked = slot.asked_to_end
        if not self.relay.settings.exactly_once:
            slot.suspected += self.relay.ledger.in_flight_of(index)
        code = self.fleet.bury(index)
        self._out.trouble(f"shard {index}", None)
        if index < len(self.relay.intake.slices):
            self.performer.perform(self.relay.shard_died(index, now))
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


class Supervisor(threading.Thread):
    """See the module's text. The thread is the core's (`harvester.relay.supervisor`)."""

    def __init__(self, core: Core, outlets: Outlets) -> None:
        """Not started yet; `outlets` are those of the core."""
        super().__init__(target=core.run, name="harvester-relay", daemon=True)
        self._core, self._performer, self._out = core, core.performer, outlets
        self._log = outlets.log(None)
        self.relay, self.trust, self.fleet = core.relay, core.trust, core.fleet
        self.shards_ready = core.shards_ready  # every shard has been ready at once

    def attach(self, marker: MarkLoop) -> None:
        """The mark loop, which could not be made before there was somebody to report to."""
        self._performer.marker = marker

    def post(self, action: Callable[[float], None]) -> None:
        """Run this on the supervisor's thread soon; it is given the monotonic time."""
        self._core.post(action)

    # -- the group and the mark loop

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        return self._core.is_working()

    def acquire(self) -> None:
        """The group made us leader."""
        self.post(self._performer.acquire)

    def fence(self, reason: str) -> None:
        """The group no longer vouches for us. Trust ends here, before the thread gets to it."""
        self.trust.revoke()
        self.post(lambda now: self._performer.fence(reason, now))

    def renounce(self) -> None:
        """Never lead again: the harvester stops."""
        self._performer.renounced = True

    def report(self, report: Report) -> None:
        """The mark loop has something to say."""
        self.post(lambda now: heed(self._performer, report, now, self._out))

    @property
    def lent_to(self) -> str | None:
        """Who has the term that this process would take (P32)."""
        marker = self._performer.marker
        return marker.lent_to if marker is not None else None

    @property
    def leadership(self) -> tuple[UUID | None, int | None]:
        """(leader id, term); (None, None) while not leading. The id shows only with its term."""
        relay = self.relay
        term = relay.tenure.term
        return (relay.tenure.leader_id, term) if term is not None else (None, None)

    # -- the end

    def drain(self, within_s: float) -> bool:
        """Finish what is on the wire. At the bound the shards are killed (P13). Returns whether we had led."""
        done, led = threading.Event(), []
        self.trust.close()
        if self._core.broken:
            return False

        def begin(now: float) -> None:
            led.append(self.relay.tenure.term is not None)
            self._performer.drain(done, now)

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

    def end(self, within_s: float) -> None:
        """End the shards (killing those that take longer) and this thread. Nothing may be leading any more."""
        self.post(lambda now: self._core.end(within_s, now))

    # -- the operator

    def scale(self, shards: int, within_s: float) -> bool:
        """Change the number of shards (P17); False when it was refused, as it is while another change is under way."""
        done, changed = threading.Event(), [False]
        if self._core.broken:
            return False
        self.post(lambda now: self._performer.scale(shards, now + within_s, done, changed, now))
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

    def log_in(self, spec: ShardSpec, login: Login) -> None:
        """Shards log in with this from now on, new ones and those that there are."""
        self.post(lambda _now: self.fleet.log_in(spec, login))

    def _do(
        self,
        decide: Callable[[float], Sequence[Command]],
        within_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        done = threading.Event()

        def act(now: float) -> None:
            self._performer.perform(decide(now))
            then()
            done.set()

        self.post(act)
        return done.wait(within_s)


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

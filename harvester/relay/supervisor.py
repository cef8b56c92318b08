"""The supervisor: one thread that performs the state machine's decisions, and the interface to it for other threads.

The thread owns the state machine and the shards' pipes and never blocks on a server or a shard: the marker, the group
member and the host's event handler have their own threads and reach it through an inbox. It waits only on one epoll.
Everything a shard sent before its death is handled before the death itself.

*In.* A frame from a shard (`_on_frame`) or a report from the marker (`_on_report`) becomes an event of the state
machine, a log line, a trouble or a metric. *Out.* `_perform` performs the resulting commands on the shards, the marker,
this process's trust and the group.

Other threads call the public methods. A caller that wants to stop does the waiting (`drain`, then `end`), so that a
drain can be part of a rebalance callback as well as of a signal. Slow operations, a drain or a change of the number of
shards, are awaited through a future that is resolved when they end, whatever their outcome.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar
from uuid import UUID, uuid4

from harvester.announcer import Announcer, Log
from harvester.errors import CrashLoop, PoisonRecord, WireError
from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Group
from harvester.relay.core import frames as f
from harvester.relay.core import messages as m
from harvester.relay.core.leadership import HandOver, RelaySettings
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from harvester.relay.forkserver import Forkserver
from harvester.relay.ipc import TrustCell, Waker, marks_live, set_in_flight, trust_check, turn
from harvester.relay.marker import Marker
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import RestartBudget, ShardPool, Slot
from harvester.telemetry.latency import Histogram
from harvester.telemetry.repeats import client_form, form_of

TICK_S = 0.1
_RETRIED = "records that failed"
_LOOK_S = 1.0  # between checks for troubles that have ended
_GAP_S = 1.0  # a turn that took longer means that this process did not run
_CUT_S = 5.0  # killed shards are gone within this time

T = TypeVar("T")


class Recorder(Protocol):
    """Remembers what is shown of a harvester: `harvester.status_recorder`. Every method is quick."""

    def settled(self, count: int, published: int, now: float) -> None: ...
    def latencies(self, latencies: Histogram, now: float) -> None: ...
    def trouble(self, source: str, text: str | None) -> None: ...
    def forget(self, source: str) -> None: ...
    def client_said(self, log: Log, level: int, text: str) -> None: ...
    def repeated(self, log: Log, level: int, kind: str, form: str, text: str) -> None: ...
    def look(self) -> None: ...
    def note(self, text: str) -> None: ...


class Host(Protocol):
    """Notified of what may end the harvester: `harvester.lifecycle`. Every method is quick."""

    def emptied(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Supervisor(threading.Thread):
    """The supervisor's thread. `marker`, which reports to it, is set before it starts."""

    marker: Marker

    def __init__(
        self,
        settings: RelaySettings,
        specs: Sequence[ShardSpec],
        forkserver: Forkserver,
        group: Group,
        *,
        host: Host,
        recorder: Recorder,
        announcer: Announcer,
        log_of: Callable[[int | None], Log],
        budget: RestartBudget,
        hand_over: HandOver,
    ) -> None:
        """Not started yet. `log_of`: returns the log of a shard, or the supervisor's for None."""
        super().__init__(name="harvester-relay", daemon=True)
        self.machine = StateMachine(settings, uuid4)
        shared = forkserver.shared
        self.trust = TrustCell(shared)
        self._trusted = trust_check(shared)  # as shards see it
        self._shared, self._group, self._host = shared, group, host
        self._recorder, self._announcer = recorder, announcer
        self._log_of, self._log = log_of, log_of(None)
        self._budget, self._hand_over = budget, hand_over
        self._poller = select.epoll()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._waker = Waker()
        self._poller.register(self._waker.fd, select.EPOLLIN)
        self.pool = ShardPool(list(specs), forkserver, self._poller)
        self.shards_ready = threading.Event()  # set once every shard has been ready at the same time
        self._renounced = False  # never lead again
        self._drains: list[Future[None]] = []
        self._wanted = False  # whether to lead again when the drain is over
        self._scaling: Future[bool] | None = None
        self._resized = False
        self._ending_deadline: float | None = None
        self._over = False
        self._broken = False  # the inbox is no longer read
        self._turned_at = time.monotonic()
        self._look_at = 0.0

    def post(self, action: Callable[[float], None]) -> None:
        """Run `action` on the supervisor's thread soon, with the monotonic time as argument."""
        self._inbox.append(action)
        self._waker.set()

    def ask(self, question: Callable[[StateMachine, float], T], within_s: float) -> T | None:
        """The answer to `question` on the supervisor's thread; None if there is none in time."""
        answer: Future[T] = Future()
        self.post(lambda now: answer.set_result(question(self.machine, now)))
        return _result(answer, within_s)

    # -- the group and the mark loop

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        return marks_live(self._shared)

    def acquire(self) -> None:
        self.post(self._acquire)

    def fence(self, reason: str) -> None:
        """The group no longer vouches for us. Trust ends here, before the thread handles it."""
        self.trust.revoke()

        def fence(now: float) -> None:
            self._wanted = False
            self._perform(self.machine.fence(reason, now))

        self.post(fence)

    def renounce(self) -> None:
        """Never lead again: the harvester is stopping."""
        self._renounced = True

    def report(self, report: m.Report) -> None:
        self.post(lambda now: self._on_report(report, now))

    def wants_term(self, holder: UUID) -> bool:
        """Whether this is the leadership under way. Trust alone does not show that: it outlasts a revoke."""
        return self.machine.tenure.holder == holder

    @property
    def lent_to(self) -> str | None:
        """Who has borrowed the term that this process would take (P32)."""
        return self.marker.lent_to

    @property
    def leadership(self) -> tuple[UUID | None, int | None]:
        """(leader id, term); (None, None) while not leading. The id is shown only together with its term."""
        tenure = self.machine.tenure
        term = tenure.term
        return (tenure.leader_id, term) if term is not None else (None, None)

    # -- the end

    def drain(self, within_s: float) -> bool:
        """Finish what is on the wire; after `within_s` the shards are killed (P13). Returns whether we had led."""
        done: Future[None] = Future()
        led: list[bool] = []
        self.trust.close()
        if self._broken:
            return False

        def begin(now: float) -> None:
            led.append(self.machine.tenure.term is not None)
            self._wanted = False  # cancels taking the term again after a loan
            self._drains.append(done)
            self._perform(self.machine.drain(now))

        def cut(_now: float) -> None:
            late = [index for index in self.pool.alive if self.machine.ledger.unsettled_of(index)]
            if late:
                self._log.warning("what was on the wire did not settle within %.1f s: it may be repeated", within_s)
            for index in late:
                self.pool.kill(index, asked=True)

        self.post(begin)
        _result(done, within_s)
        if not done.done():
            self.post(cut)
            _result(done, _CUT_S)
        return bool(led and led[0])

    def kill_shards(self) -> None:
        """End all shards at once, permanently: the next leader may repeat what is on the wire."""

        def kill(_now: float) -> None:
            self.trust.revoke()
            self.pool.closed = True
            for index in self.pool.alive:
                self.pool.kill(index, asked=True)

        self.post(kill)

    def end(self, within_s: float) -> None:
        """End the shards, killing those that take longer, and this thread. Nothing may be leading any more."""

        def begin(now: float) -> None:
            self._ending_deadline = now + within_s
            self.pool.stop(within_s)

        self.post(begin)

    # -- the operator

    def scale(self, shards: int, within_s: float) -> bool:
        """Change the number of shards (P17); False if refused, e.g. while another change is under way."""
        changed: Future[bool] = Future()
        if self._broken:
            return False

        def begin(now: float) -> None:
            if self._scaling is not None:
                changed.set_result(False)
                return
            self._scaling, self._resized = changed, False
            self._perform(self.machine.scale(shards, now + within_s, now))

        self.post(begin)
        return _result(changed, within_s + 5.0) is True

    def pause(self, within_s: float, then: Callable[[], None]) -> bool:
        """Mark nothing until `resume`. True as soon as that takes effect, whatever is still on the wire.

        `then` is called on the supervisor's thread when it takes effect, however late.
        """
        return self._do(StateMachine.pause, within_s, then)

    def resume(self, within_s: float, then: Callable[[], None]) -> bool:
        """End `pause`; True when that has begun. `then`: see `pause`."""
        return self._do(StateMachine.resume, within_s, then)

    def remark(self, reason: str, within_s: float) -> bool:
        """Drop what is queued and mark again, if this harvester leads; True when that has begun."""
        return self._do(lambda machine, now: machine.remark(reason, now), within_s)

    def _do(
        self,
        decide: Callable[[StateMachine, float], Sequence[m.Command]],
        within_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        def act(machine: StateMachine, now: float) -> bool:
            self._perform(decide(machine, now))
            then()
            return True

        return self.ask(act, within_s) is not None

    def lanes_known(self, lanes: int) -> None:
        """The number of lanes in exactly-once mode, for shards that are added later."""
        self.post(lambda _now: self.machine.lanes_known(lanes))

    def log_in(self, spec: ShardSpec, login: f.Login) -> None:
        """Use these credentials for new connections of all shards, present and future."""
        self.post(lambda _now: self.pool.log_in(spec, login))

    # -- the thread

    def run(self) -> None:
        """Runs until the end; leaves nothing behind, whatever happens."""
        next_tick = 0.0
        try:
            while not self._over:
                now = time.monotonic()
                if now - self._turned_at > _GAP_S:
                    self.machine.forgive(now - self._turned_at)
                self._turned_at = now
                for fd, _ in self._poller.poll(max(0.0, next_tick - now)):
                    self._serve(fd, time.monotonic())
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
                if self._scaling is not None and self.machine.phase is not LeadershipPhase.SCALING:
                    self._scaling.set_result(self._resized)  # done, or refused
                    self._scaling = None
                set_in_flight(self._shared, self.machine.ledger.in_flight, self.machine.settings.max_in_flight_records)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread: report it, leave nothing behind
            self._broken = True
            self._host.fail(error)
        finally:
            self.trust.revoke()
            self.pool.kill_all()
            self.marker.stop()
            self._resolve_drains()
            if self._scaling is not None:
                self._scaling.set_result(self._resized)
            self.shards_ready.set()
            self._waker.close()
            self._poller.close()

    def _serve(self, fd: int, now: float) -> None:
        self.machine.vouched_for = self.trust.trusted
        if fd == self._waker.fd:
            self._waker.clear()
            while self._inbox:
                self._inbox.popleft()(now)
            return
        index = self.pool.owner(fd)
        if index is None:
            return
        if self.pool.has_ended(index, fd):
            self._shard_ended(index, now)
        elif self.pool.has_room(index, fd):
            if self.pool.flush(index) and not self.pool.slots[index].retired:
                self._perform(self.machine.uncongested(index, now))
        else:
            self._hear(index, now)

    def _tick(self, now: float) -> None:
        turn(self._shared, marks=self.marker.is_working(now))
        self.machine.vouched_for = self.trust.trusted
        self.pool.start_due(now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._recorder.look()
        self._perform(self.machine.tick(now, self._trusted()))
        parked = self.machine.planner.deferred.parked
        for index, slot in enumerate(self.pool.slots):
            slot.parked = parked[index]
        if self._ending_deadline is not None:
            if now >= self._ending_deadline:
                for index in self.pool.alive:
                    self.pool.kill(index, asked=True)
            self._over = not self.pool.alive
        elif self.machine.phase is not LeadershipPhase.IDLE:
            unreachable_s = self.marker.unreachable_s(now)
            if self._hand_over.due(unreachable_s):
                wait_s = self._hand_over.first_s
                self._group.step_down(f"{self.marker.hindrance} for {unreachable_s:.0f} s", wait_s)

    # -- performing

    def _perform(self, commands: Sequence[m.Command]) -> None:
        for command in commands:
            match command:
                case m.Send(shard, frame):
                    if self.pool.send(shard, frame):
                        self.machine.congested(shard)
                    elif self.machine.is_congested(shard):
                        self._perform(self.machine.uncongested(shard, time.monotonic()))
                case m.Mark() | m.Fetch() | m.Look() | m.SaveBookmark() | m.TakeTerm() | m.ReleaseTerm():
                    self.marker.perform(command)
                case m.OpenTrust():
                    self.trust.open()
                case m.CloseTrust():
                    self.trust.close()
                case m.Kill(shard, reason, own_fault):
                    self._log_of(shard).error("killed: %s", reason)
                    self.pool.kill(shard, asked=not own_fault)
                case m.Resize(shards):
                    self.pool.resize(shards)
                    self._say(logging.INFO, f"changed to {shards} shards")
                    self._resized = True
                case m.Announce(event):
                    self._announce(event)
                case m.Drained():
                    self._resolve_drains()
                    if self._wanted:
                        self._acquire(time.monotonic())
                case m.Emptied():
                    self._host.emptied()

    def _announce(self, event: Event) -> None:
        match event:
            case LeaderAcquired(leader_id, term):
                self._group.lead(leader_id, term)
                text = f"leads as {leader_id} under term {term}"
                self._say(logging.INFO, text, f"leads under term {term} as {str(leader_id)[:8]}")
            case LeaderRefreshed(leader_id, term, reason):
                text = f"marks again as {leader_id} under term {term}: {reason}"
                self._say(logging.WARNING, text, f"{reason}: marks again as {str(leader_id)[:8]}")
            case LeaderFenced(reason):
                self._say(logging.WARNING, f"fenced: {reason}", f"{reason}: fenced")
        self._announcer.announce(event)

    def _say(self, level: int, text: str, event: str | None = None) -> None:
        """Write a log line and an event; the event begins with its cause, since a terminal may truncate it."""
        self._log.log(level, "%s", text)
        self._recorder.note(text if event is None else event)

    def _resolve_drains(self) -> None:
        drains, self._drains = self._drains, []
        for done in drains:
            done.set_result(None)

    # -- leadership

    def _acquire(self, now: float) -> None:
        if not self._renounced:
            self._wanted = self.machine.phase is LeadershipPhase.DRAINING  # if draining, lead when that is over
            self._perform(self.machine.acquire(now))

    def _lend(self, holder: UUID, by: str, now: float) -> None:
        """Give up the term in good order, and take it again once it is free (P32)."""
        machine = self.machine
        if holder != machine.tenure.holder or machine.phase not in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
            return
        self._wanted = True
        self._perform(machine.drain(now, trusted=True))
        self._announce(LeaderFenced(f"the term is lent to {by}"))

    def _lose_term(self, now: float) -> None:
        """The database says that the term belongs to another holder."""
        trusted = self.trust.trusted
        self._perform(self.machine.term_lost(trusted, now))
        if not trusted:  # only a new election, on fresh proofs, may try again
            self._group.step_down("the term could not be kept")

    def _change_server(self, reason: str, now: float) -> None:
        """The database is not the previous one (P9)."""
        self._say(logging.ERROR, f"the database is a different one: {reason}; shards are restarted")
        self.marker.doubt()
        self._perform(self.machine.server_changed(f"the database has changed: {reason}", now))

    # -- shards

    def _hear(self, index: int, now: float) -> None:
        try:
            for frame in self.pool.receive(index):
                self._on_frame(index, frame, now)
        except WireError as error:
            self._log_of(index).error("%s", error)
            self.pool.kill(index, asked=False)

    def _shard_ended(self, index: int, now: float) -> None:
        self._hear(index, now)  # everything it sent before its end
        slot = self.pool.slots[index]
        asked = slot.asked_to_end
        if not self.machine.settings.exactly_once:
            slot.suspected += self.machine.ledger.in_flight_of(index)
        code = self.pool.bury(index)
        self._recorder.forget(f"shard {index}")
        if index < len(self.machine.planner.shards):
            self._perform(self.machine.shard_died(index, now))
        if self._ending_deadline is not None or (slot.retired and asked):
            return
        if not asked:
            self._log_of(index).error("ended unexpectedly (exit code %s)", code)
            if not self._budget.spend(now):
                raise CrashLoop(
                    f"shards died {self._budget.budget + 1} times within {self._budget.window_s:g} s",
                    hint="the log states why each died; limits.restart_budget limits the number of restarts",
                )
        if slot.retired:  # its death was what the change waited for
            return
        slot.restarts += 1
        slot.start_at = now + (0.0 if asked else self._budget.pause_s())

    # -- what shards and the marker say

    def _on_frame(self, index: int, frame: f.Frame, now: float) -> None:
        """Raises WireError for frames that no shard sends."""
        slot = self.pool.slots[index]
        if not slot.retired:
            self._perform(self._after(slot, index, frame, now))

    def _after(self, slot: Slot, index: int, frame: f.Frame, now: float) -> Sequence[m.Command]:
        machine = self.machine
        match frame:
            case f.Settled(ids):
                count, commands = machine.settled(index, ids, now)
                self._recorder.settled(count, slot.settle(ids, count), now)
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
                text = f"record {record_id} failed (attempts {attempts}) and {what}: {error}"
                form = f"{record_id if held else ''} {form_of(error)}"
                self._recorder.repeated(self._log_of(index), logging.WARNING, _RETRIED, form, text)
                return machine.parked(index, epoch, record_id, given_back, wait_s, held, now)
            case f.InDoubt(record_id):
                machine.in_doubt(index, record_id, now)
            case f.Refused(epoch, ids):
                return machine.refused(index, epoch, ids, now)
            case f.Dropped(ids, in_doubt):
                return machine.dropped(index, ids, now, in_doubt)
            case f.FateUnknown(epoch, ids, reason):
                self._log_of(index).error("the fate of records %s is unknown: %s", list(ids), reason)
                slot.suspected += len(ids)
                return machine.fate_unknown(index, epoch, ids, f"fate unknown: {reason}", now)
            case f.QueueTimedOut(epoch, record_id, waited_s):
                return machine.queue_timed_out(index, epoch, record_id, waited_s, now)
            case f.Ready(pid):
                slot.ready = True
                if all(each.ready for each in self.pool.in_use):
                    self.shards_ready.set()
                self._log_of(index).debug("ready (pid %d)", pid)
                return machine.shard_ready(index, now)
            case f.ShardSession(pid, started):
                slot.session = (pid, started)
                self._register()
            case f.ShardServerChanged(reason):
                self._change_server(reason, now)
            case f.IdsGivenAgain(reason):
                self.marker.ids_given_again()
                self._change_server(reason, now)
            case f.Quarantined(record_id, error):
                slot.give_up(record_id)
                self._log_of(index).error("record %d went to quarantine: %s", record_id, error)
            case f.Poisoned(record_id, error):
                self._host.fail(PoisonRecord(record_id, error))
            case f.Log(logging.WARNING, text) if client_form(text) is None:
                self._recorder.repeated(self._log_of(index), logging.WARNING, "warnings of shards", form_of(text), text)
            case f.Log(level, text):
                self._recorder.client_said(self._log_of(index), level, text)
            case f.Trouble(text):
                self._recorder.trouble(f"shard {index}", text)
            case _:
                raise WireError(f"shard {index} sent {type(frame).__name__}, which only a supervisor sends")
        return ()

    def _register(self) -> None:
        """Record the shards' sessions in the term row, so that a successor can end them (P7)."""
        self.marker.register([slot.session for slot in self.pool.in_use if slot.session is not None])

    def _on_report(self, report: m.Report, now: float) -> None:
        machine, perform = self.machine, self._perform
        match report:
            case m.Marked(number, rows, floor, bookmark):
                perform(machine.marked(number, rows, now, floor, bookmark))
            case m.Fetched(number, rows):
                perform(machine.fetched(number, rows, now))
            case m.Looked(number, ids, rest):
                missed, commands = machine.looked(number, ids, now, rest)
                if missed:
                    self._log.warning("a look at the whole table found %d rows that marks had missed", missed)
                perform(commands)
            case m.StatementFailed(number, error):
                perform(machine.statement_failed(number, error, now))
            case m.ServerChanged(reason):
                self._change_server(reason, now)
            case m.ScanRestarted():
                machine.low_water.begin()
            case m.TermTaken(holder, term, server, went_back, incarnation, lanes, in_doubt):
                machine.lanes_known(lanes)
                perform(machine.term_taken(holder, term, server, now, went_back, incarnation, in_doubt))
            case m.TermGone(holder):
                if holder == machine.tenure.holder:
                    self._lose_term(now)
            case m.TermWanted(holder, by):
                self._lend(holder, by, now)
            case m.DatabaseTrouble(text):
                self._recorder.trouble("database", text)
            case m.TermWait(text):
                self._recorder.trouble("term", text)
            case m.LoopDied(error):
                self._host.fail(error)


def _latencies(text: str) -> Histogram:
    try:
        return Histogram.unpack(bytes.fromhex(text))
    except ValueError as error:
        raise WireError("a shard's latencies are not a histogram") from error


def _result(future: Future[T], within_s: float) -> T | None:
    """The result; None if it takes longer."""
    try:
        return future.result(within_s)
    except TimeoutError:
        return None

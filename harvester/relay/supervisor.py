"""The supervisor: one thread that performs what the state machine decides, and the way for others to talk to it.

The thread owns the state machine and the shards' pipes and never blocks on a server or on a shard: the marker, the
group member and the host's event handler have threads of their own and reach it through an inbox. All it waits for is
one epoll. Everything a shard said before its death is heard before the death is. `performer` performs the commands and
hears the answers.

All other methods are for other threads. Whoever wants to stop does the waiting (`Supervisor.drain`, then `end`), so
that a drain can be part of a rebalance callback as well as of a signal.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from harvester.announcer import Announcer, Log
from harvester.errors import CrashLoop, WireError
from harvester.neli.group import Group
from harvester.relay.core.frames import Login
from harvester.relay.core.leadership import HandOver, RelaySettings
from harvester.relay.core.messages import (
    Command,
    Report,
)
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from harvester.relay.ipc import Shared, TrustCell, Waker, set_in_flight, trust_check
from harvester.relay.marker import Marker
from harvester.relay.performer import Host, Performer, Recorder
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import RestartBudget, ShardPool

_LEADING = (LeadershipPhase.LEADING, LeadershipPhase.REMARKING, LeadershipPhase.SCALING)


@dataclass(frozen=True, slots=True)
class KeyUnderWay:
    """As in `harvester.status.KeyStatus`."""

    leads: bool
    shard: int
    under_way: int
    waiting: int
    retry_in_s: float | None
    held: bool


def look_up(machine: StateMachine, key: bytes, now: float) -> KeyUnderWay:
    """Where this key stands at `now`, the time of the machine's clock. Only on the thread of the relay."""
    queue = machine.planner.deferred.by_key.get(key)
    return KeyUnderWay(
        leads=machine.phase in _LEADING,
        shard=machine.planner.dispatcher.shard_of(key),
        under_way=machine.ledger.count_of(key),
        waiting=len(queue) + queue.fetching if queue is not None else 0,
        retry_in_s=max(0.0, queue.not_before - now) if queue is not None and queue.parked else None,
        held=queue is not None and queue.held,
    )


TICK_S = 0.1
_GAP_S = 1.0  # a turn that took longer means that this process did not run


class Supervisor(threading.Thread):
    """See the module's text."""

    def __init__(
        self,
        settings: RelaySettings,
        specs: Sequence[ShardSpec],
        shared: Shared,
        group: Group,
        *,
        host: Host,
        recorder: Recorder,
        announcer: Announcer,
        log_of: Callable[[int | None], Log],
        budget: RestartBudget,
        hand_over: HandOver,
    ) -> None:
        """Not started yet. `log_of`: the log of a shard, or of the supervisor for None."""
        super().__init__(name="harvester-relay", daemon=True)
        self.machine = StateMachine(settings, uuid4)
        self.trust = TrustCell(shared)
        self._trusted = trust_check(shared)  # as shards see it
        self._shared, self._group, self._host, self._recorder = shared, group, host, recorder
        self._log_of, self._log = log_of, log_of(None)
        self._budget, self._hand_over = budget, hand_over
        self._poller = select.epoll()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._waker = Waker()
        self._poller.register(self._waker.fd, select.EPOLLIN)
        self.pool = ShardPool(list(specs), shared, self._poller)
        self._performer = Performer(self.machine, self.trust, self.pool, group, host, recorder, announcer, log_of)
        self.shards_ready = self._performer.shards_ready  # every shard has been ready at once
        self._ending_deadline: float | None = None
        self._over = False
        self._broken = False  # nobody reads the inbox any more
        self._turned_at = time.monotonic()

    def attach(self, marker: Marker) -> None:
        """The mark loop, which could not be made before there was somebody to report to."""
        self._performer.marker = marker

    def post(self, action: Callable[[float], None]) -> None:
        """Run this on the supervisor's thread soon; it is given the monotonic time."""
        self._inbox.append(action)
        self._waker.set()

    # -- the group and the mark loop

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        now = time.monotonic()
        marker = self._performer.marker
        return now - self._turned_at < 5.0 and marker is not None and marker.is_working(now)

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
        self.post(lambda now: self._performer.on_report(report, now))

    @property
    def lent_to(self) -> str | None:
        """Who has the term that this process would take (P32)."""
        marker = self._performer.marker
        return marker.lent_to if marker is not None else None

    @property
    def leadership(self) -> tuple[UUID | None, int | None]:
        """(leader id, term); (None, None) while not leading. The id shows only with its term."""
        machine = self.machine
        term = machine.tenure.term
        return (machine.tenure.leader_id, term) if term is not None else (None, None)

    # -- the end

    def drain(self, within_s: float) -> bool:
        """Finish what is on the wire. At the bound the shards are killed (P13). Returns whether we had led."""
        done, led = threading.Event(), []
        self.trust.close()
        if self._broken:
            return False

        def begin(now: float) -> None:
            led.append(self.machine.tenure.term is not None)
            self._performer.drain(done, now)

        def cut(_now: float) -> None:
            late = [index for index in self.pool.alive if self.machine.ledger.unsettled_of(index)]
            if late:
                self._log.warning("what was on the wire did not settle within %.1f s: it may be repeated", within_s)
            for index in late:
                self.pool.kill(index, asked=True)

        self.post(begin)
        if not done.wait(within_s):
            self.post(cut)
            done.wait(5.0)
        return bool(led and led[0])

    def kill_shards(self) -> None:
        """End all shards at once, for good: what is on the wire may be repeated by the next leader."""

        def kill(_now: float) -> None:
            self.trust.revoke()
            self.pool.closed = True
            for index in self.pool.alive:
                self.pool.kill(index, asked=True)

        self.post(kill)

    def end(self, within_s: float) -> None:
        """End the shards (killing those that take longer) and this thread. Nothing may be leading any more."""

        def begin(now: float) -> None:
            self._ending_deadline = now + within_s
            self.pool.stop(within_s)

        self.post(begin)

    # -- the operator

    def scale(self, shards: int, within_s: float) -> bool:
        """Change the number of shards (P17); False when it was refused, as it is while another change is under way."""
        done, changed = threading.Event(), [False]
        if self._broken:
            return False
        self.post(lambda now: self._performer.scale(shards, now + within_s, done, changed, now))
        done.wait(within_s + 5.0)
        return changed[0]

    def pause(self, within_s: float, then: Callable[[], None]) -> bool:
        """Mark nothing until `resume`. True as soon as that holds, whatever is still on the wire by then.

        `then` is called when it holds, on the supervisor's thread, however late that is.
        """
        return self._do(self.machine.pause, within_s, then)

    def resume(self, within_s: float, then: Callable[[], None]) -> bool:
        """The end of `pause`; True when it has begun. `then` as there."""
        return self._do(self.machine.resume, within_s, then)

    def remark(self, reason: str, within_s: float) -> bool:
        """Drop what is queued and mark again, if this one leads; True when it has begun."""
        return self._do(lambda now: self.machine.remark(reason, now), within_s)

    def look_up(self, key: bytes, within_s: float) -> KeyUnderWay | None:
        """What the relay knows of this key; None when it does not answer in time."""
        found: list[KeyUnderWay] = []
        self._do(lambda _now: (), within_s, lambda: found.append(look_up(self.machine, key, time.monotonic())))
        return found[0] if found else None

    def lanes_known(self, lanes: int) -> None:
        """So many lanes exist, in exactly-once mode; for shards that are added later."""
        self.post(lambda _now: self.machine.lanes_known(lanes))

    def log_in(self, spec: ShardSpec, login: Login) -> None:
        """Shards log in with this from now on, new ones and those that there are."""
        self.post(lambda _now: self.pool.log_in(spec, login))

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

    # -- the thread

    def run(self) -> None:
        """Until it has ended; nothing of it is left behind, whatever happens."""
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
                self._performer.end_scaling()
                set_in_flight(self._shared, self.machine.ledger.in_flight, self.machine.settings.max_in_flight_records)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread: report it, leave nothing behind
            self._broken = True
            self._host.fail(error)
        finally:
            self.trust.revoke()
            self.pool.kill_all()
            if self._performer.marker is not None:
                self._performer.marker.stop()
            self._performer.let_all_go()
            self.shards_ready.set()
            self._waker.close()
            self._poller.close()

    def _serve(self, fd: int, now: float) -> None:
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
        elif self.pool.slots[index].watched_for_room and self.pool.flush(index):
            if not self.pool.slots[index].retired:
                self._performer.perform(self.machine.uncongested(index, now))
        else:
            self._hear(index, now)

    def _tick(self, now: float) -> None:
        self.pool.start_due(now)
        self._performer.perform(self.machine.tick(now, self._trusted()))
        parked = self.machine.planner.deferred.parked
        for index, slot in enumerate(self.pool.slots):
            slot.parked = parked[index]
        marker = self._performer.marker
        if self._ending_deadline is not None:
            if now >= self._ending_deadline:
                for index in self.pool.alive:
                    self.pool.kill(index, asked=True)
            self._over = not self.pool.alive
        elif marker is not None and self.machine.phase is not LeadershipPhase.IDLE:
            unreachable_s = marker.unreachable_s(now)
            if self._hand_over.due(unreachable_s):
                wait_s = self._hand_over.first_s
                self._group.step_down(f"the database has been out of reach for {unreachable_s:.0f} s", wait_s)

    # -- shards

    def _hear(self, index: int, now: float) -> None:
        try:
            for frame in self.pool.receive(index):
                self._performer.on_frame(index, frame, now)
        except WireError as error:
            self._log_of(index).error("%s", error)
            self.pool.kill(index, asked=False)

    def _shard_ended(self, index: int, now: float) -> None:
        self._hear(index, now)  # all it said before its end
        slot = self.pool.slots[index]
        asked = slot.asked_to_end
        if not self.machine.settings.exactly_once:
            slot.suspected += self.machine.ledger.in_flight_of(index)
        code = self.pool.bury(index)
        self._recorder.trouble(f"shard {index}", None)
        if index < len(self.machine.planner.shards):
            self._performer.perform(self.machine.shard_died(index, now))
        if self._ending_deadline is not None or (slot.retired and asked):
            return
        if not asked:
            self._log_of(index).error("ended unasked (exit code %s)", code)
            if not self._budget.spend(now):
                raise CrashLoop(
                    f"shards died {self._budget.budget + 1} times within {self._budget.window_s:g} s",
                    hint="the log names what each died of; limits.restart_budget bounds how often this is tried",
                )
        slot.restarts += 1
        slot.start_at = now + (0.0 if asked else self._budget.pause_s())

"""The supervisor: one thread that performs what the state machine decides, and the way for others to talk to it.

`Core` is that thread. It owns the state machine and the shards' pipes and never blocks on a server or on a shard: the
marker, the group member and the host's event handler have threads of their own and reach it through an inbox. All it
waits for is one epoll. Everything a shard said before its death is heard before the death is.

What it performs, and what it hears, is in `performer`.

`Supervisor` is what the rest of the process sees. Whoever wants to stop does the waiting (`Supervisor.drain`, then
`end`), so that a drain can be part of a rebalance callback as well as of a signal.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from harvester.errors import CrashLoop, WireError
from harvester.neli.group import Group
from harvester.relay.core.frames import Login
from harvester.relay.core.leadership import Settings
from harvester.relay.core.messages import (
    Command,
    Report,
)
from harvester.relay.core.state_machine import Phase, Relay
from harvester.relay.core.supervision import HandOver, RestartBudget
from harvester.relay.ipc import Shared, TrustCell, Waker, set_in_flight, trust_check
from harvester.relay.marker import MarkLoop
from harvester.relay.performer import Outlets, Performer, Tidings, hear, heed
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import Fleet

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

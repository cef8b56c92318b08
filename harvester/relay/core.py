"""The supervisor's thread, the *core*: it performs what the relay machine decides.

It owns the machine and the shards' pipes and never blocks on a server or on a shard: the mark loop, the member of the
group and the host's event handler have threads of their own, and reach it through an inbox. All it waits for is one
epoll. Everything a shard says before its death is heard before the death is.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from uuid import uuid4

from harvester.errors import CrashLoop, WireError
from harvester.neli.group import Group
from harvester.relay.fleet import Fleet
from harvester.relay.hearing import Tidings, hear
from harvester.relay.limits import Settings
from harvester.relay.machine import Phase, Relay
from harvester.relay.performing import Outlets, Performer
from harvester.relay.shared import Shared, TrustCell, set_in_flight, trust_check
from harvester.relay.spec import ShardSpec
from harvester.relay.supervision import HandOver, RestartBudget
from harvester.relay.waking import Waker

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

"""The supervisor's shards: starts, reads, feeds and ends their processes, and keeps their statistics.

For the supervisor's thread only. `forkserver` starts the processes.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harvester.relay.core.frames import Frame, Login, Stats, Stop
from harvester.relay.forkserver import Forkserver, Process
from harvester.relay.ipc import Channel
from harvester.relay.shard import ShardSpec, main
from harvester.status import ShardState

_NO_STATS = Stats(0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class Slot:
    """One place in the pool; processes come and go in it."""

    process: ShardProcess | None = None
    ready: bool = False
    asked_to_end: bool = False  # its death is intended and uses no budget
    retired: bool = False  # there are now fewer shards
    restarts: int = 0
    start_at: float | None = None  # when to start a new process
    stats: Stats = _NO_STATS
    settled: int = 0
    quarantined: int = 0
    given_up: set[int] = field(default_factory=set)  # in quarantine, not settled yet
    suspected: int = 0  # records that may have been published and will be sent again
    parked: int = 0  # keys of this shard with a record that waits for a retry
    watched_for_room: bool = False
    session: tuple[int, str] | None = None  # its database session: pid and backend_start

    def give_up(self, record_id: int) -> None:
        """The record is in quarantine; it is settled next."""
        self.quarantined += 1
        self.given_up.add(record_id)

    def settle(self, ids: Sequence[int], count: int) -> int:
        """`count` of these ids are settled now; returns how many of them were published."""
        self.settled += count
        given_up = self.given_up.intersection(ids) if self.given_up else ()
        self.given_up.difference_update(given_up)
        return max(0, count - len(given_up))

    @property
    def state(self) -> ShardState:
        if self.process is None:
            return ShardState.DEAD
        return ShardState.READY if self.ready else ShardState.STARTING


@dataclass(slots=True)
class RestartBudget:
    """At most `budget` replacements of shards within `window_s`; beyond that, the process ends, for systemd to restart
    it.

    Only unintended deaths count.
    """

    budget: int
    window_s: float
    _deaths: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> bool:
        """A shard died unexpectedly. False: the budget is used up."""
        while self._deaths and now - self._deaths[0] >= self.window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        return len(self._deaths) <= self.budget

    def pause_s(self) -> float:
        """Delay before the next replacement: none after the first death, then longer each time."""
        return min(5.0, 0.1 * 2.0 ** (len(self._deaths) - 2)) if len(self._deaths) > 1 else 0.0


class ShardPool:
    """All shards. A descriptor of the poller belongs to the shard that `owner` returns."""

    def __init__(self, specs: list[ShardSpec], forkserver: Forkserver, poller: select.epoll) -> None:
        self._specs, self._forkserver, self._poller = specs, forkserver, poller
        self.slots = [Slot(start_at=0.0) for _ in specs]
        self._by_fd: dict[int, int] = {}
        self.closed = False  # no more processes are started

    def start_due(self, now: float) -> None:
        """Start processes that are due, as soon as the server can."""
        if self.closed:
            return
        for index, slot in enumerate(self.slots):
            if slot.process is None and slot.start_at is not None and now >= slot.start_at:
                if not self._forkserver.is_up():
                    return
                started = self._forkserver.start(main, self._specs[index], f"shard-{index}")
                if started is None:
                    return
                slot.start_at = None
                process = ShardProcess(started, Channel(started.read_fd, started.write_fd))
                slot.process, slot.ready, slot.asked_to_end = process, False, False
                slot.stats = _NO_STATS
                slot.given_up.clear()
                for fd in (process.channel.read_fd, process.sentinel):
                    self._poller.register(fd, select.EPOLLIN)
                    self._by_fd[fd] = index

    def log_in(self, spec: ShardSpec, login: Login) -> None:
        """Use these credentials for new connections, in running processes and future ones."""
        self._specs = [replace(spec, index=index) for index in range(len(self._specs))]
        for index in self.alive:
            self.send(index, login)

    def owner(self, fd: int) -> int | None:
        return self._by_fd.get(fd)

    def resize(self, shards: int) -> None:
        """Change to this many shards; surplus ones have nothing to settle and are ended."""
        for index in range(shards, len(self.slots)):
            slot = self.slots[index]
            slot.retired, slot.start_at = True, None
            if slot.process is not None:
                slot.asked_to_end = True
                self.send(index, Stop(0.0))
        for index in range(min(shards, len(self.slots))):
            slot = self.slots[index]
            if slot.retired:
                slot.retired = False
                slot.start_at = 0.0 if slot.process is None else None
        while len(self.slots) < shards:
            self._specs.append(replace(self._specs[0], index=len(self.slots)))
            self.slots.append(Slot(start_at=0.0))

    @property
    def in_use(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.retired]

    def send(self, index: int, frame: Frame) -> bool:
        """Send a frame, unless the shard is gone. Returns whether the pipe is congested now."""
        process = self.slots[index].process
        if process is None:
            return False
        congested = process.channel.send(frame)
        self._watch_room(index, process.channel)
        return congested

    def receive(self, index: int) -> list[Frame]:
        """The frames that the shard has sent; also empty when it has closed its end."""
        process = self.slots[index].process
        frames: list[Frame] = []
        if process is None:
            return frames
        try:
            frames.extend(process.channel.receive())
        except EOFError:
            if process.channel.read_fd in self._by_fd:
                self._poller.unregister(process.channel.read_fd)
                del self._by_fd[process.channel.read_fd]
        return frames

    def flush(self, index: int) -> bool:
        """Write what waits; true when more may be sent."""
        process = self.slots[index].process
        if process is None:
            return False
        congested = process.channel.flush()
        self._watch_room(index, process.channel)
        return not congested

    def has_room(self, index: int, fd: int) -> bool:
        """Whether this descriptor is the one to which frames are written."""
        process = self.slots[index].process
        return process is not None and fd == process.channel.write_fd

    def has_ended(self, index: int, fd: int) -> bool:
        process = self.slots[index].process
        return process is not None and fd == process.sentinel

    def kill(self, index: int, *, asked: bool) -> None:
        """SIGKILL. `asked`: its death uses no budget."""
        slot = self.slots[index]
        if slot.process is not None:
            slot.asked_to_end = slot.asked_to_end or asked
            slot.process.process.kill()

    def bury(self, index: int) -> int | None:
        """The process has ended: reap and forget it. Returns its exit code."""
        slot = self.slots[index]
        assert slot.process is not None
        for fd in (slot.process.channel.read_fd, slot.process.sentinel):
            if fd in self._by_fd:
                self._poller.unregister(fd)
                del self._by_fd[fd]
        if slot.watched_for_room:
            self._poller.unregister(slot.process.channel.write_fd)
            del self._by_fd[slot.process.channel.write_fd]
            slot.watched_for_room = False
        slot.process.channel.close()
        code = slot.process.process.reap()
        slot.process, slot.ready, slot.session = None, False, None
        slot.stats = replace(slot.stats, queued=0, in_flight=0, parked=0)
        return code

    def stop(self, within_s: float) -> None:
        """Ask all shards to finish what is on the wire and exit."""
        for index, slot in enumerate(self.slots):
            slot.start_at = None
            if slot.process is not None:
                slot.asked_to_end = True
                self.send(index, Stop(within_s))

    @property
    def alive(self) -> list[int]:
        return [index for index, slot in enumerate(self.slots) if slot.process is not None]

    def kill_all(self) -> None:
        """SIGKILL and reap all shards, and end the server; the very last step."""
        for index in self.alive:
            self.kill(index, asked=True)
        deadline = time.monotonic() + 5
        for index in self.alive:
            if time.monotonic() < deadline:
                self.bury(index)
        self._forkserver.close()

    def _watch_room(self, index: int, channel: Channel) -> None:
        """Watch the pipe for room as long as something waits to be written."""
        slot, waits = self.slots[index], bool(channel.outbound)
        if waits == slot.watched_for_room:
            return
        slot.watched_for_room = waits
        if waits:
            self._poller.register(channel.write_fd, select.EPOLLOUT)
            self._by_fd[channel.write_fd] = index
        else:
            self._poller.unregister(channel.write_fd)
            del self._by_fd[channel.write_fd]


@dataclass(slots=True, eq=False)
class ShardProcess:
    """A running shard: its process and the supervisor's ends of its pipes."""

    process: Process
    channel: Channel

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        return self.process.sentinel

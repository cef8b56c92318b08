"""Rows that were read but cannot be sent yet, remembered by id alone. Pure.

Theory. A scan passes every row once (`scan`). A row that cannot be sent when it is read is *deferred*: its id joins a
queue, and the row is fetched by its id when it can be sent. `dispatcher` defers rows that arrive,
`state_machine.parked` a record that failed, and `read_planner` decides when a queue is worth a fetch.

- A *deferred key* has a record that waits for its next attempt (parked), or more than `max_queued_per_key` rows under
  way. Every further row of the key joins its queue, so nothing is overtaken (P18).
- A *deferred shard* accepts nothing at the moment. Every row of the shard joins its queue, including rows of deferred
  keys; when the queue is emptied, those pass through their key's queue.

A queue is a sorted array of ids: eight bytes per row, whatever the row's size, and it counts towards no shared limit. A
key that is stuck for hours costs only the ids of its own rows. Within a key, ids ascend with causality, so sorting them
gives the order in which to send them.

A parked key is left alone until its retry is due, and is then tried with one record first: what is behind a poison
record need not be fetched with it. If rows are given back while a fetch is under way, the queue's `stamp` changes, and
the fetched rows go back into the queue instead of being sent ahead of them.

A remark forgets everything here: the scan then starts from its bookmark, below all waiting rows.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

KeyOrId = bytes | int  # a key's bytes; a record without a key has its own queue, named by its id


@dataclass(slots=True, eq=False)
class DeferredQueue:
    """The waiting rows of one key, or of one shard."""

    shard: int
    ids: array[int] = field(default_factory=lambda: array("q"))
    not_before: float = 0.0
    parked: bool = False
    tried: bool = False  # one record of a parked key is under way; the others wait for the outcome
    held: bool = False  # parked by the policy "hold": never quarantined
    stamp: int = 0
    fetching: int = 0  # rows being fetched from the database
    _start: int = 0  # ids before this index have been taken

    def __len__(self) -> int:
        return len(self.ids) - self._start

    def __contains__(self, record_id: int) -> bool:
        at = bisect_left(self.ids, record_id, self._start)
        return at < len(self.ids) and self.ids[at] == record_id

    def insert(self, record_id: int) -> None:
        if not len(self) or record_id > self.ids[-1]:
            self.ids.append(record_id)
            return
        at = bisect_left(self.ids, record_id, self._start)
        if self.ids[at] != record_id:
            self.ids.insert(at, record_id)

    def take(self, count: int) -> list[int]:
        """Remove and return the first ids."""
        end = min(len(self.ids), self._start + count)
        taken = self.ids[self._start : end].tolist()
        self._start = end
        if self._start > 1024 and self._start * 2 > len(self.ids):
            del self.ids[: self._start]
            self._start = 0
        return taken


class DeferredRows:
    """All waiting rows, by key and by shard. One thread only."""

    def __init__(self) -> None:
        self.by_key: dict[KeyOrId, DeferredQueue] = {}
        self.by_shard: dict[int, DeferredQueue] = {}
        self._timers: list[tuple[float, int, KeyOrId]] = []
        self._timer = 0
        self._ready: deque[KeyOrId] = deque()
        self._is_ready: set[KeyOrId] = set()
        self._stamps = 0
        self.rows = 0  # that wait, including those being fetched
        self.parked: Counter[int] = Counter()  # keys per shard that wait for a retry or its outcome
        self.held = 0  # how many of them are held by policy

    # -- questions

    def holds(self, record_id: int, name: KeyOrId, shard: int) -> bool:
        """Whether this row is already waiting."""
        queue, behind = self.by_key.get(name), self.by_shard.get(shard)
        return (queue is not None and record_id in queue) or (behind is not None and record_id in behind)

    def ids(self) -> set[int]:
        """All waiting ids; for the occasional look at the whole table."""
        return {i for queue in (*self.by_key.values(), *self.by_shard.values()) for i in queue.ids[queue._start :]}

    def firsts(self) -> list[int]:
        """The lowest waiting id of each queue."""
        return [queue.ids[queue._start] for queue in (*self.by_key.values(), *self.by_shard.values()) if len(queue)]

    # -- rows join

    def defer(self, name: KeyOrId, shard: int, record_id: int) -> None:
        """A row waits for earlier rows of its key."""
        queue = self.by_key.get(name)
        if queue is None:
            queue = self.by_key[name] = DeferredQueue(shard, stamp=self._next_stamp())
        self._insert(queue, (record_id,))

    def defer_behind_shard(self, shard: int, record_id: int) -> None:
        """A row waits for its shard."""
        queue = self.by_shard.get(shard)
        if queue is None:
            queue = self.by_shard[shard] = DeferredQueue(shard)
        self._insert(queue, (record_id,))

    def park(self, name: KeyOrId, shard: int, ids: Iterable[int], not_before: float, held: bool) -> None:
        """A record failed: it and the rows behind it wait until `not_before`."""
        queue = self.by_key.get(name)
        if queue is None:
            queue = self.by_key[name] = DeferredQueue(shard)
        self._insert(queue, ids)
        self.unpark(queue)
        queue.parked, queue.held, queue.not_before = True, held, not_before
        self.parked[shard] += 1
        self.held += held
        queue.stamp = self._next_stamp()
        self._timer += 1
        heapq.heappush(self._timers, (not_before, self._timer, name))

    def unpark(self, queue: DeferredQueue) -> None:
        """The key has no known failure any more."""
        if queue.parked:
            self.parked[queue.shard] -= 1
            self.held -= queue.held
        queue.parked = queue.tried = queue.held = False

    def give_back(self, name: KeyOrId, ids: Iterable[int]) -> None:
        """Rows of a deferred key that were under way are returned."""
        queue = self.by_key[name]
        self._insert(queue, ids)
        queue.stamp = self._next_stamp()

    # -- rows leave

    def wake(self, names: Iterable[KeyOrId]) -> None:
        for name in names:
            if name in self.by_key and name not in self._is_ready:
                self._is_ready.add(name)
                self._ready.append(name)

    def due(self, now: float) -> list[KeyOrId]:
        """Keys that may be worth a fetch because they are due or something has changed. Each is named once."""
        while self._timers and self._timers[0][0] <= now:
            self.wake((heapq.heappop(self._timers)[2],))
        names = list(self._ready)
        self._ready.clear()
        self._is_ready.clear()
        return names

    def fetch(self, queue: DeferredQueue, count: int) -> list[int]:
        """The next ids of a queue; the queue stays until `fetched`."""
        ids = queue.take(count)
        queue.fetching += len(ids)
        return ids

    def fetched(self, name: KeyOrId) -> None:
        """All fetched rows of this key have been handled: forget the queue if it is empty, otherwise plan it again."""
        queue = self.by_key[name]
        self.rows -= queue.fetching
        queue.fetching = 0
        if not len(queue):
            self.unpark(queue)
            del self.by_key[name]
            return
        self.wake((name,))

    def fetched_of_shard(self, shard: int) -> None:
        """The same for a deferred shard."""
        queue = self.by_shard[shard]
        self.rows -= queue.fetching
        queue.fetching = 0
        if not len(queue):
            del self.by_shard[shard]

    def clear(self) -> None:
        """Forget everything: the scan starts from its bookmark."""
        self.by_key.clear()
        self.by_shard.clear()
        self._timers.clear()
        self._ready.clear()
        self._is_ready.clear()
        self.rows = 0
        self.parked.clear()
        self.held = 0

    def _insert(self, queue: DeferredQueue, ids: Iterable[int]) -> None:
        before = len(queue)
        for record_id in ids:
            queue.insert(record_id)
        self.rows += len(queue) - before

    def _next_stamp(self) -> int:
        self._stamps += 1
        return self._stamps

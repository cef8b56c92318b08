"""Rows that were read and cannot be sent yet, remembered by id alone. Pure.

Theory. A scan passes every row once (`scan`). A row that cannot be sent when it is read joins a *lane* and is fetched
again, by its id, when it can be:

- a *key's lane*: one of its records waits for its next attempt (parked), or more of the key is under way than
  `max_queued_per_key`. While a key has a lane, every further row of it joins the lane, so nothing is overtaken (P18);
- a *shard's lane*: the shard takes nothing at the moment. While the lane is not empty, every row of that shard joins
  it, rows of keys with a lane included, and it is emptied through the keys' lanes.

A lane is a sorted array of ids: eight bytes a row, whatever the row's size, and no share in any bound that others
share. A key that is stuck for hours costs its own rows' ids. Ids ascend with causality within a key, so sorting them
gives the order to send them in.

A parked lane is left alone until its time has come, and is then tried with one record first: what stands behind a
poison record need not be fetched with it. Rows given back while a fetch is under way change the lane's `stamp`, and
what that fetch brings goes back into the lane instead of ahead of them.

A remark forgets all of it: the scan then starts from its bookmark, below all that waits.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LaneName = bytes | int  # a key's bytes; a record without a key has a lane of its own, under its id


@dataclass(slots=True, eq=False)
class Lane:
    """See the module's text."""

    shard: int
    ids: array[int] = field(default_factory=lambda: array("q"))
    not_before: float = 0.0
    parked: bool = False
    tried: bool = False  # one record of a parked lane is under way; what is behind it waits for the outcome
    held: bool = False  # parked by the policy "hold": it will not go to quarantine
    stamp: int = 0
    fetching: int = 0  # rows under way from the database
    _start: int = 0  # ids before this index were taken

    def __len__(self) -> int:
        return len(self.ids) - self._start

    def __contains__(self, record_id: int) -> bool:
        at = bisect_left(self.ids, record_id, self._start)
        return at < len(self.ids) and self.ids[at] == record_id

    def insert(self, record_id: int) -> None:
        """Put an id in its place."""
        if not len(self) or record_id > self.ids[-1]:
            self.ids.append(record_id)
            return
        at = bisect_left(self.ids, record_id, self._start)
        if self.ids[at] != record_id:
            self.ids.insert(at, record_id)

    def take(self, count: int) -> list[int]:
        """The first ids, taken out."""
        end = min(len(self.ids), self._start + count)
        taken = self.ids[self._start : end].tolist()
        self._start = end
        if self._start > 1024 and self._start * 2 > len(self.ids):
            del self.ids[: self._start]
            self._start = 0
        return taken


class Waiting:
    """See the module's text. One thread only."""

    def __init__(self) -> None:
        self.lanes: dict[LaneName, Lane] = {}
        self.shards: dict[int, Lane] = {}
        self._timers: list[tuple[float, int, LaneName]] = []
        self._timer = 0
        self._ready: deque[LaneName] = deque()
        self._is_ready: set[LaneName] = set()
        self._stamps = 0
        self._total = 0
        self.parked: Counter[int] = Counter()  # by shard: lanes that wait for a retry, or for the outcome of one
        self.held = 0  # those of them that are held by policy

    # -- questions

    def __len__(self) -> int:
        """Rows that wait, those being fetched included."""
        return self._total

    def holds(self, record_id: int, name: LaneName, shard: int) -> bool:
        """Whether this row waits already."""
        lane, slice_lane = self.lanes.get(name), self.shards.get(shard)
        return (lane is not None and record_id in lane) or (slice_lane is not None and record_id in slice_lane)

    def ids(self) -> set[int]:
        """Every waiting id; for the rare look at the whole table."""
        return {i for lane in (*self.lanes.values(), *self.shards.values()) for i in lane.ids[lane._start :]}

    def firsts(self) -> list[int]:
        """The lowest waiting id of each lane."""
        return [lane.ids[lane._start] for lane in (*self.lanes.values(), *self.shards.values()) if len(lane)]

    # -- rows join

    def join(self, name: LaneName, shard: int, record_id: int) -> None:
        """A row waits for others of its key."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(shard, stamp=self._next_stamp())
        self._insert(lane, (record_id,))

    def join_shard(self, shard: int, record_id: int) -> None:
        """A row waits for its shard."""
        lane = self.shards.get(shard)
        if lane is None:
            lane = self.shards[shard] = Lane(shard)
        self._insert(lane, (record_id,))

    def park(self, name: LaneName, shard: int, ids: Iterable[int], not_before: float, held: bool) -> None:
        """A record failed: it and what stood behind it wait until then."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(shard)
        self._insert(lane, ids)
        self.unpark(lane)
        lane.parked, lane.held, lane.not_before = True, held, not_before
        self.parked[shard] += 1
        self.held += held
        lane.stamp = self._next_stamp()
        self._timer += 1
        heapq.heappush(self._timers, (not_before, self._timer, name))

    def unpark(self, lane: Lane) -> None:
        """Nothing of it failed last, as far as is known."""
        if lane.parked:
            self.parked[lane.shard] -= 1
            self.held -= lane.held
        lane.parked = lane.tried = lane.held = False

    def give_back(self, name: LaneName, ids: Iterable[int]) -> None:
        """Rows of a lane that were under way come back."""
        lane = self.lanes[name]
        self._insert(lane, ids)
        lane.stamp = self._next_stamp()

    # -- rows leave

    def wake(self, names: Iterable[LaneName]) -> None:
        """These lanes may be worth a fetch now."""
        for name in names:
            if name in self.lanes and name not in self._is_ready:
                self._is_ready.add(name)
                self._ready.append(name)

    def due(self, now: float) -> list[LaneName]:
        """Lanes that may be worth a fetch: their time has come, or something else has changed. Each is named once."""
        while self._timers and self._timers[0][0] <= now:
            self.wake((heapq.heappop(self._timers)[2],))
        names = list(self._ready)
        self._ready.clear()
        self._is_ready.clear()
        return names

    def fetch(self, lane: Lane, count: int) -> list[int]:
        """The next ids of a lane; it stays until `fetched`."""
        ids = lane.take(count)
        lane.fetching += len(ids)
        return ids

    def fetched(self, name: LaneName) -> None:
        """All that was fetched of this lane has been seen to: forget the lane if nothing is left, else go on."""
        lane = self.lanes[name]
        self._total -= lane.fetching
        lane.fetching = 0
        if not len(lane):
            self.unpark(lane)
            del self.lanes[name]
            return
        self.wake((name,))

    def fetched_shard(self, shard: int) -> None:
        """The same for a shard's lane."""
        lane = self.shards[shard]
        self._total -= lane.fetching
        lane.fetching = 0
        if not len(lane):
            del self.shards[shard]

    def clear(self) -> None:
        """Forget everything: the scan starts from its bookmark."""
        self.lanes.clear()
        self.shards.clear()
        self._timers.clear()
        self._ready.clear()
        self._is_ready.clear()
        self._total = 0
        self.parked.clear()
        self.held = 0

    def _insert(self, lane: Lane, ids: Iterable[int]) -> None:
        before = len(lane)
        for record_id in ids:
            lane.insert(record_id)
        self._total += len(lane) - before

    def _next_stamp(self) -> int:
        self._stamps += 1
        return self._stamps

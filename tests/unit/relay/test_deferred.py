"""What waits, against an oracle of plain sets: sorted, counted, and gone when it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.relay.core.deferred import DeferredQueue, DeferredRows, KeyOrId
from tests.support.longs import some_of

NAMES = st.sampled_from([b"a", b"b", 7])
IDS = st.integers(1, 60)


@dataclass
class Known:
    """A lane: what waits in it, what is being fetched of it, and the stamp that the fetch saw."""

    ids: set[int] = field(default_factory=set)
    fetching: list[int] = field(default_factory=list)
    stamp: int = 0


class WaitingMachine(RuleBasedStateMachine):
    """Every rule does the same to both."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = DeferredRows()
        self.keys: dict[KeyOrId, Known] = {}
        self.shards: dict[int, Known] = {}
        self.timers: list[tuple[float, KeyOrId]] = []
        self.woken: set[KeyOrId] = set()
        self.now = 0.0

    # -- rows join

    @rule(name=NAMES, record_id=IDS)
    def defer(self, name: KeyOrId, record_id: int) -> None:
        self.waiting.defer(name, 0, record_id)
        self.keys.setdefault(name, Known()).ids.add(record_id)

    @rule(shard=st.integers(0, 1), record_id=IDS)
    def defer_behind_shard(self, shard: int, record_id: int) -> None:
        self.waiting.defer_behind_shard(shard, record_id)
        self.shards.setdefault(shard, Known()).ids.add(record_id)

    @rule(name=NAMES, ids=st.lists(IDS, min_size=1, max_size=4), wait_s=st.integers(0, 5), held=st.booleans())
    def park(self, name: KeyOrId, ids: list[int], wait_s: int, held: bool) -> None:
        before = self.waiting.by_key.get(name)
        stamp = before.stamp if before is not None else None
        self.waiting.park(name, 0, ids, self.now + wait_s, held)
        queue = self.waiting.by_key[name]
        assert (queue.parked, queue.tried, queue.held, queue.not_before) == (True, False, held, self.now + wait_s)
        assert queue.stamp != stamp
        self.keys.setdefault(name, Known()).ids |= set(ids)
        self.timers.append((self.now + wait_s, name))

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), ids=st.lists(IDS, max_size=4))
    def give_back(self, data: st.DataObject, ids: list[int]) -> None:
        name = data.draw(st.sampled_from(list(self.keys)))
        stamp = self.waiting.by_key[name].stamp
        self.waiting.give_back(name, ids)
        assert self.waiting.by_key[name].stamp != stamp
        self.keys[name].ids |= set(ids)

    # -- rows leave

    @precondition(lambda self: any(not known.fetching for known in self.keys.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def fetch(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from([n for n, known in self.keys.items() if not known.fetching]))
        self._fetch(self.waiting.by_key[name], self.keys[name], count)

    @precondition(lambda self: any(not known.fetching for known in self.shards.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def fetch_shard(self, data: st.DataObject, count: int) -> None:
        shard = data.draw(st.sampled_from([n for n, known in self.shards.items() if not known.fetching]))
        self._fetch(self.waiting.by_shard[shard], self.shards[shard], count)

    def _fetch(self, queue: DeferredQueue, known: Known, count: int) -> None:
        known.fetching = sorted(known.ids)[:count]
        assert self.waiting.fetch(queue, count) == known.fetching
        known.ids -= set(known.fetching)

    @precondition(lambda self: any(known.fetching for known in self.keys.values()))
    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, known in self.keys.items() if known.fetching]))
        self.waiting.fetched(name)
        self.keys[name].fetching = []
        if self.keys[name].ids:
            self.woken.add(name)
        else:
            del self.keys[name]

    @precondition(lambda self: any(known.fetching for known in self.shards.values()))
    @rule(data=st.data())
    def fetched_of_shard(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from([n for n, known in self.shards.items() if known.fetching]))
        self.waiting.fetched_of_shard(shard)
        self.shards[shard].fetching = []
        if not self.shards[shard].ids:
            del self.shards[shard]

    @rule(names=st.lists(NAMES, max_size=2))
    def wake(self, names: list[KeyOrId]) -> None:
        self.waiting.wake(names)
        self.woken |= {name for name in names if name in self.keys}

    @rule(passed_s=st.integers(0, 4))
    def due(self, passed_s: int) -> None:
        """Nobody is forgotten whose time has come or who was woken; nobody is named twice."""
        self.now += passed_s
        names = self.waiting.due(self.now)
        assert len(names) == len(set(names))
        due = {name for at, name in self.timers if at <= self.now}
        self.timers = [(at, name) for at, name in self.timers if at > self.now]
        assert {name for name in names if name in self.keys} == {n for n in due | self.woken if n in self.keys}
        self.woken.clear()

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if not really:
            self.waiting.clear()
            for known in (self.keys, self.shards, self.timers, self.woken):
                known.clear()

    # -- what always holds

    @invariant()
    def same(self) -> None:
        waiting = self.waiting
        every = [*self.keys.values(), *self.shards.values()]
        assert waiting.rows == sum(len(known.ids) + len(known.fetching) for known in every)
        assert waiting.ids() == {i for known in every for i in known.ids}
        assert waiting.by_key.keys() == self.keys.keys()
        assert waiting.by_shard.keys() == self.shards.keys()
        for name, queue in waiting.by_key.items():
            left = queue.ids[queue._start :].tolist()
            assert left == sorted(self.keys[name].ids)
            assert len(queue) == len(left)
        for record_id in range(1, 61, 7):
            waits = record_id in self.keys.get(b"a", Known()).ids or record_id in self.shards.get(1, Known()).ids
            assert waiting.holds(record_id, b"a", 1) == waits
        assert waiting.held == sum(queue.held for queue in waiting.by_key.values())


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=some_of(80), stateful_step_count=40, deadline=None)


def test_a_long_lane_does_not_keep_what_was_taken() -> None:
    """Eight bytes a row that waits, and not one that has left."""
    queue = DeferredQueue(0)
    for record_id in range(10_000):
        queue.insert(record_id)
    taken: list[int] = []
    while len(queue):
        taken += queue.take(700)
        assert len(queue.ids) <= 2 * len(queue) + 2048
    assert taken == list(range(10_000))


def test_ids_in_any_order_come_out_sorted() -> None:
    queue = DeferredQueue(0)
    for record_id in (5, 1, 9, 5, 3, 1):
        queue.insert(record_id)
    assert queue.take(2) == [1, 3]
    queue.insert(2)
    assert (queue.take(9), 9 in queue) == ([2, 5, 9], False)

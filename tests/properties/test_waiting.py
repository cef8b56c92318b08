"""What waits, against an oracle of plain sets: sorted, counted, and gone when it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.relay.core.deferred import Lane, LaneName, Waiting

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
        self.waiting = Waiting()
        self.keys: dict[LaneName, Known] = {}
        self.shards: dict[int, Known] = {}
        self.timers: list[tuple[float, LaneName]] = []
        self.woken: set[LaneName] = set()
        self.now = 0.0

    # -- rows join

    @rule(name=NAMES, record_id=IDS)
    def join(self, name: LaneName, record_id: int) -> None:
        self.waiting.join(name, 0, record_id)
        self.keys.setdefault(name, Known()).ids.add(record_id)

    @rule(shard=st.integers(0, 1), record_id=IDS)
    def join_shard(self, shard: int, record_id: int) -> None:
        self.waiting.join_shard(shard, record_id)
        self.shards.setdefault(shard, Known()).ids.add(record_id)

    @rule(name=NAMES, ids=st.lists(IDS, min_size=1, max_size=4), wait_s=st.integers(0, 5), held=st.booleans())
    def park(self, name: LaneName, ids: list[int], wait_s: int, held: bool) -> None:
        before = self.waiting.lanes.get(name)
        stamp = before.stamp if before is not None else None
        self.waiting.park(name, 0, ids, self.now + wait_s, held)
        lane = self.waiting.lanes[name]
        assert (lane.parked, lane.tried, lane.held, lane.not_before) == (True, False, held, self.now + wait_s)
        assert lane.stamp != stamp
        self.keys.setdefault(name, Known()).ids |= set(ids)
        self.timers.append((self.now + wait_s, name))

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), ids=st.lists(IDS, max_size=4))
    def give_back(self, data: st.DataObject, ids: list[int]) -> None:
        name = data.draw(st.sampled_from(list(self.keys)))
        stamp = self.waiting.lanes[name].stamp
        self.waiting.give_back(name, ids)
        assert self.waiting.lanes[name].stamp != stamp
        self.keys[name].ids |= set(ids)

    # -- rows leave

    @precondition(lambda self: any(not known.fetching for known in self.keys.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def fetch(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from([n for n, known in self.keys.items() if not known.fetching]))
        self._fetch(self.waiting.lanes[name], self.keys[name], count)

    @precondition(lambda self: any(not known.fetching for known in self.shards.values()))
    @rule(data=st.data(), count=st.integers(1, 5))
    def fetch_shard(self, data: st.DataObject, count: int) -> None:
        shard = data.draw(st.sampled_from([n for n, known in self.shards.items() if not known.fetching]))
        self._fetch(self.waiting.shards[shard], self.shards[shard], count)

    def _fetch(self, lane: Lane, known: Known, count: int) -> None:
        known.fetching = sorted(known.ids)[:count]
        assert self.waiting.fetch(lane, count) == known.fetching
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
    def fetched_shard(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from([n for n, known in self.shards.items() if known.fetching]))
        self.waiting.fetched_shard(shard)
        self.shards[shard].fetching = []
        if not self.shards[shard].ids:
            del self.shards[shard]

    @rule(names=st.lists(NAMES, max_size=2))
    def wake(self, names: list[LaneName]) -> None:
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
        assert len(waiting) == sum(len(known.ids) + len(known.fetching) for known in every)
        assert waiting.ids() == {i for known in every for i in known.ids}
        assert waiting.lanes.keys() == self.keys.keys()
        assert waiting.shards.keys() == self.shards.keys()
        for name, lane in waiting.lanes.items():
            left = lane.ids[lane._start :].tolist()
            assert left == sorted(self.keys[name].ids)
            assert len(lane) == len(left)
        for record_id in range(1, 61, 7):
            waits = record_id in self.keys.get(b"a", Known()).ids or record_id in self.shards.get(1, Known()).ids
            assert waiting.holds(record_id, b"a", 1) == waits
        assert waiting.held == sum(lane.held for lane in waiting.lanes.values())


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_long_lane_does_not_keep_what_was_taken() -> None:
    """Eight bytes a row that waits, and not one that has left."""
    lane = Lane(0)
    for record_id in range(10_000):
        lane.insert(record_id)
    taken: list[int] = []
    while len(lane):
        taken += lane.take(700)
        assert len(lane.ids) <= 2 * len(lane) + 2048
    assert taken == list(range(10_000))


def test_ids_in_any_order_come_out_sorted() -> None:
    lane = Lane(0)
    for record_id in (5, 1, 9, 5, 3, 1):
        lane.insert(record_id)
    assert lane.take(2) == [1, 3]
    lane.insert(2)
    assert (lane.take(9), 9 in lane) == ([2, 5, 9], False)

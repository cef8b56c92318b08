"""The batches of a shard against an oracle that keeps lists, and the search for a record at fault."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.delivery.decode import Broken, Oversize
from harvester.delivery.progress import Progress, encode, encode_named
from harvester.record import KafkaRecord
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from tests.support.longs import some_of
from tests.support.rows import ONE, ids_of

MOST, NAMED, MOST_BYTES = 5, 8, 6
KEYS = st.sampled_from([None, b"a", b"b"])


@dataclass(eq=False)
class Known:
    id: int
    key: bytes | None
    entry: QueuedRecord
    suspect: bool = False
    alone: bool = False
    size: int = 0


class BatchesMachine(RuleBasedStateMachine):
    """Every rule does the same to both. What a shard gives back comes again, in order, ahead of anything newer.

    `log` is what readers of committed records see; `named` what each lane's last progress record names. The lanes take
    turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches = TransactionQueue(MOST, NAMED, MOST_BYTES)
        self.queue: list[Known] = []
        self.open: list[Known] = []
        self.unpurged: list[int] = []
        self.leaving: dict[int, bytes | None] = {}
        self.held: list[Known] = []  # behind records that go to quarantine
        self.log: list[Known] = []
        self.named: list[list[int]] = [[], []]
        self.lane = 0
        self.lane_of: dict[int, int] = {}
        self.given_back: list[tuple[int, bytes | None]] = []
        self.refusing: dict[int, bytes] = {}
        self.given_up: set[int] = set()
        self.at_once = 1  # suspects in a transaction
        self.is_searching = False
        self.is_over = False  # a remark waits for the end of the open transaction
        self.ids = 0

    def _make(self, record_id: int, key: bytes | None, alone: bool, size: int) -> Known:
        row = KafkaRecord(record_id, key, "topic", b"x" * size, [], -1, record_id + 2, record_id + 1)
        entry = QueuedRecord(record_id, key, row, float(record_id), record_id + 3, alone=alone)
        return Known(record_id, key, entry, alone=alone, size=size)

    @property
    def holding(self) -> set[bytes]:
        return {key for key in self.leaving.values() if key is not None}

    def _forget(self, records: list[Known]) -> None:
        """The supervisor has them again, and sends them in the order of their ids."""
        self.given_back = sorted([*self.given_back, *((one.id, one.key) for one in records)], key=lambda pair: pair[0])

    # -- records arrive

    @precondition(lambda self: not self.is_over)
    @rule(key=KEYS, alone=st.sampled_from([False, False, False, True]), size=st.sampled_from([0, 1, 1, 5, 9]))
    def offer(self, key: bytes | None, alone: bool, size: int) -> None:
        """The next one of this key: something that was given back, or a new one."""
        old = next((record_id for record_id, own in self.given_back if own == key), None)
        if old is None:
            self.ids += 1
        record = self._make(self.ids if old is None else old, key, alone, size)
        accepted = not self.batches.offer_all([record.entry])
        assert accepted == (key is None or key not in self.refusing.values())
        if old is not None:
            self.given_back.remove((old, key))
        if not accepted:
            self._forget([record])
        else:
            (self.held if record.key in self.holding else self.queue).append(record)

    # -- a transaction

    @precondition(lambda self: not self.is_over)
    @rule(most=st.integers(1, 4))
    def take(self, most: int) -> None:
        was_ready = self.batches.is_ready
        taken = self.batches.take(most)
        count = len(taken)
        assert taken == [record.entry for record in self.queue[:count]]
        room = min(most, MOST - len(self.open), NAMED - len(self.unpurged) - len(self.open))
        assert count <= max(0, room)
        assert self.open or was_ready == bool(count)
        self.open += self.queue[:count]
        del self.queue[:count]
        assert sum(record.size for record in self.open[:-1]) < MOST_BYTES
        suspects = sum(record.suspect for record in self.open)
        among = len(self.open) if self.is_searching and suspects else suspects
        assert among <= self.at_once
        assert len(self.open) == 1 or not any(record.alone for record in self.open)
        if count < room and self.queue:  # it could have been more
            following, alone = self.queue[0], self.open[0].alone if self.open else False
            assert self.open
            is_full = sum(record.size for record in self.open) >= MOST_BYTES
            enough = len(self.open) if self.is_searching else suspects
            is_next = following.suspect or (self.is_searching and suspects)
            assert is_full or alone or following.alone or (is_next and enough >= self.at_once)

    @precondition(lambda self: self.open)
    @rule()
    def commit(self) -> None:
        named = ids_of(self.batches.progress())
        assert [entry.id for entry in self.batches.committed(self.lane)] == [record.id for record in self.open]
        self._publish(named)
        self.unpurged += [record.id for record in self.open]
        self.lane_of |= {record.id: self.lane for record in self.open}
        self.lane = 1 - self.lane
        if not self.is_searching and any(record.suspect for record in self.open):
            self.at_once *= 2
        self._end()

    @precondition(lambda self: self.open)
    @rule()
    def begin(self) -> None:
        """A commit that nobody sent makes the record at the beginning of the transaction the lane's last one."""
        self.named[self.lane] = ids_of(self.batches.unpurged(self.lane))

    @precondition(lambda self: self.open)
    @rule()
    def abort(self) -> None:
        self.batches.aborted()
        self._put_back()

    @precondition(lambda self: self.open or self.unpurged)
    @rule(was_committed=st.booleans())
    def recover(self, was_committed: bool) -> None:
        """Nobody knew what became of the transaction; the lanes' progress, which is purged, tells."""
        if was_committed and self.open:
            self._publish(ids_of(self.batches.progress()))
            self.open.clear()
        found = [record_id for named in self.named for record_id in named]
        self.batches.aborted(found)
        self.unpurged = [record_id for record_id in self.unpurged if record_id not in found]
        self.named = [[], []]
        self._put_back()
        assert not self.unpurged

    def _publish(self, named: list[int]) -> None:
        """The transaction commits, its progress record with it."""
        self.log += self.open
        self.named[self.lane] = named

    def _put_back(self) -> None:
        self.queue[:0] = self.open
        self._end()

    def _end(self) -> None:
        self.open = []
        if self.is_over:
            self.batches.drop_queue()
            self._forget(self.queue + self.held)
            self.queue, self.held, self.is_over = [], [], False

    # -- failures; the open transaction has been undone

    @precondition(lambda self: self.open and not self.is_over)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """A broker refuses a part of it."""
        failed = data.draw(st.lists(st.sampled_from(self.open), min_size=1, unique_by=lambda record: record.id))
        self.batches.aborted()
        self._put_back()
        culprit = self.batches.suspect([record.entry for record in failed])
        assert culprit is (failed[0].entry if len(failed) == 1 else None)
        self.is_searching = culprit is None
        if culprit is None:
            self.at_once = max(1, len(failed) // 2)
        for record in self.queue:
            record.suspect = record.entry.suspect

    @precondition(lambda self: self.queue and not self.open)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.queue))
        self.batches.remove(record.entry)
        self.queue.remove(record)
        self.leaving[record.id] = record.key
        self.held += [one for one in self.queue if one.key in self.holding]
        self.queue = [one for one in self.queue if one.key not in self.holding]

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Quarantine would not have it; nothing more of its key comes before a remark."""
        record_id = data.draw(st.sampled_from(sorted(self.leaving)))
        key = self.leaving.pop(record_id)
        behind = [one for one in self.held if one.key == key]
        assert self.batches.give_up(record_id) == [record_id, *(one.id for one in behind)]
        self.held = [one for one in self.held if one not in behind]
        self._forget([self._make(record_id, key, alone=False, size=0), *behind])
        if key is not None:
            self.refusing[record_id] = key
            self.given_up.add(record_id)

    @precondition(lambda self: self.queue and not self.open)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.queue))
        of_key = [one for one in self.queue if one is record or (record.key is not None and one.key == record.key)]
        assert self.batches.park(record.entry) == [one.id for one in of_key if one is not record]
        self.queue = [one for one in self.queue if one not in of_key]
        self._forget(of_key)
        if record.key is not None:
            self.refusing[record.id] = record.key

    @precondition(lambda self: self.refusing)
    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        """The supervisor's word is about what was parked; for what was given up there is only a remark."""
        record_id = data.draw(st.sampled_from(sorted(self.refusing)))
        self.batches.reopen(record_id)
        if record_id not in self.given_up:
            del self.refusing[record_id]

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """With an id that is not here."""
        known = [*self.unpurged, *self.leaving]
        ids = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        self.batches.settle([*ids, -1])
        self.unpurged = [record_id for record_id in self.unpurged if record_id not in ids]
        for record_id in ids:  # each frees what it held, which goes to the head
            key = self.leaving.pop(record_id, None)
            freed = [one for one in self.held if key is not None and one.key == key]
            self.queue[:0] = freed
            self.held = [one for one in self.held if one not in freed]

    @rule()
    def remark(self) -> None:
        assert sorted(self.batches.drop_queue()) == sorted(record.id for record in self.queue + self.held)
        self._forget(self.queue + self.held)
        self.queue, self.held, self.refusing, self.given_up = [], [], {}, set()
        self.is_over = bool(self.open)

    # -- what always holds

    @invariant()
    def same(self) -> None:
        batches, first = self.batches, next(iter([*self.open, *self.queue]), None)
        assert batches.queued == len(self.queue) + len(self.held)
        assert batches.in_flight == len(self.open) + len(self.unpurged) + len(self.leaving)
        assert batches.leaving() == sorted([*self.unpurged, *self.leaving])
        of_lane = [record_id for record_id in self.unpurged if self.lane_of[record_id] == self.lane]
        assert ids_of(batches.unpurged(self.lane)) == sorted(of_lane)
        ids = sorted([*self.unpurged, *(record.id for record in self.open)])
        versions = ([record_id + number for record_id in ids] for number in (1, 2, 3))
        named = encode_named(1, ONE, batches.progress())
        assert named == encode(Progress(1, ONE, ids, *versions))
        assert batches.oldest() is (first.entry if first is not None else None)
        assert batches.alone is (self.open[0].entry if self.open and self.open[0].alone else None)
        assert all(record.entry in batches for record in self.queue)
        assert not any(record.entry in batches for record in self.open)

    @invariant()
    def a_progress_record_is_bounded(self) -> None:
        """P22."""
        assert len(ids_of(self.batches.progress())) <= NAMED
        assert len(self.open) <= MOST

    @invariant()
    def nothing_is_committed_twice_and_keys_keep_their_order(self) -> None:
        ids = [record.id for record in self.log]
        assert len(ids) == len(set(ids))
        for key in (b"a", b"b"):
            of_key = [record.id for record in self.log if record.key == key]
            assert of_key == sorted(of_key)

    @invariant()
    def nothing_is_lost(self) -> None:
        """What was committed and is not named was purged; everything else is somewhere, once."""
        assert set(self.unpurged) <= set(self.named[0]) | set(self.named[1])
        here = [
            *(record.id for record in self.queue + self.held + self.open),
            *(record_id for record_id, _ in self.given_back),
        ]
        assert len(here) == len(set(here))
        assert not set(here) & {record.id for record in self.log}


TestBatches = BatchesMachine.TestCase
TestBatches.settings = settings(max_examples=some_of(100), stateful_step_count=50, deadline=None)


ARRIVALS = st.lists(st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.booleans()), max_size=8)


@settings(deadline=None)
@given(ARRIVALS, ARRIVALS, st.booleans())
def test_records_queue_together_as_one_by_one(
    before: list[tuple[bytes | None, bool]], then: list[tuple[bytes | None, bool]], parks: bool
) -> None:
    """Whatever of them is too large, is held behind such a record, or has a key that is refused."""

    def arrive(*, together: bool) -> tuple[object, ...]:
        batches = TransactionQueue(100, 100)
        parked = entry(0, b"c", large=False)
        if parks:
            batches.offer(parked)
            batches.park(parked)
        refused: list[int] = []
        for first, arrivals in ((1, before), (101, then)):
            entries = [entry(number, key, large=large) for number, (key, large) in enumerate(arrivals, first)]
            if together:
                refused += [one.id for one in batches.offer_all(entries)]
                continue
            for one in entries:
                offer = batches.offer_oversize if isinstance(one.record, Oversize) else batches.offer
                refused += [] if offer(one) else [one.id]
        stored = [one.id for one in batches.to_store()]
        queued = batches.queued
        return refused, stored, queued, [one.id for one in batches.take(100)], sorted(batches.drop_queue())

    def entry(record_id: int, key: bytes | None, *, large: bool) -> QueuedRecord:
        record = KafkaRecord(record_id, key, "topic", b"", [], -1, 0)
        return QueuedRecord(record_id, key, Oversize(record_id, key, record) if large else record, 0.0)

    assert arrive(together=True) == arrive(together=False)


@settings(max_examples=some_of(200), deadline=None)
@given(st.sets(st.integers(0, 79), min_size=1, max_size=3), *[st.integers(1, 80)] * 3)
@example({56}, 72, 80, 59)  # the last suspects, and others behind them
@example({28}, 67, 31, 55)
def test_every_record_at_fault_is_found_by_few_aborts_and_nobody_else(
    places: set[int], count: int, batch: int, most: int
) -> None:
    """A broker refuses the whole batch, at most `batch` records in a row, in which the first of them lies."""
    entries = [QueuedRecord(number, None, Broken(number, None, ""), 0.0) for number in range(count)]
    at_fault = {entries[place % count] for place in places}
    batches = TransactionQueue(most, count + 1)
    for entry in entries:
        batches.offer(entry)
    committed: list[QueuedRecord] = []
    found: list[QueuedRecord] = []
    aborts = transactions = 0
    while batches.queued:
        taken = batches.take(count)
        transactions += 1
        assert taken
        first = next((at for at, entry in enumerate(taken) if entry in at_fault), None)
        if first is None:
            committed += batches.committed(0)
            continue
        aborts += 1
        begin = first - first % batch
        batches.aborted()
        culprit = batches.suspect(taken[begin : begin + batch])
        if culprit is not None:
            batches.remove(culprit)
            found.append(culprit)
    assert set(found) == at_fault
    assert committed == [entry for entry in entries if entry not in at_fault]
    steps = ceil(log2(min(count, batch, most) + 1)) + 2
    assert aborts <= len(at_fault) * steps
    assert transactions <= 3 * len(at_fault) * steps + count / most, "those who are not at fault are held up"

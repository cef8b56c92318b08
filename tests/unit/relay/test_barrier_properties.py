"""The barrier against an oracle that keeps one list of records in the order in which they came."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.delivery.decode import Broken
from harvester.relay.core.barrier import Barrier, BarrierEntry, EntryState
from tests.support.longs import some_of

KEYS = st.sampled_from([None, b"a", b"b"])


@dataclass
class Known:
    id: int
    key: bytes | None
    step: EntryState


class BarrierMachine(RuleBasedStateMachine):
    """Every rule does the same to both; `records` are in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = Barrier()
        self.records: list[Known] = []
        self.refusing: set[bytes] = set()
        self.announced: dict[int, bytes] = {}
        self.ids = 0

    # -- the oracle

    def at(self, *steps: EntryState) -> list[Known]:
        return [record for record in self.records if record.step in steps]

    def unsettled(self) -> list[Known]:
        return self.at(EntryState.WIRE, EntryState.ACKED, EntryState.HELD)

    def behind(self, record: Known) -> list[Known]:
        return [r for r in self.at(EntryState.QUEUED) if record.key is not None and r.key == record.key]

    def drop(self, records: list[Known]) -> list[int]:
        self.records = [record for record in self.records if record not in records]
        return [record.id for record in records]

    def draw(self, data: st.DataObject, *steps: EntryState) -> Known:
        return data.draw(st.sampled_from(self.at(*steps)))

    # -- rules

    @rule(key=KEYS)
    def offer(self, key: bytes | None) -> None:
        self.ids += 1
        answer = self.barrier.offer(BarrierEntry(self.ids, key, Broken(self.ids, key, ""), since=float(self.ids)))
        if key is not None and key in self.refusing:
            assert answer is None
            return
        held = key is not None and any(record.key == key for record in self.unsettled())
        assert answer is not held
        self.records.append(Known(self.ids, key, EntryState.QUEUED if held else EntryState.WIRE))

    @precondition(lambda self: self.at(EntryState.WIRE, EntryState.HELD))
    @rule(data=st.data())
    def acked(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.WIRE, EntryState.HELD)
        self.barrier.acked((self.barrier.unsettled[record.id],))
        record.step = EntryState.ACKED

    @precondition(lambda self: self.at(EntryState.ACKED))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Several at once, as they are purged, with an id that is not here."""
        records = data.draw(st.lists(st.sampled_from(self.at(EntryState.ACKED)), min_size=1, unique_by=lambda r: r.id))
        following = self.barrier.settle([*(record.id for record in records), -1], now=1000.0)
        self.drop(records)
        heads = [behind[0] for record in records if (behind := self.behind(record))]
        assert [entry.id for entry in following] == [head.id for head in heads]
        for head in heads:
            head.step = EntryState.WIRE

    @precondition(lambda self: self.at(EntryState.WIRE))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.WIRE)
        assert self.barrier.park(record.id) == self.drop(self.behind(record))
        self.drop([record])
        if record.key is not None:
            self.announced[record.id] = record.key
            self.refusing.add(record.key)

    @precondition(lambda self: self.at(EntryState.WIRE))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.WIRE)
        self.barrier.hold(record.id)
        record.step = EntryState.HELD

    @precondition(lambda self: self.at(EntryState.HELD))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.HELD)
        entry = self.barrier.release(record.id, 0.0)
        assert entry is not None
        assert entry.id == record.id
        record.step = EntryState.WIRE
        assert self.barrier.release(record.id, 0.0) is None

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        record_id = data.draw(st.sampled_from(sorted(self.announced)))
        self.barrier.reopen(record_id)
        self.refusing.discard(self.announced.pop(record_id))

    @precondition(lambda self: self.unsettled())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.WIRE, EntryState.ACKED, EntryState.HELD)
        assert self.barrier.forget(record.id) == self.drop(self.behind(record))
        self.drop([record])
        if record.key is not None:
            self.refusing.add(record.key)

    @precondition(lambda self: self.at(EntryState.WIRE))
    @rule(data=st.data())
    def drop_unsent(self, data: st.DataObject) -> None:
        record = self.draw(data, EntryState.WIRE)
        lost = [record, *(r for r in self.at(EntryState.QUEUED, EntryState.HELD))]
        assert self.barrier.drop_unsent(record.id) == sorted(self.drop(lost))
        self._forgive()

    @rule()
    def remark(self) -> None:
        answer = self.barrier.remark()
        self.drop(self.at(EntryState.QUEUED, EntryState.HELD))
        self._forgive()
        assert answer == sorted(record.id for record in self.records)

    def _forgive(self) -> None:
        self.refusing.clear()
        self.announced.clear()

    # -- what always holds

    @invariant()
    def same(self) -> None:
        barrier, unsettled = self.barrier, self.unsettled()
        assert barrier.queued == len(self.at(EntryState.QUEUED))
        assert barrier.held == len(self.at(EntryState.HELD))
        assert len(barrier.unsettled) == len(unsettled)
        assert barrier.on_the_wire() == sorted(r.id for r in self.at(EntryState.WIRE, EntryState.ACKED))
        assert all((record.id in barrier) == (record in unsettled) for record in self.records)

    @invariant()
    def one_of_a_key(self) -> None:
        keys = [record.key for record in self.unsettled() if record.key is not None]
        assert len(keys) == len(set(keys))
        assert {record.key for record in self.at(EntryState.QUEUED)} <= set(keys)

    @invariant()
    def the_longest_waiting_heads_its_queue(self) -> None:
        """Those behind a held record have nothing to wait for that a remark would help."""
        longest = self.barrier.longest_waiting()
        held = {record.key for record in self.at(EntryState.HELD)}
        queued = [record for record in self.at(EntryState.QUEUED) if record.key not in held]
        assert (longest is None) == (not queued)
        if longest is not None:
            assert longest.id == next(record.id for record in queued if record.key == longest.key)


TestBarrier = BarrierMachine.TestCase
TestBarrier.settings = settings(max_examples=some_of(80), stateful_step_count=40, deadline=None)

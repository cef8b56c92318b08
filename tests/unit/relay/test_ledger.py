"""The ledger against an oracle that remembers everything and computes nothing in advance."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.delivery.partitioner import shard_of
from harvester.relay.core.ledger import InFlightBounds, Ledger
from tests.support.longs import some_of

BOUNDS = InFlightBounds(in_flight=4, unsettled=8, per_key=4)
KEYS = st.sampled_from([None, b"a", b"b", b"c"])


@dataclass
class Oracle:
    """What happened, in order: ("sent", number), ("done", number), ("settled", id)."""

    unsettled: dict[int, tuple[int, bytes | None]] = field(default_factory=dict)
    history: list[tuple[str, int]] = field(default_factory=list)
    watched: set[bytes] = field(default_factory=set)
    drained: set[bytes] = field(default_factory=set)  # watched keys with a removal that left few, since last asked

    def ids_of(self, key: bytes | None) -> list[int]:
        return [i for i, (_, own) in self.unsettled.items() if own == key]

    def remove(self, ids: list[int]) -> list[int]:
        removed = [i for i in ids if i in self.unsettled]
        for record_id in removed:
            _, key = self.unsettled.pop(record_id)
            if key in self.watched and len(self.ids_of(key)) <= BOUNDS.low:
                self.drained.add(key)
        return removed

    def outstanding(self) -> list[int]:
        done = {what for kind, what in self.history if kind == "done"}
        return [what for kind, what in self.history if kind == "sent" and what not in done]

    def settled_since(self, number: int) -> set[int]:
        begun = self.history.index(("sent", number))
        return {what for event, what in self.history[begun:] if event == "settled"}


class LedgerMachine(RuleBasedStateMachine):
    """Every rule does the same to both."""

    pipelined = False

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BOUNDS, pipelined=self.pipelined)
        self.oracle = Oracle()
        self.ids = 0

    @rule(key=KEYS, shard=st.integers(0, 2))
    def add(self, key: bytes | None, shard: int) -> None:
        self.ids += 1
        if key is not None:
            owner = self.ledger.shard_of_key(key)
            shard = shard if owner is None else owner
        self.ledger.add(self.ids, key, shard)
        self.oracle.unsettled[self.ids] = (shard, key)

    @rule(keys=st.lists(KEYS, max_size=6), room=st.integers(0, 4))
    def add_rows(self, keys: list[bytes | None], room: int) -> None:
        """The same, at once, as far as there is room."""
        rows = [(self.ids + number, key, b"") for number, key in enumerate(keys, 1)]
        self.ids += len(rows)
        all_keys = [*keys, *(key for _, key in self.oracle.unsettled.values())]
        in_flight = len(all_keys) if self.pipelined else len(set(all_keys) - {None}) + all_keys.count(None)
        assert self.ledger.in_flight_with(rows) == in_flight
        taken = self.ledger.add_rows(rows, 3, room)
        shards = {row[0]: shard for shard, own in taken.items() for row in own}
        assert all(own == sorted(own) for own in taken.values())
        for record_id, key, _ in rows:
            others = self.oracle.ids_of(key) if key is not None else []
            if len(others) >= BOUNDS.per_key or (not others and not room):
                assert record_id not in shards
                break
            room -= not others
            shard = self.oracle.unsettled[others[0]][0] if others else shard_of(key, record_id, 3)
            assert shards.pop(record_id) == shard
            self.oracle.unsettled[record_id] = (shard, key)
        assert not shards

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        ids = self._some(data)
        removed = self.oracle.remove(ids)
        assert self.ledger.settle(ids) == len(removed)
        self.oracle.history += [("settled", i) for i in removed]

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ids = self._some(data)
        assert self.ledger.give_back(ids) == self.oracle.remove(ids)

    @rule(data=st.data(), shard=st.integers(0, 2))
    def keep_only(self, data: st.DataObject, shard: int) -> None:
        keep = self._some(data)
        gone = [i for i, (owner, _) in self.oracle.unsettled.items() if owner == shard and i not in keep]
        assert sorted(self.ledger.keep_only(shard, keep)) == gone
        self.oracle.remove(gone)

    @rule(key=KEYS, watched=st.booleans())
    def watch(self, key: bytes | None, watched: bool) -> None:
        if key is not None:
            for keys in (self.ledger.watched, self.oracle.watched):
                (keys.add if watched else keys.discard)(key)

    @rule()
    def drained(self) -> None:
        """Nobody who waits for a key to come down may be forgotten: it would wait for ever."""
        assert set(self.ledger.drained()) == self.oracle.drained
        self.oracle.drained.clear()
        assert not self.ledger.drained()

    @rule()
    def sent(self) -> None:
        number = self.ledger.sent()
        assert ("sent", number) not in self.oracle.history
        self.oracle.history.append(("sent", number))

    @precondition(lambda self: self.oracle.outstanding())
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.oracle.outstanding()))
        self.ledger.done(number)
        self.oracle.history.append(("done", number))

    def _some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.integers(1, self.ids + 1), max_size=4, unique=True))

    @invariant()
    def same(self) -> None:
        ledger, unsettled = self.ledger, self.oracle.unsettled
        keys = {key for _, key in unsettled.values() if key is not None}
        keyless = self.oracle.ids_of(None)
        assert set(ledger.ids) == set(unsettled)
        assert len(ledger) == len(unsettled)
        assert ledger.in_flight == (len(unsettled) if self.pipelined else len(keys) + len(keyless))
        assert ledger.queued == len(unsettled) - ledger.in_flight
        assert ledger.room() == 4 - ledger.in_flight
        for shard in range(3):
            assert ledger.unsettled_of(shard) == sum(owner == shard for owner, _ in unsettled.values())
        for key in (b"a", b"b", b"c"):
            ids = self.oracle.ids_of(key)
            assert ledger.count_of(key) == len(ids)
            assert ledger.shard_of_key(key) == (unsettled[ids[0]][0] if ids else None)
        for record_id in range(1, self.ids + 2):
            assert (record_id in ledger) == (record_id in unsettled)
            assert ledger.key_of(record_id) == unsettled.get(record_id, (0, None))[1]

    @invariant()
    def what_a_result_may_show_again_is_known(self) -> None:
        """P3: unsettled, or settled since the oldest outstanding statement was sent; nothing else is remembered."""
        outstanding = self.oracle.outstanding()
        recent = self.oracle.settled_since(outstanding[0]) if outstanding else set()
        for record_id in range(1, self.ids + 2):
            assert self.ledger.knows(record_id) == (record_id in self.oracle.unsettled or record_id in recent)
        rows = [(record_id, None, b"") for record_id in range(1, self.ids + 2)]
        assert self.ledger.unknown(rows) == [row for row in rows if not self.ledger.knows(row[0])]


class PipelinedLedgerMachine(LedgerMachine):
    """Where records do not wait for others of their key, each of them is in flight."""

    pipelined = True


TestLedger = LedgerMachine.TestCase
TestPipelinedLedger = PipelinedLedgerMachine.TestCase
TestLedger.settings = settings(max_examples=some_of(80), stateful_step_count=40, deadline=None)
TestPipelinedLedger.settings = TestLedger.settings

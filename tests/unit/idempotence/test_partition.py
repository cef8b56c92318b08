"""The inbox's rules on a database in memory: owners come, fail, freeze and go; every effect happens once, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harvester.errors import InboxFenced
from harvester.idempotence.partition import InboxTransaction, OpenPartitions, offset_of
from harvester.idempotence.seen import SeenIds
from harvester.origin import HEADER
from tests.support.inbox import Forged, stamped
from tests.support.longs import some_of

PLACE = ("orders", 0)
A, B = UUID(int=1), UUID(int=2)


@dataclass
class Row:
    """The one row, and the effects that were committed with it."""

    generation: int = 0
    version: int = 0
    next_offset: int | None = None
    seen: bytes = field(default_factory=lambda: SeenIds().to_bytes())
    effects: list[int] = field(default_factory=list)


class Owner:
    """A consumer and its buffer: what it reads next."""

    def __init__(self, row: Row, generation: int | None) -> None:
        self.group = OpenPartitions("group", HEADER, 1000, 60)
        row.generation = row.generation + 1 if generation is None else generation
        row.version += 1
        position = self.group.opened(PLACE, (row.generation, row.version, row.next_offset, row.seen))
        self.generation = position.generation
        self.at = position.offset or 0


class Consuming(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.row = Row()
        self.log: list[Forged] = []
        self.ids: list[tuple[UUID, int]] = []
        self.owners: list[Owner] = [Owner(self.row, None)]

    @rule(records=st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 12)), min_size=1, max_size=4))
    def produce(self, records: list[tuple[UUID, int]]) -> None:
        """The relay, which repeats what it likes."""
        for incarnation, record_id in records:
            self.log.append(Forged(len(self.log), stamped(record_id, incarnation)))
            self.ids.append((incarnation, record_id))

    @rule(same=st.booleans())
    def open(self, same: bool) -> None:
        """Another owner, of a generation of its own or of the same one; nobody tells those from before."""
        self.owners.append(Owner(self.row, self.row.generation if same else None))

    @precondition(lambda self: self.log)
    @rule(which=st.integers(0, 10), back=st.integers(0, 5))
    def read_again(self, which: int, back: int) -> None:
        owner = self.owners[which % len(self.owners)]
        owner.at = max(0, owner.at - back)

    @precondition(lambda self: self.log)
    @rule(
        which=st.integers(0, 10),
        count=st.integers(1, 4),
        end=st.sampled_from(["commit", "commit", "fail", "unknown: done", "unknown: not done"]),
    )
    def consume(self, which: int, count: int, end: str) -> None:
        owner = self.owners[which % len(self.owners)]
        messages = self.log[owner.at : owner.at + count]
        if not messages:
            return
        transaction = InboxTransaction(owner.group, messages)
        for _ in range(2):
            (version,) = transaction.locking()["versions"]
            row = self.row
            seen = row.seen if version is None else None
            try:
                fresh = transaction.take([(*PLACE, row.generation, row.version, row.next_offset, seen, "")])
            except InboxFenced:
                transaction.end(committed=False)
                assert row.generation > 1
                self.owners.remove(owner)
                if not self.owners:
                    self.owners.append(Owner(row, None))
                return
            if fresh:
                break
        assert fresh
        assert owner.generation == row.generation  # an owner from before has no effect
        new = [offset_of(message) for message, (novelty, _) in transaction.judge() if novelty == "new"]
        changes = transaction.write()
        if end in ("commit", "unknown: done"):
            if changes is not None:
                (self.row.next_offset,), (self.row.seen,) = changes["offsets"], changes["seen"]
                self.row.version += 1
            self.row.effects += new
        transaction.end(committed=end == "commit")
        if end == "commit":
            owner.at += len(messages)

    @invariant()
    def each_effect_once_in_the_order_of_the_log(self) -> None:
        first: dict[tuple[UUID, int], int] = {}
        for offset, name in enumerate(self.ids[: self.row.next_offset or 0]):
            first.setdefault(name, offset)
        assert self.row.effects == list(first.values())


Consuming.TestCase.settings = settings(max_examples=some_of(150), stateful_step_count=30, deadline=None)
TestConsuming = Consuming.TestCase


def test_what_is_too_much_is_forgotten_a_tenth_at_a_time_so_that_warnings_are_rare(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = OpenPartitions("group", HEADER, 100, 60)
    group.opened(PLACE, (1, 1, 0, SeenIds().to_bytes()))
    kept = []
    for offset in range(200):  # without a low water, and of every second id
        transaction = InboxTransaction(group, [Forged(offset, stamped(2 * offset))])
        assert transaction.take([(*PLACE, 1, offset + 1, None, None, "")])
        transaction.judge()
        assert transaction.write() is not None
        transaction.end(committed=True)
        kept.append(len(group.partition(PLACE).seen))
    assert (max(kept), min(kept[100:])) == (100, 90)
    assert [record.getMessage() for record in caplog.records] == [
        "orders[0]: 11 intervals of seen ids forgotten, the lowest"
    ] * 10

"""The scan against an oracle that reads from the head every time, on a table where ids and commits come in any order.

A transaction locks the table, takes ids, writes rows, becomes visible, lets go of the lock: each a step of its own,
with marks and listings in between; it may be prepared and stay for long, or roll back. Some ids are written by hand,
above the sequence. A byte chooses each step, so a failure shrinks. What has to hold: a mark returns exactly the first
rows that are visible and were not returned before, and the floor is never above a row that is still to come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.relay.scan import Gap, Scan

HISTORIES = 3000


@dataclass(eq=False)
class Transaction:
    """`ids` were given out to it; those in `written` show when it commits."""

    name: str
    ids: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    prepared: bool = False
    over: bool = False  # visible or rolled back; its lock goes after that


class ScanWorld:
    """See the module's text."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.scan = Scan()
        self.transactions: list[Transaction] = []
        self.last_value = 0
        self.used: set[int] = set()
        self.visible: set[int] = set()  # and not deleted
        self.returned: set[int] = set()  # since the last restart
        self.committed: set[int] = set()
        self.snapshot: list[int] | None = None
        self.listing: tuple[int, list[str]] | None = None
        self._named = 0

    def draw(self, below: int) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value % below

    def run(self) -> ScanWorld:
        while self._at < len(self._data):
            self._step()
            self.check_floor()
        self.end()
        return self

    def _step(self) -> None:
        kind = self.draw(16)
        if kind < 2:
            self._named += 1
            self.transactions.append(Transaction(f"t{self._named}"))
        elif kind < 9:
            if self.transactions:
                self._go_on(self.transactions[self.draw(len(self.transactions))], self.draw(8))
        elif kind < 13:
            self.mark(1 + self.draw(4))
        elif kind < 15:
            self.list()
        elif self.draw(8) == 1:
            self.restart()
        else:
            self.visible -= {i for i in self.returned if i % 2}  # purged

    # -- the application

    def _go_on(self, transaction: Transaction, what: int) -> None:
        if transaction.over:
            self.transactions.remove(transaction)  # it lets go of the lock
        elif what >= 6:
            self._finish(transaction, committed=what == 6)
        elif what == 5:
            transaction.prepared = True
        elif not transaction.prepared:
            if what < 3:
                self._next_id(transaction)
            elif what == 3:
                self._write(transaction)
            elif what == 4 and self.draw(8) == 1:
                self._by_hand(transaction)

    def _next_id(self, transaction: Transaction) -> None:
        self.last_value += 1
        if self.last_value not in self.used:  # else somebody has written it by hand, and this INSERT fails
            self.used.add(self.last_value)
            transaction.ids.append(self.last_value)

    def _by_hand(self, transaction: Transaction) -> None:
        record_id = self.last_value + 2 + self.draw(12)
        if record_id not in self.used:
            self.used.add(record_id)
            transaction.ids.append(record_id)
            transaction.written.append(record_id)

    def _write(self, transaction: Transaction) -> None:
        transaction.written = list(transaction.ids)

    def _finish(self, transaction: Transaction, *, committed: bool) -> None:
        transaction.over = True
        if committed:
            self._write(transaction)
            self.visible |= set(transaction.ids)
            self.committed |= set(transaction.ids)
        else:
            self.used -= {i for i in transaction.ids if i > self.last_value}
        transaction.ids = []

    def holders(self) -> list[str]:
        """As pg_locks shows it."""
        return [transaction.name for transaction in self.transactions]

    # -- the marker

    def mark(self, limit: int) -> list[int]:
        """A snapshot, then its rows; between the two the world goes on."""
        scan = self.scan
        snapshot = sorted(self.visible)
        for _ in range(self.draw(3)):
            if self.transactions:
                self._go_on(self.transactions[self.draw(len(self.transactions))], self.draw(8))
        ids = [i for i in snapshot if self._is_asked_for(i)][:limit]
        expected = [i for i in snapshot if i not in self.returned][:limit]
        assert ids == expected, f"the scan returns {ids}, from the head it would be {expected}"
        scan.read(ids, limit)
        self.returned |= set(ids)
        return ids

    def _is_asked_for(self, record_id: int) -> bool:
        high = self.scan.high
        return high is None or record_id > high or any(low <= record_id <= up for low, up in self.scan.ranges())

    def list(self) -> None:
        """The sequence first, then the locks."""
        last_value = self.last_value
        for _ in range(self.draw(3)):
            if self.transactions:
                self._go_on(self.transactions[self.draw(len(self.transactions))], self.draw(8))
        self.scan.listed(self.holders(), last_value)

    def restart(self) -> None:
        self.scan.restart()
        self.returned.clear()

    # -- what has to hold

    def check_floor(self) -> None:
        floor = self.scan.floor
        if floor is None:
            return
        to_come = {i for transaction in self.transactions for i in transaction.ids} | (self.visible - self.returned)
        next_id = min(set(range(self.last_value + 1, self.last_value + 99)) - self.used)
        assert min(to_come | {next_id}) >= floor, f"the floor is {floor}, {sorted(to_come)} can still appear"
        gaps = self.scan.gaps
        assert all(gap.low <= gap.high for gap in gaps)
        assert all(one.high < other.low for one, other in pairwise(gaps))

    def end(self) -> None:
        """Nobody holds a lock and the sequence has passed all: everything was returned and every gap closes."""
        for transaction in self.transactions:
            if not transaction.over:
                self._finish(transaction, committed=True)
        self.transactions.clear()
        self.last_value = max({self.last_value, *self.used})
        while self.mark(3):
            pass
        assert self.visible <= self.returned
        self.list()
        self.mark(3)
        assert not self.scan.gaps
        assert self.scan.floor == (self.scan.high + 1 if self.scan.high is not None else None)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
def test_nothing_is_missed_or_returned_twice(data: bytes) -> None:
    ScanWorld(data).run()


def test_long_histories() -> None:
    for seed in range(150):
        ScanWorld(random.Random(seed).randbytes(600)).run()


def test_a_gap_closes_when_those_who_could_fill_it_are_gone_whoever_came_since() -> None:
    """Under load somebody always holds a lock."""
    scan = Scan()
    scan.read([1, 3], 10)
    scan.listed(["a", "b"], 3)
    scan.listed(["b", "c"], 4)
    scan.listed(["c", "d"], 5)
    scan.read([], 10)
    assert not scan.gaps


def test_a_gap_waits_for_each_of_them() -> None:
    scan = Scan()
    scan.read([1, 3], 10)
    scan.listed(["a", "b"], 3)
    for holders in (["a"], ["a", "c"]):
        scan.listed(holders, 3)
        scan.read([], 10)
        assert scan.ranges()[-1] == (2, 2)


def test_ids_that_the_sequence_has_yet_to_give_out_stay_open() -> None:
    scan = Scan()
    scan.read([1, 100], 10)
    for _ in range(3):
        scan.listed([], 5)
        scan.read([], 10)
    assert scan.ranges() == [(6, 99)]


def test_without_a_sequence_every_gap_closes() -> None:
    scan = Scan()
    scan.read([1, 100], 10)
    scan.listed([], None)
    scan.read([], 10)
    assert not scan.gaps


# -- can it fail?


def _run(histories: int) -> None:
    for seed in range(histories):
        ScanWorld(random.Random(seed).randbytes(200)).run()


def _closes_without_a_listing(patch: pytest.MonkeyPatch) -> None:
    _new_gaps_have(patch, lambda _scan: frozenset())


def _uses_a_listing_from_before_the_gap_was_seen(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed
    last: dict[int, frozenset[str]] = {}

    def remember(self: Scan, holders: Sequence[str], last_value: int | None) -> None:
        last[id(self)] = frozenset(holders)
        listed(self, holders, last_value)

    patch.setattr(Scan, "listed", remember)
    _new_gaps_have(patch, lambda scan: last.get(id(scan)))


def _new_gaps_have(patch: pytest.MonkeyPatch, holders: Callable[[Scan], frozenset[str] | None]) -> None:
    pass_over = Scan._pass

    def eager(self: Scan, ids: Sequence[int]) -> None:
        before = set(map(id, self.gaps))
        pass_over(self, ids)
        for gap in self.gaps:
            if id(gap) not in before:
                gap.holders = holders(self)

    patch.setattr(Scan, "_pass", eager)


def _closes_without_a_last_look(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed

    def hasty(self: Scan, holders: Sequence[str], last_value: int | None) -> None:
        listed(self, holders, last_value)
        self.gaps = [gap for gap in self.gaps if gap.holders is None or gap.holders]

    patch.setattr(Scan, "listed", hasty)


def _closes_beyond_where_a_mark_was_cut_off(patch: pytest.MonkeyPatch) -> None:
    fill = Scan._fill
    patch.setattr(Scan, "_fill", lambda self, ids, _looked_to: fill(self, ids, self.high))


def _closes_above_the_sequence(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed
    patch.setattr(Scan, "listed", lambda self, holders, _last_value: listed(self, holders, None))


def _asks_for_transaction_ids(patch: pytest.MonkeyPatch) -> None:
    """`nextval` takes none: whoever has only ids so far is not seen."""
    patch.setattr(ScanWorld, "holders", lambda self: [t.name for t in self.transactions if t.written])


def _forgets_prepared_transactions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScanWorld, "holders", lambda self: [t.name for t in self.transactions if not t.prepared])


def _lists_the_locks_before_the_sequence(patch: pytest.MonkeyPatch) -> None:
    def list_(self: ScanWorld) -> None:
        holders = self.holders()
        for _ in range(self.draw(3)):
            self._named += 1
            self.transactions.append(Transaction(f"t{self._named}"))
            self._go_on(self.transactions[-1], 0)
        self.scan.listed(holders, self.last_value)

    patch.setattr(ScanWorld, "list", list_)


def _closes_when_one_of_the_holders_is_gone(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed

    def impatient(self: Scan, holders: Sequence[str], last_value: int | None) -> None:
        before = {id(gap): gap.holders for gap in self.gaps}
        listed(self, holders, last_value)
        for gap in self.gaps:
            if before.get(id(gap)) and gap.holders != before[id(gap)]:
                gap.holders = frozenset()

    patch.setattr(Scan, "listed", impatient)


def _a_filled_gap_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Other rows may appear on both sides of the one that did."""
    fill = Scan._fill

    def careless(self: Scan, ids: Sequence[int], looked_to: int) -> None:
        filled = [gap for gap in self.gaps if any(gap.low <= i <= gap.high for i in ids)]
        fill(self, ids, looked_to)
        self.gaps = [g for g in self.gaps if not any(one.low <= g.low <= one.high for one in filled)]

    patch.setattr(Scan, "_fill", careless)


def _what_was_read_is_looked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scan, "_fill", lambda _self, _ids, _looked_to: None)


def _a_restart_keeps_the_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scan, "restart", lambda self: self.gaps.clear())


def _the_first_mark_leaves_nothing_behind(patch: pytest.MonkeyPatch) -> None:
    """Rows may appear below the first one that was ever read."""
    read = Scan.read

    def trusting(self: Scan, ids: Sequence[int], limit: int) -> None:
        first = self.high is None
        read(self, ids, limit)
        if first and self.gaps:
            del self.gaps[0]

    patch.setattr(Scan, "read", trusting)


def _the_listing_forgets_gaps(patch: pytest.MonkeyPatch) -> None:
    """What lies below the last value of a gap that reaches above it."""
    listed = Scan.listed

    def careless(self: Scan, holders: Sequence[str], last_value: int | None) -> None:
        if last_value is not None:
            self.gaps = [
                Gap(last_value + 1, gap.high) if gap.low <= last_value < gap.high else gap for gap in self.gaps
            ]
        listed(self, holders, last_value)

    patch.setattr(Scan, "listed", careless)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], Any]] = [
    _closes_without_a_listing,
    _uses_a_listing_from_before_the_gap_was_seen,
    _closes_without_a_last_look,
    _closes_beyond_where_a_mark_was_cut_off,
    _closes_above_the_sequence,
    _asks_for_transaction_ids,
    _forgets_prepared_transactions,
    _lists_the_locks_before_the_sequence,
    _closes_when_one_of_the_holders_is_gone,
    _a_filled_gap_is_forgotten,
    _what_was_read_is_looked_for_again,
    _a_restart_keeps_the_place,
    _the_first_mark_leaves_nothing_behind,
    _the_listing_forgets_gaps,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.__name__.strip("_") for m in MUTATIONS])
def test_a_break_is_noticed(mutation: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        _run(HISTORIES)


def test_only_ids_in_gaps_are_expected() -> None:
    scan = Scan()
    scan.read([5, 6, 9], 10)
    assert [record_id for record_id in range(4, 12) if scan.expects(record_id)] == [4, 7, 8]

"""The scan against an oracle that reads from the head every time, on a table where ids and commits come in any order.

A transaction locks the table, takes ids, writes rows, becomes visible, lets go of the lock: each a step of its own,
with marks and listings in between; it may be prepared and stay for long, be forgotten to the very end, or roll back.
It has a transaction id from its first row on. Some ids are written by hand, above the sequence. Purges remove rows that
were returned, and a restart reads on from the head or from a bookmark. A byte chooses each step, so a failure shrinks.

What has to hold: a mark returns exactly the first rows that are visible and were not returned before, beside some that
were if ranges had to be joined; the floor is never above a row that is still to come; gaps stay few.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.relay.core import scan as scan_module
from harvester.relay.core.scan import Bookmark, IdGap, Scan
from tests.support.longs import some_of

HISTORIES = 3000
RANGES = 3


@dataclass(eq=False)
class Transaction:
    """`ids` were given out to it; those in `written` show when it commits. `number`: its transaction id, if it has one.

    It is in a statement while it has ids that it has not written.
    """

    name: str
    number: int | None = None
    forgotten: bool = False
    ids: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    prepared: bool = False
    over: bool = False  # visible or rolled back; its lock goes after that


class ScanWorld:
    """An outbox with concurrent writers and a scan of it, driven by `data`."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.scan = Scan(ranges=RANGES, awake=1, young=3)
        self.transactions: list[Transaction] = []
        self.last_value = 0
        self.used: set[int] = set()
        self.visible: set[int] = set()  # and not deleted
        self.returned: set[int] = set()  # since the last restart
        self.committed: set[int] = set()
        self.finished: set[int] = set()  # numbers of transactions that are over
        self.bookmark: Bookmark | None = None
        self._named = 0
        for _ in range(self.draw(3)):
            self._forget()

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
            self._begin()
        elif kind < 9:
            if self.transactions:
                self._go_on(self.transactions[self.draw(len(self.transactions))], self.draw(8))
        elif kind < 13:
            self.mark(1 + self.draw(4))
        elif kind < 15:
            self.list()
        else:
            self._seldom(self.draw(8))

    def _seldom(self, what: int) -> None:
        if what == 1:
            self.restart(None)
        elif what == 2:
            self.restart(self.bookmark)
        elif what < 5:
            self.save()
        elif what == 5:
            self._forget()
        elif what == 6:
            for transaction in self.transactions:
                transaction.forgotten = False
        else:
            self.visible -= {i for i in self.returned if i % 2}  # purged

    # -- the application

    def _begin(self) -> Transaction:
        self._named += 1
        self.transactions.append(Transaction(f"t{self._named}"))
        return self.transactions[-1]

    def _forget(self) -> None:
        """A transaction that stays open, with rows or without."""
        forgotten = self._begin()
        forgotten.forgotten = True
        for _ in range(self.draw(3)):
            self._next_id(forgotten)
        self._write(forgotten)

    def _go_on(self, transaction: Transaction, what: int) -> None:
        if transaction.over:
            self.transactions.remove(transaction)  # it lets go of the lock
        elif transaction.forgotten:
            pass
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
            self._write(transaction)

    def _write(self, transaction: Transaction) -> None:
        transaction.written = list(transaction.ids)
        if transaction.number is None:
            self._named += 1
            transaction.number = self._named

    def _finish(self, transaction: Transaction, *, committed: bool) -> None:
        transaction.over = True
        if committed:
            self._write(transaction)
        if transaction.number is not None:
            self.finished.add(transaction.number)
        if committed:
            self.visible |= set(transaction.ids)
            self.committed |= set(transaction.ids)
        else:
            self.used -= {i for i in transaction.ids if i > self.last_value}
        transaction.ids = []

    def holders(self) -> dict[str, int | None]:
        """As pg_locks shows it, without those that are idle and have no number."""
        return {t.name: t.number for t in self.transactions if t.number is not None or t.ids}

    # -- the marker

    def mark(self, limit: int) -> list[int]:
        """A snapshot, then its rows; between the two the world goes on. It is repeated if it was held back."""
        scan = self.scan
        if not scan.is_listed:
            self.list()
        while True:
            snapshot, finished = sorted(self.visible), set(self.finished)
            self._meanwhile()
            ids: list[int] = []
            if finished.isdisjoint(scan.watched):
                ids = [i for i in snapshot if self._is_asked_for(i)][:limit]
            over = self.finished.intersection(scan.watched)
            if ids or not over:
                break
            scan.ended(over)
        new = [i for i in ids if i not in self.returned]
        expected = [i for i in snapshot if i not in self.returned]
        if len(ids) >= limit:
            expected = expected[: len(new)]
        assert new == expected, f"the scan returns {new}, from the head it would be {expected}"
        scan.read(ids, limit)
        self.returned |= set(ids)
        return ids

    def _meanwhile(self) -> None:
        for _ in range(self.draw(3)):
            if self.transactions:
                self._go_on(self.transactions[self.draw(len(self.transactions))], self.draw(8))

    def _is_asked_for(self, record_id: int) -> bool:
        high = self.scan.high
        return high is None or record_id > high or any(low <= record_id <= up for low, up in self.scan.ranges())

    def list(self) -> None:
        """The sequence first, then the locks."""
        last_value = self.last_value
        self._meanwhile()
        self.scan.listed(self.holders(), last_value)

    def save(self) -> None:
        """A bookmark below all that is not settled."""
        bookmark = self.scan.bookmark()
        if bookmark is not None:
            self.bookmark = bookmark.below(min(self.returned & self.visible, default=None))

    def restart(self, bookmark: Bookmark | None) -> None:
        self.scan.restart(bookmark)
        self.returned.clear()

    # -- what has to hold

    def check_floor(self) -> None:
        floor = self.scan.floor
        if floor is None:
            return
        to_come = {i for transaction in self.transactions for i in transaction.ids} | (self.visible - self.returned)
        next_id = min(set(range(self.last_value + 1, self.last_value + 99)) - self.used)
        assert min(to_come | {next_id}) >= floor, f"the floor is {floor}, {sorted(to_come)} can still appear"
        gaps = sorted([*self.scan.gaps, *self.scan.resting], key=lambda gap: gap.low)
        assert len(self.scan.resting) <= RANGES
        assert all(gap.low <= gap.high for gap in gaps)
        assert all(one.high < other.low for one, other in pairwise(gaps))

    def end(self) -> None:
        """Nobody holds a lock and the sequence has passed all: everything was returned and every gap closes."""
        for transaction in self.transactions:
            if not transaction.over:
                self._finish(transaction, committed=True)
        self.transactions.clear()
        self.last_value = max({self.last_value, *self.used})
        for _ in range(len(self.used) + 99):
            if not self.mark(3):
                break
        assert self.visible <= self.returned
        self.list()
        for _ in range(len(self.used) + 99):
            if not self.mark(3):
                break
        assert not self.scan.gaps
        assert not self.scan.resting
        assert self.scan.floor == (self.scan.high + 1 if self.scan.high is not None else None)


@settings(max_examples=some_of(400), deadline=None)
@given(st.binary(max_size=300))
def test_nothing_is_missed_or_returned_twice(data: bytes) -> None:
    ScanWorld(data).run()


def test_long_histories() -> None:
    for seed in range(150):
        ScanWorld(random.Random(seed).randbytes(600)).run()


# -- can it fail?


def _run(histories: int) -> None:
    for seed in range(histories):
        ScanWorld(random.Random(seed).randbytes(500)).run()


def _closes_without_a_listing(patch: pytest.MonkeyPatch) -> None:
    _new_gaps_have(patch, lambda _scan: frozenset())


def _uses_a_listing_from_before_the_ids_were_given_out(patch: pytest.MonkeyPatch) -> None:
    _new_gaps_have(patch, lambda scan: frozenset(scan._holders) if scan._holders is not None else None)


def _new_gaps_have(patch: pytest.MonkeyPatch, holders: Callable[[Scan], frozenset[str] | None]) -> None:
    see = Scan._see

    def eager(self: Scan, low: int, high: int) -> None:
        see(self, low, high)
        for gap in self.gaps:
            if low <= gap.low and gap.high <= high:
                gap.holders, gap.looked = holders(self), True

    patch.setattr(Scan, "_see", eager)


def _new_gaps_count_as_looked_at_when_they_are_listed(patch: pytest.MonkeyPatch) -> None:
    """A row may have been committed, and its lock let go, between the mark and the list."""
    listed = Scan.listed

    def hasty(self: Scan, holders: Mapping[str, int | None], last_value: int | None) -> None:
        fresh = [gap for gap in self.gaps if gap.holders is None]
        listed(self, holders, last_value)
        for gap in fresh:
            gap.looked = gap.holders is not None
        self._regroup()

    patch.setattr(Scan, "listed", hasty)


def _marks_are_not_held_back(patch: pytest.MonkeyPatch) -> None:
    """Rows above those of a transaction that has ended are read first."""
    regroup = Scan._regroup

    def blind(self: Scan) -> None:
        regroup(self)
        self.watched = ()

    patch.setattr(Scan, "_regroup", blind)


def _nobody_is_woken(patch: pytest.MonkeyPatch) -> None:
    """Gaps of the one that has ended go on resting until the locks are listed."""
    ended = Scan.ended

    def deaf(self: Scan, transactions: Sequence[int]) -> None:
        looked = [gap for gap in self.resting if gap.looked]
        ended(self, transactions)
        for gap in looked:
            gap.looked = True
        self.resting = looked

    patch.setattr(Scan, "ended", deaf)


def _rests_without_a_number_to_watch(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed

    def hasty(self: Scan, holders: Mapping[str, int | None], last_value: int | None) -> None:
        listed(self, {name: -1 if number is None else number for name, number in holders.items()}, last_value)

    patch.setattr(Scan, "listed", hasty)


def _a_joined_range_waits_for_one_part_alone(patch: pytest.MonkeyPatch) -> None:
    join = scan_module._joined_gaps

    def careless(gaps: Sequence[IdGap], most: int) -> list[IdGap]:
        holders = {gap.low: gap.holders for gap in gaps}
        joined = join(gaps, most)
        for gap in joined:
            gap.holders = holders[gap.low]
        return joined

    patch.setattr(scan_module, "_joined_gaps", careless)


def _ranges_are_dropped_instead_of_joined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan_module, "_joined_gaps", lambda gaps, most: list(gaps)[-most:])


def _a_bookmark_forgets_what_is_open(patch: pytest.MonkeyPatch) -> None:
    _bookmarks_are(patch, lambda bookmark: Bookmark(bookmark.high))


def _a_bookmark_forgets_what_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bookmark, "below", lambda self, _unsettled: self)


def _a_bookmark_forgets_what_rests(patch: pytest.MonkeyPatch) -> None:
    def awake(self: Scan) -> Bookmark | None:
        bookmark = made(self)
        return None if bookmark is None else Bookmark(bookmark.high, tuple(self.ranges()))

    made = Scan.bookmark
    patch.setattr(Scan, "bookmark", awake)


def _bookmarks_are(patch: pytest.MonkeyPatch, change: Callable[[Bookmark], Bookmark]) -> None:
    made = Scan.bookmark

    def changed(self: Scan) -> Bookmark | None:
        bookmark = made(self)
        return None if bookmark is None else change(bookmark)

    patch.setattr(Scan, "bookmark", changed)


def _closes_without_a_last_look(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed

    def hasty(self: Scan, holders: Mapping[str, int | None], last_value: int | None) -> None:
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
    _holders_are(patch, lambda t: bool(t.written))


def _forgets_prepared_transactions(patch: pytest.MonkeyPatch) -> None:
    _holders_are(patch, lambda t: not t.prepared)


def _holders_are(patch: pytest.MonkeyPatch, seen: Callable[[Transaction], bool]) -> None:
    patch.setattr(ScanWorld, "holders", lambda self: {t.name: t.number for t in self.transactions if seen(t)})


def _lists_the_locks_before_the_sequence(patch: pytest.MonkeyPatch) -> None:
    def list_(self: ScanWorld) -> None:
        holders = self.holders()
        for _ in range(self.draw(3)):
            self._go_on(self._begin(), 0)
        self.scan.listed(holders, self.last_value)

    patch.setattr(ScanWorld, "list", list_)


def _closes_when_one_of_the_holders_is_gone(patch: pytest.MonkeyPatch) -> None:
    listed = Scan.listed

    def impatient(self: Scan, holders: Mapping[str, int | None], last_value: int | None) -> None:
        before = {id(gap): gap.holders for gap in (*self.gaps, *self.resting)}
        listed(self, holders, last_value)
        for gap in (*self.gaps, *self.resting):
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
    patch.setattr(Scan, "restart", lambda self, _bookmark: self.gaps.clear())


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

    def careless(self: Scan, holders: Mapping[str, int | None], last_value: int | None) -> None:
        if last_value is not None:
            self.gaps = [
                IdGap(last_value + 1, gap.high) if gap.low <= last_value < gap.high else gap for gap in self.gaps
            ]
        listed(self, holders, last_value)

    patch.setattr(Scan, "listed", careless)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], Any]] = [
    _closes_without_a_listing,
    _uses_a_listing_from_before_the_ids_were_given_out,
    _new_gaps_count_as_looked_at_when_they_are_listed,
    _marks_are_not_held_back,
    _nobody_is_woken,
    _rests_without_a_number_to_watch,
    _a_joined_range_waits_for_one_part_alone,
    _ranges_are_dropped_instead_of_joined,
    _a_bookmark_forgets_what_is_open,
    _a_bookmark_forgets_what_is_not_settled,
    _a_bookmark_forgets_what_rests,
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

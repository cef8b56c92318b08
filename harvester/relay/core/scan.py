"""How far the leader has read the outbox, what may still appear below, and what is settled for good. Pure.

Theory (P4, P10, P38). Ids are given out before transactions commit, so a row can appear below one that has already been
read. The scan therefore remembers the *gaps*: ids it passed without seeing a row. Every mark reads, in one snapshot and
in id order, the rows that have appeared in gaps and then those above the highest id read (`high`). This is equivalent
to reading from the head and skipping what was seen, so no row in the table can be missed; but its cost depends on what
is new, however many dead or waiting rows there are at the head.

    gap: FRESH ──locks listed──▶ WAITING for holders ──all gone──▶ LAST LOOK ──a mark still lacks it──▶ closed
                                  │  ▲
             a mark has looked ───▼  │── a holder is gone
                                 RESTING: no mark looks at it

*Closing.* A gap closes, and the *floor* rises with it, only when nobody can fill it any more. `nextval` takes no
transaction id, so transaction ids prove nothing here; but whoever inserts holds a RowExclusiveLock on the table from
before `nextval` until after the commit is visible. So: read the sequence, list the holders (including prepared
transactions), wait until each of them is gone, then look once more, in a *later* snapshot. Whether the gap was seen
before or after that list does not matter: its ids were given out before. This does not cover ids fetched outside an
INSERT or given out from a cache; `init` refuses caches, and an occasional look at the whole table finds the rest. Ids
that the sequence has yet to give out are never closed, even if somebody has explicitly inserted a higher id.

*Resting.* A transaction that stays open for hours keeps open every gap that arises in the meantime. Once a mark has
looked at such a gap after the list, only its holders can fill it, and none of them can while its transaction id is in
progress for the mark's own snapshot. So marks leave these gaps out and name their holders' transaction ids instead
(`watched`): a mark reads nothing if one of them is over, since the rows of that transaction may have to come first. Its
gaps are then woken and the mark is repeated. A holder without a transaction id keeps its gaps awake.

Beyond a certain number of resting gaps, neighbours are joined. Rows between them may be returned once more when the
joined range is read; the receiver already knows them.

A mark that was cut off by its limit has not looked above its last row: gaps above it stay as they are.

*The low watermark* (`LowWatermark`, P25) is the id below which everything is settled and nothing can appear any more:
the lower of the floor and the lowest id that was read and is not settled. It comes with the bookmark from which the
next leader id may continue (P38). The marker owns the scan, the state machine the low watermark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

LOWEST = -(2**63)
_WIDE = 100  # ids; a look at such a gap may read this many dead rows

Range = tuple[int, int]  # both ends included


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A position to continue from: everything up to `high` has left the table for good and nothing can appear there any
    more, except in the ranges in `open`, which ascend.
    """

    high: int
    open: tuple[Range, ...] = ()

    def below(self, unsettled: int | None) -> Bookmark:
        """The part below `unsettled`, the lowest id that was read and is not settled; None if there is none."""
        if unsettled is None or unsettled > self.high:
            return self
        return Bookmark(unsettled - 1, _up_to(unsettled - 1, self.open))


@dataclass(slots=True, eq=False)
class IdGap:
    """Ids from `low` to `high`, both included. `holders` None: no list of locks yet shows who can fill it."""

    low: int
    high: int
    holders: frozenset[str] | None = None
    looked: bool = False  # a mark has looked at it since that list, or since a holder ended
    lists: int = 0  # lists of locks that it has outlasted

    @property
    def is_wide(self) -> bool:
        return self.high - self.low >= _WIDE


class Scan:
    """The position of one leader id in the outbox. One thread only."""

    def __init__(self, *, ranges: int = 1_000, awake: int = 20, young: int = 10) -> None:
        """`ranges`: how many gaps may rest, and how many ranges a bookmark may have.

        Of the narrow gaps that could rest, the `awake` newest stay awake until they have outlasted `young` lists of the
        locks: most transactions end soon, and a repeated mark costs more than one that looks at a few gaps.
        """
        self._ranges, self._awake, self._young = ranges, awake, young
        self.high: int | None = None
        self.gaps: list[IdGap] = []  # gaps that marks look at
        self.resting: list[IdGap] = []
        self.watched: tuple[int, ...] = ()  # transaction ids that resting gaps wait for
        self._last_value: int | None = None  # of the sequence, when the locks were last listed
        self._holders: dict[str, int | None] | None = None  # the holders listed then, with their transaction ids
        self._found_none = False  # whether the last mark found no rows

    @property
    def floor(self) -> int | None:
        """Nothing can appear below this; None while the scan has not begun."""
        if self.high is None:
            return None
        return min([gaps[0].low for gaps in (self.gaps, self.resting) if gaps], default=self.high + 1)

    @property
    def is_listed(self) -> bool:
        return self._holders is not None

    def restart(self, bookmark: Bookmark | None = None) -> None:
        """Start from a bookmark or the head: after a take-over, a new leader id, a new connection, a restarted
        sequence.
        """
        self.high = None if bookmark is None else bookmark.high
        self.gaps = [] if bookmark is None else [IdGap(low, high) for low, high in bookmark.open]
        self.resting, self.watched = [], ()
        self._last_value = self._holders = None
        self._found_none = False

    def bookmark(self) -> Bookmark | None:
        """The current position, as if everything read were settled. None without a sequence, or before the locks are
        listed.
        """
        if self.high is None or self._last_value is None:
            return None
        high = min(self.high, self._last_value)
        ranges = [(gap.low, gap.high) for gap in sorted([*self.gaps, *self.resting], key=_low)]
        return Bookmark(high, tuple(_joined(_up_to(high, ranges), self._ranges)))

    def ranges(self) -> list[Range]:
        """The ranges to look at below `high`, ascending."""
        return [(gap.low, gap.high) for gap in self.gaps]

    def passed_over(self, ids: Iterable[int]) -> list[int]:
        """The given table ids that no mark will find. Resting gaps that contain any are woken."""
        found = []
        for record_id in ids:
            if (gap := _gap_of(record_id, self.resting)) is not None:
                gap.looked = False
            elif _gap_of(record_id, self.gaps) is None:
                found.append(record_id)
        self._regroup()
        return found

    def read(self, ids: Sequence[int], limit: int, *, writes: bool = False) -> None:
        """A mark returned these ids, ascending; `limit` of them means that it may have been cut off.

        A writing mark can lose rows that it chose, if they were deleted while it waited for their locks: it may have
        been cut off although it returned fewer, unless it reached rows above `high`, or none twice in a row.
        """
        reached = ids[-1] if ids else None
        cut_off = len(ids) >= limit
        if writes and (reached is None or self.high is None or reached <= self.high):
            cut_off = cut_off or reached is not None or not self._found_none
        self._found_none = not ids
        if self.high is None:
            if reached is None and (cut_off or self._last_value is None):
                return
            self.high = LOWEST - 1
        first_new = bisect_left(ids, self.high + 1)
        looked_to = (LOWEST if reached is None else reached) if cut_off else self.high
        self._fill(ids[:first_new], min(looked_to, self.high))
        self._pass(ids[first_new:])
        if reached is None and not cut_off and self._last_value is not None:
            self._pass_empty(self._last_value)
        if any(gap.looked and gap.is_wide for gap in self.gaps):
            self._regroup()

    def listed(self, holders: Mapping[str, int | None], last_value: int | None) -> None:
        """Who holds a RowExclusiveLock on the table, with each transaction's id if it has one; asked between marks.

        `last_value` is the last id given out, read before the locks; None: there is no sequence. Ids above it are still
        to be given out, whatever higher id was once inserted explicitly: a gap never closes there.
        """
        known = self._holders or {}
        # A holder that is just ending may be listed without its transaction id.
        self._holders = {name: known.get(name) if number is None else number for name, number in holders.items()}
        self._last_value, everyone = last_value, frozenset(holders)
        gaps: list[IdGap] = []
        for gap in self.gaps:
            gaps += self._split(gap)
        self.gaps = gaps
        for gap in (*self.gaps, *self.resting):
            if gap.holders is not None:
                if not gap.holders <= everyone:
                    gap.holders, gap.looked = gap.holders & everyone, False
                gap.lists += 1
            elif last_value is None or gap.high <= last_value:
                gap.holders = everyone
        self._regroup()

    def ended(self, transactions: Iterable[int]) -> None:
        """These transactions are over: the gaps that they kept open must be looked at."""
        numbers = set(transactions)
        over = {name for name, number in (self._holders or {}).items() if number in numbers}
        for gap in (*self.gaps, *self.resting):
            if gap.holders is not None and not over.isdisjoint(gap.holders):
                gap.holders -= over
                gap.looked = False
        self._regroup()

    def _split(self, gap: IdGap) -> list[IdGap]:
        """Split a gap into the part that was given out and the part that was not yet."""
        last = self._last_value
        if last is None or gap.high <= last:
            return [gap]
        to_come = IdGap(max(gap.low, last + 1), gap.high)
        return [to_come] if gap.low > last else [IdGap(gap.low, last, gap.holders, gap.looked), to_come]

    def _fill(self, ids: Sequence[int], looked_to: int) -> None:
        """Rows have appeared in gaps; gaps that were waiting for this look and lie in the range looked at are
        closed.
        """
        kept: list[IdGap] = []
        at = 0
        for gap in self.gaps:
            low = gap.low
            parts: list[Range] = []
            while at < len(ids) and ids[at] <= gap.high:
                if ids[at] >= low:
                    parts.append((low, ids[at] - 1))
                    low = ids[at] + 1
                at += 1
            if gap.holders is not None and not gap.looked and low <= looked_to < gap.high:
                parts.append((low, looked_to))
                low = looked_to + 1
            parts.append((low, gap.high))
            for first, last in parts:
                looked = gap.looked or (gap.holders is not None and last <= looked_to)
                if first <= last and (gap.holders or not looked):
                    kept.append(IdGap(first, last, gap.holders, looked, gap.lists))
        self.gaps = kept

    def _pass(self, ids: Sequence[int]) -> None:
        """Rows above `high`: the ids between them form gaps."""
        assert self.high is not None
        previous = self.high
        for record_id in ids:
            if record_id > previous + 1:
                self._see(previous + 1, record_id - 1)
            previous = record_id
        self.high = previous

    def _pass_empty(self, last_value: int) -> None:
        """Nothing is above `high`: the ids given out there form a gap as well."""
        assert self.high is not None
        if last_value > self.high:
            self._see(self.high + 1, last_value)
            self.high = last_value

    def _see(self, low: int, high: int) -> None:
        """Add a gap. For ids given out before the locks were listed, this mark counts as the look after that list."""
        for gap in self._split(IdGap(low, high)):
            if self._holders is not None and (self._last_value is None or gap.high <= self._last_value):
                gap.holders, gap.looked = frozenset(self._holders), True
            if gap.holders is None or gap.holders:
                self.gaps.append(gap)

    def _regroup(self) -> None:
        """Let gaps rest if they may, wake those that must be looked at again, and keep their number small."""
        numbers = self._holders or {}
        nameless = {name for name, number in numbers.items() if number is None}
        awake: list[IdGap] = []
        to_rest = [gap for gap in self.resting if gap.looked]
        near = 0
        for gap in reversed(self.gaps):
            if gap.looked and gap.holders and nameless.isdisjoint(gap.holders):
                near += 1
                if near > self._awake or gap.lists >= self._young or gap.is_wide:
                    to_rest.append(gap)
                    continue
            awake.append(gap)
        awake += [gap for gap in self.resting if not gap.looked]
        self.gaps = sorted(awake, key=_low)
        self.resting = _joined_gaps(sorted(to_rest, key=_low), self._ranges)
        waited_for = {gap.holders for gap in self.resting if gap.holders}
        self.watched = tuple(sorted({number for names in waited_for for name in names if (number := numbers[name])}))


def _low(gap: IdGap) -> int:
    return gap.low


def _gap_of(record_id: int, gaps: Sequence[IdGap]) -> IdGap | None:
    at = bisect_left(gaps, record_id, key=lambda gap: gap.high)
    return gaps[at] if at < len(gaps) and gaps[at].low <= record_id else None


def _up_to(high: int, ranges: Iterable[Range]) -> tuple[Range, ...]:
    return tuple((low, min(up, high)) for low, up in ranges if low <= high)


def _seams(ranges: Sequence[Range], most: int) -> set[int]:
    """Where to join neighbours so that half of `most` are left: the closest pairs, by the index of the second."""
    if len(ranges) <= most:
        return set()
    nearest = sorted(range(1, len(ranges)), key=lambda at: ranges[at][0] - ranges[at - 1][1])
    return set(nearest[: len(ranges) - max(1, most // 2)])


def _joined(ranges: Sequence[Range], most: int) -> list[Range]:
    seams = _seams(ranges, most)
    joined: list[Range] = []
    for at, (low, high) in enumerate(ranges):
        if at in seams:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _joined_gaps(gaps: Sequence[IdGap], most: int) -> list[IdGap]:
    """A joined range can be filled by whoever can fill a part of it."""
    seams = _seams([(gap.low, gap.high) for gap in gaps], most)
    joined: list[IdGap] = []
    for at, gap in enumerate(gaps):
        if at in seams:
            last = joined[-1]
            last.high, last.holders = gap.high, (last.holders or frozenset()) | (gap.holders or frozenset())
        else:
            joined.append(gap)
    return joined


_LOOK_S = 1.0
_SAVE_S = 10.0
_SAVE_IDS = 50_000  # after this many ids, a bookmark is worth another version of the term row


class LowWatermark:
    """What is settled for good. It remains so across remarks and terms of one incarnation. One thread only."""

    def __init__(self) -> None:
        self.known: int | None = None
        self.bookmark: Bookmark | None = None  # everything below it is settled
        self._floor: int | None = None  # as of the last mark: no row can appear below it any more
        self._read: Bookmark | None = None  # as of a mark of this leader id, settled or not
        self._look_at = self._save_at = 0.0
        self._saved: Bookmark | None = None

    def begin(self) -> None:
        """A new leader id: what was read and not settled is forgotten, so the old scan's position is void."""
        self._floor = self._read = None

    def forget(self) -> None:
        """Ids may have started again: another incarnation."""
        self.known = self.bookmark = self._saved = None

    def read(self, floor: int | None, bookmark: Bookmark | None) -> None:
        """A mark has come this far; its rows are known."""
        self._floor = floor
        self._read = bookmark or self._read

    def look(self, now: float, lowest: Callable[[], int | None]) -> None:
        """Time has passed: raise it if due. `lowest`: the lowest id that was read and is not settled."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self._floor is None:
            return
        unsettled = lowest()
        found = self._floor if unsettled is None else min(self._floor, unsettled)
        self.known = max(found, self.known or 1) if found > 1 else self.known
        if self._read is not None:
            self.bookmark = self._read.below(unsettled)

    def to_save(self, now: float) -> Bookmark | None:
        """The bookmark, if it has advanced far enough since it was last saved."""
        bookmark, saved = self.bookmark, self._saved
        if bookmark is None or now < self._save_at or (saved and bookmark.high < saved.high + _SAVE_IDS):
            return None
        self._save_at = now + _SAVE_S
        return self.last()

    def last(self) -> Bookmark | None:
        """The bookmark, if it differs from the last saved one."""
        if self.bookmark == self._saved:
            return None
        self._saved = self.bookmark
        return self.bookmark

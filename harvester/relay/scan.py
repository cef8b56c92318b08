"""How far the leader has read the outbox, and what may still appear below that. Pure.

Theory (P4, P10). Ids are given out before transactions commit, so a row can appear below one that was read already.
The scan therefore remembers the *gaps*: ids it passed without having seen a row. Every mark reads, in one snapshot and
in the order of ids, the rows that have appeared in gaps and then those above the highest id read (`high`). That is the
same as reading from the head and leaving out what was seen, so nothing that is in the table can be passed over; but it
costs what is new, not what is there, however many dead or waiting rows lie at the head.

    gap: FRESH ──locks listed──▶ WAITING for holders ──all gone──▶ LAST LOOK ──a mark still lacks it──▶ closed

A gap closes, and with it the *floor* rises, only when nobody can fill it any more. `nextval` takes no transaction id,
so transaction ids prove nothing; but whoever inserts holds a RowExclusiveLock on the table from before `nextval` until
after the commit is visible. So: list the holders (prepared transactions too) *after* the gap was seen, wait until each
of them is gone, then look once more, in a *later* snapshot. Ids that were fetched apart from an INSERT, or given out
from a cache, escape that; `init` refuses caches, and a look at the whole table now and then finds the rest. Ids that
the sequence has yet to give out are never closed, whatever higher id somebody has written by hand.

A mark that was cut off by its limit has not looked above its last row: gaps up there stay as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOWEST = -(2**63)


@dataclass(slots=True, eq=False)
class Gap:
    """Ids from `low` to `high`, both included. `holders` None: nobody has listed the locks since it was seen."""

    low: int
    high: int
    holders: frozenset[str] | None = None


class Scan:
    """See the module's text. One thread only."""

    def __init__(self) -> None:
        self.high: int | None = None
        self.gaps: list[Gap] = []
        self._found_none = False  # the last mark did

    @property
    def floor(self) -> int | None:
        """Nothing can appear below this; None while the scan has not begun."""
        if self.high is None:
            return None
        return self.gaps[0].low if self.gaps else self.high + 1

    def restart(self) -> None:
        """From the head again: at a take-over, a new leader id, a new connection, a restarted sequence."""
        self.high = None
        self.gaps.clear()
        self._found_none = False

    def ranges(self) -> list[tuple[int, int]]:
        """What to look at below `high`, ascending."""
        return [(gap.low, gap.high) for gap in self.gaps]

    def expects(self, record_id: int) -> bool:
        """Whether this id lies in a gap, so that a mark will find it."""
        at = bisect_left(self.gaps, record_id, key=lambda gap: gap.high)
        return at < len(self.gaps) and self.gaps[at].low <= record_id

    def read(self, ids: Sequence[int], limit: int, *, writes: bool = False) -> None:
        """A mark returned these, ascending; as many as `limit` means that it may have been cut off.

        A mark that writes can lose rows that it chose, when they were deleted while it waited for their locks: it may
        have been cut off although it returned fewer, unless it came to rows above `high`, or to none twice in a row.
        """
        reached = ids[-1] if ids else None
        cut_off = len(ids) >= limit
        if writes and self.high is not None and (reached is None or reached <= self.high):
            cut_off = cut_off or reached is not None or not self._found_none
        self._found_none = not ids
        if self.high is None:
            if reached is not None:
                self.high = LOWEST - 1
                self._pass(ids)
            return
        first_new = bisect_left(ids, self.high + 1)
        looked_to = (LOWEST if reached is None else reached) if cut_off else self.high
        self._fill(ids[:first_new], min(looked_to, self.high))
        self._pass(ids[first_new:])

    def listed(self, holders: Iterable[str], last_value: int | None) -> None:
        """Who holds a RowExclusiveLock on the table now, and the last id given out; asked after the last mark returned.

        Ids above `last_value` are still to be given out, however high an id was once written by hand: a gap never
        closes there. None: there is no sequence.
        """
        now = frozenset(holders)
        gaps: list[Gap] = []
        for gap in self.gaps:
            if last_value is not None and gap.high > last_value:
                if gap.low <= last_value:
                    gaps.append(Gap(gap.low, last_value, gap.holders))
                gaps.append(Gap(max(gap.low, last_value + 1), gap.high))
            else:
                gaps.append(gap)
        for gap in gaps:
            if last_value is None or gap.high <= last_value:
                gap.holders = now if gap.holders is None else gap.holders & now
        self.gaps = gaps

    def _fill(self, ids: Sequence[int], looked_to: int) -> None:
        """Rows have appeared in gaps; gaps that were waiting for this look, and lie in what was looked at, close."""
        kept: list[Gap] = []
        at = 0
        for gap in self.gaps:
            if gap.holders is not None and not gap.holders and gap.high <= looked_to:
                while at < len(ids) and ids[at] <= gap.high:
                    at += 1
                continue
            low = gap.low
            while at < len(ids) and ids[at] <= gap.high:
                if ids[at] >= low:
                    if ids[at] > low:
                        kept.append(Gap(low, ids[at] - 1, gap.holders))
                    low = ids[at] + 1
                at += 1
            if low <= gap.high:
                kept.append(Gap(low, gap.high, gap.holders))
        self.gaps = kept

    def _pass(self, ids: Sequence[int]) -> None:
        """Rows above `high`: what lies between them is a gap."""
        assert self.high is not None
        previous = self.high
        for record_id in ids:
            if record_id > previous + 1:
                self.gaps.append(Gap(previous + 1, record_id - 1))
            previous = record_id
        self.high = previous

"""A set of integers as sorted, non-adjacent intervals, in two flat arrays of 8 bytes per bound."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """Bounds are inclusive signed 64-bit integers; between two intervals at least one integer is missing.

    `add` at or after the end needs no search; elsewhere it costs a binary search and, if an interval begins or two
    merge, moving those after it.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = array("q")
        self._ends = array("q")
        for first, last in intervals:
            self.add_range(first, last)

    def add(self, number: int) -> bool:
        """Add one integer; returns whether it was new."""
        starts, ends = self._starts, self._ends
        if not ends or number > ends[-1] + 1:
            starts.append(number)
            ends.append(number)
            return True
        if number == ends[-1] + 1:
            ends[-1] = number
            return True
        after = bisect_right(starts, number)  # the first interval that begins above, unless the last one contains it
        if after and number <= ends[after - 1]:
            return False
        joins_left = after > 0 and ends[after - 1] == number - 1
        joins_right = starts[after] == number + 1
        if joins_left and joins_right:
            ends[after - 1] = ends[after]
            del starts[after], ends[after]
        elif joins_left:
            ends[after - 1] = number
        elif joins_right:
            starts[after] = number
        else:
            starts.insert(after, number)
            ends.insert(after, number)
        return True

    def add_range(self, first: int, last: int) -> None:
        """Add first … last; nothing if last < first."""
        if last < first:
            return
        if not self._ends or first > self._ends[-1] + 1:
            self._starts.append(first)
            self._ends.append(last)
            return
        low = bisect_left(self._ends, first - 1)  # the first interval that reaches it
        high = bisect_right(self._starts, last + 1)  # after the last interval that begins within reach
        if low < high:
            first = min(first, self._starts[low])
            last = max(last, self._ends[high - 1])
        self._starts[low:high] = array("q", (first,))
        self._ends[low:high] = array("q", (last,))

    def drop(self, at: int, count: int) -> None:
        """Drop `count` intervals, beginning at this index."""
        del self._starts[at : at + count], self._ends[at : at + count]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The missing integers between the intervals, as (first, last)."""
        for at in range(1, len(self._starts)):
            yield self._ends[at - 1] + 1, self._starts[at] - 1

    def end_from(self, number: int) -> int | None:
        """The end of the interval that contains this number; None if none does."""
        at = bisect_right(self._starts, number)
        return self._ends[at - 1] if at > 0 and number <= self._ends[at - 1] else None

    @property
    def last(self) -> int | None:
        """The highest integer; None if the set is empty."""
        return self._ends[-1] if self._ends else None

    def overlapping(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The whole intervals, ascending, that overlap first … last."""
        for at in range(bisect_left(self._ends, first), bisect_right(self._starts, last)):
            yield self._starts[at], self._ends[at]

    def __contains__(self, number: int) -> bool:
        return self.end_from(number) is not None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        """The number of intervals."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return self._starts == other._starts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Intervals({list(self)!r})"

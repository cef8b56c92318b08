"""How large the slices of a replay are, and when the next one may begin. Pure: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass

WITHOUT_RATE = 1_000_000
"""Records of a slice where nothing limits the rate: what a killed replay repeats at most."""

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """`rate`: records in a second, None for as fast as it goes. `slice_records` replaces the size that follows from it.

    Each slice buys its time from when it began, and time that went by unused is lost: after a stop the replay does
    not catch up. So what begins within t seconds is never more than rate × t and one slice.
    """

    rate: float | None = None
    slice_records: int | None = None

    @property
    def size(self) -> int:
        """Records of a slice: by default what a second may have, and one at least."""
        if self.slice_records is not None:
            return self.slice_records
        return WITHOUT_RATE if self.rate is None else max(1, int(self.rate * _SLICE_S))

    def next_s(self, began_s: float, records: int) -> float:
        """When the slice after one of so many records may begin; in the past if that one took longer than it bought."""
        return began_s if self.rate is None else began_s + records / self.rate

"""The low water: every id below it is settled, and none can appear there (P25). Pure."""

from __future__ import annotations

from collections.abc import Callable

_LOOK_S = 1.0


class LowWater:
    """See the module's text. What is known stays so, over remarks and terms of one incarnation. One thread only."""

    def __init__(self) -> None:
        self.known: int | None = None
        self.floor: int | None = None  # as of the last mark: no row can appear below it any more
        self._look_at = 0.0

    def forget(self) -> None:
        """Ids may have started again: another incarnation."""
        self.known = None

    def look(self, now: float, lowest: Callable[[], int | None]) -> None:
        """Time has passed: raise it, if it is time to. `lowest`: the lowest id that was read and is not settled."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self.floor is None:
            return
        unsettled = lowest()
        found = self.floor if unsettled is None else min(self.floor, unsettled)
        self.known = max(found, self.known or 1) if found > 1 else self.known

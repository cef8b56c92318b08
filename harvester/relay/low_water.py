"""The low water: every id below it is settled, and none can appear there (P25). The bookmark of a scan (P38). Pure."""

from __future__ import annotations

from collections.abc import Callable

from harvester.relay.scan import Bookmark

_LOOK_S = 1.0
_SAVE_S = 10.0
_SAVE_IDS = 50_000  # so many ids further a bookmark is worth another version of the term row


class LowWater:
    """What is settled for good. It stays so, over remarks and terms of one incarnation. One thread only."""

    def __init__(self) -> None:
        self.known: int | None = None
        self.bookmark: Bookmark | None = None  # below it everything is settled
        self._floor: int | None = None  # as of the last mark: no row can appear below it any more
        self._read: Bookmark | None = None  # as of a mark of this leader id, settled or not
        self._look_at = self._save_at = 0.0
        self._saved: Bookmark | None = None

    def begin(self) -> None:
        """A new leader id: what was read and not settled is forgotten, so how far the last one came means nothing."""
        self._floor = self._read = None

    def forget(self) -> None:
        """Ids may have started again: another incarnation."""
        self.known = self.bookmark = self._saved = None

    def read(self, floor: int | None, bookmark: Bookmark | None) -> None:
        """A mark has come so far; its rows are known."""
        self._floor = floor
        self._read = bookmark or self._read

    def look(self, now: float, lowest: Callable[[], int | None]) -> None:
        """Time has passed: raise it, if it is time to. `lowest`: the lowest id that was read and is not settled."""
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
        """The bookmark, if it has gone far enough since it was last saved."""
        bookmark, saved = self.bookmark, self._saved
        if bookmark is None or now < self._save_at or (saved and bookmark.high < saved.high + _SAVE_IDS):
            return None
        self._save_at = now + _SAVE_S
        return self.last()

    def last(self) -> Bookmark | None:
        """The bookmark, if it is another one than was last saved."""
        if self.bookmark == self._saved:
            return None
        self._saved = self.bookmark
        return self.bookmark

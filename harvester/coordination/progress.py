"""What of the delivered records is processed without a hole in between. Pure.

A consumer is given the records of a partition in order and may finish them in any. A heartbeat reports the last offset
of the *prefix*: everything that was delivered up to it is done. A successor begins behind it, so what is done behind a
record that is not will be done again; nothing is left out.

Offsets that Kafka never delivers (markers of transactions, what compaction removed) are no holes: only what was
delivered counts.
"""

from __future__ import annotations


class Progress:
    """Of one partition under one claim. `last_offset`: of the prefix; None before the first record."""

    __slots__ = ("_done", "last_offset")

    def __init__(self, last_offset: int | None = None) -> None:
        self.last_offset = last_offset
        self._done: dict[int, bool] = {}  # of what was delivered behind the prefix, in order

    def deliver(self, offset: int) -> None:
        """Given to the application; offsets come in order."""
        self._done[offset] = False

    def finish(self, offset: int) -> bool:
        """Processed. Whether the prefix has grown; a record that was not delivered, or is done, changes nothing."""
        if offset not in self._done:
            return False
        self._done[offset] = True
        before = self.last_offset
        for first in self._leading():
            self.last_offset = first
            del self._done[first]
        return self.last_offset != before

    def _leading(self) -> list[int]:
        leading = []
        for offset, done in self._done.items():
            if not done:
                break
            leading.append(offset)
        return leading

    @property
    def first_open(self) -> int | None:
        """The record that a successor would begin with, if it was delivered."""
        return next(iter(self._done), None)

    @property
    def open_records(self) -> int:
        """Delivered, and not in the prefix."""
        return len(self._done)

"""How much more may be read, by what is unsettled, under way and waiting already. Pure.

Marks are bounded by the room in the ledger, fetches by room and by key. Lanes have no share in any bound but their
number and, far away, the sum of their ids: then marks pause until some of it is gone.

The room has two parts: keys in flight, and rows in all. Keys whose first record does not get on (its partition is
away, its row is locked) could fill the second with what is queued behind them. When it stays full and little is
settled, only the first part counts: one row of a key is sent, further ones join its lane.
"""

from __future__ import annotations

from harvester.relay.expectation import Expectation
from harvester.relay.ledger import Ledger
from harvester.relay.statements import Statements
from harvester.relay.waiting import Waiting

MAX_LANES = 10_000
MAX_WAITING = 2_000_000
_STALL_S = 1.0


class Room:
    """See the module's text. `batch`: rows that a statement may bring at all. One thread only."""

    def __init__(self, batch: int, ledger: Ledger, waiting: Waiting, statements: Statements) -> None:
        self.batch = batch
        self._ledger, self._waiting, self._statements = ledger, waiting, statements
        self.expected = Expectation()
        self.stalled = False  # the window stays full, and little is settled
        self._full_since: float | None = None
        self._settled_then = 0

    def is_full(self) -> bool:
        """Whether so much waits that nothing more is read."""
        return len(self._waiting.lanes) >= MAX_LANES or len(self._waiting) >= MAX_WAITING

    def least(self) -> int:
        """Room for fewer rows is not worth a mark."""
        return max(1, min(self.batch, self._ledger.bounds.in_flight // 4))

    def free(self) -> tuple[int, int]:
        """For how many more keys, and rows in all, statements may be asked for."""
        ledger = self._ledger
        kept_keys, kept_rows = self._statements.kept()
        keys = ledger.room() - kept_keys
        if self.stalled:
            return keys, keys
        return keys, self.expected.bound(ledger.bounds.unsettled) - len(ledger) - kept_rows

    def for_mark(self) -> int:
        """How many rows the next mark may bring."""
        keys, rows = self.free()
        return min(self.batch, rows, MAX_WAITING - len(self._waiting), self.expected.rows(keys))

    def watch(self, now: float) -> None:
        """Time has passed: see whether the window is full of rows that stand."""
        ledger = self._ledger
        if ledger.room_behind() >= self.least():
            self.forget()
        elif self._full_since is None:
            self._full_since, self._settled_then = now, ledger.settled_total
        elif now - self._full_since >= _STALL_S:
            self.stalled = ledger.settled_total - self._settled_then < ledger.bounds.unsettled // 4
            self._full_since, self._settled_then = now, ledger.settled_total

    def forget(self) -> None:
        """The window is not full, or nothing is known of what is behind it."""
        self.stalled, self._full_since = False, None

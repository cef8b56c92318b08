"""From a mark's rows to what is sent to which shard. Pure.

Theory. Up to two marks are under way, so that the database works while the supervisor does; they are performed one
after the other on one session, together with the resets, in the order in which they were asked for. A mark takes rows
from the head, never after an offset (P4), and leaves out *closed* keys (the ledger's) and *closed shards*: a shard
that takes nothing at the moment, with `send_buffer` rows held for it here, has its slice of the keys left out.

A result's rows are filtered: what is on its way already is skipped (P3), rows of a key or shard that was closed at any
time since the statement was sent are given back (P18). So nothing that was closed may open while a mark is under way
that was sent before it closed: that mark's rows are still to be given back, and a later mark, sent after the opening,
would find the rows behind them and not them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from harvester.relay.commands import Mark
from harvester.relay.ledger import Ledger
from harvester.relay.router import shard_of

Row = tuple[int, bytes | None, bytes]  # id, key, the row as the database sent it

MARKS_UNDER_WAY = 2


@dataclass(slots=True, eq=False)
class Slice:
    """What is known of one shard: whether it takes rows, and what waits for it."""

    ready: bool = False
    congested: bool = False
    heard_at: float = 0.0
    held: deque[Row] = field(default_factory=deque)
    held_since: float = 0.0

    @property
    def takes(self) -> bool:
        """Whether rows can be sent to it."""
        return self.ready and not self.congested


@dataclass(slots=True)
class Taken:
    """A result, sorted: rows to send, by shard, and ids to give back."""

    mark: Mark
    rows: dict[int, list[Row]] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)
    left_out: bool = False  # the mark, or its filtering, left something out


class Intake:
    """See the module's text. One thread only."""

    def __init__(self, shards: int, batch: int, send_buffer: int, ledger: Ledger) -> None:
        self._batch, self._send_buffer, self._ledger = batch, send_buffer, ledger
        self.slices = [Slice() for _ in range(shards)]
        self._closed: set[int] = set()
        self._marks: dict[int, Mark] = {}
        self._closed_since: dict[int, set[int]] = {}  # mark number -> shards closed since it was sent
        self._idle = 0  # empty marks in a row
        self._more = False  # the last result was full
        self._kept: set[int] = set()

    # -- marks

    @property
    def under_way(self) -> int:
        """Marks that were asked for and have neither a result nor been abandoned."""
        return len(self._marks)

    def begin(self) -> None:
        """A new leader id: what is marked from now on starts from the head again.

        What is in the ledger now has been on the wire since before, under an older leader id, and marks leave it
        alone: the ledger would skip these rows, but the statement would lock and rewrite what shards are deleting.
        """
        self._idle, self._more = 0, False
        self._kept = set(self._ledger.ids)

    def next_marks(self, term: int, holder: UUID, leader_id: UUID, parked_keys: int) -> list[Mark]:
        """The marks that are worth asking for now."""
        asked: list[Mark] = []
        while len(self._marks) < (MARKS_UNDER_WAY if self._more else 1):
            room = self._ledger.room() - sum(mark.limit for mark in self._marks.values())
            worth = min(self._batch, (self._ledger.bounds.in_flight - parked_keys) // 4)
            if room < max(1, worth) and (len(self._ledger) or self._marks):
                break
            self._open_slices()
            if self._kept:
                self._kept = {record_id for record_id in self._kept if record_id in self._ledger}
            mark = Mark(
                number=self._ledger.mark_sent(),
                term=term,
                holder=holder,
                leader_id=leader_id,
                limit=min(self._batch, room),
                idle=self._idle,
                closed_keys=self._ledger.closed,
                closed_shards=frozenset(self._closed),
                shards=len(self.slices),
                kept=tuple(sorted(self._kept)),
            )
            self._marks[mark.number] = mark
            self._closed_since[mark.number] = set()
            asked.append(mark)
        return asked

    def knows(self, number: int) -> bool:
        """Whether this mark is under way."""
        return number in self._marks

    def abandon(self) -> None:
        """The results of all marks under way are discarded whole (P4)."""
        for number in self._marks:
            self._ledger.mark_done(number)
        self._marks.clear()
        self._closed_since.clear()

    def result(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a mark's rows, which come by id. Rows taken are in the ledger from here on."""
        mark = self._marks.pop(number)
        shards_closed = self._closed_since.pop(number)
        keys_closed = self._ledger.closed_since(number)
        taken = Taken(mark)
        for row in rows:
            self._take(row, taken, keys_closed, shards_closed, now)
        self._ledger.mark_done(number)  # not before: until then the ledger remembers what was settled meanwhile (P3)
        self._idle = 0 if rows else self._idle + 1
        self._more = len(rows) >= mark.limit
        taken.left_out = bool(mark.closed_keys or mark.closed_shards or keys_closed or shards_closed)
        return taken

    def _take(self, row: Row, taken: Taken, keys_closed: frozenset[bytes], shards_closed: set[int], now: float) -> None:
        record_id, key, _ = row
        ledger = self._ledger
        if ledger.knows(record_id):
            return
        if key is not None and key in keys_closed:
            taken.back.append(record_id)
            return
        index = ledger.shard_of_key(key) if key is not None else None
        if index is None:
            index = shard_of(key, record_id, len(self.slices))
        if index in shards_closed or index in self._closed:
            taken.back.append(record_id)
            return
        shard = self.slices[index]
        if shard.takes and not shard.held:
            taken.rows.setdefault(index, []).append(row)
        elif len(shard.held) < self._send_buffer:
            if not shard.held:
                shard.held_since = now
            shard.held.append(row)
        else:
            self._closed.add(index)
            shards_closed.add(index)
            for since in self._closed_since.values():
                since.add(index)
            taken.back.append(record_id)
            return
        if not ledger.unsettled_of(index):
            shard.heard_at = now  # it had nothing to say until now
        ledger.add(record_id, key, index)

    # -- slices

    def resize(self, shards: int) -> None:
        """There are this many shards now; nothing is unsettled and no mark under way."""
        self.slices = [*self.slices[:shards], *(Slice() for _ in range(shards - len(self.slices)))]
        self._closed.clear()

    def _open_slices(self) -> None:
        for index in tuple(self._closed):
            shard = self.slices[index]
            if shard.takes and not shard.held and not any(index in since for since in self._closed_since.values()):
                self._closed.discard(index)

    def release(self, index: int) -> list[Row]:
        """What was held for a shard that takes rows again."""
        shard = self.slices[index]
        rows = list(shard.held)
        shard.held.clear()
        return rows

    def forget_held(self) -> None:
        """A remark: what is held was never sent; forget it."""
        for shard in self.slices:
            self._ledger.give_back([row[0] for row in shard.held])
            shard.held.clear()

    def unhold(self, index: int, key: bytes) -> list[int]:
        """Take this key's rows out of what is held; returns their ids."""
        shard = self.slices[index]
        ids = [row[0] for row in shard.held if row[1] == key]
        if ids:
            shard.held = deque(row for row in shard.held if row[1] != key)
        return ids

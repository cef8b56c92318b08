"""Which statements are worth asking for now: marks, fetches of what waits, looks at the whole table. Pure.

Theory. Up to two marks and one fetch are under way, so that the database works while the supervisor does; how much they
may bring: `harvester.relay.room`. Marks, keys' lanes and shards' lanes take turns where room is short: keys that are
tried again and again, however many, must not keep the rest from flowing.
"""

from __future__ import annotations

from uuid import UUID

from harvester.relay.commands import Fetch, Look, Mark
from harvester.relay.ledger import Ledger
from harvester.relay.room import Room
from harvester.relay.slices import Slices
from harvester.relay.statements import Part, Statements
from harvester.relay.waiting import Lane, LaneName, Waiting

MARKS_UNDER_WAY = 2


class Asking:
    """See the module's text. One thread only."""

    def __init__(self, ledger: Ledger, waiting: Waiting, slices: Slices, statements: Statements, room: Room) -> None:
        self._ledger, self._waiting, self._slices = ledger, waiting, slices
        self._statements, self._room = statements, room
        self.found: list[int] = []  # seen by a look at the whole table and by no scan: to be fetched
        self.proven = False  # the last mark was empty, and for no other reason than that there was nothing
        self._starved = False  # fetches took what room there was, and no mark could be asked for
        self._passed_by = False  # keys' lanes took what room there was, and others could have been fetched
        self._idle = 0  # empty marks in a row
        self._more = False  # the last result was full
        self._rested = False  # it was not: the table had no more
        self._kept: set[int] = set()

    def begin(self) -> None:
        """A new leader id: what is marked from now on starts from the bookmark again.

        What is in the ledger now has been on the wire since before, under an older leader id, and marks that write
        leave it alone: the ledger would skip these rows, but the statement would lock and rewrite what shards are
        deleting.
        """
        self._idle, self._more, self._rested = 0, False, False
        self._kept = set(self._ledger.ids)

    def forget(self) -> None:
        """Nothing waits any more: nobody's turn has been missed, and what a look found is found again."""
        self._starved = self._passed_by = False
        self.found.clear()

    def marked(self, mark: Mark, rows: int) -> None:
        """A mark has brought so many rows."""
        self._idle = 0 if rows else self._idle + 1
        self._more = rows >= mark.limit
        self._rested = not self._more
        self.proven = not rows and mark.is_proof

    def fetched(self) -> None:
        """A fetch is over."""
        self._idle = 0

    def next(self, term: int, holder: UUID, leader_id: UUID, now: float) -> list[Mark | Fetch | Look]:
        """The statements that are worth asking for now."""
        asked: list[Mark | Fetch | Look] = []
        if self._starved:
            asked += self._next_marks(term, holder, leader_id)
        fetch = self._next_fetch(term, holder, now)
        if fetch is not None:
            asked.append(fetch)
        asked += self._next_marks(term, holder, leader_id)
        self._starved = not self._statements.marks() and (self._starved or self._statements.fetches())
        return asked

    def look(self, term: int, holder: UUID) -> Look:
        """Read all ids of the table: nothing may have been passed over."""
        look = Look(self._ledger.sent(), term, holder)
        self._statements.add(look)
        return look

    def _next_marks(self, term: int, holder: UUID, leader_id: UUID) -> list[Mark]:
        asked: list[Mark] = []
        while self._statements.marks() < (MARKS_UNDER_WAY if self._more else 1) and not self._room.is_full():
            room = self._room.for_mark()
            busy = len(self._ledger) or len(self._statements) or len(self._waiting)
            if room < self._room.least() and busy:
                break
            if self._kept:
                self._kept = {record_id for record_id in self._kept if record_id in self._ledger}
            mark = Mark(
                number=self._ledger.sent(),
                term=term,
                holder=holder,
                leader_id=leader_id,
                limit=room if not self._idle or room < 2 else room // 2,
                idle=self._idle,
                rested=self._rested,
                kept=tuple(sorted(self._kept)),
            )
            self._statements.add(mark, mark.limit, self._room.expected.keys(mark.limit))
            asked.append(mark)
        return asked

    def _next_fetch(self, term: int, holder: UUID, now: float) -> Fetch | None:
        waiting = self._waiting
        if not (len(waiting) or self.found) or self._statements.fetches():
            return None
        waiting.wake(self._ledger.drained())
        reserved = self._reserved_for_mark()
        room = max(0, min(*self._room.free(), self._room.batch + reserved) - reserved)
        parts: list[Part] = []
        if self._passed_by:
            room -= self._fetch_of_shards(room, parts)
        put_back: list[LaneName] = []
        for name in waiting.due(now):
            lane = waiting.lanes.get(name)
            if lane is None:
                continue
            if room <= 0:
                put_back.append(name)
                continue
            count = min(self._share_of(name, lane, now), room)
            if count and self._slices.takes(lane.shard):
                part = self._part(name, lane, count)
                room -= len(part.ids)
                parts.append(part)
            elif count:
                put_back.append(name)  # its shard takes nothing; looked at again with the next change
        if not self._passed_by:
            room -= self._fetch_of_shards(room, parts)
        waiting.wake(put_back)
        if not parts:
            return None
        self._passed_by = not room and not self._passed_by
        ids = sorted({record_id for part in parts for record_id in part.ids})
        fetch = Fetch(self._ledger.sent(), term, holder, tuple(ids))
        self._statements.add(fetch, len(ids), len(ids), parts)
        return fetch

    def _reserved_for_mark(self) -> int:
        """How much of the room a fetch leaves to a mark whose turn it is."""
        its_turn = self._starved and not self._statements.marks() and not self._room.is_full()
        return self._room.least() if its_turn else 0

    def _fetch_of_shards(self, room: int, parts: list[Part]) -> int:
        """What no key waits for: shards' lanes, and what a look has found. Returns how much of the room it takes."""
        left = room
        for index, lane in self._waiting.shards.items():
            if left > 0 and self._slices.takes(index):
                part = self._part(None, lane, left)
                left -= len(part.ids)
                parts.append(part)
        found = self.found[:left]
        del self.found[: len(found)]
        if found:
            left -= len(found)
            parts.append(Part(tuple(found), None, -1, 0))
        return room - left

    def _share_of(self, name: LaneName, lane: Lane, now: float) -> int:
        """How many rows of this lane may be fetched now."""
        if lane.not_before > now or lane.fetching or not len(lane):
            return 0
        under_way = self._ledger.count_of(name) if isinstance(name, bytes) else 0
        if lane.parked:
            if under_way:
                return 0
            if not lane.tried:
                return 1
            self._waiting.unpark(lane)  # what was tried has left the key's way
        bounds = self._ledger.bounds
        if self._room.stalled:
            return 0 if under_way else 1
        return bounds.per_key - under_way if under_way <= bounds.low else 0

    def _part(self, name: LaneName | None, lane: Lane, count: int) -> Part:
        lane.tried = lane.parked
        return Part(tuple(self._waiting.fetch(lane, count)), name, lane.shard, lane.stamp)

"""From the rows that were read to what is sent to which shard. Pure.

Theory. Two kinds of statement read rows, performed one after the other on one session. A *mark* goes on from where the
last one ended (`harvester.relay.scan`): it passes every row once under one leader id, in id order, late commits
included (P4). A *fetch* reads rows again by id, which had to wait (`harvester.relay.waiting`). Up to two marks and one
fetch are under way, so that the database works while the supervisor does.

A row of a mark is skipped if it is known already (P3). It joins its shard's lane if the shard takes nothing, or its
key's lane if the key has one or has `max_queued_per_key` under way; otherwise it is sent. So nothing of a key is sent
while anything older of it waits, whatever is under way from the database at that moment: what is closed is decided
when a row arrives, not when its statement was sent, and nothing has to be given back to the table.

Marks are bounded by the room in the ledger, fetches by room and by key. Lanes have no share in any bound but their
number and, far away, the sum of their ids: then marks pause until some of it is gone.

The room has two parts: keys in flight, and rows in all. Keys whose first record does not get on (its partition is
away, its row is locked) could fill the second with what is queued behind them. When it stays full and little is
settled, only the first part counts: one row of a key is sent, further ones join its lane.

Marks, keys' lanes and shards' lanes take turns where room is short: keys that are tried again and again, however many,
must not keep the rest from flowing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from harvester.relay.commands import Fetch, Look, Mark
from harvester.relay.expectation import Expectation
from harvester.relay.ledger import Ledger, Row
from harvester.relay.router import shard_of
from harvester.relay.spread import Spread
from harvester.relay.waiting import Lane, LaneName, Waiting

MARKS_UNDER_WAY = 2
MAX_LANES = 10_000
MAX_WAITING = 2_000_000
_STALL_S = 1.0


@dataclass(slots=True, eq=False)
class Slice:
    """What is known of one shard: whether it takes rows. `surplus`: rows sent since its pipe was full.

    `opening`: it has yet to find out what its predecessor has published (exactly-once mode).
    """

    ready: bool = False
    opening: bool = False
    congested: bool = False
    heard_at: float = 0.0
    surplus: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """What a fetch takes from one lane."""

    ids: tuple[int, ...]
    name: LaneName | None  # None: the lane of the shard
    shard: int
    stamp: int


@dataclass(slots=True)
class _Statement:
    """`rows`: how many it can bring; `keys`: how many places in flight are kept for them."""

    asked: Mark | Fetch | Look
    rows: int = 0
    keys: int = 0
    parts: list[_Part] = field(default_factory=list)


Taken = dict[int, list[Row]]  # rows to send, by shard


class Intake:
    """See the module's text. One thread only."""

    def __init__(self, batch: int, send_buffer: int, ledger: Ledger, shards: int, spread: Spread) -> None:
        self._batch, self._send_buffer, self._ledger, self._spread = batch, send_buffer, ledger, spread
        self.slices = [Slice() for _ in range(shards)]
        self.waiting = Waiting()
        self._under_way: dict[int, _Statement] = {}
        self._starved = False  # fetches took what room there was, and no mark could be asked for
        self._passed_by = False  # keys' lanes took what room there was, and others could have been fetched
        self._idle = 0  # empty marks in a row
        self._more = False  # the last result was full
        self._rested = False  # it was not: the table had no more
        self._proven = False  # it was empty, and for no other reason
        self._kept: set[int] = set()
        self._found: list[int] = []  # seen by a look at the whole table and by no scan: to be fetched
        self._now = 0.0
        self._stalled = False  # the window stays full, and little is settled
        self._full_since: float | None = None
        self._settled_then = 0
        self._expected = Expectation()
        self._crowded = 0  # rows of this mark for whose keys there was no room

    # -- statements

    @property
    def under_way(self) -> int:
        """Statements that were asked for and have neither a result nor been abandoned."""
        return len(self._under_way)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known that would have to be sent, and the last mark proves that there is nothing else."""
        return (
            self._proven and not len(self._ledger) and not len(self.waiting) and not self._found and not self._under_way
        )

    def lowest(self) -> int | None:
        """The lowest id that was read and is not settled; None: there is none."""
        parts = [part.ids[0] for statement in self._under_way.values() for part in statement.parts if part.ids]
        return min([*self._ledger.ids, *self.waiting.firsts(), *self._found[:1], *parts], default=None)

    def begin(self) -> None:
        """A new leader id: what is marked from now on starts from the head again.

        What is in the ledger now has been on the wire since before, under an older leader id, and marks that write
        leave it alone: the ledger would skip these rows, but the statement would lock and rewrite what shards are
        deleting.
        """
        self._idle, self._more, self._rested = 0, False, False
        self._kept = set(self._ledger.ids)
        self._forget_waiting()

    def next(self, term: int, holder: UUID, leader_id: UUID, now: float) -> list[Mark | Fetch | Look]:
        """The statements that are worth asking for now."""
        asked: list[Mark | Fetch | Look] = []
        if self._starved:
            asked += self._next_marks(term, holder, leader_id)
        fetch = self._next_fetch(term, holder, now)
        if fetch is not None:
            asked.append(fetch)
        asked += self._next_marks(term, holder, leader_id)
        self._starved = not self._marks_under_way() and (self._starved or self._fetches())
        return asked

    def _next_marks(self, term: int, holder: UUID, leader_id: UUID) -> list[Mark]:
        asked: list[Mark] = []
        while self._marks_under_way() < (MARKS_UNDER_WAY if self._more else 1) and not self._is_full():
            keys, rows = self._free_room()
            rows = min(rows, MAX_WAITING - len(self.waiting))
            room = min(self._batch, rows, self._expected.rows(keys))
            busy = len(self._ledger) or self._under_way or len(self.waiting)
            if room < self._least() and busy:
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
            self._under_way[mark.number] = _Statement(mark, mark.limit, self._expected.keys(mark.limit))
            asked.append(mark)
        return asked

    def look(self, term: int, holder: UUID) -> Look:
        """Read all ids of the table: nothing may have been passed over."""
        look = Look(self._ledger.sent(), term, holder)
        self._under_way[look.number] = _Statement(look)
        return look

    def knows(self, number: int) -> bool:
        """Whether this statement is under way."""
        return number in self._under_way

    def abandon(self) -> None:
        """The results of all statements under way are discarded whole (P4), and what waits is forgotten."""
        for number in self._under_way:
            self._ledger.done(number)
        self._under_way.clear()
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._starved = self._passed_by = self._stalled = False
        self._full_since = None
        self.waiting.clear()
        self._found.clear()
        self._ledger.watched.clear()

    def _marks_under_way(self) -> int:
        return sum(1 for statement in self._under_way.values() if isinstance(statement.asked, Mark))

    def _fetches(self) -> bool:
        return any(isinstance(statement.asked, Fetch) for statement in self._under_way.values())

    def _is_full(self) -> bool:
        """Whether so much waits that nothing more is read."""
        return len(self.waiting.lanes) >= MAX_LANES or len(self.waiting) >= MAX_WAITING

    def _least(self) -> int:
        """Room for fewer rows is not worth a mark."""
        return max(1, min(self._batch, self._ledger.bounds.in_flight // 4))

    def _free_room(self) -> tuple[int, int]:
        """For how many more keys, and rows in all, statements may be asked for."""
        ledger, under_way = self._ledger, self._under_way.values()
        keys = ledger.room() - sum(statement.keys for statement in under_way)
        if self._stalled:
            return keys, keys
        rows = self._expected.bound(ledger.bounds.unsettled)
        return keys, rows - len(ledger) - sum(statement.rows for statement in under_way)

    def _is_crowded(self, key: bytes | None) -> bool:
        """Whether this row's key is not in flight, and may not become so: a mark has brought more keys than expected.

        What a fetch under way has to bring keeps its places.
        """
        if key is not None and self._ledger.count_of(key):
            return False
        return self._ledger.room() <= self._kept_for_fetches()

    def _kept_for_fetches(self) -> int:
        return sum(s.keys for s in self._under_way.values() if isinstance(s.asked, Fetch))

    def watch(self, now: float) -> None:
        """Time has passed: see whether fewer shards would do, and whether the window is full of rows that stand."""
        ledger = self._ledger
        if not self.waiting.shards:
            self._spread.shrink(len(ledger))
        if ledger.room_behind() >= self._least():
            self._stalled, self._full_since = False, None
        elif self._full_since is None:
            self._full_since, self._settled_then = now, ledger.settled_total
        elif now - self._full_since >= _STALL_S:
            self._stalled = ledger.settled_total - self._settled_then < ledger.bounds.unsettled // 4
            self._full_since, self._settled_then = now, ledger.settled_total

    def _is_enough(self, key: bytes) -> bool:
        """Whether further rows of this key wait by their ids."""
        bound = 1 if self._stalled else self._ledger.bounds.per_key
        return key in self.waiting.lanes or self._ledger.count_of(key) >= bound

    # -- what waits

    def _next_fetch(self, term: int, holder: UUID, now: float) -> Fetch | None:
        waiting = self.waiting
        if not (len(waiting) or self._found) or self._fetches():
            return None
        waiting.wake(self._ledger.drained())
        reserved = self._least() if self._starved and not self._marks_under_way() and not self._is_full() else 0
        room = max(0, min(*self._free_room(), self._batch + reserved) - reserved)
        parts: list[_Part] = []
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
            if count and self._takes(lane.shard):
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
        self._under_way[fetch.number] = _Statement(fetch, len(ids), len(ids), parts)
        return fetch

    def _fetch_of_shards(self, room: int, parts: list[_Part]) -> int:
        """What no key waits for: shards' lanes, and what a look has found. Returns how much of the room it takes."""
        left = room
        for index, lane in self.waiting.shards.items():
            if left > 0 and self._takes(index):
                part = self._part(None, lane, left)
                left -= len(part.ids)
                parts.append(part)
        found = self._found[:left]
        del self._found[: len(found)]
        if found:
            left -= len(found)
            parts.append(_Part(tuple(found), None, -1, 0))
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
            self.waiting.unpark(lane)  # what was tried has left the key's way
        bounds = self._ledger.bounds
        if self._stalled:
            return 0 if under_way else 1
        return bounds.per_key - under_way if under_way <= bounds.low else 0

    def _part(self, name: LaneName | None, lane: Lane, count: int) -> _Part:
        lane.tried = lane.parked
        return _Part(tuple(self.waiting.fetch(lane, count)), name, lane.shard, lane.stamp)

    # -- results

    def marked(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a mark's rows, which come by id. Rows to be sent are in the ledger from here on."""
        self._now = now
        mark = self._under_way.pop(number).asked
        assert isinstance(mark, Mark)
        taken = self._take_all(rows)
        self._ledger.done(number)  # not before: until then the ledger remembers what was settled meanwhile (P3)
        self._idle = 0 if rows else self._idle + 1
        self._more = len(rows) >= mark.limit
        self._rested = not self._more
        self._proven = not rows and mark.is_proof
        return taken

    def fetched(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a fetch's rows. What is missing has left the table, by whomever."""
        self._now = now
        statement = self._under_way.pop(number)
        by_id = {row[0]: row for row in rows}
        taken: Taken = {}
        for part in statement.parts:
            found = [by_id[record_id] for record_id in part.ids if record_id in by_id]
            if part.name is not None:
                self._take_from_lane(part, part.name, found, taken)
            elif part.shard >= 0:
                self._take_from_shard(part, found, taken)
            else:
                for row in self._ledger.unknown(found):
                    self._take(row, taken)
        self._ledger.done(number)
        self._idle = 0
        return taken

    def looked(self, number: int, ids: Iterable[int]) -> int:
        """Compare all ids of the table with what is known. Returns how many nobody knew of; they are fetched."""
        self._under_way.pop(number)
        waits = self.waiting.ids()
        for statement in self._under_way.values():
            waits.update(record_id for part in statement.parts for record_id in part.ids)
        unknown = [i for i in ids if not self._ledger.knows(i) and i not in waits]
        self._found = sorted({*self._found, *unknown})
        self._ledger.done(number)
        return len(unknown)

    def _take_all(self, rows: Sequence[Row]) -> Taken:
        """What a mark has brought. Where nothing waits, and all shards take rows, in one go as far as there is room."""
        ledger, slices = self._ledger, self.slices
        in_flight, self._crowded = ledger.in_flight, 0
        new = ledger.unknown(rows)
        if not self.waiting.shards:
            self._spread.grow(len(ledger) + len(new))
        taken: Taken = {}
        flows = all(state.ready and not (state.opening or state.congested) for state in slices) and not self._stalled
        if flows and not self.waiting.lanes and not self.waiting.shards:
            silent = [index for index in range(len(slices)) if not ledger.unsettled_of(index)]
            taken = ledger.add_rows(new, self._spread.active, ledger.room() - self._kept_for_fetches())
            for index in silent:
                slices[index].heard_at = self._now  # it had nothing to say until now
        for row in new[sum(map(len, taken.values())) :]:
            self._take(row, taken)
        self._expected.learn(rows, ledger.in_flight - in_flight + self._crowded)
        return taken

    def _take(self, row: Row, taken: Taken) -> None:
        """A row that is new."""
        record_id, key, _ = row
        waiting = self.waiting
        home = shard_of(key, record_id, self._spread.active)
        index = self._place_of(key, home)
        if len(waiting) and waiting.holds(record_id, record_id if key is None else key, index):
            return
        if index == home and index in waiting.shards:
            waiting.join_shard(index, record_id)
        elif index == home or key is None or self._takes(index):
            self._pass_on(row, index, taken)
        else:
            self._join(key, index, record_id)  # in the shard's lane nobody would know that it has to go there
            waiting.wake((key,))

    def shard_of(self, key: bytes) -> int:
        """The shard that a row of this key would go to now."""
        return self._place_of(key, shard_of(key, 0, self._spread.active))

    def _place_of(self, key: bytes | None, home: int) -> int:
        """The shard that has anything of this key, or else the one it goes to when nothing is under way."""
        if key is None:
            return home
        index = self._ledger.shard_of_key(key)
        if index is not None:
            return index
        lane = self.waiting.lanes.get(key)
        return lane.shard if lane is not None else home

    def _join(self, name: LaneName, index: int, record_id: int) -> None:
        """Let a row wait for others of its key, or for room."""
        if isinstance(name, bytes):
            self._ledger.watched.add(name)
        self.waiting.join(name, index, record_id)

    def _pass_on(self, row: Row, index: int, taken: Taken) -> None:
        """Send a row that is new and has no older one of its shard before it, or let it wait for its shard or key."""
        record_id, key, _ = row
        if not self._takes(index):
            self.waiting.join_shard(index, record_id)
        elif key is not None and self._is_enough(key):
            self._join(key, index, record_id)
        elif self._is_crowded(key):
            self._crowded += 1
            name = record_id if key is None else key
            self._join(name, index, record_id)
            self.waiting.wake((name,))
        else:
            self._send(row, index, taken)

    def _take_from_lane(self, part: _Part, name: LaneName, rows: Sequence[Row], taken: Taken) -> None:
        lane = self.waiting.lanes[name]
        if lane.stamp != part.stamp or not self._takes(part.shard):
            # Something older was given back meanwhile, or the shard takes nothing: not now.
            lane.tried = False
            self.waiting.give_back(name, [row[0] for row in rows])
        else:
            for row in self._ledger.unknown(rows):
                self._send(row, part.shard, taken)
            if lane.tried and not rows:
                self.waiting.unpark(lane)  # what was to be tried has left the table
        self.waiting.fetched(name)
        if name not in self.waiting.lanes and isinstance(name, bytes):
            self._ledger.watched.discard(name)

    def _take_from_shard(self, part: _Part, rows: Sequence[Row], taken: Taken) -> None:
        for row in self._ledger.unknown(rows):
            self._pass_on(row, part.shard, taken)
        self.waiting.fetched_shard(part.shard)

    def _send(self, row: Row, index: int, taken: Taken) -> None:
        if not self._ledger.unsettled_of(index):
            self.slices[index].heard_at = self._now  # it had nothing to say until now
        self.slices[index].surplus += 1
        self._ledger.add(row[0], row[1], index)
        taken.setdefault(index, []).append(row)

    # -- failures

    def park(self, name: LaneName, shard: int, ids: Sequence[int], not_before: float, held: bool) -> None:
        """A record failed and will be tried again then; `ids` are it and what stood behind it."""
        self._ledger.give_back(ids)
        if isinstance(name, bytes):
            self._ledger.watched.add(name)
        self.waiting.park(name, shard, ids, not_before, held)

    def is_parked(self, name: LaneName) -> bool:
        """Whether rows of this key may come back without having been sent."""
        return name in self.waiting.lanes

    def give_back(self, name: LaneName, ids: Iterable[int]) -> None:
        """Rows that reached their shard behind a parked one come back."""
        self.waiting.give_back(name, self._ledger.give_back(ids))

    # -- slices

    def _takes(self, index: int) -> bool:
        state = self.slices[index]
        return state.ready and not state.opening and (not state.congested or state.surplus < self._send_buffer)

    def congested(self, index: int) -> None:
        """Its pipe takes nothing at the moment."""
        state = self.slices[index]
        if not state.congested:
            state.congested, state.surplus = True, 0

    def uncongested(self, index: int) -> None:
        """Its pipe takes frames again."""
        self.slices[index].congested = False

    def resize(self, shards: int) -> None:
        """There are this many shards now; nothing is unsettled and nothing under way."""
        self._spread.resize(shards)
        self.slices = [*self.slices[:shards], *(Slice() for _ in range(shards - len(self.slices)))]

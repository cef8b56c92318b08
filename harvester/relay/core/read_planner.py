"""Plans the next statements: marks, fetches of deferred rows, looks at the whole table. Pure.

Theory. Three kinds of statement read rows; they are executed one after the other on one session:

- a *mark* continues where the last one ended (`scan`): under one leader id it passes every row once, in id order,
  including late commits (P4);
- a *fetch* reads deferred rows by id (`deferred`);
- a *look* reads all ids, in case any row was missed; if that takes too long, in portions, with marks in between
  (`LookPlan`).

Up to two marks and one fetch are under way, so that the database and the supervisor work at the same time. When room is
short, marks, deferred keys and deferred shards take turns: keys that are retried again and again, however many, must
not block the rest. `dispatcher` decides where the returned rows go.

*Flow control* (`FlowControl`). Marks are limited by the room in the ledger, fetches by that room and per key. Deferred
rows count towards no limit other than their number and, far away, the sum of their ids: beyond it, marks pause until
some are gone. The room has two parts: keys in flight, and rows in total. Keys whose first record makes no progress (its
partition is unavailable, its row is locked) could fill the second part with what is queued behind them. When that part
stays full and little is settled, only the first part counts: one row per key is sent, further ones are deferred.

*Estimates* (`MarkEstimate`). A mark is requested as a number of rows, but the limits apply to the keys in flight (I3)
and the memory that rows take. Both are estimated from recent marks, as decaying means. A wrong estimate breaks nothing:
rows whose keys find no room are deferred, and the next estimate is higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from harvester.relay.core.deferred import DeferredQueue, DeferredRows, KeyOrId
from harvester.relay.core.dispatcher import Dispatcher, Part, ShardFlows, Spread, Taken
from harvester.relay.core.ledger import Ledger, Row
from harvester.relay.core.messages import Fetch, Look, Mark

_WEIGHT = 0.3  # weight of the last mark
_LEAST_SHARE = 0.02
_MARGIN = 1.25
_MOST_BYTES = 1 << 28  # of rows that are unsettled or requested
_FIRST_ROWS = 100  # while their size is unknown


class MarkEstimate:
    """Estimates how many keys, and bytes, a mark will bring. One thread only."""

    def __init__(self) -> None:
        self._share = 1.0  # fraction of rows whose key was not in flight
        self._row_bytes = 0.0

    def learn(self, rows: Sequence[Row], new_keys: int) -> None:
        """A mark has brought these rows, with this many keys that were not in flight (or would not have fitted)."""
        if not rows:
            return
        self._share += (max(new_keys / len(rows), _LEAST_SHARE) - self._share) * _WEIGHT
        self.weigh(rows)

    def weigh(self, rows: Sequence[Row]) -> None:
        """A mark or a fetch has brought these rows: so large are they. Those that were cut off do not count."""
        sizes = [len(row[2]) for row in rows if row[2]]
        if sizes:
            row_bytes = sum(sizes) / len(sizes)
            self._row_bytes += (row_bytes - self._row_bytes) * (_WEIGHT if self._row_bytes else 1.0)

    def rows(self, keys: int) -> int:
        """How many rows may be requested when there is room for this many keys."""
        return int(keys / self._expected) if self._row_bytes else min(_FIRST_ROWS, keys)

    def keys(self, rows: int) -> int:
        """How many keys need room for this many rows."""
        return math.ceil(rows * self._expected)

    def bound(self, rows: int) -> int:
        """This many rows, or as many as there is memory for."""
        return min(rows, max(1, int(_MOST_BYTES / self._row_bytes))) if self._row_bytes else rows

    @property
    def _expected(self) -> float:
        return min(1.0, self._share * _MARGIN)


@dataclass(frozen=True, slots=True)
class Statement:
    """`rows`: the most it can return; `keys`: places in flight reserved for them."""

    asked: Mark | Fetch | Look
    rows: int = 0
    keys: int = 0
    parts: Sequence[Part] = ()


class Statements:
    """Statements that were requested and have no result yet. One thread only."""

    def __init__(self) -> None:
        self.under_way: dict[int, Statement] = {}

    def __len__(self) -> int:
        return len(self.under_way)

    def add(self, asked: Mark | Fetch | Look, rows: int = 0, keys: int = 0, parts: Sequence[Part] = ()) -> None:
        self.under_way[asked.number] = Statement(asked, rows, keys, parts)

    def end(self, number: int) -> Statement:
        return self.under_way.pop(number)

    def abandon(self) -> Iterable[int]:
        """Forget all of them; returns their numbers."""
        numbers = list(self.under_way)
        self.under_way.clear()
        return numbers

    def marks(self) -> int:
        return sum(1 for statement in self.under_way.values() if isinstance(statement.asked, Mark))

    def looks(self) -> bool:
        return any(isinstance(statement.asked, Look) for statement in self.under_way.values())

    def fetches(self) -> bool:
        return any(isinstance(statement.asked, Fetch) for statement in self.under_way.values())

    def kept(self) -> tuple[int, int]:
        """The number of keys, and of rows in total, for which places are reserved."""
        statements = self.under_way.values()
        return sum(statement.keys for statement in statements), sum(statement.rows for statement in statements)

    def kept_for_fetches(self) -> int:
        """The number of keys reserved for fetches: surplus keys of a mark do not get these places."""
        return sum(s.keys for s in self.under_way.values() if isinstance(s.asked, Fetch))

    def parts(self) -> Iterator[Part]:
        """What all of them take from queues."""
        return (part for statement in self.under_way.values() for part in statement.parts)


MOST_GROWTH = 10
MAX_DEFERRED_KEYS = 10_000
MAX_DEFERRED_ROWS = 2_000_000
_STALL_S = 1.0


class FlowControl:
    """How much may be requested. `batch`: the most rows a statement may bring. One thread only.

    A backlog is drained with larger statements than a steady load needs: the batch doubles with each mark that fills
    it, up to `MOST_GROWTH` times the setting, and returns to the setting after one that finds fewer rows than
    requested.

    A statement may fail because its rows take longer than a statement may, and it would fail again, for ever, if as
    many were requested once more. So each failure leaves a limit of a quarter of its rows, and each statement that
    fills the limit raises it by an eighth.
    """

    def __init__(self, batch: int, ledger: Ledger, deferred: DeferredRows, statements: Statements) -> None:
        self._grown = self._setting = batch
        self._limit = MOST_GROWTH * batch  # left by failures
        self._ledger, self._deferred, self._statements = ledger, deferred, statements
        self.expected = MarkEstimate()
        self.stalled = False  # the window stays full, and little is settled
        self._full_since: float | None = None
        self._settled_then = 0

    @property
    def batch(self) -> int:
        return min(self._grown, self._limit)

    def marked(self, rows: int, limit: int) -> None:
        """A mark that requested up to `limit` rows has brought this many."""
        if rows < limit:
            self._grown = self._setting
        elif limit >= self._grown:
            self._grown = min(2 * self._grown, MOST_GROWTH * self._setting)
        self.brought(rows)

    def brought(self, rows: int) -> None:
        """A statement has brought this many rows in time."""
        if rows >= self._limit:
            self._limit = min(self._limit + max(1, self._limit // 8), MOST_GROWTH * self._setting)

    def failed(self, rows: int) -> None:
        """A statement that requested this many rows has failed."""
        self._limit = max(1, min(self._limit, rows // 4))

    def is_full(self) -> bool:
        """Whether so many rows wait that nothing more is read."""
        return len(self._deferred.by_key) >= MAX_DEFERRED_KEYS or self._deferred.rows >= MAX_DEFERRED_ROWS

    def least(self) -> int:
        """Room for fewer rows than this is not worth a mark."""
        return max(1, min(self.batch, self._ledger.bounds.in_flight // 4, self._most_rows // 4))

    @property
    def _most_rows(self) -> int:
        """The number of rows that may be unsettled: the configured one, or what memory holds if that is less."""
        return self.expected.bound(self._ledger.bounds.unsettled)

    def free(self) -> tuple[int, int]:
        """For how many more keys, and rows in total, statements may be requested."""
        ledger = self._ledger
        kept_keys, kept_rows = self._statements.kept()
        keys = ledger.room() - kept_keys
        if self.stalled:
            return keys, self.expected.bound(keys)
        return keys, self._most_rows - len(ledger) - kept_rows

    def for_mark(self) -> int:
        keys, rows = self.free()
        return min(self.batch, rows, MAX_DEFERRED_ROWS - self._deferred.rows, self.expected.rows(keys))

    def watch(self, now: float) -> None:
        """Time has passed: check whether the window is full of rows that make no progress."""
        ledger = self._ledger
        if self._most_rows - len(ledger) >= self.least():
            self.forget()
        elif self._full_since is None:
            self._full_since, self._settled_then = now, ledger.settled_total
        elif now - self._full_since >= _STALL_S:
            self.stalled = ledger.settled_total - self._settled_then < max(1, self._most_rows // 4)
            self._full_since, self._settled_then = now, ledger.settled_total

    def forget(self) -> None:
        """The window is not full, or what is behind it is unknown."""
        self.stalled, self._full_since = False, None


_FIRST_WIDTH = 1 << 17


class LookPlan:
    """What a look reads next. One thread only.

    Dead rows that vacuum may not remove lie among the newest ids: a look that reads past them all would hold up marks
    for as long. So a look that was too long goes on with few ids at a time, from the highest down, twice as many after
    each portion, and a quarter of them after one that was too long. Below the dead rows it soon reaches all the rest.
    No portion needs the snapshot of another: a row that stays in the table is seen by each look that begins after it
    has come. One that comes later may be seen by the next look only, as it would be after a single statement.
    """

    def __init__(self) -> None:
        self.high: int | None = None  # None: the highest id
        self.width: int | None = None  # None: all ids

    def looked(self, rest: int | None) -> None:
        """A portion was read; `rest`: the highest id below it, None if that was all."""
        self.high = rest
        self.width = None if rest is None or self.width is None else 2 * self.width

    def failed(self) -> None:
        """A portion was too long."""
        self.width = _FIRST_WIDTH if self.width is None else max(1, self.width // 4)

    def forget(self) -> None:
        """The next look begins at the highest id."""
        self.high = self.width = None


MARKS_UNDER_WAY = 2


class ReadPlanner:
    """Plans statements and sorts their results. Owns all state of reading except the ledger. One thread only."""

    def __init__(self, batch: int, send_buffer: int, ledger: Ledger, shards: int, spread: Spread) -> None:
        self._ledger, self._spread = ledger, spread
        self.shards = ShardFlows(shards, send_buffer)
        self.deferred = DeferredRows()
        self.statements = Statements()
        self.dispatcher = Dispatcher(ledger, self.deferred, self.shards, spread)
        self._flow = FlowControl(batch, ledger, self.deferred, self.statements)
        self._look = LookPlan()
        self._found: list[int] = []  # seen by a look at the whole table but by no scan: to be fetched
        self._proven = False  # the last mark was empty because there was nothing
        self._starved = False  # fetches took all the room, and no mark could be requested
        self._passed_by = False  # deferred keys took all the room, although other queues could have been fetched
        self._idle = 0  # consecutive empty marks
        self._more = False  # the last result was full
        self._rested = False  # the last result was not full: the table had no more
        self._kept: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no known row remains to be sent, and the last mark proves that there are no others."""
        known = len(self._ledger) or self.deferred.rows or self._found or len(self.statements)
        return self._proven and not known

    def lowest(self) -> int | None:
        """The lowest id that was read and is not settled; None if there is none."""
        parts = [part.ids[0] for part in self.statements.parts() if part.ids]
        return min([*self._ledger.ids, *self.deferred.firsts(), *self._found[:1], *parts], default=None)

    def begin(self) -> None:
        """A new leader id: marks start from the bookmark again.

        What is in the ledger now has been on the wire since an older leader id, and writing marks leave it alone: the
        ledger would skip these rows, but the statement would lock and rewrite what shards are deleting.
        """
        self._idle, self._more, self._rested = 0, False, False
        self._look.forget()
        self._kept = set(self._ledger.ids)
        self._forget_deferred()

    def abandon(self) -> None:
        """Discard the results of all statements under way (P4), and forget deferred rows."""
        for number in self.statements.abandon():
            self._ledger.done(number)
        self._forget_deferred()

    def _forget_deferred(self) -> None:
        """Nothing waits any more: no turn was missed, and what a look has found will be found again."""
        self._starved = self._passed_by = False
        self._found.clear()
        self._flow.forget()
        self.deferred.clear()
        self._ledger.watched.clear()

    def watch(self, now: float) -> None:
        """Time has passed: check whether fewer shards would do, and whether the window makes no progress."""
        if not self.deferred.by_shard:
            self._spread.shrink(self._ledger.in_flight)
        self._flow.watch(now)

    # -- statements

    def next(self, term: int, holder: UUID, leader_id: UUID, now: float) -> list[Mark | Fetch | Look]:
        asked: list[Mark | Fetch | Look] = []
        if self._starved:
            asked += self._next_marks(term, holder, leader_id)
        fetch = self._next_fetch(term, holder, now)
        if fetch is not None:
            asked.append(fetch)
        asked += self._next_marks(term, holder, leader_id)
        self._starved = not self.statements.marks() and (self._starved or self.statements.fetches())
        return asked

    def look(self, term: int, holder: UUID) -> list[Look]:
        """Read all ids of the table, or the next portion of them, to make sure that nothing was missed."""
        if self.statements.looks():
            return []
        look = Look(self._ledger.sent(), term, holder, self._look.high, self._look.width)
        self.statements.add(look)
        return [look]

    def knows(self, number: int) -> bool:
        return number in self.statements.under_way

    def _next_marks(self, term: int, holder: UUID, leader_id: UUID) -> list[Mark]:
        asked: list[Mark] = []
        while self.statements.marks() < (MARKS_UNDER_WAY if self._more else 1) and not self._flow.is_full():
            room = self._flow.for_mark()
            busy = len(self._ledger) or len(self.statements) or self.deferred.rows
            if room < self._flow.least() and busy:
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
                is_proof=self._idle > 0 or not self._rested,
                kept=tuple(sorted(self._kept)),
            )
            self.statements.add(mark, mark.limit, self._flow.expected.keys(mark.limit))
            asked.append(mark)
        return asked

    def _next_fetch(self, term: int, holder: UUID, now: float) -> Fetch | None:
        deferred = self.deferred
        if not (deferred.rows or self._found) or self.statements.fetches():
            return None
        deferred.wake(self._ledger.drained())
        reserved = self._reserved_for_mark()
        room = max(0, min(*self._flow.free(), self._flow.batch + reserved) - reserved)
        parts: list[Part] = []
        if self._passed_by:
            room -= self._fetch_of_shards(room, parts)
        put_back: list[KeyOrId] = []
        for name in deferred.due(now):
            queue = deferred.by_key.get(name)
            if queue is None:
                continue
            if room <= 0:
                put_back.append(name)
                continue
            count = min(self._share_of(name, queue, now), room)
            if count and self.shards.takes(queue.shard):
                part = self._part(name, queue, count)
                room -= len(part.ids)
                parts.append(part)
            elif count:
                put_back.append(name)  # its shard accepts nothing; looked at again at the next change
        if not self._passed_by:
            room -= self._fetch_of_shards(room, parts)
        deferred.wake(put_back)
        if not parts:
            return None
        self._passed_by = not room and not self._passed_by
        ids = sorted({record_id for part in parts for record_id in part.ids})
        fetch = Fetch(self._ledger.sent(), term, holder, tuple(ids))
        self.statements.add(fetch, len(ids), len(ids), parts)
        return fetch

    def _reserved_for_mark(self) -> int:
        """How much of the room a fetch leaves to a mark whose turn it is."""
        its_turn = self._starved and not self.statements.marks() and not self._flow.is_full()
        return self._flow.least() if its_turn else 0

    def _fetch_of_shards(self, room: int, parts: list[Part]) -> int:
        """Rows that wait for no key: deferred shards, and what a look has found. Returns how much room this takes."""
        left = room
        for index, queue in self.deferred.by_shard.items():
            if left > 0 and self.shards.takes(index):
                part = self._part(None, queue, left)
                left -= len(part.ids)
                parts.append(part)
        found = self._found[:left]
        del self._found[: len(found)]
        if found:
            left -= len(found)
            parts.append(Part(tuple(found), None, -1, 0))
        return room - left

    def _share_of(self, name: KeyOrId, queue: DeferredQueue, now: float) -> int:
        """How many rows of this key may be fetched now."""
        if queue.not_before > now or queue.fetching or not len(queue):
            return 0
        under_way = self._ledger.count_of(name) if isinstance(name, bytes) else 0
        if queue.parked:
            if under_way:
                return 0
            if not queue.tried:
                return 1
            self.deferred.unpark(queue)  # the row that was tried no longer blocks the key
        bounds = self._ledger.bounds
        if self._flow.stalled:
            return 0 if under_way else 1
        return bounds.per_key - under_way if under_way <= bounds.low else 0

    def _part(self, name: KeyOrId | None, queue: DeferredQueue, count: int) -> Part:
        queue.tried = queue.parked
        return Part(tuple(self.deferred.fetch(queue, count)), name, queue.shard, queue.stamp)

    # -- results

    def marked(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a mark's rows, which come in id order. Rows to be sent are in the ledger from here on."""
        mark = self._end(number, now).asked
        assert isinstance(mark, Mark)
        in_flight = self._ledger.in_flight
        taken = self.dispatcher.marked(rows)
        self._flow.expected.learn(rows, self._ledger.in_flight - in_flight + self.dispatcher.crowded)
        self._ledger.done(number)  # only now: until here the ledger remembers what was settled in the meantime (P3)
        self._idle = 0 if rows else self._idle + 1
        self._more = len(rows) >= mark.limit
        self._flow.marked(len(rows), mark.limit)
        self._rested = not self._more
        self._proven = not rows and mark.is_proof
        return taken

    def fetched(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a fetch's rows. Missing rows have left the table, whoever deleted them."""
        taken = self.dispatcher.fetched(self._end(number, now).parts, rows)
        self._flow.expected.weigh(rows)
        self._flow.brought(len(rows))
        self._ledger.done(number)
        self._idle = 0
        return taken

    def looked(self, number: int, ids: Iterable[int], rest: int | None = None) -> int:
        """Compare ids of the table with the known ones. Returns how many were unknown; they are fetched."""
        self.statements.end(number)
        self._look.looked(rest)
        waits = self.deferred.ids()
        for part in self.statements.parts():
            waits.update(part.ids)
        unknown = [i for i in ids if not self._ledger.knows(i) and i not in waits]
        self._found = sorted({*self._found, *unknown})
        self._ledger.done(number)
        return len(unknown)

    def _end(self, number: int, now: float) -> Statement:
        statement = self.statements.end(number)
        self.dispatcher.begin(now, self.statements.kept_for_fetches(), stalled=self._flow.stalled)
        return statement

    # -- failures

    def failed(self, number: int) -> bool:
        """A statement has failed: request less. Returns whether the results of all under way were discarded (P4).

        A look takes no rows, so nothing is lost with it.
        """
        statement = self.statements.under_way[number]
        if isinstance(statement.asked, Look):
            self._look.failed()
            self.statements.end(number)
            self._ledger.done(number)
            return False
        self._flow.failed(statement.rows)
        self.abandon()
        return True

    def park(self, name: KeyOrId, shard: int, ids: Sequence[int], not_before: float, held: bool) -> None:
        """A record failed and will be retried at `not_before`; `ids` are the record and those behind it."""
        self._ledger.give_back(ids)
        if isinstance(name, bytes):
            self._ledger.watched.add(name)
        self.deferred.park(name, shard, ids, not_before, held)

    def is_parked(self, name: KeyOrId) -> bool:
        """Whether rows of this key may be returned unsent."""
        return name in self.deferred.by_key

    def give_back(self, name: KeyOrId, ids: Iterable[int]) -> None:
        """Rows that reached their shard behind a parked record are returned."""
        self.deferred.give_back(name, self._ledger.give_back(ids))

    # -- the number of shards

    def resize(self, shards: int) -> None:
        """The number of shards has changed; nothing is unsettled or under way."""
        self._spread.resize(shards)
        self.shards.resize(shards)

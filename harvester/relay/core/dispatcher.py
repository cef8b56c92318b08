"""Decides where each row that was read goes: to its shard, or into a queue of deferred rows. Pure.

Theory. A row of a mark is skipped if it is known already (P3). It is deferred behind its shard if the shard accepts
nothing, or behind its key if the key is deferred or has `max_queued_per_key` rows under way; otherwise it is sent. So
nothing of a key is sent while anything older of it waits, whatever is on its way from the database at that moment: the
decision is made when a row arrives, not when its statement was sent, and nothing has to be returned to the table.
A row that was *cut off*, since those before it were too large together, came without its content: it is deferred too.

*How many shards* (`Spread`). A shard that gets one record at a time wakes its threads, calls its broker and commits its
purge for that one record; on a small machine, eight such shards cost four times as much as a single shard that gets
eight records at a time. So keys with nothing under way go only to the first `active` shards, chosen by the key's hash:
one shard while little is in flight, as many as the cores can support when there is a backlog of many keys. (Of one key,
one record is in flight at a time, however long its queue: more shards would only get fewer records each.) The number
grows immediately and shrinks by one at a time.

*Order.* A key with anything unsettled stays with its shard, whatever its hash (`ledger`), and so does a deferred key;
no key is ever in two shards. Rows deferred behind a shard are known by id alone: while there are any, the number of
shards in use does not change, so that rows read later join the same queue.

`ShardFlows` holds the state of each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter

from harvester.delivery.partitioner import shard_of
from harvester.relay.core.deferred import DeferredRows, KeyOrId
from harvester.relay.core.ledger import Ledger, Row

_RAW = itemgetter(2)  # of a row


@dataclass(slots=True, eq=False)
class ShardFlow:
    """Flow state of one shard. `surplus`: rows sent since its pipe was full.

    `opening`: it has yet to find out what its predecessor published (exactly-once mode).
    """

    ready: bool = False
    opening: bool = False
    congested: bool = False
    heard_at: float = 0.0
    surplus: int = 0


class ShardFlows(list[ShardFlow]):
    """One per shard, by index. One thread only."""

    def __init__(self, shards: int, send_buffer: int) -> None:
        """`send_buffer`: how many rows a shard is sent even though its pipe is full."""
        super().__init__(ShardFlow() for _ in range(shards))
        self._send_buffer = send_buffer

    def takes(self, index: int) -> bool:
        state = self[index]
        return state.ready and not state.opening and (not state.congested or state.surplus < self._send_buffer)

    def all_take(self) -> bool:
        """Whether every shard accepts rows and no pipe is full."""
        return all(state.ready and not (state.opening or state.congested) for state in self)

    def congested(self, index: int) -> None:
        state = self[index]
        if not state.congested:
            state.congested, state.surplus = True, 0

    def uncongested(self, index: int) -> None:
        self[index].congested = False

    def resize(self, shards: int) -> None:
        del self[shards:]
        self.extend(ShardFlow() for _ in range(shards - len(self)))


class Spread:
    """The number of shards in use. One thread only."""

    def __init__(self, shards: int, in_flight: int, records: int, most: int) -> None:
        """`shards` and `in_flight` are the limits; each further `records` in flight are worth one more shard.

        At most `most` shards are used, all of those from half of the `in_flight` limit on. `records` 0: always all
        shards.
        """
        self._shards, self._in_flight, self._records, self._most = shards, in_flight, records, most
        self.active = shards if not records else 1

    def wanted(self, in_flight: int) -> int:
        """The number of shards that this many records in flight are worth."""
        if not self._records:
            return self._shards
        usable = max(1, min(self._shards, self._most))
        each = max(1, min(self._records, self._in_flight // (2 * usable)))
        return min(usable, 1 + in_flight // each)

    def grow(self, in_flight: int) -> None:
        self.active = max(self.active, self.wanted(in_flight))

    def shrink(self, in_flight: int) -> None:
        """Time has passed: use one shard fewer if that is enough even for twice as much.

        In a backlog of many keys, what is in flight goes up and down, and keys that went to fewer shards would stay.
        """
        if self.wanted(2 * in_flight) < self.active:
            self.active -= 1
        else:
            self.grow(in_flight)

    def resize(self, shards: int) -> None:
        self._shards = shards
        self.active = min(self.active, shards) if self._records else shards


@dataclass(frozen=True, slots=True)
class Part:
    """What a fetch takes from one queue."""

    ids: tuple[int, ...]
    name: KeyOrId | None  # None: the queue of the shard
    shard: int  # -1: found by a look, in no queue
    stamp: int


Taken = dict[int, list[Row]]  # rows to send, by shard


class Dispatcher:
    """Sorts the results of statements. Rows to be sent are in the ledger from here on. One thread only."""

    def __init__(self, ledger: Ledger, deferred: DeferredRows, shards: ShardFlows, spread: Spread) -> None:
        self._ledger, self._deferred, self._flows, self._spread = ledger, deferred, shards, spread
        self._takes = shards.takes
        self.crowded = 0  # rows of this result whose keys found no room, or that were cut off
        self._now = 0.0
        self._kept = 0  # places in flight reserved for other results
        self._stalled = False
        self._per_key = 0  # with this many rows of a key under way, further ones wait

    def begin(self, now: float, kept: int, *, stalled: bool) -> None:
        """A result has arrived. `kept`: places in flight reserved for fetches under way; `stalled`: the window makes no
        progress.
        """
        self._now, self._kept, self._stalled, self.crowded = now, kept, stalled, 0
        self._per_key = 1 if stalled else self._ledger.bounds.per_key

    def marked(self, rows: Sequence[Row]) -> Taken:
        """Sort the rows of a mark. If nothing waits and all shards accept rows, all that fit are taken at once."""
        ledger, shards, deferred = self._ledger, self._flows, self._deferred
        new = ledger.unknown(rows)
        if not deferred.by_shard:
            self._spread.grow(ledger.in_flight_with(new))
        taken: Taken = {}
        flows = shards.all_take() and not self._stalled and all(map(_RAW, new))
        if flows and not deferred.by_key and not deferred.by_shard:
            silent = [index for index in range(len(shards)) if not ledger.unsettled_of(index)]
            taken = ledger.add_rows(new, self._spread.active, ledger.room() - self._kept)
            for index in silent:
                shards[index].heard_at = self._now  # it had nothing to report until now
        for row in new[sum(map(len, taken.values())) :]:
            self._take(row, taken)
        return taken

    def fetched(self, parts: Sequence[Part], rows: Sequence[Row]) -> Taken:
        """Sort the rows of a fetch. Missing rows have left the table, whoever deleted them."""
        by_id = {row[0]: row for row in rows}
        taken: Taken = {}
        for part in parts:
            self._ledger.unpin(record_id for record_id in part.ids if record_id not in by_id)
            found = [by_id[record_id] for record_id in part.ids if record_id in by_id]
            if part.name is not None:
                self._take_from_key(part, part.name, found, taken)
            elif part.shard >= 0:
                self._take_from_shard(part, found, taken)
            else:
                for row in self._ledger.unknown(found):
                    self._take(row, taken)
        return taken

    def shard_of(self, key: bytes) -> int:
        """The shard that a row of this key would go to now."""
        return self._place_of(key, shard_of(key, 0, self._spread.active))

    def _take(self, row: Row, taken: Taken) -> None:
        """Place a row that is new."""
        record_id, key, _ = row
        deferred = self._deferred
        home = shard_of(key, record_id, self._spread.active)
        index = self._place_of(key, home)
        if deferred.rows and deferred.holds(record_id, record_id if key is None else key, index):
            return
        if index == home and index in deferred.by_shard:
            deferred.defer_behind_shard(index, record_id)
        elif index == home or key is None or self._takes(index):
            self._pass_on(row, index, taken)
        else:
            self._defer(key, index, record_id)  # in the shard's queue, nothing would say that it belongs there
            deferred.wake((key,))

    def _place_of(self, key: bytes | None, home: int) -> int:
        """The shard that has anything of this key, otherwise its default shard."""
        if key is None:
            return home
        index = self._ledger.shard_of_key(key)
        if index is not None:
            return index
        queue = self._deferred.by_key.get(key)
        return queue.shard if queue is not None else home

    def _defer(self, name: KeyOrId, index: int, record_id: int) -> None:
        """Let a row wait for earlier rows of its key, or for room."""
        if isinstance(name, bytes):
            self._ledger.watched.add(name)
        self._deferred.defer(name, index, record_id)

    def _pass_on(self, row: Row, index: int, taken: Taken) -> None:
        """Send a new row that has no older row of its shard ahead of it, or defer it behind its shard or key."""
        record_id, key, _ = row
        if not self._takes(index):
            self._deferred.defer_behind_shard(index, record_id)
        elif key is not None and self._is_enough(key):
            self._defer(key, index, record_id)
        elif not row[2] or self._is_crowded(key):
            self.crowded += 1
            name = record_id if key is None else key
            self._defer(name, index, record_id)
            self._deferred.wake((name,))
        else:
            self._send(row, index, taken)

    def _is_enough(self, key: bytes) -> bool:
        """Whether further rows of this key are remembered by id only."""
        return key in self._deferred.by_key or self._ledger.count_of(key) >= self._per_key

    def _is_crowded(self, key: bytes | None) -> bool:
        """Whether this row's key is not in flight and must not be yet: a mark has brought more keys than expected.

        Places reserved for a fetch under way are kept for it.
        """
        if key is not None and self._ledger.count_of(key):
            return False
        return self._ledger.room() <= self._kept

    def _take_from_key(self, part: Part, name: KeyOrId, rows: Sequence[Row], taken: Taken) -> None:
        queue = self._deferred.by_key[name]
        if queue.stamp != part.stamp or not self._takes(part.shard):
            # Something older was given back in the meantime, or the shard accepts nothing: not now.
            queue.tried = False
            self._deferred.give_back(name, [row[0] for row in rows])
        else:
            new = self._ledger.unknown(rows)
            whole = list(takewhile(lambda row: row[2], new))
            for row in whole:
                self._send(row, part.shard, taken)
            if len(whole) < len(new):
                queue.tried = False
                self._deferred.give_back(name, [row[0] for row in new[len(whole) :]])
            elif queue.tried and not rows:
                self._deferred.unpark(queue)  # the row to be tried has left the table
        self._deferred.fetched(name)
        if name not in self._deferred.by_key and isinstance(name, bytes):
            self._ledger.watched.discard(name)

    def _take_from_shard(self, part: Part, rows: Sequence[Row], taken: Taken) -> None:
        for row in self._ledger.unknown(rows):
            self._pass_on(row, part.shard, taken)
        self._deferred.fetched_of_shard(part.shard)

    def _send(self, row: Row, index: int, taken: Taken) -> None:
        if not self._ledger.unsettled_of(index):
            self._flows[index].heard_at = self._now  # it had nothing to report until now
        self._flows[index].surplus += 1
        self._ledger.add(row[0], row[1], index)
        taken.setdefault(index, []).append(row)

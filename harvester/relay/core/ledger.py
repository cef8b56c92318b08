"""The supervisor's memory of every record that was handed to a shard and is not settled. Pure.

It answers three questions. *Is this row new?* Results are filtered against the ledger, since a snapshot can show rows
that are already under way or whose DELETE has committed since (P3): a settled id is remembered until every statement
sent before its settling has been processed or abandoned. *How much is in flight?* Because of the barrier, a shard has
at most one unsettled record of a key on the wire, so the number of distinct keys with anything unsettled (plus the
unsettled records without a key) is never less than what producers hold. That number is the shared counter, which only
the supervisor writes (P16), and `room` keeps it within `max_in_flight_records` (I3) without asking a shard. *How much
of a key is under way?* `count_of`; each key has its own limit, and `drained` returns the watched keys that have fallen
to the low mark, so that more of them can be fetched. *Which shard is a key bound to?* `shard_of_key`: the shard that
has anything of the key unsettled, otherwise the shard whose producer has a record of it in doubt.

A record is *in doubt* if it timed out at its producer: its bytes may still be in the network, and may arrive after
whatever another producer sends of that key. When the same producer sends the record again, it first raises its epoch,
after which brokers refuse the old bytes. So the key is *pinned* to the shard from the failure until the record is
settled, wherever the record is in the meantime: held in its shard, parked in the supervisor, or forgotten by a remark,
a pause, or a change of the number of shards or of the term, and read again from the table. A pin also ends with the
process, which is replaced only when it is certainly dead, and when a fetch or the low watermark shows that the record
has left the table, whoever settled it (P36).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from harvester.delivery.partitioner import shard_of

Row = tuple[int, bytes | None, bytes]  # id, key, the row as the database sent it (empty: cut off)


@dataclass(slots=True, eq=False)
class _Key:
    """What is unsettled of one key; each record without a key has its own."""

    key: bytes | None
    shard: int
    count: int = 0


@dataclass(frozen=True, slots=True)
class InFlightBounds:
    """Limits in records: in flight in total, unsettled in total, and unsettled per key."""

    in_flight: int
    unsettled: int
    per_key: int

    @property
    def low(self) -> int:
        """A key with no more than this many unsettled is worth fetching more of."""
        return self.per_key // 4


class Ledger:
    """Every record that was handed out and is not settled. One thread only."""

    def __init__(self, bounds: InFlightBounds, *, pipelined: bool = False) -> None:
        self.bounds, self._pipelined = bounds, pipelined
        self.watched: set[bytes] = set()  # keys that `drained` reports on
        self.settled_total = 0
        self._drained: list[bytes] = []
        self._entries: dict[int, _Key] = {}
        self._keys: dict[bytes, _Key] = {}
        # key -> its record in doubt, that record's shard, and whether it was found below the low watermark
        self._pins: dict[bytes, tuple[int, int, bool]] = {}
        self._doubtful: dict[int, bytes] = {}  # record -> key
        self._keyless = 0
        self._per_shard: dict[int, int] = {}
        # settled ids, by the number of the last statement sent before they settled
        self._recently_settled: dict[int, set[int]] = {}
        self._last_sent = 0
        self._outstanding: set[int] = set()

    # -- questions

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._entries

    @property
    def in_flight(self) -> int:
        """The most that producers can hold now: distinct unsettled keys plus unsettled records without a key.

        If records do not wait for others of their key: everything unsettled.
        """
        if self._pipelined:
            return len(self._entries)
        return len(self._keys) + self._keyless

    def in_flight_with(self, rows: Sequence[Row]) -> int:
        """The value of `in_flight` once these new rows are taken."""
        if self._pipelined:
            return len(self._entries) + len(rows)
        keys = [row[1] for row in rows]
        distinct = set(keys).difference(self._keys)
        distinct.discard(None)
        return self.in_flight + len(distinct) + keys.count(None)

    @property
    def queued(self) -> int:
        """Records waiting behind the barrier of their key."""
        return len(self._entries) - self.in_flight

    @property
    def ids(self) -> Iterable[int]:
        return self._entries.keys()

    def room(self) -> int:
        """How many more keys (or records without one) may be in flight."""
        return self.bounds.in_flight - self.in_flight

    def unsettled_of(self, shard: int) -> int:
        return self._per_shard.get(shard, 0)

    def in_flight_of(self, shard: int) -> int:
        """The most that this shard's producer can hold now; iterates over all unsettled records."""
        own = [state for state in self._entries.values() if state.shard == shard]
        return len(own) if self._pipelined else len({id(state) for state in own})

    def count_of(self, key: bytes) -> int:
        state = self._keys.get(key)
        return state.count if state else 0

    def key_of(self, record_id: int) -> bytes | None:
        """The key of an unsettled record; also None if it has no key."""
        state = self._entries.get(record_id)
        return state.key if state else None

    def shard_of_key(self, key: bytes) -> int | None:
        """The shard that holds unsettled records of this key, or must get the next ones; None: any shard may."""
        state = self._keys.get(key)
        if state is not None:
            return state.shard
        pin = self._pins.get(key)
        return pin[1] if pin is not None else None

    def pinned(self, first: int = 0) -> list[int]:
        """Records in doubt at shards from index `first` on, ascending."""
        return sorted(record_id for record_id, shard, _ in self._pins.values() if shard >= first)

    def knows(self, record_id: int) -> bool:
        """Whether a row in a result is already under way, or was settled after the statement was sent (P3)."""
        return record_id in self._entries or any(record_id in ids for ids in self._recently_settled.values())

    def unknown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of a result for which `knows` is false."""
        known: Container[int]
        for known in (self._entries, *self._recently_settled.values()):
            rows = [row for row in rows if row[0] not in known]
        return rows

    def drained(self) -> list[bytes]:
        """Watched keys that have fallen to the low mark since the last call."""
        drained, self._drained = self._drained, []
        return drained

    # -- statements

    def sent(self) -> int:
        """A statement that reads rows is being sent; returns its number."""
        self._last_sent += 1
        self._outstanding.add(self._last_sent)
        return self._last_sent

    def done(self, number: int) -> None:
        """The statement's result is processed or abandoned."""
        self._outstanding.remove(number)
        if self._recently_settled:
            oldest = min(self._outstanding, default=self._last_sent + 1)
            for last in [last for last in self._recently_settled if last < oldest]:
                del self._recently_settled[last]

    # -- changes

    def add(self, record_id: int, key: bytes | None, shard: int) -> None:
        """A row is taken for this shard."""
        state = self._keys.get(key) if key is not None else None
        if state is None:
            state = self._begin(key, shard)
        state.count += 1
        self._entries[record_id] = state
        self._per_shard[shard] = self._per_shard.get(shard, 0) + 1

    def add_rows(self, rows: Sequence[Row], shards: int, room: int) -> dict[int, list[Row]]:
        """Take new rows in order, up to the first that needs more `room` than there is or exceeds the limit per key.

        Returns them by shard. Does what `add` does, for many rows at once: this runs for every record.
        """
        taken: dict[int, list[Row]] = {}
        entries, keys, most = self._entries, self._keys, self.bounds.per_key
        for row in rows:
            record_id, key, _ = row
            state = keys.get(key) if key is not None else None
            if state is None:
                if room <= 0:
                    break
                room -= 1
                state = self._begin(key, shard_of(key, record_id, shards))
            elif state.count >= most:
                break
            state.count += 1
            entries[record_id] = state
            if state.shard in taken:
                taken[state.shard].append(row)
            else:
                taken[state.shard] = [row]
        for shard, own in taken.items():
            self._per_shard[shard] = self._per_shard.get(shard, 0) + len(own)
        return taken

    def _begin(self, key: bytes | None, shard: int) -> _Key:
        """Nothing of this key was unsettled until now. A pinned key goes to the shard of its pin."""
        if self._pins and key in self._pins:
            shard = self._pins[key][1]
        state = _Key(key, shard)
        if key is None:
            self._keyless += 1
        else:
            self._keys[key] = state
        return state

    def settle(self, ids: Iterable[int]) -> int:
        """Their purge has committed. Ids that are not in the ledger are ignored; returns how many were in it."""
        self.unpin(ids)
        settled = self.give_back(ids)
        if settled and self._outstanding:
            self._recently_settled.setdefault(self._last_sent, set()).update(settled)
        self.settled_total += len(settled)
        return len(settled)

    def give_back(self, ids: Iterable[int]) -> list[int]:
        """They are no longer under way: forget them. Returns those that were in the ledger."""
        entries, watched, low = self._entries, self.watched, self.bounds.low
        removed: list[int] = []
        for record_id in ids:
            state = entries.pop(record_id, None)
            if state is None:
                continue
            removed.append(record_id)
            self._per_shard[state.shard] -= 1
            state.count -= 1
            key = state.key
            if key is None:
                self._keyless -= 1
                continue
            if not state.count:
                del self._keys[key]
            if watched and state.count <= low and key in watched:
                self._drained.append(key)
        return removed

    def pin(self, record_id: int, shard: int, *, passed_over: bool = False) -> None:
        """This unsettled record is in doubt at this shard's producer. A record without a key has no order to keep.

        `passed_over`: it was found below the low watermark, which therefore says nothing about it.
        """
        key = self.key_of(record_id)
        if key is not None:
            before = self._pins.get(key)
            if before is not None:
                self.unpin([before[0]])
            self._pins[key], self._doubtful[record_id] = (record_id, shard, passed_over), key

    def unpin(self, ids: Iterable[int]) -> None:
        """These records are settled or have left the table."""
        if not self._pins:
            return
        for record_id in ids:
            key = self._doubtful.pop(record_id, None)
            if key is not None:
                del self._pins[key]

    def unpin_shard(self, shard: int) -> None:
        """Its process is dead, and so is its producer."""
        self.unpin([record_id for record_id, pinned, _ in self._pins.values() if pinned == shard])

    def unpin_below(self, low_water: int) -> None:
        """Everything below this id has left the table, except what was found there later."""
        pins = self._pins.values()
        self.unpin([record_id for record_id, _, passed_over in pins if record_id < low_water and not passed_over])

    def keep_only(self, shard: int, on_the_wire: Iterable[int]) -> list[int]:
        """The reply to a remark: keep exactly these ids of this shard. Returns the forgotten ones."""
        keep = set(on_the_wire)
        return self.give_back([i for i, state in self._entries.items() if state.shard == shard and i not in keep])

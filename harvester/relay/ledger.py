"""The supervisor's memory of every record that is marked and not settled. Pure.

It answers three questions. *Is this row new?* A mark's result is filtered against the ledger, since a snapshot can
show rows that are already on their way or whose DELETE has committed since (P3): a settled id is remembered until
every mark that was sent before its settling was processed has itself been processed. *How much is in flight?* By
the barrier a shard has at most one record of a key unsettled on the wire, so the number of distinct keys with
anything unsettled (plus the unsettled records without a key) is never less than what producers hold. That number
is the shared counter, written by the supervisor alone (P16), and `room` keeps it within `max_in_flight_records`
(I3) without asking a shard. *Which keys may not be marked?* A key with a parked record, or with more than
`max_queued_per_key` behind its barrier, is *closed* (P18): marks leave it out, and a result drops rows of any key
that was closed at any time since its statement was sent. A closed key opens only when nothing of it is unsettled
and no mark is under way that was sent before it closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Key:
    shard: int
    count: int = 0
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in records: in flight in total, unsettled in total, and behind the barrier of one key."""

    in_flight: int
    unsettled: int
    queued_per_key: int


class Ledger:
    """See the module's text. One thread only."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._entries: dict[int, tuple[int, bytes | None]] = {}  # id -> (shard, key)
        self._keys: dict[bytes, _Key] = {}
        self._keyless = 0
        self._per_shard: dict[int, int] = {}
        self._closed: set[bytes] = set()
        self._ghosts: dict[int, int] = {}  # settled id -> number of the last mark sent before
        self._last_mark = 0
        self._outstanding: dict[int, set[bytes]] = {}  # mark number -> keys closed since it was sent

    # -- questions

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._entries

    @property
    def in_flight(self) -> int:
        """The most that producers can hold now: distinct unsettled keys plus unsettled records without one."""
        return len(self._keys) + self._keyless

    @property
    def queued(self) -> int:
        """Records behind the barrier of their key."""
        return len(self._entries) - self.in_flight

    @property
    def closed(self) -> frozenset[bytes]:
        """Keys that marks leave out."""
        return frozenset(self._closed)

    @property
    def ids(self) -> Iterable[int]:
        """Every unsettled id."""
        return self._entries.keys()

    def room(self) -> int:
        """How many more rows may be taken without risking a bound."""
        return min(self.bounds.in_flight - self.in_flight, self.bounds.unsettled - len(self._entries))

    def unsettled_of(self, shard: int) -> int:
        """How many records this shard has to settle."""
        return self._per_shard.get(shard, 0)

    def key_of(self, record_id: int) -> bytes | None:
        """The key of an unsettled record; None also when it has none."""
        entry = self._entries.get(record_id)
        return entry[1] if entry else None

    # -- marks

    def mark_sent(self) -> int:
        """A mark statement goes out; returns its number."""
        self._last_mark += 1
        self._outstanding[self._last_mark] = set()
        return self._last_mark

    def mark_done(self, number: int) -> None:
        """Its result is processed or abandoned."""
        for key in self._outstanding.pop(number):
            if key not in self._keys:
                self._open(key)
        oldest = min(self._outstanding, default=self._last_mark + 1)
        if self._ghosts:
            self._ghosts = {i: mark for i, mark in self._ghosts.items() if mark >= oldest}

    def closed_since(self, number: int) -> frozenset[bytes]:
        """The keys closed since this mark was sent, until now."""
        return frozenset(self._outstanding[number])

    def knows(self, record_id: int) -> bool:
        """Whether a row in a mark's result is on its way already, or settled after the mark was sent (P3)."""
        return record_id in self._entries or record_id in self._ghosts

    # -- changes

    def shard_of_key(self, key: bytes) -> int | None:
        """The shard that holds unsettled records of this key, if any does."""
        state = self._keys.get(key)
        return state.shard if state else None

    def add(self, record_id: int, key: bytes | None, shard: int) -> None:
        """A row is taken for this shard."""
        self._entries[record_id] = (shard, key)
        self._per_shard[shard] = self._per_shard.get(shard, 0) + 1
        if key is None:
            self._keyless += 1
            return
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(shard, closed=key in self._closed)
        state.count += 1
        if state.count > self.bounds.queued_per_key and not state.closed:
            self.close(key)

    def settle(self, ids: Iterable[int]) -> int:
        """Their purge has committed. Ids that are not in the ledger are ignored; returns how many were."""
        mark = self._last_mark
        remember = bool(self._outstanding)
        settled = 0
        for record_id in ids:
            if self._remove(record_id):
                settled += 1
                if remember:
                    self._ghosts[record_id] = mark
        return settled

    def give_back(self, ids: Iterable[int]) -> list[int]:
        """They are to be marked again: forget them. Returns those that were in the ledger."""
        return [record_id for record_id in ids if self._remove(record_id)]

    def keep_only(self, shard: int, on_the_wire: Iterable[int]) -> list[int]:
        """A remark's answer: of this shard exactly these ids stay. Returns what was forgotten."""
        keep = set(on_the_wire)
        return self.give_back([i for i, (owner, _) in self._entries.items() if owner == shard and i not in keep])

    def close(self, key: bytes) -> None:
        """Leave this key out of marks until nothing of it is unsettled."""
        state = self._keys.get(key)
        if state is None or state.closed:
            return
        state.closed = True
        self._closed.add(key)
        for closed_since in self._outstanding.values():
            closed_since.add(key)

    def _remove(self, record_id: int) -> bool:
        entry = self._entries.pop(record_id, None)
        if entry is None:
            return False
        shard, key = entry
        self._per_shard[shard] -= 1
        if key is None:
            self._keyless -= 1
            return True
        state = self._keys[key]
        state.count -= 1
        if not state.count:
            del self._keys[key]
            if state.closed:
                self._open(key)
        return True

    def _open(self, key: bytes) -> None:
        """Nothing of it is unsettled; it opens unless a mark is under way that was sent before it closed."""
        if not any(key in closed_since for closed_since in self._outstanding.values()):
            self._closed.discard(key)

"""The barrier of one shard: at most one record of a key is unsettled on the wire. Pure.

Theory. A record enters through `offer`. If nothing of its key is unsettled in this shard, it is to be sent at once and
the key's barrier goes up; otherwise it waits in the key's queue. Only `settle` lowers the barrier. The shard calls it
when the *commit* of the record's purge or quarantine has come back (rule P1), never at the acknowledgement: if x is
acked, y is sent and the process dies before DELETE(x) commits, the log reads x y x' y'.

    QUEUED ──offer/settle──▶ WIRE ──acked──▶ ACKED ──settle──▶ (gone)
                              │ ▲
                       hold   ▼ │ release
                             HELD

Failure handling. While nothing at all gets through to the broker, a record that failed is *held*: it keeps its
position, and what is behind it stays queued. Otherwise it is *parked*: removed from this shard together with everything
queued behind it. The supervisor keeps their ids and sends them again when they are due (P18). From then on every
further record of that key is refused, because frames already on their way must not overtake what was given back (P5).
The shard calls `reopen` to end this once the supervisor has confirmed that nothing older of the key can still arrive.
`remark` drops everything that is not on the wire, and returns exactly what is.

Records without a key never wait and never hold up others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from harvester.delivery.decode import Decoded, Oversize


class EntryState(Enum):
    QUEUED = "queued"
    WIRE = "wire"  # handed to the producer
    ACKED = "acked"  # acknowledged or refused for good; its DELETE is not yet committed
    HELD = "held"  # could not be handed to the producer, or failed; waits for its next attempt


_QUEUED: Final = EntryState.QUEUED  # enum member access is slow, and this is needed for every record
_WIRE: Final = EntryState.WIRE
_ACKED: Final = EntryState.ACKED
_HELD: Final = EntryState.HELD


@dataclass(slots=True, eq=False)
class BarrierEntry:
    """A record inside a shard.

    `record` is what to publish, or why that is impossible; `since` is when it was queued, `term` the term it was
    dispatched under, `sent_at` when it was last handed to the producer, `origin` its header, from the first attempt on.
    """

    id: int
    key: bytes | None
    record: Decoded | Oversize
    since: float
    term: int | None = None
    step: EntryState = _QUEUED
    sent_at: float = 0.0
    origin: bytes | None = None


_Queue = deque[BarrierEntry] | None  # None: nothing has waited yet


class Barrier:
    """Which records may be sent, and which wait. Not thread-safe: the shard holds its lock around every call."""

    def __init__(self) -> None:
        self.unsettled: dict[int, BarrierEntry] = {}  # handed to the producer and not settled: WIRE, ACKED, HELD
        self._queues: dict[bytes, _Queue] = {}  # contains a key while its barrier is up
        self._refusing: set[bytes] = set()
        self._announced: dict[int, bytes] = {}  # parked record -> its key, until the supervisor has replied
        self.queued = 0  # records that wait behind another of their key
        self.held = 0  # records that wait here for their next attempt

    def __contains__(self, record_id: int) -> bool:
        return record_id in self.unsettled

    def on_the_wire(self) -> list[int]:
        """Ids that are sent or acknowledged and not yet purged, ascending."""
        return sorted(i for i, entry in self.unsettled.items() if entry.step is not _HELD)

    def offer(self, entry: BarrierEntry) -> bool | None:
        """Admit a record. True: send it now. False: it is queued. None: refused, because its key has a parked
        record.
        """
        key = entry.key
        if key is not None:
            if key in self._refusing:
                return None
            queues = self._queues
            if key in queues:
                queue = queues[key]
                if queue is None:
                    queues[key] = deque((entry,))
                else:
                    queue.append(entry)
                self.queued += 1
                return False
            queues[key] = None
        entry.step = _WIRE
        self.unsettled[entry.id] = entry
        return True

    def acked(self, entries: Iterable[BarrierEntry]) -> None:
        """They were acknowledged, or are on their way to quarantine; settling is all that can follow."""
        for entry in entries:
            if entry.step is _HELD:
                self.held -= 1
            entry.step = _ACKED

    def settle(self, ids: Iterable[int], now: float) -> list[BarrierEntry]:
        """Their purge has committed: lower the barriers. Returns the next records of their keys, to be sent now.

        Unknown ids are ignored.
        """
        following: list[BarrierEntry] = []
        unsettled, queues = self.unsettled, self._queues
        for record_id in ids:
            entry = unsettled.pop(record_id, None)
            if entry is None:
                continue
            if entry.step is _HELD:
                self.held -= 1
            key = entry.key
            if key is None:
                continue
            queue = queues[key]
            if not queue:
                del queues[key]
                continue
            entry = queue.popleft()
            if queue:
                queue[0].since = now  # progress: the queue timeout looks for keys that make none
            entry.step = _WIRE
            unsettled[entry.id] = entry
            following.append(entry)
        self.queued -= len(following)
        return following

    def park(self, record_id: int) -> list[int]:
        """Remove a failed record, and what is queued behind it; the supervisor decides when they are sent again.

        Returns the ids behind it. Its key is refused until `reopen`.
        """
        key = self.unsettled[record_id].key
        behind: list[int] = []
        if key is not None:
            behind = self._drop_queue(key)
            self._refusing.add(key)
            self._announced[record_id] = key
        self.settle((record_id,), 0.0)
        return behind

    def hold(self, record_id: int) -> None:
        """The record waits here for its next attempt; what is behind it stays queued."""
        entry = self.unsettled[record_id]
        if entry.step is not _HELD:
            self.held += 1
        entry.step = _HELD

    def forget(self, record_id: int) -> list[int]:
        """This shard will not send the record again: lower its barrier.

        Nothing of its key may follow it: what is queued behind it is dropped and returned, and what is still on its way
        is refused until the next remark (P5).
        """
        key = self.unsettled[record_id].key
        behind: list[int] = []
        if key is not None:
            behind = self._drop_queue(key)
            self._refusing.add(key)
        self.settle((record_id,), 0.0)
        return behind

    def drop_unsent(self, record_id: int) -> list[int]:
        """Trust expired before this record was sent: drop it and everything else that is not on the wire."""
        before = {*self.unsettled, *(entry.id for queue in self._queues.values() for entry in queue or ())}
        self._drop_all_queues()
        self.forget(record_id)
        return sorted(before - set(self.remark()))

    def release(self, record_id: int, now: float) -> BarrierEntry | None:
        """Its wait is over: send it again. None if a remark has dropped it."""
        entry = self.unsettled.get(record_id)
        if entry is None or entry.step is not _HELD:
            return None
        entry.step = _WIRE
        self.held -= 1
        queue = None if entry.key is None else self._queues.get(entry.key)
        if queue:
            queue[0].since = now  # until now they were behind a held record, which does not count as waiting
        return entry

    def reopen(self, record_id: int) -> None:
        """The supervisor has recorded this parked record: nothing older of its key can still arrive."""
        key = self._announced.pop(record_id, None)
        if key is not None:
            self._refusing.discard(key)

    def remark(self) -> list[int]:
        """Drop what is queued or held; returns exactly the ids that are on the wire or not purged, ascending."""
        self._drop_all_queues()
        held = [i for i, entry in self.unsettled.items() if entry.step is _HELD]
        self.settle(held, 0.0)
        self._refusing.clear()
        self._announced.clear()
        return sorted(self.unsettled)

    def longest_waiting(self) -> BarrierEntry | None:
        """The record that has been queued longest without progress, ignoring those behind a held one."""
        held = {entry.key for entry in self.unsettled.values() if entry.step is _HELD} if self.held else ()
        oldest: BarrierEntry | None = None
        for key, queue in self._queues.items():
            if queue and key not in held and (oldest is None or queue[0].since < oldest.since):
                oldest = queue[0]
        return oldest

    def _drop_all_queues(self) -> None:
        for key in self._queues:
            self._drop_queue(key)

    def _drop_queue(self, key: bytes) -> list[int]:
        queue = self._queues.get(key)
        if not queue:
            return []
        ids = [entry.id for entry in queue]
        self.queued -= len(ids)
        queue.clear()
        return ids

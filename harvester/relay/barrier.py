"""The barrier of one shard: at most one record of a key is unsettled on the wire. Pure.

Theory. A record enters by `offer`. If nothing of its key is unsettled in this shard it is to be sent at once and
the key's barrier is up; otherwise it waits in the key's queue. The barrier is lowered by `settle` alone, which the
shard calls when the *commit* of the record's purge or quarantine has come back (rule P1), never at the
acknowledgement: x acked, y sent, the process dies before DELETE(x) commits would give x y x' y'.

    QUEUED ──offer/settle──▶ WIRE ──acked──▶ ACKED ──settle──▶ (gone)
                              │ ▲
                       park   ▼ │ unpark
                            PARKED ──poison──▶ ACKED

Failure handling. A record that failed and will be retried is *parked*: what was queued behind it is dropped and
reported, so that the key holds one place in memory however long the retries take (P18), and from then on every
further record of that key is refused, because frames that were on their way must not overtake what was dropped
(P5). `reopen` ends that; the shard calls it when the supervisor has said that it sends nothing of the key any more.
`remark` drops everything that is not on the wire, and names exactly what is.

Records without a key are never held up and never park anybody else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class Step(Enum):
    """Where an entry stands."""

    QUEUED = "queued"
    WIRE = "wire"  # handed to the producer
    ACKED = "acked"  # acknowledged or refused for good; its DELETE is not yet committed
    PARKED = "parked"  # failed; waits for its next attempt


@dataclass(slots=True, eq=False)
class Entry:
    """A record inside a shard.

    `raw` is the row as the database sent it, `since` when it was queued, `term` the one it was dispatched under.
    """

    id: int
    key: bytes | None
    raw: bytes
    since: float
    term: int | None = None
    step: Step = Step.QUEUED


class Barrier:
    """See the module's text. Not thread-safe: the shard holds its lock around every call."""

    def __init__(self) -> None:
        self._unsettled: dict[int, Entry] = {}  # WIRE, ACKED, PARKED
        self._queues: dict[bytes, deque[Entry]] = {}  # a key is in here while its barrier is up
        self._refusing: set[bytes] = set()
        self._announced: dict[int, bytes] = {}  # parked record -> its key, until the supervisor has answered
        self._queued = 0
        self._parked = 0

    @property
    def queued(self) -> int:
        """Records waiting behind another of their key."""
        return self._queued

    @property
    def parked(self) -> int:
        """Records waiting for their next attempt."""
        return self._parked

    @property
    def in_flight(self) -> int:
        """Records handed to the producer and not settled, those that wait for a retry included."""
        return len(self._unsettled)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._unsettled

    def on_the_wire(self) -> list[int]:
        """Ids that are sent or acknowledged and not yet purged, ascending."""
        return sorted(i for i, entry in self._unsettled.items() if entry.step is not Step.PARKED)

    def offer(self, entry: Entry) -> bool | None:
        """Take a record in. True: send it now. False: it is queued. None: refused, its key is parked."""
        key = entry.key
        if key is not None:
            if key in self._refusing:
                return None
            queue = self._queues.get(key)
            if queue is not None:
                queue.append(entry)
                self._queued += 1
                return False
            self._queues[key] = deque()
        entry.step = Step.WIRE
        self._unsettled[entry.id] = entry
        return True

    def acked(self, record_id: int) -> None:
        """The broker acknowledged it, or it is on its way to quarantine: it can only be settled now."""
        entry = self._unsettled[record_id]
        if entry.step is Step.PARKED:
            self._parked -= 1
        entry.step = Step.ACKED

    def settle(self, record_id: int, now: float) -> Entry | None:
        """Its purge has committed: lower the barrier. Returns the key's next record, to be sent now."""
        entry = self._unsettled.pop(record_id)
        if entry.step is Step.PARKED:
            self._parked -= 1
        key = entry.key
        if key is None:
            return None
        queue = self._queues[key]
        if not queue:
            del self._queues[key]
            return None
        following = queue.popleft()
        self._queued -= 1
        if queue:
            queue[0].since = now  # progress: the queue timeout watches for keys that stand still
        following.step = Step.WIRE
        self._unsettled[following.id] = following
        return following

    def park(self, record_id: int) -> list[int] | None:
        """It failed and will be retried.

        Returns the ids that stood behind it, to be announced to the supervisor together with the record; they are
        dropped here. None when nothing is to be announced: the record has no key, or the supervisor has yet to
        answer an earlier announcement.
        """
        entry = self._unsettled[record_id]
        if entry.step is not Step.PARKED:
            self._parked += 1
        entry.step = Step.PARKED
        key = entry.key
        if key is None or record_id in self._announced:
            return None
        self._announced[record_id] = key
        self._refusing.add(key)
        return self._drop_queue(key)

    def hold(self, record_id: int) -> None:
        """It could not be handed to the producer just now: as parked, but nobody behind it goes back."""
        entry = self._unsettled[record_id]
        entry.step = Step.PARKED
        self._parked += 1

    def forget(self, record_id: int) -> list[int]:
        """It will not be sent again by this shard: lower its barrier.

        Nothing of its key may follow it: what stood behind it is dropped and returned, and what is still on its way
        is refused until the next remark (P5).
        """
        key = self._unsettled[record_id].key
        behind: list[int] = []
        if key is not None:
            behind = self._drop_queue(key)
            self._refusing.add(key)
        self.settle(record_id, 0.0)
        return behind

    def drop_unsent(self, record_id: int) -> list[int]:
        """Trust ran out before this record was sent: drop it and everything that is not on the wire."""
        before = {*self._unsettled, *(entry.id for queue in self._queues.values() for entry in queue)}
        self._drop_all_queues()
        self.forget(record_id)
        return sorted(before - set(self.remark()))

    def unpark(self, record_id: int) -> Entry | None:
        """Its wait is over: send it again. None when a remark dropped it meanwhile."""
        entry = self._unsettled.get(record_id)
        if entry is None or entry.step is not Step.PARKED:
            return None
        entry.step = Step.WIRE
        self._parked -= 1
        return entry

    def reopen(self, record_id: int) -> None:
        """The supervisor has closed this parked record's key: nothing older of it can arrive any more."""
        key = self._announced.pop(record_id, None)
        if key is not None:
            self._refusing.discard(key)

    def remark(self) -> list[int]:
        """Drop what is queued or parked; returns exactly the ids on the wire or unpurged, ascending."""
        self._drop_all_queues()
        parked = [i for i, entry in self._unsettled.items() if entry.step is Step.PARKED]
        for record_id in parked:
            self.settle(record_id, 0.0)
        self._refusing.clear()
        self._announced.clear()
        return sorted(self._unsettled)

    def longest_waiting(self) -> Entry | None:
        """The record that has been queued longest without progress, those behind a parked one left out."""
        oldest: Entry | None = None
        for queue in self._queues.values():
            if queue and (oldest is None or queue[0].since < oldest.since):
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
        self._queued -= len(ids)
        queue.clear()
        return ids

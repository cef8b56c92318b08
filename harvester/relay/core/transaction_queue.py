"""The records of one shard in exactly-once mode: queue, open transaction, committed. Pure.

Theory. Records are published in the order of arrival, many per transaction, without waiting for each other: a
transaction is all or nothing, and transactions follow each other, so the order of a key needs no barrier. A record is

    QUEUED ──take──▶ OPEN ──committed──▶ UNPURGED ──settle──▶ (gone)
       ▲               │
       └────aborted────┘

*Unpurged* records are committed in Kafka, and their DELETE is not known to have committed; they are named at the end of
every transaction, and at the beginning of one on the lane that committed them (P22). After an abort the records of the
transaction return to the head of the queue in their order, as if nothing had happened. The same applies after an
unknown outcome, except to records that the lanes' progress names.

Failure handling. When brokers refuse a record they refuse its whole batch, including innocent records. All of them
become *suspects*; a transaction takes at most half as many of them as failed together, until one fails alone, which is
then at fault. Until it is found, a transaction with suspects has no more records than that altogether: if others fail
together with them, the search has narrowed all the same. After that, each transaction of suspects that succeeds lets
the next take twice as many. Other records continue in their order meanwhile. A record that is at fault is removed.
Either it goes to quarantine, and what is behind it in its key is *held* until it has arrived there: if the shard dies
first, the record is sent again, and may be accepted. Or it is *parked* together with what is behind it, and everything
of its key that still arrives is refused until `reopen` (P5, P18). A record that timed out is sent *alone* next time,
with a short timeout: its partition may be unavailable, and nothing else should wait for it.

An *oversize* record is queued once its value has been stored (`stored`); until then, it and everything behind it in its
key are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import attrgetter

from harvester.delivery.decode import Decoded, Oversize, row_versions
from harvester.delivery.progress import NamedRows, name
from harvester.record import KafkaRecord


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """A record inside a shard; `since` when it was queued, monotonic. `row_sum`: see `decode`."""

    id: int
    key: bytes | None
    record: Decoded | Oversize
    since: float
    row_sum: int = 0
    suspect: bool = False
    alone: bool = False


@dataclass(slots=True, eq=False)
class _Committed:
    """A transaction that has committed, until its records are purged."""

    lane: int
    entries: list[QueuedRecord]
    named: NamedRows
    unpurged: int  # how many of its records are not purged


_BY_ID = attrgetter("id")


class TransactionQueue:
    """The records of a shard, by state. Not thread-safe: the shard holds its lock around every call.

    A transaction takes at most `most` records, and no more once they have `most_bytes`; its progress record names at
    most `most_named`, which may change.
    """

    def __init__(self, most: int, most_named: int, most_bytes: int = 1 << 62) -> None:
        self._most, self.most_named, self._most_bytes = most, most_named, most_bytes
        self._queue: deque[QueuedRecord] = deque()
        self._open: list[QueuedRecord] = []
        self._open_named: NamedRows | None = None  # the open transaction's records, if `progress` has named them
        self._committed: list[_Committed] = []  # in order; some may be purged by now
        self._unpurged: dict[int, _Committed] = {}  # unpurged record -> its transaction
        self._leaving: dict[int, bytes | None] = {}  # records on their way to quarantine, and their keys
        self._held: dict[bytes, deque[QueuedRecord]] = {}  # key of such a record -> the records behind it, in order
        # by key, or by id without one; what is behind is held as well
        self._oversize: dict[bytes | int, QueuedRecord] = {}
        self._to_store: list[QueuedRecord] = []  # those not yet returned by `to_store`
        self._refusing: set[bytes] = set()
        self._announced: dict[int, bytes] = {}  # parked record -> its key, until the supervisor has replied
        self.put_back = 0  # by the last abort
        self._suspects_at_once = 1
        self._searching = False  # one of the suspects is at fault and not yet found
        self._suspects_open = self._open_bytes = 0

    @property
    def queued(self) -> int:
        """Records that are not in a transaction yet."""
        return len(self._queue) + len(self._oversize) + sum(map(len, self._held.values()))

    @property
    def in_flight(self) -> int:
        """Records handed to the producer, or on their way to quarantine, and not settled."""
        return len(self._open) + len(self._unpurged) + len(self._leaving)

    @property
    def is_ready(self) -> bool:
        return bool(self._queue) and len(self._unpurged) + len(self._open) < self.most_named

    @property
    def taken(self) -> tuple[QueuedRecord, ...]:
        """The records of the open transaction, in order."""
        return tuple(self._open)

    @property
    def alone(self) -> QueuedRecord | None:
        """The record that is alone in the open transaction because it timed out before."""
        return self._open[0] if self._open and self._open[0].alone else None

    def __contains__(self, entry: QueuedRecord) -> bool:
        """Whether it is queued and not held behind a quarantine."""
        return entry in self._queue

    def leaving(self) -> list[int]:
        """Ids that are committed or go to quarantine, and may not have left the outbox; ascending."""
        return sorted([*self._unpurged, *self._leaving])

    def progress(self) -> list[NamedRows]:
        """The unpurged records and those of the open transaction, which its progress names at the end; ascending."""
        if self._open and self._open_named is None:
            self._open_named = named(self._open)
        return self._named(self._not_purged(), self._open_named)

    def unpurged(self, lane: int) -> list[NamedRows]:
        """The unpurged records of this lane alone, which its progress names at the beginning of a transaction."""
        return self._named([transaction for transaction in self._not_purged() if transaction.lane == lane])

    def _not_purged(self) -> list[_Committed]:
        left = [transaction for transaction in self._committed if transaction.unpurged]
        for transaction in left:
            if transaction.unpurged < len(transaction.entries):
                transaction.entries = [entry for entry in transaction.entries if entry.id in self._unpurged]
                transaction.named = named(transaction.entries)
        self._committed = left
        return left

    def _named(self, transactions: list[_Committed], then: NamedRows | None = None) -> list[NamedRows]:
        parts = [transaction.named for transaction in transactions]
        if then is not None:
            parts.append(then)
        if all(before.ids[-1] < after.ids[0] for before, after in pairwise(parts)):
            return parts
        entries = [entry for transaction in transactions for entry in transaction.entries]
        return [named(entries if then is None else [*entries, *self._open])]

    def oldest(self) -> QueuedRecord | None:
        """The record that has been here longest without being committed, ignoring held ones."""
        if self._open:
            return self._open[0]
        return self._queue[0] if self._queue else None

    # -- in order

    def offer(self, entry: QueuedRecord) -> bool:
        """Queue a record; False: refused, a record of its key is parked."""
        if entry.key in self._refusing:
            return False
        held = self._held.get(entry.key) if entry.key is not None else None
        (self._queue if held is None else held).append(entry)
        return True

    def offer_oversize(self, entry: QueuedRecord) -> bool:
        """The same for an oversize record."""
        if entry.key in self._refusing:
            return False
        if entry.key in self._held:
            self._held[entry.key].append(entry)
            return True
        self._oversize[_place(entry)] = entry
        self._to_store.append(entry)
        if entry.key is not None:
            self._held[entry.key] = deque()
        return True

    def offer_all(self, entries: Sequence[QueuedRecord]) -> list[QueuedRecord]:
        """Queue these records, in this order; returns those that are refused."""
        if not (self._refusing or self._held or any(isinstance(entry.record, Oversize) for entry in entries)):
            self._queue.extend(entries)
            return []
        return [
            entry
            for entry in entries
            if not (self.offer_oversize if isinstance(entry.record, Oversize) else self.offer)(entry)
        ]

    def to_store(self) -> list[QueuedRecord]:
        """The oversize records that have come up since the last call."""
        found, self._to_store = self._to_store, []
        return found

    def is_oversize(self, entry: QueuedRecord) -> bool:
        """Whether it still waits for its value to be stored."""
        return self._oversize.get(_place(entry)) is entry

    def stored(self, entry: QueuedRecord, record: KafkaRecord, now: float) -> None:
        """The value of an oversize record was stored: it is queued as `record`, with everything behind it.

        It goes to the end of the queue, since older records of its key may be in it.
        """
        entry.record = record
        del self._oversize[_place(entry)]
        held = self._held.pop(entry.key) if entry.key is not None else ()
        for other in (entry, *held):
            other.since = now
        self.offer_all((entry, *held))

    def take(self, most: int) -> list[QueuedRecord]:
        """The next records of the open transaction, at most `most`; none if it is complete."""
        taken: list[QueuedRecord] = []
        if self.alone is not None:
            return taken
        queue, named = self._queue, len(self._unpurged) + len(self._open)
        room = min(most, self._most - len(self._open), self.most_named - named)
        while queue and len(taken) < room and self._open_bytes < self._most_bytes:
            entry = queue[0]
            if entry.alone and (self._open or taken):
                break
            if entry.suspect or (self._searching and self._suspects_open):
                among = len(self._open) + len(taken) if self._searching else self._suspects_open
                if among >= self._suspects_at_once:
                    break
                self._suspects_open += entry.suspect
            record = entry.record
            if isinstance(record, KafkaRecord) and record.value is not None:
                self._open_bytes += len(record.value)
            taken.append(queue.popleft())
            if entry.alone:
                break
        self._open += taken
        self._open_named = None
        return taken

    def committed(self, lane: int) -> list[QueuedRecord]:
        """The transaction has certainly committed, on this lane. Returns its records, which are to be purged."""
        entries = self._open
        if self._suspects_open and not self._searching:
            self._suspects_at_once *= 2  # these suspects were innocent; the next may be, too
        transaction = _Committed(lane, entries, self._open_named or named(entries), len(entries))
        self._committed.append(transaction)
        self._unpurged.update(dict.fromkeys([entry.id for entry in entries], transaction))
        # Last: other threads count what is in flight.
        self._open, self._open_named, self._suspects_open, self._open_bytes = [], None, 0, 0
        return entries

    def settle(self, ids: Iterable[int]) -> None:
        """They have left the outbox. Unknown ids are ignored."""
        for record_id in ids:
            transaction = self._unpurged.pop(record_id, None)
            if transaction is not None:
                transaction.unpurged -= 1
                if not transaction.unpurged:
                    transaction.entries = []  # it may be long before the next progress
                continue
            key = self._leaving.pop(record_id, None)
            if key is not None:
                held = list(self._held.pop(key))
                ready = list(takewhile(lambda entry: not isinstance(entry.record, Oversize), held))
                self._queue.extendleft(reversed(ready))
                self.offer_all(held[len(ready) :])

    # -- failures

    def aborted(self, published: Iterable[int] = ()) -> None:
        """Nothing of the open transaction is published, except these ids, whose purge has committed as well."""
        gone = set(published)
        self.settle(gone)
        entries, self._open, self._open_named = self._open, [], None
        self._suspects_open = self._open_bytes = 0
        back = [entry for entry in entries if entry.id not in gone]
        self.put_back = len(back)
        self._queue.extendleft(reversed(back))

    def suspect(self, failed: Sequence[QueuedRecord]) -> QueuedRecord | None:
        """These records failed together, and one of them may be at fault: returns that one if it can be determined."""
        self._searching = len(failed) > 1
        if not self._searching:
            return failed[0]
        for entry in failed:
            entry.suspect = True
        self._suspects_at_once = max(1, len(failed) // 2)
        return None

    def remove(self, entry: QueuedRecord) -> None:
        """Remove a queued record that is on its way to quarantine; its key is held until it is settled."""
        self._queue.remove(entry)
        self._leaving[entry.id] = key = entry.key
        if key is not None:
            self._held[key] = self._take_out(key)

    def give_up(self, record_id: int) -> list[int]:
        """Quarantine was not possible for this record: return it and what is behind it in its key, for the supervisor.

        No more records of its key are accepted until the queue is dropped.
        """
        key = self._leaving.pop(record_id, None)
        if key is None:
            return [record_id]
        self._refusing.add(key)
        return [record_id, *(entry.id for entry in self._held.pop(key))]

    def park(self, entry: QueuedRecord) -> list[int]:
        """The supervisor decides when a queued or oversize record is sent again: remove it and its key.

        Returns the other ids of its key, which is refused until `reopen`.
        """
        key = entry.key
        if key is None:
            if self._oversize.pop(entry.id, None) is None:
                self._queue.remove(entry)
            return []
        self._refusing.add(key)
        self._announced[entry.id] = key
        return [other.id for other in self._take_out(key) if other is not entry]

    def _take_out(self, key: bytes) -> deque[QueuedRecord]:
        keys = [entry.key for entry in self._queue]  # many keys may fail in one transaction: one pass, mostly
        if keys.count(key) == 1:
            at = keys.index(key)
            found = deque([self._queue[at]])
            del self._queue[at]
        else:
            found = deque(entry for entry in self._queue if entry.key == key)
            self._queue = deque(entry for entry in self._queue if entry.key != key)
        oversize = self._oversize.pop(key, None)
        if oversize is not None:
            found += [oversize, *self._held.pop(key)]
        return found

    def reopen(self, record_id: int) -> None:
        """The supervisor has recorded this parked record: nothing older of its key can still arrive."""
        key = self._announced.pop(record_id, None)
        if key is not None:
            self._refusing.discard(key)

    def drop_queue(self) -> list[int]:
        """Forget what is in no transaction; returns its ids. Nothing is refused any more.

        Keys of records that go to quarantine stay held.
        """
        all_queued = (self._queue, self._oversize.values(), *self._held.values())
        ids = [entry.id for entries in all_queued for entry in entries]
        self._queue.clear()
        for entry in self._oversize.values():
            if entry.key is not None:
                del self._held[entry.key]
        self._oversize.clear()
        self._to_store.clear()
        for held in self._held.values():
            held.clear()
        self._refusing.clear()
        self._announced.clear()
        return ids


def named(entries: list[QueuedRecord]) -> NamedRows:
    """Their ids and versions, by which progress names them."""
    entries = sorted(entries, key=_BY_ID)
    return name(row_versions([entry.record for entry in entries], [entry.row_sum for entry in entries]))


def _place(entry: QueuedRecord) -> bytes | int:
    return entry.id if entry.key is None else entry.key

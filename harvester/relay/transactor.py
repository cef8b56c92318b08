"""What a shard does with its records in exactly-once mode: transactions, one after the other, on a lane of its own.

One thread, the *transactor*, talks to Kafka. The shard's main thread queues records and passes the supervisor's words
on, the purger's thread reports commits; one lock of this process orders them, and is never held while something waits.

Theory. While a transaction is sent and committed, further records queue up, and are the next one: batches size
themselves by load. A transaction takes what is queued until nothing is left, it has `max_transaction_records`, or it
has taken long enough (`filling`); it ends with the lane's progress record (`harvester.delivery.progress`), and what it
held is purged when its commit is *clear* (`harvester.delivery.lane`). Outcomes and what follows:

    DONE      purge; go on
    REFUSED   abort; find out who is at fault, by halves if need be (`harvester.relay.batches`); go on
    UNCLEAR   close the lane, *open* it again; what its progress names was committed, the rest is sent again

*Opening* a lane fences whoever had it, compares the term row with our own term after that and before anything is sent
(P20: a producer that was initialised by a zombie would fence the one that leads), reads the lane's progress, purges
what it names, and then leaves an empty record behind. With a new term a shard opens its own lane and ends those of
shards that are no more (P19). Until that is done it does not answer the supervisor's `Remark`, and nothing is marked.
A shard's successor does the same before the supervisor lets go of the ids of the dead one (P21).

Trust is looked at before a transaction begins and before it is committed. In between it need not be: what a zombie
sends cannot be committed once its successor has opened the lane.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from confluent_kafka import KafkaError

from harvester.delivery.decode import Broken, decode
from harvester.delivery.lane import Lane, Lanes, Outcome
from harvester.delivery.progress import MAX_IDS, Progress, encode
from harvester.outbox.purge_session import Outcome as Moved
from harvester.outbox.purge_session import Poison
from harvester.record import KafkaRecord
from harvester.relay.attempts import Policy
from harvester.relay.batches import Batches, Entry
from harvester.relay.filling import Filler
from harvester.relay.frames import (
    Dropped,
    Log,
    Quarantined,
    QueueTimedOut,
    Refused,
    Remark,
    Remarked,
    Settled,
    Stats,
    Trouble,
)
from harvester.relay.hooks import Hooks
from harvester.relay.opening import Deposed, Leadership, Opener, Superseded, Surroundings
from harvester.relay.refusals import Refusals
from harvester.relay.sender import Outlets
from harvester.relay.stamps import Stamps
from harvester.telemetry.latency import Histogram

_MOST_BYTES = 1 << 23  # a commit has to be over soon, or its outcome counts as unclear
# Kafka answers a commit before it has written its markers. A transaction that begins sooner is put off by the broker,
# and the client tries again only after 20 ms. It asks a millisecond after the first record.
_MARKERS_S = 0.0015
_PATIENCE_S = 0.5  # for a record that timed out before


@dataclass(frozen=True, slots=True)
class Database:
    """What opening a lane needs of the database. Each waits until it is done; None when the shard ends."""

    term: Callable[[], tuple[int, str | None] | None]  # term and holder that the term row names
    delete: Callable[[Sequence[int]], bool | None]


class Transactor:
    """See the module's text."""

    def __init__(
        self,
        index: int,
        lanes: Lanes,
        policy: Policy,
        most: int,
        header: str,
        reserved: frozenset[str],
        outlets: Outlets,
        database: Database,
        hooks: Hooks,
        dated: bool = False,
    ) -> None:
        self._index, self._out, self._hooks = index, outlets, hooks
        around = Surroundings(
            term=database.term,
            delete=database.delete,
            is_over=self._is_superseded,
            pause=self._pause,
            trouble=lambda text: outlets.send(Trouble(text)),
            hit=partial(hooks.hit, index=index),
        )
        self._opener = Opener(lanes, around)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batches = Batches(most, MAX_IDS, _MOST_BYTES)
        self._refusals = Refusals(self._batches, policy, outlets)
        self._attempts = self._refusals.attempts
        self._pending: Remark | None = None  # what the transactor has not answered yet
        self._under: Remark | None = None  # the leadership that is obeyed
        self._wanted: Remark | None = None  # the one that is being answered
        self._term: int | None = None  # of the last answer
        self._opened: tuple[int | None, int] | None = None  # term and lanes for which all is fenced
        self._lane: Lane | None = None
        self._filler = Filler(self._batches, Stamps(header, index), reserved, self._changed, self._is_over, dated)
        self._ended = False
        self._latency = Histogram()
        self._delivered = self._quarantined = 0
        self._seen: tuple[int, ...] = ()
        self._committed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="transactor", daemon=True)

    def start(self) -> None:
        """Start the transactor."""
        self._thread.start()

    # -- frames; the shard's main thread

    def dispatch(self, epoch: int, rows: bytes, low_water: int | None) -> None:
        """Rows in id order: queue them."""
        now = time.monotonic()
        entries = [Entry(record[0], record[1], record, now) for record in decode(rows)]
        refused: list[int] = []
        with self._changed:
            meant = self._pending or self._under
            blocked = meant is None or meant.term is None
            stale = meant is None or blocked or epoch != meant.epoch
            self._filler.low_water = low_water
            some_failed = len(self._attempts) > 0
            for entry in entries:
                entry.alone = some_failed and self._attempts.has_timed_out(entry.id)
                if isinstance(entry.record, KafkaRecord) and entry.record.value is not None:
                    entry.size = len(entry.record.value)
                if stale or not self._batches.offer(entry):
                    refused.append(entry.id)
            if refused:
                self._out.send(Dropped(refused) if blocked else Refused(epoch, refused))
            self._changed.notify()

    def remark(self, frame: Remark) -> None:
        """Drop what is not committed; the transactor answers when the lane is ready for the frame's term."""
        with self._changed:
            self._pending = frame
            self._batches.drop_queue()
            self._changed.notify()

    def closed(self, epoch: int, record_id: int) -> None:
        """The supervisor knows of this parked record; its key may come again."""
        with self._lock:
            if self._under is not None and epoch == self._under.epoch:
                self._batches.reopen(record_id)

    def stop(self) -> None:
        """Send nothing from now on; what is not being committed is dropped without a word."""
        with self._changed:
            self._ended, self._under = True, None
            self._batches.drop_queue()
            self._changed.notify()

    @property
    def unsettled(self) -> int:
        """Records in a transaction or not yet purged; one read, so no lock."""
        return self._batches.in_flight

    @property
    def is_awaited(self) -> bool:
        """Whether the end waits for records to be settled; no record does."""
        return self._under is None or self._pending is not None

    def due(self, _now: float) -> float | None:
        """Nothing is retried by time here."""
        return None

    def check_queues(self, now: float) -> None:
        """Report the record that has waited for longer than queue_timeout, while transactions could be committed."""
        with self._lock:
            oldest, under = self._batches.oldest(), self._under
            if oldest is None or under is None or self._pending is not None or self._lane is None:
                return
            waited_s = now - max(oldest.since, self._committed_at)
            if waited_s >= self._attempts.policy.queue_timeout_s:
                self._out.send(QueueTimedOut(under.epoch, oldest.id, waited_s))

    def stats(self) -> Stats | None:
        """Figures for the supervisor, and a sign of life; None while nothing has changed and nothing is awaited."""
        with self._lock:
            batches = self._batches
            now = (batches.queued, batches.in_flight, 0, self._delivered, self._refusals.errors, self._quarantined)
            opening = self._pending is not None or (self._under is not None and self._lane is None)
            if now == self._seen and not batches.in_flight and not opening:
                return None
            self._seen = now
            latency, self._latency = self._latency, Histogram()
        return Stats(*now[:4], self._refusals.retried, *now[4:], latency.pack().hex())

    # -- commits; the purger's thread

    def purged(self, ids: Sequence[int]) -> None:
        """The DELETE of these ids has committed."""
        with self._changed:
            self._batches.settle(ids)
            self._attempts.settled(ids)
            self._out.send(Settled(ids))  # in order with the answer to a remark
            self._changed.notify()  # there is room, and keys that were held

    def quarantined(self, poison: Poison, outcome: Moved) -> None:
        """The outcome of a quarantine has committed."""
        if outcome is Moved.FENCED:
            with self._lock:
                self._refusals.give_up(poison.id)
            return
        if outcome is Moved.MOVED:
            self._quarantined += 1
            self._out.send(Quarantined(poison.id, poison.error))
        self.purged([poison.id])

    # -- the transactor

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    ended, pending = self._ended, self._pending
                if ended:
                    return
                self._wanted = pending
                if pending is not None:
                    self._answer(pending)
                elif self._lane is None and self._under is not None:
                    self._open(self._under, [self._index])
                elif self._lane is not None:
                    self._transact(self._lane)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would be sent
            self._out.fatal(f"the transactor failed: {error!r}")

    def _has_work(self) -> bool:
        if self._ended or self._pending is not None:
            return True
        return self._under is not None and (self._lane is None or self._batches.is_ready)

    def _is_over(self) -> bool:
        """Whether the open transaction is not wanted any more."""
        return self._pending is not None or self._under is None

    def _transact(self, lane: Lane) -> None:
        """One transaction, from its beginning to its end."""
        if not self._out.trusted():
            self._give_all_up()
            return
        if lane.begin() is not Outcome.DONE:
            self._lose_lane()
            return
        under = self._under  # one read, so no lock; the last progress record of a transaction is the one that counts
        if under is None or lane.note(_progress(under, ())) is not Outcome.DONE or not self._filler.fill(lane):
            self._abort(lane)
            return
        with self._lock:
            ids, alone = self._batches.progress(), self._batches.alone
        if self._is_over() or not self._out.trusted():
            self._abort(lane)
            return
        if alone is not None and not lane.flush(_PATIENCE_S):
            self._filler.failed.append((alone, KafkaError(KafkaError._MSG_TIMED_OUT)))
            self._abort(lane)
            return
        self._hooks.hit("shard.commit", index=self._index, ids=ids)
        outcome = lane.commit(_progress(under, ids))
        self._hooks.hit("shard.committed", index=self._index, ids=ids, outcome=outcome.value)
        if outcome is Outcome.REFUSED:
            self._abort(lane)
        elif outcome is Outcome.UNCLEAR:
            self._lose_lane()
        else:
            self._filler.committed()
            self._commit()

    def _commit(self) -> None:
        """The transaction is committed, for certain."""
        now_us = time.time_ns() // 1000
        with self._changed:
            entries = self._batches.committed()
            self._latency.add_all(
                [now_us - entry.record[6] for entry in entries if not isinstance(entry.record, Broken)]
            )
            self._delivered += len(entries)
            self._committed_at = time.monotonic()
            self._out.purge([entry.id for entry in entries])
            self._changed.wait_for(lambda: self._ended, _MARKERS_S)

    def _abort(self, lane: Lane) -> None:
        """Give the transaction up, and see to those that failed. What timed out may still arrive (P23)."""
        failed = self._filler.failed
        timed_out = any(isinstance(why, KafkaError) and why.name() == "_MSG_TIMED_OUT" for _, why in failed)
        if timed_out or lane.abort() is not Outcome.DONE:
            self._lose_lane()
            return
        with self._lock:
            self._batches.aborted()
            self._judge()

    def _lose_lane(self) -> None:
        """Nobody knows what became of the transaction, or nothing can be done with the producer any more."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    # -- failures

    def _judge(self) -> None:
        """The transaction is undone: see to the records that failed; the lock is held."""
        failed, self._filler.failed = self._filler.failed, []
        under = self._under
        if under is None or self._pending is not None:
            self._batches.drop_queue()
        elif failed:
            self._refusals.judge(failed, under)

    def _give_all_up(self) -> None:
        """Trust has run out: nothing is sent before the supervisor's next remark."""
        with self._lock:
            self._under = None
            self._out.send(Dropped(self._batches.drop_queue()))

    # -- opening

    def _answer(self, frame: Remark) -> None:
        """Be ready for what the supervisor wants, and say what is still to be purged."""
        self._under = None
        if frame.term is None:
            with self._lock:
                self._batches.aborted()  # of an unclear outcome: who opens the lane next finds out
                self._batches.drop_queue()
        elif self._lane is None or self._opened != (frame.term, frame.lanes):
            self._lose_lane()
            self._opened = None
            if not self._open(frame, [*range(self._index + frame.shards, frame.lanes, frame.shards), self._index]):
                return
            if self._lane is not None:
                self._opened = (frame.term, frame.lanes)
        with self._lock:
            if self._pending is not frame:
                return
            if frame.term != self._term:
                self._attempts.clear()
            self._pending, self._term = None, frame.term
            self._under = frame if self._lane is not None and frame.term is not None else None
            self._out.send(Remarked(frame.epoch, self._batches.leaving()))

    def _open(self, frame: Remark, numbers: Sequence[int]) -> bool:
        """Open these lanes, the last of which is our own and stays open. False: nobody wants that any more."""
        assert frame.term is not None
        assert frame.holder is not None
        assert frame.incarnation is not None
        under = Leadership(frame.term, frame.holder, UUID(frame.incarnation))
        try:
            for number in numbers:
                lane = self._opener.open(number, under, partial(self._published, number))
                if number == self._index:
                    self._lane = lane
                    self._filler.begin(frame.term, frame.incarnation)
                else:
                    lane.close()
        except Superseded:
            return False
        except Deposed as error:
            self._out.send(Log(30, f"lane {self._index} is not opened: {error}"))
            with self._lock:
                self._batches.aborted()  # of an unclear outcome: else the supervisor waits for them, and never asks why
            self._give_all_up()
        return True

    def _published(self, number: int, ids: list[int]) -> None:
        """These, and no others of the lane's open transaction, were committed; they are purged by now."""
        with self._lock:
            if number == self._index:
                self._batches.aborted(ids)
                self._judge()
            self._attempts.settled(ids)
            if ids:
                self._out.send(Settled(ids))

    def _is_superseded(self) -> bool:
        """Whether the lane that is being opened is no longer wanted."""
        return self._ended or self._pending is not self._wanted

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(self._is_superseded, seconds)


def _progress(under: Remark, ids: Sequence[int]) -> bytes:
    assert under.term is not None
    assert under.incarnation is not None
    return encode(Progress(under.term, UUID(under.incarnation), ids))

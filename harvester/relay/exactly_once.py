"""Publishes a shard's records exactly once: in consecutive transactions on its two lanes.

One thread, the *transactor*, does all work with Kafka. It takes queued records and the supervisor's requests from the
shard's `transaction_intake`.

Theory. While a transaction is sent and committed, further records queue up and become the next one: batches adapt their
size to the load. A transaction takes what is queued until nothing is left, it has `max_transaction_records`, or it has
taken long enough. It ends with the lane's progress record (`harvester.delivery.progress`), and its records are purged
when its commit is *clear* (`harvester.delivery.lane`). Outcomes and what follows:

    DONE      purge; go on
    REFUSED   abort; find out who is at fault, by halves if need be (`core.transaction_queue`); go on
    UNCLEAR   close the lanes, *open* them again; what their progress names was committed, the rest is sent again

If a transaction is refused although none of its records failed, it is repeated: immediately at first, then with pauses
that grow to 30 s while a trouble states cause and remedy. Usually it is the progress record that was refused.

*Taking turns*. Kafka answers a commit before it has written the transaction's markers, and delays the producer's next
transaction until then. So a shard has two lanes (ADR 25), and the next transaction uses the other lane. It begins while
the current one commits, and takes no record before that commit is clear: only one of a shard's transactions has records
at a time, and they commit in order.

*Opening* a lane fences its last owner and purges what that owner had committed (P20). At a new term a shard opens its
own lanes and fences those of shards that no longer exist (P19); until then it does not reply to the supervisor's
`Remark`, and nothing is marked. A shard's successor does the same before the supervisor releases the dead shard's ids
(P21). The fate of an open transaction is known when both lanes are open, since it may have been on either.

Trust is checked before a transaction begins and before it is committed. No check is needed in between: what a zombie
sends cannot be committed once its successor has opened the lane.

*Filling* (`TransactionWriter`). Kafka's coordinator learns of a transaction's partitions one millisecond after the
first record, in one request, and nothing is sent before it answers. So a transaction that has taken everything there is
waits that long for more, unless the transactor was idle before. The partition of the lane's progress would need a
second such request at the end, so a progress record that names only earlier transactions is sent first: ahead of all
records if none is queued when the previous transaction is clear, otherwise together with them, since one request costs
the coordinator less than two. A transaction begun ahead is aborted if no record arrives soon.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException

from harvester.delivery.decode import Broken
from harvester.delivery.lane import NOT_ALLOWED, Lane, Lanes, TransactionOutcome
from harvester.delivery.opening import Deposed, Leadership, Opener, Superseded
from harvester.delivery.progress import EncodedProgress, NamedRows, encode_named, lanes_of, lanes_to_fence
from harvester.delivery.retries import INNOCENT
from harvester.origin import Stamps, timestamp_ms
from harvester.record import KafkaRecord
from harvester.relay.at_least_once import INFERRED, RESERVED
from harvester.relay.core import frames as f
from harvester.relay.core.transaction_queue import QueuedRecord
from harvester.relay.purger import Purger, ShardHost
from harvester.relay.transaction_intake import Failed, TransactionIntake

_PATIENCE_S = 0.5  # for a record that has timed out before
_IDLE_S = 30.0  # after this, the client's pending events are served
_AHEAD_S = 0.5  # how long a transaction without records stays open
_UNSAID = 2  # consecutive refusals without a record at fault before they are reported
_GONE = frozenset({"UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


class Transactor:
    """The thread that does all work with Kafka. It is also the `LaneHost` for opening lanes."""

    def __init__(
        self,
        intake: TransactionIntake,
        lanes: Lanes,
        shard: ShardHost,
        purger: Purger,
        header: str,
        reserved: frozenset[str],
        dated: bool = False,
    ) -> None:
        self._intake, self._lanes, self._shard, self._index = intake, lanes, shard, shard.index
        self.term_row, self.progress_topic = purger.term, purger.progress_topic
        self.delete, self.delete_same = purger.delete, purger.delete_same
        self._opener = Opener(lanes, self)
        self._idle: Lane | None = None  # the shard's other lane, which is next
        self._found: set[int] = set()  # ids that the opened lanes had committed, while some are not open yet
        self._unanswered: list[str] = []  # topics whose records timed out since the last commit
        self._refused = 0  # consecutive commits refused with no record at fault
        self._wanted: f.Remark | None = None  # the remark being answered
        self._term: int | None = None  # term of the last reply
        self._opened: tuple[int | None, int] | None = None  # term and lanes for which everything is fenced
        self._writer = TransactionWriter(intake, Stamps(header, shard.index), reserved, dated)
        self._thread = threading.Thread(target=self._run, name="transactor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- transactions

    def _run(self) -> None:
        intake = self._intake
        try:
            while True:
                with intake.changed:
                    busy = intake.has_work()
                    due = busy or intake.changed.wait_for(intake.has_work, _AHEAD_S if self._is_begun() else _IDLE_S)
                    ended, pending = intake.ended, intake.pending
                if ended:
                    self._give_back()
                    return
                self._wanted = pending
                if pending is not None:
                    self._answer(pending)
                elif intake.lane is None and intake.under is not None:
                    self._open(intake.under, lanes_of(self._index))
                elif intake.lane is not None and due:
                    self._transact(intake.lane, _JOIN_S if busy else _QUIET_JOIN_S)
                elif self._is_begun():
                    self._abort_begun()
                elif any(lane.poll(0) is not TransactionOutcome.DONE for lane in self._lanes_open()):
                    self._lose_lanes()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would be sent
            self._shard.die(f"the transactor failed: {error!r}")

    def _transact(self, lane: Lane, join_s: float) -> None:
        intake = self._intake
        if not self._shard.trusted():
            intake.give_all_up()
            return
        if not self._begin(lane):
            return
        if not self._writer.fill(lane, join_s):
            over = intake.is_over()
            # The record sent ahead may be refused. An unusable lane is opened again instead.
            if not self._abort(lane) and not over and (intake.lane is not None or lane.refused is not None):
                self._repeat(lane)
            return
        with intake.changed:
            under, batches = intake.under, intake.batches
            named, alone = batches.progress(), batches.alone
        if under is None or intake.is_over() or not self._shard.trusted():
            self._abort(lane)
            return
        # After this, all failures are known (P46).
        arrived = lane.flush(lane.answer_s if alone is None else _PATIENCE_S)
        if alone is not None and not arrived:
            self._writer.failed.append((alone, KafkaError(KafkaError._MSG_TIMED_OUT)))
        if not arrived or self._writer.failed:
            self._abort(lane)
            return
        self._shard.failpoints.hit("shard.commit", index=self._index)
        idle = self._idle
        assert idle is not None
        outcome = lane.conclude(_progress(under, named))
        if outcome is TransactionOutcome.DONE:
            if not idle.begun:
                idle.begin()  # while the progress is on its way; a failure shows when this lane is next
            self._shard.failpoints.hit("shard.concluded", index=self._index)
            outcome = lane.commit_concluded()
        self._shard.failpoints.hit("shard.committed", index=self._index, outcome=outcome.value)
        if outcome is TransactionOutcome.REFUSED:
            if not self._abort(lane):
                self._repeat(lane)
        elif outcome is TransactionOutcome.UNCLEAR:
            self._lose_lanes()
        else:
            self._writer.committed()
            self._commit(lane.number)
            intake.lane, self._idle = idle, lane
            with intake.changed:
                due = intake.has_work()
            if not due:
                self._begin(idle)

    def _begin(self, lane: Lane) -> bool:
        """Make sure that a transaction is open for the next records. False: impossible; the consequences have been
        handled.
        """
        if not lane.begun and lane.begin() is not TransactionOutcome.DONE:
            self._lose_lanes()
            return False
        if lane.noted:
            return True
        with self._intake.changed:
            under, before = self._intake.under, self._intake.batches.unpurged(lane.number)
        if under is None:
            self._abort(lane)
            return False
        if lane.note(_progress(under, before)) is not TransactionOutcome.DONE:
            self._abort(lane)
            self._repeat(lane)
            return False
        return True

    def _repeat(self, lane: Lane) -> None:
        """The transaction was refused and none of its records is at fault: report why, and wait.

        If the progress topic is gone, the lanes are opened again, and opening waits until it is back.
        """
        if lane.refused is not None and lane.refused.name() in _GONE:
            self._lose_lanes()
            return
        self._refused += 1
        if self._refused <= _UNSAID:
            return
        self._abort_begun()
        self.trouble(f"nothing can be committed: {self._lanes.explain(lane)}")
        with self._intake.changed:
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._refused - _UNSAID, 20))
            self._intake.changed.wait_for(self._intake.is_over, pause_s)

    def _forget_refusals(self) -> None:
        if self._refused > _UNSAID:
            self.trouble(None)
        self._refused, self._unanswered = 0, []

    def _commit(self, lane: int) -> None:
        """The transaction has certainly committed on this lane."""
        now_us = time.time_ns() // 1000
        intake = self._intake
        self._forget_refusals()
        with intake.changed:
            intake.commit(lane, now_us)

    def _abort(self, lane: Lane) -> bool:
        """Abort the transaction and handle its failed records. What timed out may still arrive (P23).

        False: none failed, not even among those whose reports came only now.
        """
        failed = [why for _, why in self._writer.failed] + [lane.refused]
        timed_out = any(_has_timed_out(why) for why in failed)
        silent = {_topic(entry) for entry, why in self._writer.failed if _has_timed_out(why)}
        self._unanswered = sorted({*self._unanswered, *filter(None, silent)})
        unclear = timed_out or lane.abort() is not TransactionOutcome.DONE
        if not self._writer.failed:
            self._blame(lane)
        at_fault = bool(self._writer.failed)
        if unclear:
            self._lose_lanes()
            return at_fault
        with self._intake.changed:
            self._intake.batches.aborted()
            self._judge()
        return at_fault

    def _blame(self, lane: Lane) -> None:
        """Blame the records for topics to which this user may not write. The coordinator refuses the whole transaction
        because of them, and the client reports of every record only that.
        """
        denied = {topic for topic, why in lane.not_added.items() if why == NOT_ALLOWED.str()}
        if denied:
            with self._intake.changed:
                taken = self._intake.batches.taken
            self._writer.failed = [(entry, NOT_ALLOWED) for entry in taken if _topic(entry) in denied]

    def _lose_lanes(self) -> None:
        """The outcome of the transaction is unknown, or a producer is unusable: close the lanes."""
        for lane in self._lanes_open():
            lane.close()
        self._intake.lane = self._idle = None

    def _lanes_open(self) -> list[Lane]:
        return [lane for lane in (self._intake.lane, self._idle) if lane is not None]

    def _is_begun(self) -> bool:
        """A transaction is open; between two turns, it has no records."""
        return any(lane.begun for lane in self._lanes_open())

    def _abort_begun(self) -> None:
        """Abort transactions that have no records."""
        for lane in self._lanes_open():
            if lane.begun:
                self._abort(lane)

    def _judge(self) -> None:
        """The transaction is undone: handle the records that failed; the lock is held."""
        failed, self._writer.failed = self._writer.failed, []
        self._intake.judge(failed)

    def _give_back(self) -> None:
        """Forget what is not known to be committed: whoever opens the lane next finds out."""
        with self._intake.changed:
            self._undo()
            self._intake.batches.drop_queue()

    def _undo(self) -> None:
        """Nothing of the open transaction is committed, except what opening has found; the lock is held."""
        self._intake.batches.aborted(self._found)
        self._found.clear()

    # -- opening

    def _answer(self, frame: f.Remark) -> None:
        """Fulfil the supervisor's remark, and reply with what is still to be purged."""
        intake = self._intake
        intake.under = None
        if frame.term != self._term:
            self._forget_refusals()  # they belong to the previous leadership
        # What was open on lanes that are not open again may be committed.
        in_doubt = frame.term is None and intake.lane is None
        if frame.term is None:
            self._abort_begun()
            self._give_back()
        elif intake.lane is None or self._opened != (frame.term, frame.lanes):
            self._lose_lanes()
            self._opened = None
            if not self._open(frame, lanes_to_fence(self._index, frame.shards, frame.lanes)):
                return
            if intake.lane is not None:
                self._opened = (frame.term, frame.lanes)
        with intake.changed:
            if intake.pending is not frame:
                return
            if frame.term != self._term:
                intake.refusals.attempts.states.clear()
            intake.pending, self._term = None, frame.term
            intake.under = frame if intake.lane is not None and frame.term is not None else None
            self._shard.send(f.Remarked(frame.epoch, intake.batches.leaving(), in_doubt))

    def _open(self, frame: f.Remark, numbers: Sequence[int]) -> bool:
        """Open these lanes; the last two are our own and stay open. False: they are no longer wanted."""
        assert frame.term is not None
        assert frame.holder is not None
        assert frame.incarnation is not None
        intake = self._intake
        under = Leadership(frame.term, frame.holder, UUID(frame.incarnation))
        own: list[Lane] = []
        try:
            for number in numbers:
                lane = self._opener.open(number, under, partial(self._published, number))
                if number in lanes_of(self._index):
                    own.append(lane)
                else:
                    lane.close()
            with intake.changed:
                self._idle, intake.lane = own
                intake.batches.most_named = own[-1].room
            self._writer.begin(frame.term, frame.incarnation)
        except (Superseded, Deposed) as error:
            for lane in own:
                lane.close()
            if isinstance(error, Superseded):
                return False
            self._shard.send(f.Log(30, f"its lanes could not be opened: {error}"))
            # after an unclear outcome; otherwise the supervisor would wait for them and never ask why
            with intake.changed:
                self._undo()
            intake.give_all_up()
        return True

    def _published(self, number: int, ids: list[int]) -> None:
        """Exactly these ids of a transaction open on this lane were committed; they are purged by now."""
        own = lanes_of(self._index)
        with self._intake.changed:
            if number in own:
                self._found.update(ids)
            if number == own[-1]:
                self._undo()
                self._judge()
            self._intake.refusals.attempts.settled(ids)
            if ids:
                self._shard.send(f.Settled(ids))

    # -- what opening needs

    def is_over(self) -> bool:
        return self._intake.ended or self._intake.pending is not self._wanted

    def pause(self, seconds: float) -> None:
        with self._intake.changed:
            self._intake.changed.wait_for(self.is_over, seconds)

    def trouble(self, text: str | None) -> None:
        if text is not None and self._unanswered:
            text += f"; records of {', '.join(self._unanswered)} were not acknowledged in time"
        self._shard.send(f.Trouble(text))

    def fenced(self, lane: int) -> None:
        self._shard.failpoints.hit("lane.fenced", lane=lane, index=self._index)


def _has_timed_out(why: object) -> bool:
    return isinstance(why, KafkaError) and why.name() == "_MSG_TIMED_OUT"


def _topic(entry: QueuedRecord) -> str | None:
    return entry.record.topic if isinstance(entry.record, KafkaRecord) else None


def _progress(under: f.Remark, rows: Sequence[NamedRows]) -> EncodedProgress:
    assert under.term is not None
    assert under.incarnation is not None
    return encode_named(under.term, UUID(under.incarnation), rows)


_LONGEST_S = 0.04  # for taking records into one transaction
_JOIN_S = 0.0015  # the time in which the coordinator learns of the partitions
_QUIET_JOIN_S = 0.0005  # when records come one by one
_SLICE = 256  # records taken under the lock at a time


class TransactionWriter:
    """Fills transactions. `dated`: see `Sender`."""

    def __init__(
        self, intake: TransactionIntake, stamps: Stamps, reserved: frozenset[str], dated: bool = False
    ) -> None:
        self._intake, self._stamps, self._reserved, self._dated = intake, stamps, reserved, dated
        self._sequence = self._last = 0  # of the last record committed, and of the last one produced
        self.failed: list[Failed] = []  # failed records of the open transaction

    def begin(self, term: int, incarnation: str) -> None:
        """Start a new scope of sequence numbers."""
        self._stamps.begin(term, incarnation, random.getrandbits(32))
        self._sequence = 0

    def committed(self) -> None:
        """The numbers of this transaction count; those of a transaction that does not commit are used again (P25)."""
        self._sequence = self._last

    def fill(self, lane: Lane, join_s: float) -> bool:
        """Produce what is queued, until nothing is left or the transaction is full. False: the transaction cannot go
        on.

        `join_s`: how long after its beginning further records are waited for.
        """
        began = time.monotonic()
        self.failed, self._last = [], self._sequence
        self._stamps.rewind(self._sequence)
        intake, room = self._intake, True
        while room:
            with intake.changed:
                if self._last > self._sequence:
                    intake.changed.wait_for(intake.has_more, max(0.0, began + join_s - time.monotonic()))
                entries = [] if intake.is_over() else intake.batches.take(_SLICE)
                self._stamps.set_low_water(intake.low_water)
            for entry in entries:
                try:
                    if not self._produce(lane, entry):
                        return False
                except Exception as error:  # noqa: BLE001 - no record may end the shard (P33)
                    self.failed.append((entry, f"the client refused it: {error}"))
                    return False
                self._last += 1
            room = bool(entries) and time.monotonic() - began < _LONGEST_S
        return True

    def _produce(self, lane: Lane, entry: QueuedRecord) -> bool:
        """False: the transaction cannot go on, because of this record or for another reason."""
        record = entry.record
        if not isinstance(record, KafkaRecord):
            assert isinstance(record, Broken)  # oversize records are not queued
            self.failed.append((entry, record.reason))
            return False
        record_id, key, topic, value, headers, partition, created_us, _ = record
        if topic in self._reserved:
            self.failed.append((entry, RESERVED))
            return False
        if self._stamps.name:
            headers = [*headers, (self._stamps.name, self._stamps.stamp(record_id, created_us))]
        at_ms = timestamp_ms(created_us) if self._dated else 0
        while True:
            try:
                # Positional arguments: keywords would cost a third of the call. They are on_delivery, its alias,
                # timestamp, headers.
                lane.produce(topic, value, key, partition, partial(self._reported, entry), None, at_ms, headers)
            except BufferError:
                if lane.poll(0.01) is not TransactionOutcome.DONE or self._intake.is_over():
                    return False
            except KafkaException as error:
                lane.error = error.args[0].str()
                self._reported(entry, error.args[0], None)
                return False
            else:
                return True

    def _reported(self, entry: QueuedRecord, error: KafkaError | None, message: Any) -> None:
        """Delivery report of a failed record; of a delivered one only if the lane asks for it (P45)."""
        if error is None:
            if message.offset() is None:
                self.failed.append((entry, INFERRED))
        elif error.name() not in INNOCENT:
            self.failed.append((entry, error))

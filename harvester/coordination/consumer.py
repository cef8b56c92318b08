"""Consumes partitions shared with other consumers through the coordination topic.

    settings = ConsumerSettings(kafka={"bootstrap.servers": "…"}, group="billing", topics=("orders",))
    with CoordinatedConsumer(settings) as consumer:
        for record in consumer:
            …
            consumer.commit(record)

or, with a function that is called for each record, `CoordinatedConsumer(settings).run(function)`; `handling` deals with
what it raises.

The caller's thread fetches from Kafka (`fetcher`) and hands out; it checks the claim immediately before each record. A
separate thread does everything else (`session`). At least once, a record counts as processed when it is committed; at
most once (`at_most_once`), it counts before it is handed out, and `commit` does nothing. Kafka's own group offsets
follow, one more than the last processed offset, for tools that show lag.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from harvester.claim_check import ClaimChecks
from harvester.clock import clock_s
from harvester.coordination.admin import setting_position
from harvester.coordination.core.claim import BatchWaiting, ReleaseClaim
from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.partition_buffer import NOTHING, Health, RecordBatch
from harvester.coordination.dead_letters import ensure_dead_letter_topic
from harvester.coordination.events import Event, EventHandler, Paused, Resumed
from harvester.coordination.fetcher import Fetcher
from harvester.coordination.handling import ConsumerRun, Handling
from harvester.coordination.offsets import GroupOffsets
from harvester.coordination.session import Session
from harvester.coordination.settings import ConsumerSettings, Open, Statistics
from harvester.coordination.topic import ensure_coordination_topic
from harvester.errors import BrokerUnavailable, ClaimCheckError, ConfigurationError, Problem

if TYPE_CHECKING:
    import pyarrow

_OPEN_S = 0.1  # how long a batch is handed out before everything else is attended to
_IDLE_S = 0.1
_SHORTEST_S = 0.001  # for the client to wait
_WAIT_S = 0.05  # for records, before the claims are checked again


class Turns:
    """Chooses the batch to hand out next: each partition in turn, as its claim allows.

    At least once, a batch is everything fetched of a partition for which there is room (P43: `max_open_records`); it is
    handed out until the claim has to be renewed. At most once, it is what has permanently become ours. It is proposed
    while the previous batch is being handed out, so that nothing waits for the coordination topic, but not earlier:
    what dies with the process is the rest of one batch of a partition, and the next. For the consumer's thread only.
    """

    def __init__(
        self, settings: ConsumerSettings, session: Session, is_paused: Callable[[GroupPartition], bool]
    ) -> None:
        self._settings, self._session, self._is_paused = settings, session, is_paused
        self._pace = settings.pace

    def after(self, before: RecordBatch) -> RecordBatch:
        """The next batch; what was not handed out of the previous one comes again. An empty batch if there is none."""
        now = clock_s()
        with self._session.lock:
            if self._session.error is not None:
                return NOTHING
            if self._settings.at_most_once:
                batch = self._owned(before)
                self._propose(now)
            else:
                batch = self._held(before, now)
            if batch is not NOTHING:
                batch.until = min(batch.until, now + _OPEN_S)
        return batch

    def begin(self, batch: RecordBatch) -> None:
        """The turn of a batch opened earlier begins now, unless something has ended it in the meantime."""
        with self._session.lock:
            if batch.ended or batch is NOTHING or self._session.error is not None:
                return
            once = self._settings.at_most_once
            until = math.inf if once else self._session.holding(batch.place).hand_out_until(self._pace)
            batch.begin(min(until, clock_s() + _OPEN_S))

    def _held(self, before: RecordBatch, now: float) -> RecordBatch:
        """At least once."""
        session = self._session
        buffer = session.buffer.get(before.place)
        if buffer is not None:
            buffer.close_batch()
        waiting = [place for place, buffer in session.buffer.items() if buffer.fetched]
        for place in sorted(waiting, key=lambda place: (place <= before.place, place)):
            buffer = session.buffer[place]
            until = session.holding(place).hand_out_until(self._pace)
            room = self._settings.max_open_records - buffer.open_records
            if room > 0 and now < until and not self._is_paused(place):
                batch = buffer.open_batch(room)
                batch.until = until
                return batch
        return NOTHING

    def _owned(self, before: RecordBatch) -> RecordBatch:
        """At most once."""
        session = self._session
        buffer = session.buffer.get(before.place)
        if buffer is not None and buffer.batch is before:
            left = buffer.lay_down()
            if buffer.stopping_at is not None:
                left = None  # it has been given back
        else:  # the claim is lost: what is ours stays ours, except what was given back or withdrawn
            left = None
            if before.rest and not before.withdrawn:
                left = RecordBatch(before.place, before.rest)
                before.give_back()
        session.in_hand = NOTHING
        if left is not None:
            session.owned.appendleft(left)
        for batch in tuple(session.owned):
            if not self._is_paused(batch.place):
                session.owned.remove(batch)
                batch.until = math.inf
                buffer = session.buffer.get(batch.place)
                if buffer is not None and batch in buffer.owned:
                    buffer.batch = batch
                session.in_hand = batch
                return batch
        return NOTHING

    def _propose(self, now: float) -> None:
        """At most once: propose a batch for each partition, unless one is already waiting."""
        session = self._session
        waiting = {batch.place for batch in session.owned}
        for place, buffer in tuple(session.buffer.items()):
            if buffer.proposed or place in waiting or self._is_paused(place):
                continue
            if not session.holding(place).may_fetch(now, self._settings.pace):
                continue
            last_offset = buffer.propose(self._settings.batch_records)
            if last_offset is not None:
                session.tell(place, BatchWaiting(last_offset))
                if session.holding(place).batch is None:  # it came to nothing
                    buffer.proposed = 0


def at_least_one(most: int) -> None:
    """Reject an empty list size."""
    if most < 1:
        raise ValueError(f"a list has at least one record, not {most}")


class CoordinatedConsumer:
    """Consumes what it claims; created from settings, or from their keyword arguments.

    All methods except `stop`, `claims`, `lag`, `ages`, `open_records` and `statistics` belong to one thread. `on_event`
    is called in that thread with the events of claims (`events`).
    """

    def __init__(
        self, settings: ConsumerSettings | None = None, *, on_event: EventHandler | None = None, **given: Any
    ) -> None:
        if settings is None:
            settings = ConsumerSettings(**given)
        elif given:
            raise TypeError(f"both settings and {', '.join(given)} are given")
        settings.check_subscription()
        self.settings = settings
        self.client = Client.begin(settings.client_id or uuid4().hex[:12], uuid4().hex)
        self._on_event = on_event
        self._claim_checks = None if settings.claim_check is None else ClaimChecks(settings.claim_check)
        ensure_coordination_topic(
            settings.coordination_topic, settings.kafka, settings.coordination_partitions, settings.timing.interval_ms
        )
        if settings.on_error == "dead-letter":
            ensure_dead_letter_topic(settings.dead_letters, settings.kafka)
        self._session = Session(settings, self.client)
        self._offsets = GroupOffsets(settings)
        self._fetcher = Fetcher(settings, self._session, self._offsets)
        self._turns = Turns(settings, self._session, self._fetcher.is_paused)
        self._handling = Handling(settings, self.client.id, self._session, self._fetcher.is_paused)
        self._batch = NOTHING
        self._records = 0  # of earlier batches
        self._stopping = self._closing = False
        self._mirror_at = self._look_at = self._attend_at = 0.0
        self._session.start()

    # -- records

    def run(self, handler: Callable[[Any], object]) -> None:
        """Give each record to the handler, and commit it when that returns; until `stop` is called or `on_error` ends
        it.

        Closes the consumer in any case. With several `workers` the handler runs in their threads.
        """
        with self:
            self._run(handler, handler, self.settings.workers).run(self._offers(self._handling.wait_s))

    def __iter__(self) -> Iterator[Any]:
        """Records, until the consumer is stopped or closed."""
        offers = self._offers(lambda: _IDLE_S) if self._claim_checks is None else self._polls()
        return (record for record in offers if record is not None)

    def poll(self, timeout_s: float) -> Any:
        """The next record that may be processed, or None. Raises the error that ended the coordination."""
        if self._claim_checks is None:
            return self._next(timeout_s)
        return next(iter(self._resolved(1, timeout_s)), None)

    def consume(self, most: int, timeout_s: float) -> list[Any]:
        """Up to `most` records of any partitions; waits for the first one, and returns those that have arrived with it.

        Half as many suffice if a partition has no more: lists of a single partition are committed fastest. At most
        once, and with values from a store, all are of one partition. Raises ValueError if `most` is less than 1.
        """
        at_least_one(most)
        return self._consume(most, timeout_s) if self._claim_checks is None else self._resolved(most, timeout_s)

    def consume_arrow(self, most: int, timeout_s: float) -> pyarrow.RecordBatch:
        """Like `consume`, but returns a `pyarrow.RecordBatch`; requires the extra `[arrow]`, otherwise
        ConfigurationError.

        Columns: topic, partition, offset, timestamp, key, value, and headers, a list of structs of key and value.
        """
        from harvester.arrow import record_batch

        return record_batch(self.consume(most, timeout_s))

    def _consume(self, most: int, timeout_s: float) -> list[Any]:
        """Events are delivered before the first record is taken, and not later: their handler may raise.

        At most once, all are of one batch: asking for the next one says that this one has been dealt with.
        """
        records = self._batch.take_some(most, clock_s()) if clock_s() < self._attend_at else []
        if not records:
            first = self._poll(timeout_s)
            records = [] if first is None else [first, *self._batch.take_some(most - 1, clock_s())]
        fetched = False
        while records and 2 * len(records) < most and not self.settings.at_most_once:
            more = self._replace_batch(self._turns.after(self._batch)).take_some(most - len(records), clock_s())
            if not more and fetched:
                break
            records += more
            fetched = not more
            if fetched:
                self._fetcher.fetch(0)
        return records

    def _resolved(self, most: int, timeout_s: float) -> list[Any]:
        """Like `_consume`, with values from a store, which are resolved before their records are taken.

        Raises ClaimCheckError for the first record; for a later one, the list ends before it.
        """
        assert self._claim_checks is not None
        if not self._batch.is_open(clock_s()):
            self._open_batch(timeout_s)
        found, failure = list[Any](), None
        try:
            for record in self._batch.rest[:most]:
                found.append(self._claim_checks.resolve(record))
        except ClaimCheckError as error:
            failure = error
        return self._take_resolved(found, failure)

    def _take_resolved(self, found: list[Any], failure: ClaimCheckError | None) -> list[Any]:
        """Take the next records of the batch, given with their values; raises `failure` if there are none."""
        self._begin_batch()  # the store may have been slow
        if failure is not None and not found and self._batch.take(clock_s()) is not None:
            raise failure
        return found[: len(self._batch.take_some(len(found), clock_s()))]

    def run_batches(self, handler: Callable[[list[Any]], object], most: int = 500) -> None:
        """Like `run`, with lists of up to `most` records. If the handler raises, it is given each record separately."""
        self._refuse_batches(most)
        with self:
            self._run(handler, lambda record: handler([record]), 1).run(self._offer_batches(most))

    def _refuse_batches(self, most: int) -> None:
        at_least_one(most)
        if self.settings.workers > 1:
            raise ConfigurationError([Problem("workers", "is more than 1, but batches are handled one by one", "1")])

    def commit(self, record: Any) -> None:
        """Mark as processed a record, each record of a list, or an Arrow batch or part of one; in any order."""
        if not (self._batch.finish_some(record) if isinstance(record, list) else self._batch.finish(record)):
            self._finish(record)

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Hand out nothing of a partition, of a topic, or at all; claims are kept. Stays in effect when a claim
        ends.
        """
        self._fetcher.pause(topic, partition)
        self._batch.end()
        self._announce(Paused(topic, partition))

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """End a `pause` with the same arguments; without arguments, end all."""
        self._fetcher.resume(topic, partition)
        self._announce(Resumed(topic, partition))

    # -- positions

    def position(self, topic: str, partition: int) -> int | None:
        """The next offset to be handed out; None if the partition is not held, or its position is unknown."""
        with self._session.lock:
            buffer = self._session.buffer.get(self._place(topic, partition))
            return None if buffer is None or not buffer.assigned else buffer.position

    def offsets_for_times(self, times: Mapping[tuple[str, int], datetime]) -> dict[tuple[str, int], int]:
        """For each partition, the offset of the first record from that time on, or the end if there is none.

        Partitions without an answer at the moment are left out. Raises BrokerUnavailable.
        """
        asked = {self._place(*where): round(at.timestamp() * 1000) for where, at in times.items()}
        return {(place.topic, place.partition): offset for place, offset in self._offsets.at_times(asked).items()}

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Permanently set the group's position in a held partition, as `harvester claims set-position` does.

        The claim ends (`Lost`), and the next one, usually ours, begins there. Raises ValueError if the partition is not
        held, BrokerUnavailable if the message may not have arrived.
        """
        place, deadline = self._place(topic, partition), clock_s() + 2 * self.settings.heartbeat_interval_s
        with self._session.lock:
            buffer = self._session.buffer.get(place)
            if buffer is None or self._session.ended.is_set():
                raise ValueError(f"{topic}[{partition}] is not held")
            arrived = self._session.write(setting_position(place, offset))
        # The claim may end for another reason before the message has arrived.
        while not arrived.done() or self._session.buffer.get(place) is buffer:
            if clock_s() > deadline or self._session.ended.wait(_SHORTEST_S):
                break
        if not (arrived.done() and arrived.result()) or self._session.buffer.get(place) is buffer:
            raise BrokerUnavailable(f"the position of {topic}[{partition}] may not have been set")

    # -- claims

    def claims(self) -> dict[tuple[str, int], int]:
        """The held partitions, with the fencing token of each claim, to protect whatever the records change."""
        with self._session.lock:
            held = {} if self._session.ended.is_set() else self._session.claims()
        return {(place.topic, place.partition): generation for place, generation in held.items()}

    def release(self, topic: str, partition: int) -> None:
        """Give up a partition for others to claim; this consumer does not claim it for 2 intervals. With whole topics:
        the topic.
        """
        with self._session.lock:
            self._release(topic, partition, "on request")

    def _release(self, topic: str, partition: int, reason: str) -> None:
        """The lock is held. A topic's first partition takes the others with it."""
        place = self._place(topic, 0 if self.settings.whole_topics else partition)
        if place in self._session.buffer:
            self._session.tell(place, ReleaseClaim(reason))

    def lag(self) -> dict[tuple[str, int], int]:
        """The number of waiting records in each held partition, as of the last fetch; empty once the consumer is
        closed.
        """
        return {(place.topic, place.partition): behind for place, behind in self._lag().items()}

    def ages(self) -> dict[tuple[str, int], float]:
        """For each held partition with a record to hand out next: how many seconds ago that record was written.

        According to the record's timestamp, and so to its writer's clock.
        """
        with self._session.lock:
            waiting = {place: buffer.next_record for place, buffer in self._session.buffer.items()}
        now, ages = time.time(), {}
        for place, record in waiting.items():
            kind, at_ms = (0, 0) if record is None else record.timestamp()
            if kind:
                ages[place.topic, place.partition] = max(0.0, now - at_ms / 1000)
        return ages

    def open_records(self) -> dict[tuple[str, int], Open]:
        """For each held partition, what is handed out and not committed, if anything; always empty at most once."""
        now = clock_s()
        with self._session.lock:
            found = {place: buffer.open(now) for place, buffer in self._session.buffer.items()}
        return {(place.topic, place.partition): each for place, each in found.items() if each is not None}

    def statistics(self) -> Statistics:
        """Statistics since the start."""
        handling = self._handling
        return replace(
            self._session.statistics(self._records + self._batch.given),
            failures=handling.failures, retries=handling.retries, given_up=handling.given_up,
            dead_letters=handling.dead_letters, parked=handling.queues.parked,
            processing=tuple(handling.processing.counts), processing_s=handling.processing.total_s,
        )  # fmt: skip

    # -- the end

    def stop(self) -> None:
        """Let `run`, or a loop over the consumer, end after the current record. From any thread or signal handler."""
        self._stopping = True
        self._batch.end()

    def close(self, *, release: bool = True) -> None:
        """Stop. With `release`, hand everything over after what is committed or, at most once, was handed out.

        Without it, the claims expire, or the next life of this client id takes them up; at most once, the rest of the
        last batches is then never processed.
        """
        if self._closing:
            return
        self._closing = True
        with ExitStack() as last:  # in reverse order, each even if others raise
            last.callback(self._announce_changes)
            last.callback(self._handling.close)
            last.callback(self._fetcher.close)
            last.callback(self._offsets.close)
            last.callback(self._replace_batch, NOTHING)
            last.callback(self._session.stop, release=release)
            self._offsets.mirror(self._session.processed(), unanswered=2)  # others may write offsets after the release

    def _announce_changes(self) -> None:
        while self._session.changes:
            change = self._session.changes.popleft()
            if self._fetcher.concerns_application(change):
                self._announce(change[2])

    def __enter__(self) -> CoordinatedConsumer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- parts

    @property
    def _is_over(self) -> bool:
        return self._stopping or self._session.ended.is_set()

    def _offers(self, wait_s: Callable[[], float]) -> Iterator[Any]:
        """Records, and None whenever none has arrived for `wait_s()`."""
        while not self._is_over:
            record = self._poll(wait_s())
            yield record
            if record is not None:
                yield from self._batch.handed_out(clock_s)

    def _polls(self) -> Iterator[Any]:
        while not self._is_over:
            yield self.poll(_IDLE_S)

    def _offer_batches(self, most: int) -> Iterator[list[Any] | None]:
        while not self._is_over:
            yield self._consume(most, self._handling.wait_s()) or None

    def _next(self, timeout_s: float) -> Any:
        """The next record as consumed from Kafka, or None."""
        record = self._batch.take(clock_s())
        return self._poll(timeout_s) if record is None else record

    def _finish(self, given: Any) -> None:
        """Commit records out of order; from any thread."""
        if self.settings.at_most_once:
            return
        if hasattr(given, "schema"):
            from harvester.arrow import places

            offsets = places(given)
        elif isinstance(given, list):
            offsets = defaultdict(list)
            for record in given:
                offsets[record.topic(), record.partition()].append(record.offset())
        else:  # all records behind a waiting one take this path
            offsets = {(given.topic(), given.partition()): [given.offset()]}
        with self._session.lock:
            for where, processed in offsets.items():
                buffer = self._session.buffer.get(self._place(*where))
                if buffer is not None:
                    buffer.finish(*processed)

    def _run(self, handler: Callable[[Any], object], single: Callable[[Any], object], workers: int) -> ConsumerRun:
        if self._claim_checks is not None:  # within each attempt, so that on_error decides what follows a failure
            handler, single = self._claim_checks.resolving(handler), self._claim_checks.resolving(single)
        return ConsumerRun(
            self._handling, handler, single,
            workers=workers, commit=self.commit, announce=self._announce, is_stopping=lambda: self._stopping,
        )  # fmt: skip

    def _poll(self, timeout_s: float) -> Any:
        deadline = clock_s() + timeout_s
        record = None
        while record is None and not self._is_over:
            self._open_batch(deadline - clock_s())
            record = self._batch.take(clock_s())
            if deadline - clock_s() < _SHORTEST_S:
                break
        return record

    def _open_batch(self, timeout_s: float) -> None:
        """Do what is due, and open a batch with records after waiting for them up to `timeout_s`. Takes none of
        them.
        """
        deadline = clock_s() + timeout_s
        fetched = False
        while not self._is_over:
            self._attend()
            batch = self._replace_batch(self._turns.after(self._batch))
            left_s = deadline - clock_s()
            if batch.given < len(batch.records) or (fetched and left_s < _SHORTEST_S):
                break
            self._fetcher.fetch(max(0.0, min(left_s, _WAIT_S)))
            fetched = True

    def _begin_batch(self) -> None:
        """Start handing out what was opened earlier."""
        self._turns.begin(self._batch)

    def _attend(self) -> None:
        """Do what is due apart from records."""
        self._attend_at = clock_s() + _OPEN_S
        for event in self._fetcher.follow():
            self._announce(event)
        if self._session.error is not None:
            raise self._session.error
        now, interval_s = clock_s(), self.settings.heartbeat_interval_s
        if now >= self._look_at:
            self._look_at = now + interval_s
            topics = self._fetcher.topics()  # partitions may have been added, and topics created
            if topics is not None:
                self._session.consume(topics)
            self._give_up_what_falls_behind()
            self._fetcher.look()
        if now >= self._mirror_at:
            self._mirror_at = now + interval_s / 2
            self._fetcher.pass_over()
            self._offsets.mirror(self._session.processed())

    def _lag(self) -> dict[GroupPartition, int]:
        """Uses the ends received with the last fetch: requesting one would wait up to half a second behind a fetch."""
        behind: dict[GroupPartition, int] = {}
        for place, last_offset in self._session.processed().items():
            bounds = self._fetcher.bounds(place)
            if bounds is None:
                return {}
            low, high = bounds
            behind[place] = max(0, high - max(low, 0 if last_offset is None else last_offset + 1))
        return behind

    def _give_up_what_falls_behind(self) -> None:
        """One at a time, if a client that holds less is present; otherwise giving up would only delay it."""
        for place, behind in self._lag().items():
            buffer = self._session.buffer.get(place)
            if buffer is None:
                continue
            if not behind or self._fetcher.is_paused(place):
                buffer.health = Health()
                continue
            with self._session.lock:
                falls_behind = buffer.falls_behind(behind)
                if falls_behind and buffer.stopping_at is None and self._session.fewer_elsewhere():
                    self._release(place.topic, place.partition, "it falls behind")
                    return

    def _replace_batch(self, batch: RecordBatch) -> RecordBatch:
        self._records += self._batch.given
        self._batch = batch
        if self._stopping:  # `stop` ends the current batch
            batch.end()
        return batch

    def _announce(self, event: Event | None) -> None:
        if self._on_event is not None and event is not None:
            self._on_event(event)

    def _place(self, topic: str, partition: int) -> GroupPartition:
        return GroupPartition(self.settings.group, topic, partition)

"""Reads and writes the coordination topic.

The reader is in no group: it is assigned all partitions. It begins at the first retained record or, in a long log, in
the tail: as far before the last record as makes a late reader certain of every partition (P30). The writer is
idempotent and waits for all in-sync replicas; messages it gives up are reported by number, and may still be in the log.
Offsets only grow: a topic recreated under the same name would make every reader wait for offsets that it has already
read in the old one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from harvester.bounds import PURGED, close_aside, let_go, passes, read_bounds
from harvester.clock import clock_s
from harvester.coordination.core.claim import PositionFound
from harvester.coordination.core.messages import GroupPartition, Heartbeats, Message, encode, may_concern
from harvester.coordination.core.world import World
from harvester.coordination.errors import CoordinationTopicError
from harvester.coordination.settings import LONGEST_ANSWER_MS, ConsumerSettings
from harvester.coordination.topic import failed, refused, refuses
from harvester.errors import BrokerError, BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_TIMEOUT_S = 10.0
_MOST_RECORDS = 500
_POLL_S = 0.1
_NEAR, _FURTHER = 1_000, 8  # records before a claim in which to look for its position first; factor for the next
_LONG = 1_000  # records of a partition; with fewer, reading them is faster than finding their tail
_LEAST_ANSWER_S = 1.0
_RENEWED_AFTER = 2.0  # times the time in which a message must arrive
_LONGEST_PAUSE_S = 1.0  # between two attempts to connect
_LEAST_STANDSTILL_S = 1.0
_READY_S = 30.0  # a newly created topic has no leaders at first
_LOOK_S = 2.0  # of these, until it is noticed that nobody waits any more

P = TypeVar("P", bound=Hashable)
Record = tuple[int, int, int, bytes | None]  # partition, offset, append time in ms, value


class Standstill(Generic[P]):
    """Detects that a reader of many partitions has stalled although the brokers have more for it. Pure.

    Kafka's client sometimes does not continue with a partition after its broker was away (librdkafka 5153), and reports
    nothing. The indication: the brokers report a record twice, more than `limit_s` apart, and nothing of its partition
    was read in between. Times are in seconds of one clock.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._next: dict[P, int] = {}
        self._there: dict[P, int] = {}  # the newest known record, while it is not read yet
        self._moved_at: dict[
            P, float
        ] = {}  # for the same: when something was read, or when there was first more to read

    def begin(self, positions: Mapping[P, int]) -> None:
        """The offset to be read next, by partition; earlier information is forgotten."""
        self._next = dict(positions)
        self._there.clear()

    def forget(self, partition: P) -> None:
        self._next.pop(partition, None)
        self._there.pop(partition, None)

    @property
    def positions(self) -> Mapping[P, int]:
        return self._next

    def read(self, partition: P, offset: int, now: float) -> None:
        self._next[partition] = offset + 1
        self._moved_at[partition] = now
        if self._there.get(partition, -1) <= offset:
            self._there.pop(partition, None)

    def is_there(self, partition: P, offset: int, now: float) -> bool:
        """The brokers have just reported this record; returns whether that shows the reader to have stalled."""
        if offset < self._next.get(partition, 0):
            return False
        if partition not in self._there:
            self._moved_at[partition] = now
        self._there[partition] = offset
        return now - self._moved_at[partition] > self._limit_s


class CoordinationLog:
    """One reader and one writer. `not_sent` is called from `poll`, on its thread, not from `append`, because it may
    append.

    A message that was not sent within `expires_s` is given up: after an outage it would only be in the way of others. A
    connection that does not answer for as long is considered dead, and attempts to connect are at most a third of that
    apart: a client that was cut off has no share until it is heard. A writer that has got nothing through for twice as
    long, while messages were given up, is replaced: otherwise a client that is stuck after an outage would silence this
    one forever, and nobody would know. So is a writer that has failed fatally.
    """

    def __init__(
        self,
        topic: str,
        options: Mapping[str, Any],
        not_sent: Callable[[GroupPartition, int], None],
        expires_s: float = _TIMEOUT_S,
    ) -> None:
        self.topic = topic
        self.tails: set[int] = set()  # partitions with records before those read
        self._not_sent, self._expires_s = not_sent, expires_s
        self._options = {
            "socket.nagle.disable": True,  # messages are small and urgent
            "socket.timeout.ms": min(LONGEST_ANSWER_MS, round(max(expires_s, _LEAST_ANSWER_S) * 1000)),
            "reconnect.backoff.max.ms": round(min(expires_s / 3, _LONGEST_PAUSE_S) * 1000),
            # Otherwise the client forgets all brokers when none is connected, and after reaching one it takes up to a
            # second to ask for the leaders again. If their addresses have changed, it is replaced and starts over.
            "metadata.recovery.strategy": "none",
            **options,
        }
        self._reader = self._new_reader()
        self._writer = self._new_writer()
        self._standstill = Standstill[int](max(expires_s / 2, _LEAST_STANDSTILL_S))  # before its claims expire
        self._stands_still = False
        self._complaint = ""  # the last one logged
        self._given_up: list[tuple[GroupPartition, int]] = []  # not reported yet
        self._failing_since: float | None = (
            None  # when the first message was sent that did not arrive, since the last one that did
        )
        self._refusal: CoordinationTopicError | BrokerError | None = None
        self._unwritten = ""  # why messages do not arrive, as logged

    def begin(
        self, worlds: Mapping[int, World], tail_ms: int | None = None, ready_s: float = _READY_S
    ) -> dict[int, int]:
        """Start reading each world from its next offset; returns the current end of each partition.

        With `tail_ms`, a long partition is read from that long before its last record; `tails` lists these. Raises
        BrokerUnavailable if a partition's ends are not known after `ready_s`.
        """
        bounds = {partition: self._ends(partition, ready_s) for partition in worlds}
        starts = {partition: max(low, worlds[partition].next_offset) for partition, (low, _) in bounds.items()}
        ends = {partition: high for partition, (_, high) in bounds.items()}
        if tail_ms is not None:
            for partition, offset in self._tails(ends, starts, tail_ms).items():
                if offset > starts[partition]:
                    starts[partition] = offset
                    self.tails.add(partition)
        for partition, start in starts.items():
            if start > worlds[partition].next_offset:
                worlds[partition].miss(start)
        self._assign([TopicPartition(self.topic, partition, start) for partition, start in starts.items()])
        return ends

    def poll(self, timeout_s: float) -> Iterator[Record]:
        """The records that have arrived, after waiting for the first one up to `timeout_s`; serves the writer, too.

        Raises CoordinationTopicError if offsets begin again or the topic accepts no messages, BrokerError or
        BrokerUnavailable.
        """
        self._serve_writer()
        if self._stands_still:
            self._renew_reader()
        first = self._reader.poll(timeout_s)
        if first is None:
            return
        message: Any
        for message in (
            first,
            *self._reader.consume(_MOST_RECORDS, 0),
        ):  # with a timeout, it would wait for the full number
            error = message.error()
            if error is not None:
                self._complain(error)
                continue
            kind, at_ms = message.timestamp()
            if kind != TIMESTAMP_LOG_APPEND_TIME:
                raise CoordinationTopicError(
                    f"a record of the coordination topic {self.topic!r} has its writer's timestamp, not the broker's",
                    hint="set message.timestamp.type=LogAppendTime on the topic, and wait for its retention",
                )
            self._advance(message.partition(), message.offset())
            yield message.partition(), message.offset(), at_ms, message.value()

    def append(self, partition: int, message: Message | Heartbeats, arrived: Future[bool] | None = None) -> int:
        """Write a message; reading it, or `arrived`, shows whether it arrived. Returns its size in bytes."""
        value, sent_at = encode(message), clock_s()

        def give_up() -> None:
            self._given_up += [(part.place, part.number) for part in message.parts]
            if arrived is not None:
                arrived.set_result(False)

        def delivered(error: KafkaError | None, record: Any) -> None:
            if error is None and record.offset() is None:  # the client only infers that it was written (P45)
                give_up()
                return
            if error is None:
                self._failing_since = None
                if arrived is not None:
                    arrived.set_result(True)
                self._arrives()
                self._stands_still |= self._standstill.is_there(partition, record.offset(), clock_s())
                return
            if self._failing_since is None:
                self._failing_since = sent_at
            give_up()
            self._arrives_not(error)

        try:
            self._writer.produce(self.topic, value, partition=partition, on_delivery=delivered)
        except BufferError:
            give_up()
        except KafkaException as error:
            if error.args[0].fatal():
                self._renew_writer()
            elif not passes(error.args[0]):
                raise failed(self.topic, self._options, error) from error
            give_up()
        return len(value)

    def _arrives_not(self, error: KafkaError) -> None:
        """Log this once; an error that does not pass by itself ends the reader, too."""
        if refuses(error):
            self._refusal = refused(self.topic, error)
        elif not passes(error):
            self._refusal = failed(self.topic, self._options, KafkaException(error))
        elif error.code() not in PURGED and error.str() != self._unwritten:
            self._unwritten = error.str()
            _LOGGER.warning(
                "messages do not reach the coordination topic %s: %s; claims expire until they do"
                " (check that its brokers are up, and enough replicas in sync)", self.topic, self._unwritten,
            )  # fmt: skip

    def _arrives(self) -> None:
        if self._unwritten:
            self._unwritten = ""
            _LOGGER.warning("messages reach the coordination topic %s again", self.topic)

    def _serve_writer(self) -> None:
        if not _serve(self._writer):
            self._renew_writer()
        if self._refusal is not None:
            raise self._refusal
        if self._failing_since is not None and clock_s() - self._failing_since > _RENEWED_AFTER * self._expires_s:
            self._renew_writer()
        given_up, self._given_up = self._given_up, []
        for place, number in given_up:
            self._not_sent(place, number)

    def _new_reader(self) -> Consumer:
        options = {
            **self._options,
            "group.id": "harvester-coordination",  # required by the client; nothing joins, nothing is committed
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",  # records removed by retention show as a hole in the offsets
            "allow.auto.create.topics": False,
            "isolation.level": "read_uncommitted",
        }
        return Consumer(options)

    def _renew_reader(self) -> None:
        _LOGGER.warning("the reader of the coordination topic %s has stalled, and is replaced", self.topic)
        self._replace_reader()
        positions = self._standstill.positions
        self._assign([TopicPartition(self.topic, partition, offset) for partition, offset in positions.items()])

    def _replace_reader(self) -> None:
        lost, self._reader = self._reader, self._new_reader()
        close_aside(lost)

    def _new_writer(self) -> Producer:
        options = {
            **self._options,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "delivery.timeout.ms": round(self._expires_s * 1000),
            # The client's default for writers is true: a topic deleted while its group is active would be recreated
            # with the broker's settings, with which claims are not safe (timestamps are the writers').
            "allow.auto.create.topics": False,
        }
        return Producer(options)

    def _renew_writer(self) -> None:
        lost, self._writer = self._writer, self._new_writer()
        lost.purge()
        while not _serve(lost):  # what it still had was not sent
            pass
        self._failing_since = None

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for what was written, and close the connections."""
        with contextlib.suppress(KafkaException, SystemError):  # no longer matters to anyone
            self._writer.flush(timeout_s)
        let_go(self._writer)
        del self._writer
        self._reader.close()

    def _assign(self, partitions: list[TopicPartition]) -> None:
        self._standstill.begin(  # it may go back intentionally
            {each.partition: each.offset for each in partitions}
        )
        self._stands_still = False
        self._reader.assign(partitions)

    def _advance(self, partition: int, offset: int) -> None:
        expected = self._standstill.positions.get(partition, 0)
        if offset < expected:
            raise CoordinationTopicError(
                f"the coordination topic {self.topic!r} was recreated, or has lost records: "
                f"partition {partition} has offset {offset} after {expected - 1}",
                hint="claims read from it have ended; restart the consumers of all groups that use it",
            )
        self._standstill.read(partition, offset, clock_s())

    def _tails(self, ends: Mapping[int, int], starts: Mapping[int, int], tail_ms: int) -> dict[int, int]:
        """Where the tails of the long partitions begin; omits those that cannot be determined."""
        last = [TopicPartition(self.topic, each, end - 1) for each, end in ends.items() if end - starts[each] > _LONG]
        if not last:
            return {}
        self._assign(last)
        begins: list[TopicPartition] = []
        deadline = time.monotonic() + _TIMEOUT_S
        while len(begins) < len(last) and time.monotonic() < deadline:
            for partition, offset, at_ms, _ in self.poll(_POLL_S):
                if offset == ends[partition] - 1:
                    begins.append(TopicPartition(self.topic, partition, max(0, at_ms - tail_ms)))
        try:
            found = self._reader.offsets_for_times(begins, timeout=_TIMEOUT_S) if begins else []
        except KafkaException:
            return {}  # everything is read instead, which takes longer
        return {each.partition: each.offset for each in found if each.error is None and each.offset >= 0}

    def _ends(self, partition: int, ready_s: float) -> tuple[int, int]:
        try:
            return read_bounds(self._reader, self.topic, partition, ready_s)
        except KafkaException as error:
            self._replace_reader()  # this one may never find a broker again (P48)
            raise failed(self.topic, self._options, error) from error

    def _complain(self, error: KafkaError) -> None:
        if not passes(error):
            raise failed(self.topic, self._options, KafkaException(error))
        if error.code() != KafkaError._PARTITION_EOF and error.str() != self._complaint:
            self._complaint = error.str()
            _LOGGER.info("the coordination topic %s: %s", self.topic, self._complaint)


def _serve(writer: Producer) -> bool:
    """Process delivery reports; False for a writer that has failed fatally, which is logged here, once."""
    try:
        writer.poll(0)
    except KafkaException:
        return False
    return True


Answer = Callable[[GroupPartition, PositionFound], None]


@dataclass(slots=True)
class _Past:
    """A partition of the log as read from `start` on; `whole`: from the first retained record."""

    world: World
    start: int
    whole: bool

    def knows(self, place: GroupPartition) -> bool:
        """Whether an earlier beginning would not change what is known of the position."""
        return self.whole or self.world.knows_position(place)


class LogBackfill:
    """Finds the position of a partition that was silent for long, in the log before the tail.

    A claim that wins by silence does not carry its position (`world`), which is further back in the log. The last
    records before the claim are read first; if a late reader of those is not certain of the position (P30), eight times
    as many, and so on up to all retained records: a group that returns after a minute does not read a day. This runs in
    a separate thread, since heartbeats do not wait. What was read is kept: an expired claim, and other partitions of
    the same log partition, are answered at once. `answer` is called from the thread; a request that fails gets no
    answer.
    """

    def __init__(self, settings: ConsumerSettings, answer: Answer) -> None:
        self._settings, self._answer = settings, answer
        self._concerns = may_concern(settings.group, settings.topics)
        self._pasts: dict[int, _Past] = {}
        self._questions: queue.SimpleQueue[tuple[int, GroupPartition, int] | None] = queue.SimpleQueue()
        self._newest: dict[GroupPartition, int] = {}  # the last question about a partition
        self._thread: threading.Thread | None = None
        self._closed = False

    def find(self, partition: int, place: GroupPartition, generation: int) -> None:
        """Request the position under which the claim at this offset was won."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordination-past", daemon=True)
            self._thread.start()
        self._newest[place] = generation
        self._questions.put((partition, place, generation))

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (question := self._questions.get()) is not None and not self._closed:
            partition, place, generation = question
            if generation < self._newest[place]:
                continue  # that claim has expired, and there is another one
            try:
                world = self._search(partition, place, generation)
                if world is not None and not self._closed:
                    claim = world.claim(place)
                    self._answer(place, PositionFound(generation, claim.last_offset, claim.positioned))
            except Exception as error:  # noqa: BLE001 - the top frame; the claim expires, and is retried
                _LOGGER.warning("the position of %s was not found: %s", place, error)

    def _search(self, partition: int, place: GroupPartition, generation: int) -> World | None:
        """Read as far back as needed for the place's position; None if the log could not be read up to the claim."""
        past = self._pasts.get(partition)
        # Kept if to read on costs no more than what was read: otherwise a busy log would be read anew for each claim.
        read = 0 if past is None else past.world.next_offset - past.start
        if past is None or not (past.whole or generation < past.world.next_offset + max(_NEAR, read)):
            past = self._pasts[partition] = self._before(generation, _NEAR)
        while not self._closed:
            if past.world.next_offset <= generation:
                self._read(partition, past, generation)
            if past.world.next_offset <= generation:
                break
            if past.knows(place):
                return past.world
            past = self._pasts[partition] = self._before(generation, _FURTHER * (generation - past.start))
        return None

    def _before(self, generation: int, records: int) -> _Past:
        start = max(0, generation - records)
        return _Past(World.begin(self._settings.timing, start), start, whole=start == 0)

    def _begin(self, log: CoordinationLog, partition: int, world: World) -> None:
        deadline = clock_s() + _READY_S
        while True:
            try:
                log.begin({partition: world}, ready_s=_LOOK_S)
            except BrokerUnavailable:
                if self._closed or clock_s() > deadline:
                    raise
            else:
                return

    def _read(self, partition: int, past: _Past, generation: int) -> None:
        """Read on up to the claim, or as far as records arrive."""
        world, begun_at = past.world, past.world.next_offset
        log = CoordinationLog(self._settings.coordination_topic, self._settings.kafka, lambda place, number: None)
        try:
            self._begin(log, partition, world)
            past.whole |= world.next_offset > begun_at  # earlier ones are not retained
            deadline = clock_s() + _TIMEOUT_S
            while world.next_offset <= generation and not self._closed and clock_s() < deadline:
                for _, offset, at_ms, value in log.poll(_POLL_S):
                    # Only the time of others' messages matters.
                    world.read(offset, at_ms, value if self._concerns(value) else None)
                    deadline = clock_s() + _TIMEOUT_S  # a stalled reader is replaced for the next request
        finally:
            log.close(0)

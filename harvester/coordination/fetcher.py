"""Fetches records of held partitions from Kafka, starting at the right offset.

Used by the consumer's thread, which waits neither for the group coordinator nor for the ends of partitions: separate
threads ask for these. `partition_buffer` decides where a partition begins, and what to do when its position no longer
exists; the client itself never moves a position.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from harvester.bounds import close_aside, existing_topics, passes
from harvester.clock import clock_s
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer, resume
from harvester.coordination.errors import OffsetOutOfRange
from harvester.coordination.events import Blocked, Event, OutOfRange, Unblocked
from harvester.coordination.log import Standstill
from harvester.coordination.offsets import GroupOffsets, Inquiry, Question
from harvester.coordination.session import Change, Session
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_END_KNOWN_S = 1.0  # within which a new leader knows the end of its partition
# The client reports these at every fetch, and goes no further; or it passes the records over.
_UNREADABLE = frozenset({
    KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED, KafkaError.MSG_SIZE_TOO_LARGE,
})  # fmt: skip


_LEAST_S = 5.0


class Stalls:
    """Finds held partitions that deliver nothing although there is something (`Standstill`).

    The ends of partitions that come with fetched records do not help here, so `ends` asks for them, for all silent
    partitions at once, and through another client: a request on a fetch's connection waits behind the fetch.
    """

    def __init__(
        self, ends: Callable[[Collection[GroupPartition]], Mapping[GroupPartition, int]], interval_s: float
    ) -> None:
        self.question = Question(ends)
        self._standstill = Standstill[GroupPartition](max(2 * interval_s, _LEAST_S))

    def look(self, waiting: Mapping[GroupPartition, int], now: float) -> list[GroupPartition]:
        """To be called once an interval. `waiting`: what the client reads next, for all places that delivered nothing
        lately.

        Returns those that have stalled.
        """
        known = dict(self._standstill.positions)
        for place in known.keys() - waiting.keys():
            self._standstill.forget(place)
        for place, position in waiting.items():
            if known.get(place) != position:
                self._standstill.read(place, position - 1, now)
        ends = self._ends()
        stalled = [
            place for place, end in ends.items() if place in waiting and self._standstill.is_there(place, end - 1, now)
        ]
        for place in stalled:
            self._standstill.forget(place)
        silent = [place for place, position in waiting.items() if known.get(place) == position]
        if silent and not self.question.is_open:
            self.question.put(silent)
        return stalled

    def _ends(self) -> Mapping[GroupPartition, int]:
        try:
            return self.question.take() or {}
        except BrokerUnavailable:
            return {}


_CALL_S = 5.0
_PATIENCE_S, _LONGER_PATIENCE_S = 8.0, 30.0
_POLL_S = 0.002
_LEAST_FETCHED = 2000  # per call
_MOST_WAITING, _MOST_WAITING_AMO = 3, 10  # calls fetched ahead; more at most once: batches of all partitions wait
_TOPIC: Any = Message.topic
_PARTITION: Any = Message.partition
_ERROR: Any = Message.error


FULL_MS = 20  # how long the client rests once its queue is full; the default, a second, was most of the time


def connect(settings: ConsumerSettings) -> Consumer:
    """Create a client for records."""
    return Consumer(
        {
            "fetch.queue.backoff.ms": FULL_MS,
            **settings.connection,
            "group.id": settings.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
    )


@dataclass(slots=True)
class _Displaced:
    """A partition whose position did not exist. `lowest_end`: of all ends below the position that were seen."""

    since: float
    lowest_end: float = math.inf


class Fetcher:
    """Assigns held partitions to a client, and puts arriving records into the session's buffers."""

    def __init__(
        self,
        settings: ConsumerSettings,
        session: Session,
        offsets: GroupOffsets,
        connect: Callable[[ConsumerSettings], Consumer] = connect,
    ) -> None:
        self._settings, self._session, self._connect = settings, session, connect
        self._data = connect(settings)
        self._silent_since: float | None = None  # since when the brokers have not answered this client
        self._swap = threading.Lock()  # guards its replacement, and its use by other threads
        self._inquiry = Inquiry(offsets.committed, settings.heartbeat_interval_s / 2)
        self._assigned: set[GroupPartition] = set()
        self._pauses: set[tuple[str | None, int | None]] = set()
        self._crowded: set[GroupPartition] = set()  # enough of their records wait, and there is no room for more
        self._displaced: dict[GroupPartition, _Displaced] = {}
        self._ask_topics = offsets.topic_ids
        self._topics = Question(offsets.topic_ids)
        self._begun_in: dict[GroupPartition, str | None] = {}  # the topic's id, None until it is known
        self._missing = frozenset[str]()  # of the settings' topics, at the last look
        self._reported = frozenset[str]()
        self._untold = set[GroupPartition]()  # claimed and ended before anyone was notified
        self._stalls = Stalls(offsets.ends, settings.heartbeat_interval_s)
        self._emptied = False  # the client had no more records at some time since the last check for stalls
        self._fetched = max(_LEAST_FETCHED, settings.batch_records if settings.at_most_once else 0)

    # -- claims

    def close(self) -> None:
        """To be called when no more requests are made."""
        try:
            self._inquiry.question.close()
            self._stalls.question.close()
            self._topics.close()
        finally:
            self._data.close()

    def topics(self) -> dict[str, int] | None:
        """The existing topics of the settings, with their current partitions; None if the brokers do not answer."""
        try:
            known = existing_topics(self._data, self._settings.topics, _CALL_S)
        except KafkaException:
            self._hears_nothing()
            return None  # if this persists, claims expire by themselves
        self._silent_since = None
        if any(each.error is not None for each in known.values()):
            return None  # a broker that has just started may not know yet
        self._report_missing(frozenset(self._settings.topics) - known.keys())
        return {name: len(each.partitions) for name, each in known.items()}

    def _report_missing(self, missing: frozenset[str]) -> None:
        """Not at the first look: a topic that was just created is unknown to some brokers."""
        for topic in sorted(missing & self._missing - self._reported):
            _LOGGER.warning(
                "there is no topic %r, or this user may not describe it: nothing is consumed from it until there is",
                topic,
            )
        for topic in sorted(self._reported - missing):
            _LOGGER.warning("topic %r is there now", topic)
        self._reported = missing & (self._missing | self._reported)
        self._missing = missing

    def _hears_nothing(self) -> None:
        """This client may never find the brokers again, although they answer others while claims are held.

        Its statistics cannot show this (P48): nobody reads them while the application does not poll.
        """
        now, since = clock_s(), self._silent_since
        if since is None:
            self._silent_since = now
        elif now >= since + (_PATIENCE_S if self._session.buffer else _LONGER_PATIENCE_S):
            _LOGGER.warning("Kafka's client does not reach the brokers: another client fetches records now")
            other = self._connect(self._settings)
            with self._swap:
                lost, self._data = self._data, other
            close_aside(lost)
            self._silent_since = None
            self._assigned.clear()
            self._pace()

    def follow(self) -> Iterator[Event]:
        """Assign what was begun, unassign what was stopped; yields the events for the application.

        A claim waits until the group coordinator has said where it begins, if the log does not; other places do not
        wait.
        """
        changes, waiting = self._session.changes, list[Change]()
        changed = bool(changes)
        committed = self._committed() if changed else {}
        try:
            while changes:
                place, buffer, event = changes[0]
                waits = any(place == each[0] for each in waiting) or not self._reassign(place, buffer, committed)
                change = changes.popleft()
                if waits:
                    waiting.append(change)
                elif event is not None and self.concerns_application(change):
                    yield event
        finally:  # also if the application's handler raises
            changes.extendleft(reversed(waiting))
            if changed:
                self._pace()
        for place, displaced in tuple(self._displaced.items()):
            if place in self._displaced:  # the application may have paused it
                yield from self._replace(place, displaced)
        with self._session.lock:
            blocks = self._blocks(clock_s())
        yield from blocks

    def concerns_application(self, change: Change) -> bool:
        """False for a claim that ended before anyone was notified of it, and for that end.

        Whatever would be opened for it, such as an inbox, belongs to another consumer by now. Called once for each
        change, in order.
        """
        place, buffer, event = change
        if buffer is not None:
            if self._session.buffer.get(place) is not buffer:
                self._untold.add(place)
                return False
            self._untold.discard(place)
            return True
        if event is None or place not in self._untold:
            return True
        self._untold.remove(place)
        return False

    def _blocks(self, now: float) -> list[Event]:
        """Report places that have waited for a commit for an interval, and the end of that; the lock is held."""
        events: list[Event] = []
        for place, buffer in self._session.buffer.items():
            if not buffer.busy:
                continue
            full_since = buffer.full_since
            if full_since is None:
                if buffer.blocked:
                    buffer.blocked = False
                    _LOGGER.warning("%s no longer waits for a commit", place)
                    events.append(Unblocked(place.topic, place.partition))
                continue
            due = not buffer.blocked and now >= full_since + self._settings.heartbeat_interval_s
            if due and (first := buffer.open(now)) is not None:
                buffer.blocked = True
                _LOGGER.warning(
                    "%s waits for a commit: offset %d was handed out %.0f s ago, and %d records are open with it,"
                    " as many as max_open_records allows", place, first.offset, first.age_s, first.records,
                )  # fmt: skip
                events.append(Blocked(place.topic, place.partition, first.offset, first.records, first.age_s))
        return events

    def _committed(self) -> dict[PartitionBuffer, int | None]:
        """For beginning claims that need it, as far as the group coordinator has answered."""
        session = self._session
        with session.lock:
            begun = [
                buffer
                for place, buffer, _ in session.changes
                if buffer and session.buffer.get(place) is buffer and not buffer.is_placed
            ]
        try:
            return self._inquiry.look(begun)
        except BrokerError as error:  # asking again would not help
            session.fail(error)
            return {}

    def _reassign(
        self, place: GroupPartition, buffer: PartitionBuffer | None, committed: Mapping[PartitionBuffer, int | None]
    ) -> bool:
        """False if the claim cannot begin yet; it is kept."""
        if place in self._assigned:
            self._unassign([place])
        self._begun_in.pop(place, None)
        if buffer is None or self._session.buffer.get(place) is not buffer:
            return True
        if not buffer.is_placed and buffer not in committed:
            return False
        with self._session.lock:
            buffer.begin(committed.get(buffer))
        self._begun_in[place] = None
        return True

    def _learn_topics(self) -> None:
        """The client does not tell one topic from another of its name."""
        try:
            ids = self._topics.take() or {}
        except BrokerUnavailable:
            return
        for place in [place for place, topic in self._begun_in.items() if topic is None]:
            self._begun_in[place] = ids.get(place.topic)

    def _is_recreated(self, place: GroupPartition) -> bool:
        """Whether another topic has this name now. Raises BrokerUnavailable."""
        self._learn_topics()
        begun_in = self._begun_in.get(place)
        return begun_in is not None and self._ask_topics([place]).get(place.topic, begun_in) != begun_in

    def _replace(self, place: GroupPartition, displaced: _Displaced) -> Iterator[Event]:
        """The client found no record at a place's position."""
        buffer = self._session.buffer.get(place)
        if buffer is None or place not in self._assigned:
            del self._displaced[place]
            return
        try:
            first, end = self._data.get_watermark_offsets(_partition(place), _CALL_S)
            offset = buffer.next_offset
            is_recreated = offset <= end and self._is_recreated(place)
        except (KafkaException, BrokerUnavailable):
            return
        resumed_at = resume(offset, first, end, self._settings.out_of_range)
        if offset > end:
            displaced.lowest_end = min(end, displaced.lowest_end)
            if clock_s() < displaced.since + 2 * self._settings.heartbeat_interval_s:
                return  # a new leader may not know its end yet
        elif is_recreated:
            resumed_at = None  # it may have grown past our position, with other records
        elif displaced.lowest_end < offset and clock_s() > displaced.since + _END_KNOWN_S:
            # It was below our position for too long: what has come since are other records.
            resumed_at, end = None, int(displaced.lowest_end)
        del self._displaced[place]
        if resumed_at is None:
            self._session.fail(OffsetOutOfRange(place.topic, place.partition, offset=offset, first=first, end=end))
        if resumed_at != offset:
            yield OutOfRange(place.topic, place.partition, offset, first, end, resumed_at)
        if resumed_at is None:
            return
        _LOGGER.warning(
            "%s continues at offset %d instead of %d: offsets %d to %d exist", place, resumed_at, offset, first, end
        )
        with self._session.lock:
            buffer.skip_to(resumed_at)
            if buffer.is_empty:
                buffer.pass_over(resumed_at)
        if place in self._assigned:  # not if the application has just paused it
            self._unassign([place])
        self._pace()

    def _assign(self, places: Mapping[GroupPartition, int | None]) -> None:
        """Make the client fetch from these offsets; None stands for the first existing record."""
        self._data.incremental_assign([
            TopicPartition(place.topic, place.partition, OFFSET_BEGINNING if offset is None else offset)
            for place, offset in places.items()
        ])  # fmt: skip
        self._assigned |= places.keys()

    def _unassign(self, places: Collection[GroupPartition]) -> None:
        for place in places:
            self._displaced.pop(place, None)
        self._assigned.difference_update(places)
        self._data.incremental_unassign(list(map(_partition, places)))

    # -- pauses

    def pause(self, topic: str | None, partition: int | None) -> None:
        """Pause one partition, a whole topic, or everything."""
        self._pauses.add(_named(topic, partition))
        self._pace()

    def resume(self, topic: str | None, partition: int | None) -> None:
        """End a pause with the same arguments; without any, end all pauses."""
        self._pauses.discard(_named(topic, partition))
        if topic is None:
            self._pauses.clear()
        self._pace()

    def is_paused(self, place: GroupPartition) -> bool:
        return not self._pauses.isdisjoint({(None, None), (place.topic, None), (place.topic, place.partition)})

    def _pace(self) -> None:
        """Assign what is to be fetched and unassign the rest, each in one call.

        Pausing in the client would be an alternative; but its `resume` does not wake the thread that fetches from a
        broker, which sleeps for a second if all partitions there were paused (librdkafka 2.16,
        `rd_kafka_toppar_pause_resume`).
        """
        with self._session.lock:
            held = {
                place: buffer.fetched_from
                for place, buffer in self._session.buffer.items()
                if buffer.assigned and buffer.stopping_at is None
            }
        waiting = {place for place in held if self.is_paused(place) or place in self._crowded}
        if idle := waiting & self._assigned:
            self._unassign(idle)
        if begun := held.keys() - waiting - self._assigned:
            self._assign({place: held[place] for place in begun})

    def _make_room(self, busy: Mapping[GroupPartition, PartitionBuffer]) -> None:
        """Stop fetching a place that has enough waiting records and waits for a commit: others would wait with it.

        Until little waits: what the client had fetched ahead is dropped, and fetched again.
        """
        most = self._settings.max_open_records
        crowded = {
            place
            for place, buffer in busy.items()
            if len(buffer.fetched) >= self._fetched and (place in self._crowded or buffer.open_records >= most)
        }
        if crowded != self._crowded:
            self._crowded = crowded
            self._pace()

    # -- records

    def bounds(self, place: GroupPartition) -> tuple[int, int] | None:
        """The first offset and the end, as received with the last fetch; None once closed. From any thread."""
        try:
            with self._swap:
                low, high = self._data.get_watermark_offsets(_partition(place), cached=True)
        except RuntimeError:
            return None
        return low, high

    def fetch(self, timeout_s: float) -> None:
        """Put arriving records into the buffers, after waiting for the first one up to `timeout_s`."""
        session = self._session
        with session.lock:
            busy = {place: buffer for place, buffer in session.buffer.items() if buffer.busy}
            self._make_room(busy)
            waiting = self._waiting_records(busy)
            proposed = self._settings.at_most_once and any(buffer.proposed for buffer in busy.values())
        if proposed:
            timeout_s = min(timeout_s, _POLL_S)  # the answer arrives on the other thread
        if waiting > (_MOST_WAITING_AMO if self._settings.at_most_once else _MOST_WAITING) * self._fetched:
            session.news.wait(min(timeout_s, _POLL_S))
            session.news.clear()
            return
        try:
            first = self._data.poll(timeout_s)
            if first is None:
                self._emptied = True
                return
            # With a timeout, it would wait for the full number.
            messages = [first, *self._data.consume(self._fetched - 1, 0)]
        except BaseException:  # of a callback of the application: what the client had taken out is lost with it
            self._unassign(tuple(self._assigned))
            self._pace()
            raise
        self._emptied |= len(messages) < self._fetched
        troubles = list(filter(_ERROR, messages))
        if troubles:
            messages = [message for message in messages if message.error() is None]
        if messages:
            self._silent_since = None
        runs = self._runs(messages)
        with session.lock:
            for (topic, partition), run in runs.items():
                buffer = session.buffer.get(GroupPartition(self._settings.group, topic, partition))
                if buffer is not None and buffer.assigned and buffer.stopping_at is None:
                    buffer.fetch(run)
        for message in troubles:  # last: the client would not return the records that came with them
            self._trouble(message)

    def _waiting_records(self, busy: Mapping[GroupPartition, PartitionBuffer]) -> int:
        """Counts places that are still fetched, without those that wait for a commit: others must not wait for these.

        `_make_room` limits what waits for these.
        """
        settings = self._settings
        most = math.inf if settings.at_most_once else settings.max_open_records
        return sum(
            len(buffer.fetched)
            for place, buffer in busy.items()
            if buffer.fetched and place in self._assigned and buffer.open_records < most
        )

    def pass_over(self) -> None:
        """Count transaction markers, aborted and compacted records as processed where nothing else is left.

        Kafka's client skips them when it is polled; otherwise they would appear as a permanent lag.
        """
        with self._session.lock:
            empty = {place: buffer for place, buffer in self._session.buffer.items() if self._is_empty(place, buffer)}
        places = list(empty)
        positions = self._data.position([_partition(each) for each in places]) if places else []
        with self._session.lock:
            for place, position in zip(places, positions, strict=True):
                buffer = empty[place]
                if self._is_empty(place, buffer):  # the client has no position until it has read a record
                    buffer.pass_over(max(position.offset, buffer.next_offset))

    def _is_empty(self, place: GroupPartition, buffer: PartitionBuffer) -> bool:
        idle = buffer.assigned and buffer.is_empty and buffer.stopping_at is None
        return idle and place in self._assigned and place not in self._displaced

    def _runs(self, messages: list[Any]) -> Mapping[tuple[str, int], list[Any]]:
        """By topic and partition. The client returns many of one in a row, which therefore need no loop of ours."""
        runs: dict[tuple[str, int], list[Any]] = defaultdict(list)
        topics = self._settings.topics
        for topic, of_topic in [(topics[0], messages)] if len(topics) == 1 else groupby(messages, _TOPIC):
            for partition, run in groupby(of_topic, _PARTITION):
                runs[topic, partition] += run
        return runs

    def look(self) -> None:
        """To be called once an interval: continue with places that the client has stopped fetching."""
        self._learn_topics()
        unknown = [place for place, topic in self._begun_in.items() if topic is None]
        if unknown and not self._topics.is_open:
            self._topics.put(unknown)
        emptied, self._emptied = self._emptied, False
        for place in self._stalls.look(self._waiting() if emptied else {}, clock_s()):
            buffer = self._session.buffer.get(place)
            if buffer is None or place not in self._assigned:
                continue
            _LOGGER.warning("%s had stalled, and continues at offset %d", place, buffer.next_offset)
            self._unassign([place])
            self._assign({place: buffer.fetched_from})

    def _waiting(self) -> dict[GroupPartition, int]:
        """What the client reads next, of places with nothing waiting. It has skipped what is not visible to us."""
        with self._session.lock:
            known = {
                place: buffer.fetched_to
                for place, buffer in self._session.buffer.items()
                if place in self._assigned and place not in self._displaced and not buffer.fetched
            }
        places, waiting = list(known), {}
        positions = self._data.position([_partition(each) for each in places]) if places else []
        for place, position in zip(places, positions, strict=True):
            fetched_to = known[place]
            if position.offset >= 0:
                waiting[place] = position.offset
            elif fetched_to is not None:  # nothing has arrived since it was assigned
                waiting[place] = fetched_to + 1
        return waiting

    def _trouble(self, message: Any) -> None:
        error = message.error()
        if error.code() == KafkaError._AUTO_OFFSET_RESET and "truncation" in error.str().lower():
            # The log may have grown past our position by the time we look, with other records.
            self._session.fail(
                BrokerError(
                    f"{message.topic()}[{message.partition()}] has lost records, and may have others at their offsets:"
                    f" {error.str()}",
                    hint="`harvester claims set-position` sets where to continue",
                )
            )
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            place = GroupPartition(self._settings.group, message.topic(), message.partition())
            self._displaced.setdefault(place, _Displaced(clock_s()))
        elif not passes(error) or error.code() in _UNREADABLE:
            self._session.fail(BrokerError(f"{message.topic()}[{message.partition()}]: {error.str()}"))


def _partition(place: GroupPartition) -> TopicPartition:
    return TopicPartition(place.topic, place.partition)


def _named(topic: str | None, partition: int | None) -> tuple[str | None, int | None]:
    if topic is None and partition is not None:
        raise ValueError(f"partition {partition} is given without a topic")
    return topic, partition

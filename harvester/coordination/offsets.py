"""Reads and writes Kafka's own group offsets: for tools, and to find where a group stood before it coordinated.

Thin. `Inquiry` asks for them on behalf of new claims, so that the consumer's thread does not wait for an answer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from harvester.bounds import SILENT, answer, passes, refresh
from harvester.clock import clock_s
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")
_LOGGER = logging.getLogger("harvester.coordination")
_CALL_S = 5.0
_LONGEST_CALL_S = 8.0
_LAST_S = 2.0
_POLL_S = 0.002
_TURN_S = 0.5
_PATIENCE_S = 10.0  # for a coordinator's answer; 2 intervals if longer


class _Writer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        sent_at: deque[float] = deque()  # of commits without an answer yet

        def answered(error: KafkaError | None, _: Any) -> None:
            sent_at.popleft()
            if error is not None:
                _LOGGER.info("group offsets were not written: %s", error)

        self.sent_at = sent_at
        self._client = Consumer({**options, "on_commit": answered})

    def commit(self, offsets: list[TopicPartition]) -> None:
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            _LOGGER.info("group offsets were not written: %s", error)
            return
        self.sent_at.append(clock_s())

    def serve(self, timeout_s: float) -> None:
        self._client.poll(timeout_s)

    def wait(self) -> None:
        while self.sent_at:
            self.serve(_TURN_S)


class GroupOffsets:
    """For the consumer's thread, except for `committed` and `ends`, which any thread may call.

    It has one client for reading and one for writing. The client repeats a commit forever that the group coordinator
    does not answer. Until it is answered, the client does not start to fetch what is assigned to it, does not report
    the group's offsets, and cannot be closed (librdkafka issue 3740); and after it was released, its main thread takes
    a whole core until a broker is back. So a client that waits for an answer is kept until it has it: an outage of the
    brokers then costs nothing. Administrative requests would end by themselves, but with a moving coordinator they end
    the process (librdkafka issue 4605, and `rd_kafka_handle_OffsetFetch` of 2.16).
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._group = settings.group
        self._connection = settings.connection
        self._options = {
            **settings.connection,
            "group.id": settings.group,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
        }
        self._patience_s = max(_PATIENCE_S, 2 * settings.heartbeat_interval_s)
        self._reader = Consumer(self._options)
        self._unanswered_since: dict[str, float] = {}  # by the kind of request to the reader
        self._lock = threading.Lock()  # guards its replacement
        self._writer = _Writer(self._options)
        self._last: threading.Thread | None = None  # waits for the previous writer's answers

    def committed(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int | None]:
        """The next offset of each partition, None if the group has none; partitions without an answer now are left out.

        Raises BrokerUnavailable (ask again) or BrokerError.
        """
        asked = [TopicPartition(place.topic, place.partition) for place in places]
        reader = self._reader
        try:
            answers = reader.committed(asked, timeout=_CALL_S)
        except KafkaException as error:
            self._no_answer(reader, "committed")
            problem = error.args[0]
            text = f"the offsets of group {self._group!r} cannot be read: {problem.str()}"
            if passes(problem):
                raise BrokerUnavailable(text) from error
            raise BrokerError(text, hint="this user needs to read and write the group's offsets") from error
        found = {
            GroupPartition(self._group, each.topic, each.partition): each.offset if each.offset >= 0 else None
            for each in answers
            if each.error is None
        }
        if found:
            self._unanswered_since.pop("committed", None)
        else:
            self._no_answer(reader, "committed")
        return found

    def _no_answer(self, reader: Consumer, question: str) -> None:
        """This client gets no answer: if that persists, use another one."""
        with self._lock:
            since = self._unanswered_since.setdefault(question, clock_s())
            if clock_s() >= since + self._patience_s and reader is self._reader:
                _LOGGER.info("another client requests the offsets of group %r now", self._group)
                self._reader = Consumer(self._options)
                self._unanswered_since.clear()

    def ends(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int]:
        """The end offset of each partition; partitions without an answer now are left out.

        Raises BrokerUnavailable.
        """
        return self._at(dict.fromkeys(places, OFFSET_END))

    def topic_ids(self, places: Collection[GroupPartition]) -> dict[str, str]:
        """The ids of these partitions' topics, by name; those without an answer now are left out.

        The client that asks is not kept: claims begin rarely. Raises BrokerUnavailable.
        """
        admin = AdminClient({**self._connection, **SILENT})
        names = {place.topic for place in places}
        found: dict[str, str] = {}
        try:
            futures = admin.describe_topics(TopicCollection(list(names)), request_timeout=_CALL_S)
            for name, future in futures.items():
                found[name] = str(answer(future, _CALL_S).topic_id)
        except KafkaException as error:
            raise BrokerUnavailable(f"topics cannot be described: {error.args[0].str()}") from error
        return found

    def at_times(self, times: Mapping[GroupPartition, int]) -> dict[GroupPartition, int]:
        """The offset of the first record from that time on, in milliseconds since the epoch; as in `ends` if there is
        none.
        """
        found = self._at(times)
        return {**self.ends(times.keys() - found.keys()), **found} if len(found) < len(times) else found

    def _at(self, asked_at: Mapping[GroupPartition, int]) -> dict[GroupPartition, int]:
        asked = [TopicPartition(place.topic, place.partition, at) for place, at in asked_at.items()]
        reader = self._reader
        try:
            found = reader.offsets_for_times(asked, timeout=_CALL_S)
        except KafkaException as error:
            self._no_answer(reader, "ends")
            self._ask_anew({place.topic for place in asked_at})
            raise BrokerUnavailable(f"offsets of partitions cannot be read: {error.args[0].str()}") from error
        self._unanswered_since.pop("ends", None)
        self._ask_anew({each.topic for each in found if each.error is not None})
        return {
            GroupPartition(self._group, each.topic, each.partition): each.offset
            for each in found
            if each.error is None and each.offset >= 0
        }

    def _ask_anew(self, topics: Collection[str]) -> None:
        """For the next request: the client caches what it was told while a partition had no leader."""
        for topic in topics:
            refresh(self._reader, topic, _LAST_S)

    def mirror(self, processed: Mapping[GroupPartition, int | None], *, unanswered: int = 1) -> None:
        """Write the last processed offsets, unless more than `unanswered` commits have no answer yet.

        Nothing depends on whether that succeeds.
        """
        writer = self._writer
        writer.serve(0)
        late = bool(writer.sent_at) and clock_s() > writer.sent_at[0] + self._patience_s
        if late and (self._last is None or not self._last.is_alive()):  # otherwise there would be more and more
            _LOGGER.info("group offsets were not written: no answer for %g s", self._patience_s)
            self._last = _let_go(writer)
            writer = self._writer = _Writer(self._options)
        offsets = [
            TopicPartition(place.topic, place.partition, last_offset + 1)
            for place, last_offset in processed.items()
            if last_offset is not None
        ]
        if offsets and len(writer.sent_at) < unanswered:
            writer.commit(offsets)

    def close(self) -> None:
        """Wait a while for answers, and close the connections."""
        deadline = clock_s() + _LAST_S
        while self._writer.sent_at and clock_s() < deadline:
            self._writer.serve(_POLL_S)
        last = _let_go(self._writer)
        del self._writer, self._reader
        last.join(_LAST_S)


def _let_go(writer: _Writer) -> threading.Thread:
    """Release it once it has its answers; the thread holds the last reference, and nobody waits for it."""
    thread = threading.Thread(target=writer.wait, name="group-offsets", daemon=True)
    thread.start()
    return thread


class Question(Generic[T]):
    """A request to the brokers, one at a time. Belongs to one thread; `ask` is called on another."""

    def __init__(self, ask: Callable[[Collection[GroupPartition]], T]) -> None:
        self._ask = ask
        self._future: Future[T] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._future is not None

    def put(self, places: Collection[GroupPartition]) -> None:
        self._future = Future()
        self._thread = threading.Thread(target=_answer, args=(self._future, self._ask, places), daemon=True)
        self._thread.start()

    def take(self) -> T | None:
        """The answer, once; None if there is none now. Raises what `ask` raised."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        try:
            return future.result()
        finally:
            del future  # otherwise an error's traceback would keep the client alive

    def close(self) -> None:
        """Wait a while for the answer to the last request; until then the client in use stays alive."""
        if self._thread is not None:
            self._thread.join(_LONGEST_CALL_S)
        self._future = None


def _answer(
    future: Future[T], ask: Callable[[Collection[GroupPartition]], T], places: Collection[GroupPartition]
) -> None:
    try:
        future.set_result(ask(places))
    except Exception as error:  # noqa: BLE001 - the top frame of this thread; `take` raises it
        future.set_exception(error)
    finally:
        del future


Committed = dict[GroupPartition, int | None]  # the next offset; None if the group has none


class Inquiry:
    """Asks Kafka for the group's offsets on behalf of new claims: only they wait while the group coordinator is slow.

    One request for all of them at a time. If it gets no answer, the next one is sent `again_s` later.
    """

    def __init__(self, ask: Callable[[Collection[GroupPartition]], Committed], again_s: float) -> None:
        self.question, self._again_s = Question(ask), again_s
        self._answers: dict[PartitionBuffer, int | None] = {}  # by claim: an older claim's would be out of date
        self._asked: list[PartitionBuffer] = []
        self._ask_at = 0.0
        self._waits = False  # whether the wait for an answer was logged

    def look(self, begun: Iterable[PartitionBuffer]) -> dict[PartitionBuffer, int | None]:
        """The answers for these claims so far; asks for the others. Raises BrokerError if there never will be one."""
        self._take()
        wanted = list(begun)
        self._answers = {buffer: self._answers[buffer] for buffer in wanted if buffer in self._answers}
        if not self.question.is_open and len(self._answers) < len(wanted) and clock_s() >= self._ask_at:
            self._asked = [buffer for buffer in wanted if buffer not in self._answers]
            self.question.put([buffer.place for buffer in self._asked])
        return self._answers

    def _take(self) -> None:
        try:
            committed = self.question.take()
        except BrokerUnavailable as error:
            self._ask_at = clock_s() + self._again_s
            if not self._waits:
                _LOGGER.warning("claims wait until the group's offsets are known: %s", error)
            self._waits = True
            return
        if committed is None:
            return
        if committed and self._waits:
            _LOGGER.warning("the group's offsets are known again")
            self._waits = False
        self._answers |= {buffer: committed[buffer.place] for buffer in self._asked if buffer.place in committed}
        if len(committed) < len(self._asked):
            self._ask_at = clock_s() + self._again_s

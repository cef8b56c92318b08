"""Reads and writes Kafka's own group offsets: for tools, and where the group stood before it coordinated. Thin."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from harvester.bounds import passes, refresh
from harvester.clock import clock_s
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_CALL_S = 5.0
_LAST_S = 2.0
_POLL_S = 0.002
_TURN_S = 0.5
_PATIENCE_S = 10.0  # with a coordinator's answer; 2 intervals, if that is more


class _Writer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        sent_at: deque[float] = deque()  # of commits that have no answer yet

        def answered(error: KafkaError | None, _: Any) -> None:
            sent_at.popleft()
            if error is not None:
                _LOGGER.info("group offsets are not written: %s", error)

        self.sent_at = sent_at
        self._client = Consumer({**options, "on_commit": answered})

    def commit(self, offsets: list[TopicPartition]) -> None:
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            _LOGGER.info("group offsets are not written: %s", error)
            return
        self.sent_at.append(clock_s())

    def serve(self, timeout_s: float) -> None:
        self._client.poll(timeout_s)

    def wait(self) -> None:
        while self.sent_at:
            self.serve(_TURN_S)


class GroupOffsets:
    """Belongs to the consumer's thread, but for `committed` and `ends`, which any may call.

    It has a client that reads and one that writes. A commit that the group's coordinator does not answer is repeated by
    the client for ever. Until it is answered the client neither starts to fetch what is assigned to it, nor tells where
    the group stands, nor lets itself be closed (librdkafka issue 3740); and once it was let go, its main thread takes a
    whole core until a broker is back. So a client that waits for an answer is kept until it has it: an outage of the
    brokers costs nothing. Requests of an administrator would end by themselves, but with a coordinator that moves they
    end the process (librdkafka issue 4605, and `rd_kafka_handle_OffsetFetch` of 2.16).
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._group = settings.group
        self._options = {
            **settings.connection,
            "group.id": settings.group,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
        }
        self._patience_s = max(_PATIENCE_S, 2 * settings.heartbeat_interval_s)
        self._reader = Consumer(self._options)
        self._unanswered_since: dict[str, float] = {}  # by what the reader is asked
        self._lock = threading.Lock()  # around its replacement
        self._writer = _Writer(self._options)
        self._last: threading.Thread | None = None  # that waits for the answers of the writer before

    def committed(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int | None]:
        """The next offset of each partition, None if the group has none; left out is what has no answer now.

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
        """This one has none: from now on another one is asked, if that lasts."""
        with self._lock:
            since = self._unanswered_since.setdefault(question, clock_s())
            if clock_s() >= since + self._patience_s and reader is self._reader:
                _LOGGER.info("the offsets of group %r are asked for by another client", self._group)
                self._reader = Consumer(self._options)
                self._unanswered_since.clear()

    def ends(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int]:
        """The offset behind the last record of each partition; left out is what has no answer now.

        Raises BrokerUnavailable.
        """
        return self._at(dict.fromkeys(places, OFFSET_END))

    def at_times(self, times: Mapping[GroupPartition, int]) -> dict[GroupPartition, int]:
        """The offset of the first record from that many milliseconds since the epoch on; as `ends` if there is none."""
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
        """For the next question: the client keeps what it was told while a partition was led by nobody."""
        for topic in topics:
            refresh(self._reader, topic, _LAST_S)

    def mirror(self, processed: Mapping[GroupPartition, int | None], *, unanswered: int = 1) -> None:
        """Tell them the last offsets that are processed, unless so many commits have no answer yet.

        Nothing is decided by whether that succeeds.
        """
        writer = self._writer
        writer.serve(0)
        late = bool(writer.sent_at) and clock_s() > writer.sent_at[0] + self._patience_s
        if late and (self._last is None or not self._last.is_alive()):  # or there would be more and more
            _LOGGER.info("group offsets are not written: no answer for %g s", self._patience_s)
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
        """Wait a while for answers, and forget the connections."""
        deadline = clock_s() + _LAST_S
        while self._writer.sent_at and clock_s() < deadline:
            self._writer.serve(_POLL_S)
        last = _let_go(self._writer)
        del self._writer, self._reader
        last.join(_LAST_S)


def _let_go(writer: _Writer) -> threading.Thread:
    """Forget it once it has its answers; the thread has the last reference, and nobody waits for that."""
    thread = threading.Thread(target=writer.wait, name="group-offsets", daemon=True)
    thread.start()
    return thread

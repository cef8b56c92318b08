"""Kafka's own group offsets: where the group stands for tools, and where it stood before it coordinated. Thin.

They are written as an administrator does it, by requests that end at a time limit, and never through a consumer. A
consumer repeats a commit that the group's coordinator does not answer for ever. Until it is answered it neither starts
to fetch what is assigned to it nor lets itself be closed (librdkafka issue 3740); and once it is let go, its main
thread takes a whole core until a broker is back.

They are read through a consumer that does nothing else: as an administrator's request it would end the process, when
the group's coordinator has just moved (`rd_kafka_handle_OffsetFetch` speaks to a consumer that is not there, 2.16).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.messages import Place
from harvester.coordination.troubles import passes
from harvester.errors import BrokerError, BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_CALL_S = 5.0
_LAST_S = 2.0
_PATIENCE_S = 10.0  # with a commit; 2 intervals, if that is more
_MARGIN_S = 5.0


def reader(group: str, options: Mapping[str, Any]) -> Consumer:
    """A client for `committed` alone."""
    return Consumer(
        {**options, "group.id": group, "enable.auto.commit": False, "allow.auto.create.topics": False, "log_level": 0}
    )


def write_offsets(admin: AdminClient, group: str, offsets: Sequence[TopicPartition], within_s: float) -> None:
    """Write the next offset of each partition. Raises KafkaException, also if it is for one of them only."""
    _check(_result(_begin_to_write(admin, group, offsets, within_s), within_s))


def _begin_to_write(admin: AdminClient, group: str, offsets: Sequence[TopicPartition], within_s: float) -> Future[Any]:
    request = ConsumerGroupTopicPartitions(group, list(offsets))
    answer: Future[Any] = admin.alter_consumer_group_offsets([request], request_timeout=within_s)[group]
    return answer


def _result(answer: Future[Any], within_s: float) -> Any:
    try:
        return answer.result(within_s + _MARGIN_S)
    except TimeoutError as error:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from error


def _check(answered: Any) -> None:
    for each in answered.topic_partitions:
        if each.error is not None:
            raise KafkaException(each.error)


class GroupOffsets:
    """See the module's text. Belongs to the consumer's thread, but for `committed`, which any may call."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._group = settings.group
        self._patience_s = max(_PATIENCE_S, 2 * settings.heartbeat_interval_s)
        self._admin = AdminClient({**settings.connection, "log_level": "0"})
        self._reader = reader(self._group, settings.connection)
        self._sent: list[Future[Any]] = []  # what has no answer yet

    def committed(self, places: Collection[Place]) -> dict[Place, int | None]:
        """The next offset of each partition, None if the group has none; left out is what has no answer now.

        Raises BrokerUnavailable (ask again) or BrokerError.
        """
        asked = [TopicPartition(place.topic, place.partition) for place in places]
        try:
            found = self._reader.committed(asked, timeout=_CALL_S)
        except KafkaException as error:
            problem = error.args[0]
            text = f"the offsets of group {self._group!r} cannot be read: {problem.str()}"
            if passes(problem):
                raise BrokerUnavailable(text) from error
            raise BrokerError(text, hint="this user needs to read and write the group's offsets") from error
        return {
            Place(self._group, each.topic, each.partition): each.offset if each.offset >= 0 else None
            for each in found
            if each.error is None
        }

    def mirror(self, processed: Mapping[Place, int | None], *, unanswered: int = 1) -> None:
        """Tell them the last offsets that are processed, unless so many requests have no answer yet.

        Nothing is decided by whether that succeeds.
        """
        for answer in [each for each in self._sent if each.done()]:
            self._sent.remove(answer)
            _look(answer)
        offsets = [
            TopicPartition(place.topic, place.partition, last_offset + 1)
            for place, last_offset in processed.items()
            if last_offset is not None
        ]
        if offsets and len(self._sent) < unanswered:
            self._sent.append(_begin_to_write(self._admin, self._group, offsets, self._patience_s))

    def close(self) -> None:
        """Wait a while for answers, and forget the connection."""
        for answer in wait(self._sent, _LAST_S).done:
            _look(answer)
        self._sent.clear()
        last: list[Any] = [self._admin, self._reader]
        del self._admin, self._reader
        # They are waited for by whoever drops the last reference.
        threading.Thread(target=last.clear, name="group-offsets", daemon=True).start()


def _look(answer: Future[Any]) -> None:
    try:
        _check(answer.result())
    except KafkaException as error:
        _LOGGER.info("group offsets are not written: %s", error)

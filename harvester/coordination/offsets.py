"""Kafka's own group offsets: where the group stands for tools, and where it stood before it coordinated. Thin.

By a client of its own. A commit that the group's coordinator does not answer is repeated by the client for ever, and
until it is answered the client neither starts to fetch what is assigned to it nor lets itself be closed
(librdkafka issue 3740). Records must not wait for that, and a client with such a commit is replaced.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from harvester.clock import clock_s
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.messages import Place
from harvester.coordination.troubles import passes
from harvester.errors import BrokerError, BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_CALL_S = 5.0
_LAST_S = 2.0
_POLL_S = 0.002
_PATIENCE_S = 10.0  # with a commit; 2 intervals, if that is more


class GroupOffsets:
    """See the module's text. Belongs to the consumer's thread, but for `committed`, which any may call."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._group = settings.group
        self._options = {
            **settings.connection,
            "group.id": settings.group,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
        }
        self._patience_s = max(_PATIENCE_S, 2 * settings.heartbeat_interval_s)
        self._connect()

    def committed(self, places: Collection[Place]) -> dict[Place, int | None]:
        """The next offset of each partition, None if the group has none; left out is what has no answer now.

        Raises BrokerUnavailable (reconnect, and ask again) or BrokerError.
        """
        asked = [TopicPartition(place.topic, place.partition) for place in places]
        try:
            found = self._client.committed(asked, timeout=_CALL_S)
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
        """Tell them the last offsets that are processed, unless so many commits have no answer yet.

        Nothing is decided by whether that succeeds.
        """
        self._client.poll(0)
        if self._sent_at and clock_s() > self._sent_at[0] + self._patience_s:
            _LOGGER.info("group offsets are not written: no answer for %g s", self._patience_s)
            self.reconnect()
        offsets = [
            TopicPartition(place.topic, place.partition, last_offset + 1)
            for place, last_offset in processed.items()
            if last_offset is not None
        ]
        if not offsets or len(self._sent_at) >= unanswered:
            return
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            _LOGGER.info("group offsets are not written: %s", error)
            return
        self._sent_at.append(clock_s())

    def close(self) -> None:
        """Wait a while for answers, and forget the connection."""
        deadline = clock_s() + _LAST_S
        while self._sent_at and clock_s() < deadline:
            self._client.poll(_POLL_S)
        last = [self._client]
        del self._client
        _let_go(last)

    def reconnect(self) -> None:
        """By a new client: one that waits for an answer would give none to the next question either."""
        last = [self._client]
        self._connect()
        _let_go(last)

    def _connect(self) -> None:
        sent_at: deque[float] = deque()  # of commits that have no answer yet

        def answered(error: KafkaError | None, _: Any) -> None:
            sent_at.popleft()
            if error is not None:
                _LOGGER.info("group offsets are not written: %s", error)

        self._sent_at = sent_at
        self._client = Consumer({**self._options, "on_commit": answered})


def _let_go(clients: list[Consumer]) -> None:
    """Forget what is in the list. `close` would wait for the coordinator, and so does the last reference to a client
    with a commit that has no answer, for 45 s.
    """
    threading.Thread(target=clients.clear, name="group-offsets", daemon=True).start()

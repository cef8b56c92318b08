"""The second proof: asking the group's coordinator to accept an offset, which shows that it still counts us in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from harvester.clock import clock_s
from harvester.neli.asked import Asked
from harvester.neli.election import Timing


class Commits:
    """Of one member, for partition 0 of the leader topic. `position`: what is committed; None until it is known.

    Each commit carries its number as metadata, by which its answer is known. For the member's thread.
    """

    def __init__(self, topic: str, timing: Timing) -> None:
        self._topic = topic
        self._interval_s = timing.heartbeat_interval_s / 2
        self._asked = Asked(timing.heartbeat_timeout_s)
        self._next_at = 0.0
        self.position: int | None = None

    def ask(self, consumer: Any) -> None:
        """Commit, without waiting for it; does nothing soon after the last time."""
        now = clock_s()
        if self.position is None or now < self._next_at:
            return
        self._next_at = now + self._interval_s
        number = self._asked.ask(now)
        offset = TopicPartition(self._topic, 0, self.position, metadata=str(number))
        try:
            consumer.commit(offsets=[offset], asynchronous=True)
        except KafkaException:
            self._asked.take(number)

    def answered(self, error: KafkaError | None, partitions: Any) -> Iterator[float]:
        """The client's answer: when each of those that were accepted was asked for."""
        for partition in partitions or ():
            sent_at = self._asked.take(int(partition.metadata or 0))
            if sent_at is not None and error is None and partition.error is None:
                yield sent_at

"""Prints the way of a claim through the code, from the moment a partition is wanted until its records are consumed.

The functions are the real ones. Kafka's clients are replaced by a few lines that keep the coordination log in memory,
and the consumer's threads by this script, which calls what each of them would call next.

What counts as a file, an object and a call across files is told by `scripts/walk --help`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import confluent_kafka
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, TopicPartition

from scripts.walking import Way, show

TOPIC = "orders"


class Record:
    """A record of the coordination log."""

    def __init__(self, partition: int, offset: int, value: bytes) -> None:
        self._partition, self._offset, self._value = partition, offset, value
        self._at_ms = round(time.time() * 1000)

    def error(self) -> None:
        """There is none."""

    def partition(self) -> int:
        """Of the log."""
        return self._partition

    def offset(self) -> int:
        """In that partition."""
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        """When it was appended."""
        return TIMESTAMP_LOG_APPEND_TIME, self._at_ms

    def value(self) -> bytes:
        """The message."""
        return self._value


LOG: list[Record] = []


class Producer:
    """Appends to the log at once, and says so when it is polled."""

    def __init__(self, _options: dict[str, Any]) -> None:
        self._reports: list[Callable[[], None]] = []

    def produce(self, _topic: str, value: bytes, *, partition: int, on_delivery: Callable[..., None]) -> None:
        """Append a message."""
        record = Record(partition, sum(each.partition() == partition for each in LOG), value)
        LOG.append(record)
        self._reports.append(lambda: on_delivery(None, record))

    def poll(self, _timeout: float) -> int:
        """Deliver the reports."""
        reports, self._reports = self._reports, []
        for report in reports:
            report()
        return len(reports)


class Consumer:
    """Reads the log from its beginning, knows one topic, and takes assignments without fetching anything."""

    def __init__(self, _options: dict[str, Any]) -> None:
        self._read = 0
        self.assigned: list[TopicPartition] = []

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Of the log."""

    def poll(self, _timeout: float) -> Record | None:
        """The next record of the log."""
        if self._read == len(LOG):
            return None
        self._read += 1
        return LOG[self._read - 1]

    def consume(self, _most: int, _timeout: float) -> list[Record]:
        """The others."""
        read, self._read = self._read, len(LOG)
        return LOG[read:]

    def get_watermark_offsets(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Everything is empty at first."""
        return 0, 0

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        """The one topic, with one partition."""
        return SimpleNamespace(topics={TOPIC: SimpleNamespace(topic=TOPIC, partitions={0: None}, error=None)})

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """The group has no offsets."""
        return partitions

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Of the topic."""
        self.assigned += partitions

    def pause(self, _partitions: list[TopicPartition]) -> None:
        """Nothing is fetched anyway."""

    resume = pause


class Inline:
    """A thread that has done its work when `start` returns; the coordination's own never starts."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", **_: Any) -> None:
        self._run = (lambda: None) if name == "coordination" else (lambda: target(*args))

    def start(self) -> None:
        """Do it."""
        self._run()


def record() -> Way:
    """The way of a claim that nobody else wants."""
    confluent_kafka.Consumer, confluent_kafka.Producer = Consumer, Producer  # type: ignore[misc, assignment]
    threading.Thread = Inline  # type: ignore[misc, assignment]
    from harvester.coordination import consumer as module
    from harvester.coordination.events import Claimed

    module.ensure_coordination_topic = lambda *_: None
    told: list[object] = []
    settings = module.ConsumerSettings(kafka={}, group="walk", topics=(TOPIC,), coordination_partitions=1)
    consumer = module.CoordinatedConsumer(settings, on_event=told.append)
    session, fetcher = consumer._session, consumer._fetcher
    session._coordinator.begin(session._log.begin(session._coordinator.worlds), 0.0)
    topics = fetcher.topics()
    assert topics is not None
    session.consume(topics)
    way = Way()
    with way.step("the coordination's thread wants the partition, and appends a claim"):
        session._turn()
    assert not session.buffer
    with way.step("it reads the claim back, which has won, and appends a heartbeat"):
        session._turn()
    assert session.buffer
    with way.step("the consumer's thread finds where to begin, fetches from there, and tells the application"):
        while not told:
            for event in fetcher.follow():
                consumer._announce(event)
    assert isinstance(told[0], Claimed)
    return way


def main() -> int:
    """The command."""
    return show("claim", __doc__ or "", record)


if __name__ == "__main__":
    sys.exit(main())

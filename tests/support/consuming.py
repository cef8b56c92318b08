"""What stands in a topic, read to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from .wait import eventually


@dataclass(frozen=True)
class Published:
    """A record as a consumer sees it."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int
    offset: int
    created_ms: int  # when it was handed to the producer


def _watermarks(consumer: Consumer, partition: TopicPartition, timeout_s: float) -> tuple[int, int]:
    """A topic that has just come to be names its leader before the leader knows."""

    def asked() -> tuple[int, int] | None:
        try:
            offsets: tuple[int, int] = consumer.get_watermark_offsets(partition, timeout_s)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE):
                return None
            raise
        return offsets

    offsets = eventually(asked, timeout_s, f"watermarks of {partition}")
    assert offsets is not None
    return offsets


def read_topic(bootstrap: str, topic: str, timeout_s: float = 30.0) -> list[Published]:
    """All records up to the ends that the partitions have now; those of a partition in order. [] without a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "group.id": "test-reader",  # demanded by the client; nothing joins
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 20,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,  # the last offset may be a marker of a transaction, which nobody is given
        }
    )
    try:
        known = consumer.list_topics(timeout=timeout_s).topics.get(topic)
        ends: dict[int, int] = {}
        for partition in known.partitions if known is not None else ():
            low, high = _watermarks(consumer, TopicPartition(topic, partition), timeout_s)
            if high > low:
                ends[partition] = high
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        found: list[Published] = []

        def finished() -> bool:
            for message in consumer.consume(1000, 0.05):
                partition, offset, error = message.partition(), message.offset(), message.error()
                assert partition is not None
                assert offset is not None
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    if offset >= ends.get(partition, 0):
                        ends.pop(partition, None)
                    continue
                assert error is None, error
                if offset >= ends.get(partition, 0):
                    continue  # came after we had looked
                headers: Any = message.headers() or []
                created_ms = message.timestamp()[1]
                found.append(Published(message.key(), message.value(), headers, partition, offset, created_ms))
            return not ends

        eventually(finished, timeout_s, f"the end of {topic}")
        return found
    finally:
        consumer.close()


def by_key(records: Iterable[Published]) -> dict[str | None, list[str | None]]:
    """The values of each key in the order of the log: what is lost, repeated or out of order shows at once."""
    found: dict[str | None, list[str | None]] = {}
    for record in records:
        key = record.key.decode() if record.key is not None else None
        found.setdefault(key, []).append(record.value.decode() if record.value is not None else None)
    return found

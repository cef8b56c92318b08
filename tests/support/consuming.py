"""What stands in a topic, read to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

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


def _bounds(consumer: Consumer, topic: str, timeout_s: float) -> dict[int, tuple[int, int]]:
    """Of each partition the first offset and the end. A topic that has just come to be has no leaders for a moment."""

    def asked() -> list[dict[int, int]]:
        # An answer about all topics of a run is large. Asked for again each time: the client keeps what it was told.
        known = consumer.list_topics(topic, timeout_s).topics[topic]
        found = []
        for which in (OFFSET_BEGINNING, OFFSET_END) if known.partitions else ():
            places = [TopicPartition(topic, partition, which) for partition in known.partitions]
            try:
                answer = consumer.offsets_for_times(places, timeout_s)
                for error in (each.error for each in answer if each.error is not None):
                    raise KafkaException(error)
            except KafkaException as raised:  # by the call itself where no partition has an answer
                if raised.args[0].code() in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE):
                    return []
                raise
            found.append({each.partition: each.offset for each in answer})
        return found or [{}, {}]

    firsts, ends = eventually(asked, timeout_s, f"offsets of {topic}")
    return {partition: (first, ends[partition]) for partition, first in firsts.items()}


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
        bounds = _bounds(consumer, topic, timeout_s)
        ends = {partition: end for partition, (first, end) in bounds.items() if end > first}
        if not ends:
            return []
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

"""From a field at rest to a history: the audit tables, the topics, the logs and the faults put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from harvester.verify.wire import ROLLED_BACK, parse
from tests.support.wait import eventually

from . import audit, logs
from .field import TOPICS, Field, Process
from .history import Delivered, Fault, History, Led, Limits, Stuck


def record(field: Field, faults: Sequence[Fault], stuck: Sequence[Stuck], limits: Limits, rolled_back: int) -> History:
    """Read everything there is; the harvesters and the writers have ended."""
    delivered, foreign = read_topics(field.bootstrap, TOPICS)
    accidents = list(field.accidents)
    with field.connect() as connection:
        committed = audit.read_committed(connection)
        counts: dict[str, int] = {}
        for row in committed:
            counts[row.key] = counts.get(row.key, 0) + 1
        if counts != audit.side_counts(connection):
            accidents.append("the audit and the writers' own counts differ")
        return History(
            committed=committed,
            delivered=delivered,
            quarantined=audit.read_quarantined(connection),
            waiting=audit.read_waiting(connection),
            removed=audit.read_removed(connection),
            marked=audit.read_marked(connection),
            led=read_leaderships(field.processes),
            faults=[*faults, *(loss for each in field.processes for loss in logs.losses(each.name, each.log()))],
            stuck=stuck,
            accidents=accidents,
            rolled_back=rolled_back,
            foreign=foreign,
            limits=limits,
        )


def read_leaderships(processes: Iterable[Process]) -> list[Led]:
    """Of all processes, by time."""
    found = [
        led
        for each in processes
        for led in logs.leaderships(each.name, each.log(), each.ended or each.began, each.frozen)
    ]
    return sorted(found, key=lambda led: led.began)


def read_topics(bootstrap: str, topics: Sequence[str], timeout_s: float = 60.0) -> tuple[list[Delivered], list[str]]:
    """(the writers' records in the order of each partition, positions of what is none of theirs)."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "group.id": "campaign",  # demanded by the client; nothing joins
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
    )
    delivered: list[Delivered] = []
    foreign: list[str] = []
    try:
        ends = dict(_ends(consumer, topics, timeout_s))
        consumer.assign([TopicPartition(*place, 0) for place in ends])

        def finished() -> bool:
            for message in consumer.consume(5_000, 0.05):
                assert message.error() is None, message.error()
                place = (message.topic() or "", message.partition() or 0)
                offset = message.offset() or 0
                _take(message, place, offset, delivered, foreign)
                if offset + 1 >= ends.get(place, 0):
                    ends.pop(place, None)
            return not ends

        eventually(finished, timeout_s, "the ends of the topics")
    finally:
        consumer.close()
    return delivered, foreign


def _ends(consumer: Consumer, topics: Sequence[str], timeout_s: float) -> Iterable[tuple[tuple[str, int], int]]:
    known = consumer.list_topics(timeout=timeout_s).topics
    for topic in topics:
        for partition in known[topic].partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout_s)
            if high > low:
                yield (topic, partition), high


def _take(message: Any, place: tuple[str, int], offset: int, delivered: list[Delivered], foreign: list[str]) -> None:
    row, key = parse(message.value()), message.key()
    if row is None or key is None or row.kind == ROLLED_BACK:
        foreign.append(f"{place[0]}[{place[1]}]@{offset}: {(message.value() or b'')[:40]!r}")
        return
    at = message.timestamp()[1] / 1000
    delivered.append(Delivered(key.decode(), row.seq, *place, offset, at, row.created_us))

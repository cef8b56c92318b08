"""From a field at rest to a history: the audit tables, the topics, the logs and the faults put together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from harvester import origin
from harvester.verify.load import ROLLED_BACK, parse

from . import audit, logs
from .field import TOPICS, Field
from .history import Delivered, Fault, History, Led, Limits, Stuck
from .process import Process


def record(field: Field, faults: Sequence[Fault], stuck: Sequence[Stuck], limits: Limits, rolled_back: int) -> History:
    """Read everything there is; the harvesters and the writers have ended."""
    delivered, foreign, hidden = read_topics(field.bootstrap, TOPICS)
    accidents = [*field.accidents, *hidden]
    accidents += [text for each in field.processes for text in logs.failures(each.name, each.log())]
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
            truncated=audit.read_truncated(connection),
            removed=audit.read_removed(connection),
            marked=audit.read_marked(connection),
            led=read_leaderships(field.processes),
            faults=[*faults, *(loss for each in field.processes for loss in logs.losses(each.name, each.log()))],
            stuck=stuck,
            accidents=accidents,
            rolled_back=rolled_back,
            foreign=foreign,
            limits=limits,
            delivery=field.delivery,
        )


def read_leaderships(processes: Iterable[Process]) -> list[Led]:
    """Of all processes, by time."""
    found = [
        led
        for each in processes
        for led in logs.leaderships(each.name, each.log(), each.ended or each.began, each.frozen, each.setup.delivery)
    ]
    return sorted(found, key=lambda led: led.began)


def read_topics(
    bootstrap: str, topics: Sequence[str], timeout_s: float = 60.0
) -> tuple[list[Delivered], list[str], list[str]]:
    """(the writers' records in the order of each partition, positions of what is none of theirs, what cannot be read).

    Read is what is committed, to the ends that everything has: an open transaction hides what follows it. `timeout_s`:
    how long to wait for the next record.
    """
    options = {
        "bootstrap.servers": bootstrap,
        "broker.address.family": "v4",
        "group.id": "campaign",  # demanded by the client; nothing joins
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
    }
    ends = _ends(options, topics, timeout_s)
    # The last offset may be a marker of a transaction, which nobody is given: then the end of the partition is told.
    consumer = Consumer({**options, "isolation.level": "read_committed", "enable.partition.eof": True})
    delivered: list[Delivered] = []
    foreign: list[str] = []
    try:
        consumer.assign([TopicPartition(*place, 0) for place in ends])
        deadline = time.monotonic() + timeout_s
        while ends and time.monotonic() < deadline:
            messages = consumer.consume(5_000, 0.05)
            if messages:  # on a busy machine it takes minutes to read them all
                deadline = time.monotonic() + timeout_s
            for message in messages:
                place = (message.topic() or "", message.partition() or 0)
                offset, error = message.offset() or 0, message.error()
                if error is None:
                    _take(message, place, offset, delivered, foreign)
                    offset += 1
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                if offset >= ends.get(place, 0):
                    ends.pop(place, None)
    finally:
        consumer.close()
    hidden = [
        f"an open transaction hides the end of {topic}[{number}], after {timeout_s:g} s" for topic, number in ends
    ]
    return delivered, foreign, hidden


def _ends(options: dict[str, Any], topics: Sequence[str], timeout_s: float) -> dict[tuple[str, int], int]:
    consumer = Consumer({**options, "isolation.level": "read_uncommitted"})
    found = {}
    try:
        known = consumer.list_topics(timeout=timeout_s).topics
        for topic in topics:
            for partition in known[topic].partitions:
                low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout_s)
                if high > low:
                    found[topic, partition] = high
    finally:
        consumer.close()
    return found


def _take(message: Any, place: tuple[str, int], offset: int, delivered: list[Delivered], foreign: list[str]) -> None:
    row, key = parse(message.value()), message.key()
    if row is None or key is None or row.kind == ROLLED_BACK:
        foreign.append(f"{place[0]}[{place[1]}]@{offset}: {(message.value() or b'')[:40]!r}")
        return
    at = message.timestamp()[1] / 1000
    sent = origin.decode(origin.find(message.headers()))
    term = None if sent is None else sent.term
    delivered.append(Delivered(key.decode(), row.seq, *place, offset, at, row.created_us, term))

"""A relay of a few lines and a free hand over the log, to make histories that `verify` has to judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from confluent_kafka import Producer

from harvester.outbox.tables import OutboxTable
from harvester.verify.load import Load
from harvester.verify.pump import PumpReport, pump

TABLE = OutboxTable.parse("outbox")


@dataclass(frozen=True)
class Row:
    """A row of the outbox as it goes to Kafka; `partition` -1 lets the key decide."""

    id: int
    topic: str
    key: bytes
    value: bytes
    partition: int = -1


def fill(dsn: str, topic: str, records: int = 40, keys: int = 4) -> PumpReport:
    return pump(dsn, TABLE, Load(records=records, topics=(topic,), keys=keys, value_bytes=60))


def take(dsn: str) -> list[Row]:
    """Empty the outbox; its rows in the order of their ids."""
    query = "DELETE FROM outbox RETURNING id, kafka_topic, kafka_key, kafka_value"
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(query).fetchall()
    return [Row(row_id, topic, key.encode(), value.encode()) for row_id, topic, key, value in sorted(found)]


def publish(bootstrap: str, rows: Iterable[Row]) -> None:
    """Produce in the given order; one partition's records land in that order."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    for row in rows:
        producer.produce(row.topic, row.value, row.key, row.partition)
    assert producer.flush(30) == 0


def transactional(bootstrap: str, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "linger.ms": 5})
    producer.init_transactions(30)
    return producer


def produce_in(producer: Producer, rows: Iterable[Row]) -> None:
    """Add records to the producer's open transaction and wait until the broker has them."""
    for row in rows:
        producer.produce(row.topic, row.value, row.key, row.partition)
    assert producer.flush(30) == 0

"""The environment of the session: its own servers, empty database, two topics and configuration."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewTopic
from psycopg import sql
from psycopg.conninfo import make_conninfo

from harvester import load_config, stack
from harvester.errors import BrokerError

NAME = "billing-1"
_SMALL, _LARGE = 2_000, 1_000_000  # bytes that a record of the second topic may have, before and after
_APPLIED_S = 60.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """`folder` has a short path. Records of `orders` are published; those of `invoices` are too large at first."""

    folder: Path
    config: Path
    dsn: str
    bootstrap: str
    orders: str
    invoices: str

    def client(self) -> dict[str, Any]:
        """Options of every client."""
        return {"bootstrap.servers": self.bootstrap, "broker.address.family": "v4", "log_level": 3}

    def admin(self) -> AdminClient:
        return AdminClient(self.client())

    def insert_invoice(self) -> None:
        """A record that is too large for its topic, as an application would write it."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute(
                """INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
                   VALUES (%s, 'customer-42', repeat('x', %s), '{}', '{}')""",
                (self.invoices, 2 * _SMALL),
            )

    def permit_large_invoices(self) -> None:
        """Fixes the topic's configuration."""
        entry = ConfigEntry("max.message.bytes", str(_LARGE), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.invoices, incremental_configs=[entry])
        admin = self.admin()
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(60)
        # The broker applies it a little later; a record that it takes is the proof.
        deadline = time.monotonic() + _APPLIED_S
        producer = Producer(self.client())
        while (error := _produced(producer, self.invoices, bytes(2 * _SMALL))) is not None:
            if time.monotonic() > deadline:
                raise BrokerError(f"the topic {self.invoices} still takes no large record: {error}")
            time.sleep(_LOOK_S)

    def published_invoices(self) -> int:
        """The number of records in the topic, from which none is removed meanwhile."""
        consumer = Consumer({**self.client(), "group.id": "nobody"})
        try:
            first, end = consumer.get_watermark_offsets(TopicPartition(self.invoices, 0), timeout=60)
        finally:
            consumer.close()
        return int(end - first)


def _produced(producer: Producer, topic: str, value: bytes) -> KafkaError | None:
    """Produces a record and waits for its report: None, or the reason for a refusal."""
    reports: list[KafkaError | None] = []
    producer.produce(topic, value, on_delivery=lambda error, _: reports.append(error))
    producer.flush(_APPLIED_S)
    return reports[0] if reports else KafkaError(KafkaError._TIMED_OUT)


@contextmanager
def prepared(dsn: str | None, bootstrap: str | None, say: Callable[[str], None]) -> Iterator[Place]:
    """Starts servers unless they are given; in given ones, it removes only what it created."""
    unique = uuid.uuid4().hex[:6]
    name = f"recording-{unique}"
    folder = Path(tempfile.mkdtemp(prefix="hv-", dir="/tmp"))
    folder.chmod(0o755)  # started by root, PostgreSQL runs under another account
    options = stack.StackOptions(durable=False, kafka_heap_mb=512, dsn=dsn, bootstrap=bootstrap)
    try:
        info = stack.up(folder / "stack", options, progress=say)
        place = Place(
            folder=folder,
            config=folder / "harvester.toml",
            dsn=make_conninfo(info.dsn, dbname=name),
            bootstrap=info.bootstrap,
            orders=f"orders-{unique}",
            invoices=f"invoices-{unique}",
        )
        _configure(place, name)
        try:
            _create(place, info.dsn, name)
            yield place
        finally:
            _remove(place, info.dsn, name)
    finally:
        stack.down(folder / "stack", delete=True)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(place: Place, name: str) -> None:
    settings = {"name": NAME, "leader_group_id": name, "data_source": place.dsn, "archive": "ids"}
    kafka = {"bootstrap.servers": place.bootstrap, "broker.address.family": "v4"}
    place.config.touch(mode=0o600)  # the DSN may hold a password
    # A JSON string is a TOML string; $ begins a variable there.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    # All shards work, however little there is to do; a machine that is busy does not cost the lead.
    lines += ["limits.records_per_shard = 0", 'limits.heartbeat_timeout = "10s"']
    lines += ["[base_kafka_config]", *(f'"{key}" = {json.dumps(value)}' for key, value in kafka.items())]
    place.config.write_text("\n".join(lines).replace("$", "$$") + "\n")


def _create(place: Place, dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    topics = [NewTopic(place.orders, 8, -1), NewTopic(place.invoices, 1, -1, config={"max.message.bytes": str(_SMALL)})]
    admin = place.admin()
    for done in admin.create_topics(topics).values():
        done.result(60)


def _remove(place: Place, dsn: str, name: str) -> None:
    """Best effort: leftovers are harmless."""
    with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
    with suppress(KafkaException):
        admin = place.admin()
        topics = admin.delete_topics([place.orders, place.invoices, load_config(place.config).leader_topic])
        wait([*topics.values(), *admin.delete_consumer_groups([name]).values()], timeout=30)

"""What an audit looks at, made up: deliveries as Kafka has them, the database's history, and the real things."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import Producer
from harvester_cli.main import main

from harvester.origin import HEADER, Origin, encode
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime(2026, 3, 1, 10, tzinfo=UTC)
A = UUID(int=1)


def at(seconds: float) -> datetime:
    """A moment of the audited day."""
    return START + timedelta(seconds=seconds)


def micros(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000 + moment.microsecond


@dataclass(frozen=True, slots=True)
class Sent:
    """A delivery. Offsets count up within what is made together; `seconds` from START are its time in Kafka."""

    id: int
    key: bytes | None = b"key"
    sequence: int = 1
    seconds: float = 0.0
    incarnation: UUID = A
    term: int = 1
    lane: int = 0
    producer: int = 1
    topic: str = "orders"
    partition: int = 0
    took_s: float = 0.5
    created_us: int | None = None
    header: bool = True
    value: bytes | None = b"value"
    low_water: int | None = None

    @property
    def origin(self) -> bytes:
        created = self.created_us
        if created is None:
            created = micros(at(self.seconds - self.took_s))
        scope = (self.term, self.lane, self.producer)
        return encode(Origin(self.incarnation, self.id, *scope, self.sequence, created, self.low_water))

    @property
    def headers(self) -> list[tuple[str, str | bytes | None]] | None:
        return [(HEADER, self.origin)] if self.header else None

    def row(self) -> dict[str, Any]:
        """For `kafka_rows`."""
        return {
            "key": self.key, "value": self.value, "topic": self.topic, "partition": self.partition,
            "timestamp": at(self.seconds), "headers": self.headers,
        }  # fmt: skip


def numbered(sent: Iterable[Sent]) -> list[Sent]:
    """With sequences as a relay gives them: each id of a stream the next one, in this order."""
    given: dict[tuple[object, ...], dict[int, int]] = {}
    found = []
    for one in sent:
        ids = given.setdefault((one.incarnation, one.term, one.lane, one.producer), {})
        found.append(replace(one, sequence=ids.setdefault(one.id, len(ids) + 1)))
    return found


def records(spark: SparkSession, sent: Iterable[Sent], notices: str = "", **bounds: datetime | None) -> DataFrame:
    """audit.schemas.RECORDS, by the transforms themselves."""
    from harvester.pipeline.audit.inputs import trimmed
    from harvester.pipeline.origin_columns import bronze_columns

    bronze = bronze_columns(kafka_rows(spark, [one.row() for one in sent]))
    return trimmed(bronze, bounds.get("since"), bounds.get("until"), notices)


def history(spark: SparkSession, *rows: Mapping[str, Any]) -> DataFrame:
    """audit.schemas.HISTORY; what a row does not say is that of a purged record."""
    from harvester.pipeline.audit.schemas import HISTORY

    usual = {
        "source": "archive", "incarnation": str(A), "topic": "orders", "partition": None, "key": b"key",
        "created_at": at(-1), "at": at(1), "origin": None,
    }  # fmt: skip
    made = [tuple({**usual, **row}[name] for name in HISTORY.names) for row in rows]
    return spark.createDataFrame(made, HISTORY)


@dataclass
class Scene:
    """A database and a topic: what is delivered goes to real Kafka, what is purged to a real archive."""

    dsn: str
    bootstrap: str
    topic: str
    incarnation: UUID = field(init=False)

    def __post_init__(self) -> None:
        from harvester.outbox.archive import create_archive
        from tests.support.databases import TABLE

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in create_archive(TABLE):
                connection.execute(statement)
            row = connection.execute(f"SELECT incarnation FROM {TABLE.term}").fetchone()
        assert row is not None
        self.incarnation = row[0]

    def own(self, sent: Iterable[Sent]) -> list[Sent]:
        """As this outbox and topic have them, with sequences."""
        return numbered(replace(one, incarnation=self.incarnation, topic=self.topic) for one in sent)

    def deliver(self, sent: Iterable[Sent], *, aborted: Iterable[Sent] = ()) -> None:
        """A committed transaction, after one with `aborted` that was not: its records and markers leave holes."""
        producer = self._producer()
        for batch, commit in ((aborted, False), (sent, True)):
            producer.begin_transaction()
            for one in batch:
                producer.produce(
                    one.topic, one.value, one.key, one.partition, headers=one.headers,
                    timestamp=int(at(one.seconds).timestamp() * 1000),
                )  # fmt: skip
            producer.flush(30)
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)

    @contextmanager
    def open_transaction(self) -> Iterator[None]:
        """One record in partition 0 whose transaction stays open for as long."""
        producer = self._producer()
        producer.begin_transaction()
        producer.produce(self.topic, b"open", partition=0)
        producer.flush(30)
        try:
            yield
        finally:
            producer.abort_transaction(30)

    def _producer(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap, "broker.address.family": "v4", "log_level": 3,
                "transactional.id": f"audit-{self.topic}",
            }
        )  # fmt: skip
        producer.init_transactions(30)
        return producer

    def quarantine(self, one: Sent) -> None:
        """As the relay leaves a record that Kafka refuses."""
        self._execute(
            "INSERT INTO outbox_quarantine (id, incarnation, kafka_topic, kafka_key, error, attempts, origin)"
            " VALUES (%s, %s, %s, %s, 'too large', 5, %s)",
            (one.id, self.incarnation, one.topic, _text(one.key), one.origin),
        )

    def wait(self, one: Sent) -> None:
        """A row that nobody has sent yet."""
        self._execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (%s, %s, %s)", (one.id, one.topic, _text(one.key))
        )

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement, values)

    def archive(self, sent: Iterable[Sent]) -> None:
        """As the purges of these would have left them."""
        rows = {
            one.id: (one.id, self.incarnation, at(one.seconds + 0.1), at(one.seconds - one.took_s), one.topic, one.key)
            for one in sent
        }
        with psycopg.connect(self.dsn, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO outbox_archive (id, incarnation, purged_at, create_time, kafka_topic, kafka_key)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                list(rows.values()),
            )


def audit_command(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`harvester pipeline audit` on the database of a scene, with the Spark of this process; returns the exit code."""

    @contextmanager
    def running(*_: object, **__: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr("harvester.pipeline.session.session", running)

    def command(scene: Scene, *arguments: str) -> int:
        given = [
            "harvester", "pipeline", "audit", "--set", f"data_source={scene.dsn}", "--set", "leader_group_id=audited",
            *arguments,
        ]  # fmt: skip
        monkeypatch.setattr("sys.argv", given)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return command


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()

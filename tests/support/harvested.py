"""Topics as harvesters leave them, and as strangers do: records with the header, without it, repeated, or aborted."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from confluent_kafka import Producer

from harvester.origin import HEADER, Origin, encode

A, B = UUID(int=2**127), UUID(int=1)
"""Two incarnations; by their text B comes before A."""

DAY_US = 86_400_000_000
CREATED_US = 1_772_323_200_000_000  # 2026-03-01
SENT_MS = 1_772_409_600_000  # a day later
KEPT = {"retention.ms": "-1"}
"""A topic's settings: the broker would remove records of so long ago whenever it looks."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A record. `headers` are made of the rest unless they are given, behind `more`; `at_ms` is Kafka's timestamp."""

    id: int
    key: bytes | None = b"key"
    value: bytes | None = b'{"n": 1}'
    incarnation: UUID = A
    created_us: int = CREATED_US
    at_ms: int = SENT_MS
    headers: tuple[tuple[str, bytes | None], ...] | None = None
    partition: int = -1
    more: tuple[tuple[str, bytes | None], ...] = ()
    low_water: int | None = None

    def again(self, hours: float = 0.0) -> Sent:
        """The same record, sent once more so much later."""
        return replace(self, at_ms=self.at_ms + round(hours * 3_600_000))

    @property
    def named(self) -> bool:
        """Whether a sound header says what it is."""
        return self.headers is None

    def written(self) -> list[tuple[str, str | bytes | None]]:
        """The headers in Kafka."""
        if self.headers is not None:
            return list(self.headers)
        origin = Origin(self.incarnation, self.id, 1, 0, 1, abs(self.id) + 1, self.created_us, self.low_water)
        return [*self.more, (HEADER, encode(origin))]

    def row(self) -> dict[str, Any]:
        """As Spark's Kafka source has it (`kafka_rows`)."""
        at = datetime.fromtimestamp(self.at_ms / 1000, UTC)
        return {"key": self.key, "value": self.value, "timestamp": at, "headers": self.written()}


@dataclass(frozen=True, slots=True)
class Delivered:
    """A record and its place in Kafka."""

    sent: Sent
    topic: str
    partition: int
    offset: int


def first_ones(batch: Iterable[Delivered]) -> dict[tuple[UUID, int], Delivered]:
    """The first delivery of each id: in the partition where the earliest is, the one at the lowest offset."""
    every: dict[tuple[UUID, int], list[Delivered]] = {}
    for one in batch:
        if one.sent.named:
            every.setdefault((one.sent.incarnation, one.sent.id), []).append(one)
    found = {}
    for name, deliveries in every.items():
        _, topic, partition = min((one.sent.at_ms, one.topic, one.partition) for one in deliveries)
        here = (one for one in deliveries if (one.topic, one.partition) == (topic, partition))
        found[name] = min(here, key=lambda one: one.offset)
    return found


class Writer:
    """Writes records into topics of a broker."""

    def __init__(self, bootstrap: str) -> None:
        self._options = {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "enable.idempotence": True,
            "linger.ms": 0,
            "log_level": 3,
        }
        self._producer = Producer(self._options)

    def send(self, topic: str, records: Iterable[Sent]) -> list[Delivered]:
        """Returns when all are in Kafka; in the order in which they were given."""
        return _send(self._producer, topic, records)

    def send_aborted(self, topic: str, records: Iterable[Sent]) -> None:
        """In a transaction that comes to nothing."""
        producer = self._transaction()
        _send(producer, topic, records)
        producer.abort_transaction(_TIMEOUT_S)

    def send_committed(self, topic: str, records: Iterable[Sent]) -> list[Delivered]:
        """In a transaction."""
        producer = self._transaction()
        delivered = _send(producer, topic, records)
        producer.commit_transaction(_TIMEOUT_S)
        return delivered

    def _transaction(self) -> Producer:
        producer = Producer({**self._options, "transactional.id": f"test-{uuid.uuid4().hex[:12]}"})
        producer.init_transactions(_TIMEOUT_S)
        producer.begin_transaction()
        return producer


def _send(producer: Producer, topic: str, records: Iterable[Sent]) -> list[Delivered]:
    wanted = list(records)
    found: list[Delivered | None] = [None] * len(wanted)
    for number, sent in enumerate(wanted):
        producer.produce(
            topic, sent.value, sent.key, sent.partition, _keep(found, number, sent), timestamp=sent.at_ms,
            headers=sent.written(),
        )  # fmt: skip
    left = producer.flush(_TIMEOUT_S)
    delivered = [one for one in found if one is not None]
    assert left == 0, f"{left} records were not delivered"
    assert len(delivered) == len(wanted), "some records failed"
    return delivered


def _keep(found: list[Delivered | None], number: int, sent: Sent) -> Callable[[Any, Any], None]:
    def report(number: int, error: Any, message: Any) -> None:
        if error is None:
            found[number] = Delivered(sent, message.topic(), message.partition(), message.offset())

    return partial(report, number)

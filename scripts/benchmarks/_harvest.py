"""Topics full of harvested records, without a harvester: what the jobs of the pipeline are measured with."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from confluent_kafka import Producer

from harvester.origin import HEADER, head, stamp
from scripts.benchmarks._place import PARTITIONS, make_topic, remove_topics
from scripts.benchmarks._scenario import Bench

_INCARNATION = UUID(int=2**120)
CREATED_AT = datetime(2025, 10, 9, tzinfo=UTC)
"""Of the first record."""
_CREATED_US = int(CREATED_AT.timestamp()) * 1_000_000


@dataclass(frozen=True, slots=True)
class Harvest:
    """What a topic is filled with: `keys` in turn, values of JSON of 250 to 350 bytes, `repeats` of each 1000 twice.

    Every other repeat comes right behind its record, the others `late` records later. `settled`: each record says that
    all but so many before it are settled. `dated`: Kafka's times are those of creation instead of today's.
    `every_us`: between creations.
    """

    count: int
    keys: int = 10_000
    repeats: int = 10
    late: int = 250_000
    incarnation: UUID = _INCARNATION
    settled: int | None = None
    dated: bool = False
    every_us: int = 1_000


Sent = Callable[[str, int, str, str], None]
"""Is told the topic, number, key and value of each record when it is sent for the first time."""


@contextmanager
def harvested(
    bench: Bench, harvest: Harvest, partitions: int = PARTITIONS, sent: Sent = lambda *_: None
) -> Iterator[str]:
    """A topic with these records in it."""
    name = f"bench-lake-{os.urandom(4).hex()}"
    times = {"message_timestamp_type": "CreateTime", "retention_ms": "-1"} if harvest.dated else {}
    make_topic(bench, name, partitions, **times)
    try:
        _fill(bench.bootstrap, name, harvest, sent)
        yield name
    finally:
        remove_topics(bench, name)


def _fill(bootstrap: str, topic: str, harvest: Harvest, sent: Sent) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap, "broker.address.family": "v4", "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000, "linger.ms": 20, "log_level": 0,
        }
    )  # fmt: skip
    scope = (harvest.incarnation, 1, 0, 1)
    begin = head(*scope, 1)
    chance = random.Random(1)
    late = deque[tuple[int, str, str, bytes, int]]()
    for number in range(1, harvest.count + 1):
        created_us = _CREATED_US + number * harvest.every_us
        record = (
            number,
            _order(chance, number),
            f"k-{number % harvest.keys}",
            stamp(begin, number, number, created_us),
            created_us // 1000 if harvest.dated else 0,
        )
        _produce(producer, topic, *record[1:])
        sent(topic, number, record[2], record[1])
        if (place := number % 1000) < harvest.repeats:
            if place % 2:
                late.append(record)
            else:
                _produce(producer, topic, *record[1:])
        while late and late[0][0] + harvest.late <= number:
            _produce(producer, topic, *late.popleft()[1:])
        if place == 0:
            producer.poll(0)
            if harvest.settled is not None:
                begin = head(*scope, max(1, number - harvest.settled))
    for record in late:
        _produce(producer, topic, *record[1:])
    if left := producer.flush(60):
        raise SystemExit(f"{left} records were not taken by the broker")


_WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "hazel", "iris", "juniper", "kelp", "lotus")


def _order(chance: random.Random, number: int) -> str:
    """An order as a shop would write it: some of it the same in each, some never."""
    order = {
        "order_id": number,
        "customer": f"{chance.getrandbits(64):016x}",
        "placed_at": f"2026-03-{number % 28 + 1:02d}T{number % 24:02d}:{number % 60:02d}:00Z",
        "currency": "EUR",
        "total": round(chance.random() * 1000, 2),
        "lines": [
            {"sku": chance.getrandbits(40), "count": chance.randrange(1, 9)} for _ in range(chance.randrange(1, 4))
        ],
        "address": {"street": f"{chance.choice(_WORDS)} street {chance.randrange(200)}", "city": chance.choice(_WORDS)},
        "note": " ".join(chance.choices(_WORDS, k=6)),
    }
    return json.dumps(order)


def _produce(producer: Producer, topic: str, value: str, key: str, header: bytes, at_ms: int) -> None:
    while True:
        try:
            producer.produce(topic, value, key, headers=[(HEADER, header)], timestamp=at_ms)
            return
        except BufferError:
            producer.poll(0.1)

"""Topics full of harvested records, without a harvester: what the jobs of the pipeline are measured with."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from confluent_kafka import Producer

from harvester.origin import HEADER, head, stamp
from scripts.benchmarks._place import PARTITIONS, make_topic, remove_topics
from scripts.benchmarks._scenario import Bench

_INCARNATION = UUID(int=2**120)
_CREATED_US = 1_760_000_000_000_000  # a day of October 2025
_US_BETWEEN = 1_000


@dataclass(frozen=True, slots=True)
class Harvest:
    """What a topic is filled with: `keys` in turn, values of JSON of 250 to 350 bytes, `repeats` of each 1000 twice.

    Every other repeat comes right behind its record, the others `late` records later.
    """

    count: int
    keys: int = 10_000
    repeats: int = 10
    late: int = 250_000


@contextmanager
def harvested(bench: Bench, harvest: Harvest, partitions: int = PARTITIONS) -> Iterator[str]:
    """A topic with these records in it."""
    name = f"bench-lake-{os.urandom(4).hex()}"
    make_topic(bench, name, partitions)
    try:
        _fill(bench.bootstrap, name, harvest)
        yield name
    finally:
        remove_topics(bench, name)


def _fill(bootstrap: str, topic: str, harvest: Harvest) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap, "broker.address.family": "v4", "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000, "linger.ms": 20, "log_level": 0,
        }
    )  # fmt: skip
    begin = head(_INCARNATION, 1, 0, 1, 1)
    chance = random.Random(1)
    late = deque[tuple[int, str, str, bytes]]()
    for number in range(1, harvest.count + 1):
        record = (
            number,
            _order(chance, number),
            f"k-{number % harvest.keys}",
            stamp(begin, number, number, _CREATED_US + number * _US_BETWEEN),
        )
        _produce(producer, topic, *record[1:])
        if (place := number % 1000) < harvest.repeats:
            if place % 2:
                late.append(record)
            else:
                _produce(producer, topic, *record[1:])
        while late and late[0][0] + harvest.late <= number:
            _produce(producer, topic, *late.popleft()[1:])
        if place == 0:
            producer.poll(0)
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


def _produce(producer: Producer, topic: str, value: str, key: str, header: bytes) -> None:
    while True:
        try:
            producer.produce(topic, value, key, headers=[(HEADER, header)])
            return
        except BufferError:
            producer.poll(0.1)

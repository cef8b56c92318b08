"""Topics full of harvested records, without a harvester: what the jobs of the pipeline are measured with."""

from __future__ import annotations

import os
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
    """What a topic is filled with: `keys` in turn, values of JSON with `size` bytes, `repeats` of each 1000 twice."""

    count: int
    keys: int = 10_000
    size: int = 200
    repeats: int = 10


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
    pad = "." * max(0, harvest.size - 60)
    for number in range(1, harvest.count + 1):
        value = f'{{"number": {number}, "customer": "c-{number % 977}", "pad": "{pad}"}}'
        header = stamp(begin, number, number, _CREATED_US + number * _US_BETWEEN)
        for _ in range(2 if number % 1000 < harvest.repeats else 1):
            _produce(producer, topic, value, f"k-{number % harvest.keys}", header)
        if number % 1000 == 0:
            producer.poll(0)
    if left := producer.flush(60):
        raise SystemExit(f"{left} records were not taken by the broker")


def _produce(producer: Producer, topic: str, value: str, key: str, header: bytes) -> None:
    while True:
        try:
            producer.produce(topic, value, key, headers=[(HEADER, header)])
            return
        except BufferError:
            producer.poll(0.1)

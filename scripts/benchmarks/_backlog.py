"""Fills an outbox, and reads the resulting log.

Every value begins with the row's number in its backlog, and rows are inserted in that order; so in a topic the
numbers of each key must grow: a lost, repeated or late record shows.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, TopicPartition

from scripts.benchmarks._place import Place

HOT = "hot"
_CHUNK_ROWS = 200_000
_POLL_S = 0.1
_SQL = """
INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT clock_timestamp(), %(topic)s, {key}, {value}, ARRAY['source'], ARRAY['bench']
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS i"""


@dataclass(frozen=True, slots=True)
class Rows:
    """What to fill an outbox with. `skew` is a Zipf exponent; `hot` the share of rows on one further key."""

    count: int
    keys: int = 1_000
    size: int = 200
    skew: float = 0.0
    hot: float = 0.0
    prefix: str = "k-"


def fill(place: Place, rows: Rows, topic: str | None = None) -> None:
    """Insert a backlog, then vacuum and write a checkpoint: neither shall fall into what is measured."""
    key, parameters = _key(rows)
    value = f"rpad(i || ':', {rows.size}, '.')"
    if rows.size > 1_000:
        # Values beyond 2 kB are compressed by PostgreSQL, and nobody's values are all dots.
        value = f"i || ':' || substr(%(noise)s, 1 + (random() * 100000)::int, {rows.size} - length(i || ':'))"
        parameters["noise"] = os.urandom((rows.size + 100_002) // 2 + 1).hex()
    statement = _SQL.format(key=key, value=value)
    with place.connect() as connection:
        for first in range(1, rows.count + 1, _CHUNK_ROWS):
            last = min(rows.count, first + _CHUNK_ROWS - 1)
            connection.execute(statement, {"topic": topic or place.name, "first": first, "last": last, **parameters})
        settle(place)


def settle(place: Place) -> None:
    """The work that a fill leaves to the server, done now."""
    with place.connect() as connection:
        connection.execute("VACUUM (ANALYZE) outbox")
        connection.execute("CHECKPOINT")


def _key(rows: Rows) -> tuple[str, dict[str, object]]:
    parameters: dict[str, object] = {"prefix": rows.prefix}
    index = f"floor(random() * {rows.keys})::int"
    if rows.skew:
        weights = [(rank + 1) ** -rows.skew for rank in range(rows.keys)]
        total, so_far, bounds = sum(weights), 0.0, []
        for weight in weights[:-1]:
            so_far += weight
            bounds.append(so_far / total)
        index = "width_bucket(random(), %(bounds)s::float8[])"
        parameters["bounds"] = bounds
    key = f"%(prefix)s::text || {index}"
    if rows.hot:
        key = f"CASE WHEN random() < {rows.hot} THEN '{HOT}' ELSE {key} END"
    return key, parameters


@dataclass(slots=True)
class Log:
    """The records of a topic: when each was appended (ms), and whether it was of the hot key; by time of append.

    `repeats`: how many came again, which are not among the others.
    """

    appended_ms: array[int] = field(default_factory=lambda: array("q"))
    others_ms: array[int] = field(default_factory=lambda: array("q"))  # those not of the hot key
    repeats: int = 0

    @property
    def rate_per_s(self) -> float:
        """From the first record to the last."""
        return rate(self.appended_ms)


def rate(moments_ms: Sequence[int]) -> float:
    """Records per second between the first and the last of these moments."""
    took_ms = moments_ms[-1] - moments_ms[0] if moments_ms else 0
    return (len(moments_ms) - 1) * 1000 / max(took_ms, 1)


def read(
    place: Place, expected: int, topic: str | None = None, timeout_s: float = 60.0, *, may_repeat: bool = False
) -> Log:
    """Read a topic to its end; SystemExit unless it holds each record once and each key's in order.

    `may_repeat`: repeats are counted, and no reason to end; what was asked for is waited for.
    """
    topic = topic or place.name
    seen = set[int]()
    consumer = Consumer(
        {
            "bootstrap.servers": place.bootstrap,
            "broker.address.family": "v4",
            "group.id": "bench-reader",  # demanded by the client; nothing joins or commits
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 20,
            "queued.min.messages": 100_000,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,  # the end may be a marker of a transaction, which nobody is given
            "log_level": 0,
        }
    )
    log, tops, wrong, silent_s = Log(), dict[bytes, int](), 0, 0.0
    hot = HOT.encode()
    try:
        left = _ends(consumer, topic, timeout_s)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in left])
        moments: list[tuple[int, bool]] = []
        while left or (may_repeat and len(moments) < expected):
            messages = consumer.consume(5_000, _POLL_S)
            silent_s = 0.0 if messages else silent_s + _POLL_S
            if silent_s > timeout_s:
                raise SystemExit(f"{topic} could not be read to its end")
            for message in messages:
                error, partition, offset = message.error(), message.partition() or 0, message.offset() or 0
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    if offset >= left.get(partition, 0):
                        left.pop(partition, None)
                    continue
                if error is not None:
                    raise SystemExit(f"reading {topic}: {error}")
                key, number = message.key() or b"", int((message.value() or b"0").partition(b":")[0])
                if may_repeat:
                    if number in seen:
                        log.repeats += 1
                        continue
                    seen.add(number)
                wrong += number <= tops.get(key, 0)
                tops[key] = number
                moments.append((message.timestamp()[1], key == hot))
    finally:
        consumer.close()
    if wrong or len(moments) != expected:
        raise SystemExit(
            f"the measured run was wrong: {len(moments)} records of {expected}, {wrong} repeated or out of order"
        )
    moments.sort()
    log.appended_ms.extend(at for at, _ in moments)
    log.others_ms.extend(at for at, is_hot in moments if not is_hot)
    return log


def _ends(consumer: Consumer, topic: str, timeout_s: float) -> dict[int, int]:
    known = consumer.list_topics(topic, timeout=timeout_s).topics[topic]
    ends = {}
    for partition in known.partitions:
        bounds = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout_s)
        if bounds is not None and bounds[1] > 0:
            ends[partition] = bounds[1]
    return ends

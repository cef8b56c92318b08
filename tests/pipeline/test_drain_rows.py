"""The outbox's rows as Spark's Kafka sink takes them: header, deadline, partitions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.delivery.partitioner import murmur2
from harvester.origin import HEADER, Origin
from harvester.pipeline.drain.slices import LATE, SINK, Stamp, batch_bytes, sink_rows
from tests.support.sparks import assert_same_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The first one starts Spark, maybe beside all other workers.
pytestmark = pytest.mark.usefixtures("compiled_queries")

LAST = 2**63 - 1
NEVER_MS = 9_000_000_000_000
STAMP = Stamp(HEADER, UUID(int=2**127 + 7), 12, 4711)
COLUMNS = "id bigint, key binary, value binary, topic string, partition int, created_us bigint"

stamps = st.builds(
    Stamp, header=st.sampled_from([HEADER, "x-origin"]), incarnation=st.uuids(), term=st.integers(0, LAST),
    producer=st.integers(0, 2**32 - 1),
)  # fmt: skip
pairs = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=8)), max_size=3)
rows = st.tuples(
    st.integers(1, LAST), st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=9),
    st.sampled_from(["a", "b.c"]), st.none() | st.integers(0, 9), st.integers(-(2**63), LAST), pairs,
)  # fmt: skip


@pytest.fixture
def plain(spark: SparkSession) -> SparkSession:
    """As a drain has it: numbers can be read as their bytes."""
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "false")
    return session


def outbox(session: SparkSession, batch: Sequence[Any]) -> tuple[DataFrame, tuple[int, int]]:
    """Rows with a list of headers, as the statement of a task gives them; and how many headers they have."""
    counts = [len(row[-1]) for row in batch]
    most = max(counts)
    named = "".join(f", name_{number} string, value_{number} binary" for number in range(1, most + 1))
    flat = [
        (*row[:-1], *(part for pair in row[-1] for part in pair), *[None, None] * (most - len(row[-1])))
        for row in batch
    ]
    return session.createDataFrame(flat, COLUMNS + named), (min(counts), most)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(rows, min_size=1, max_size=40), stamp=stamps)
def test_each_row_becomes_the_record_that_the_relay_would_send(
    plain: SparkSession, batch: list[Any], stamp: Stamp
) -> None:
    frame, headers = outbox(plain, batch)
    sunk = sink_rows(frame, stamp, headers, NEVER_MS)
    assert_same_columns(sunk, SINK)
    found = sunk.collect()
    assert len(found) == len(batch)
    numbers: dict[int, int] = {}
    for (record_id, key, value, topic, partition, created_us, given_headers), row in zip(batch, found, strict=True):
        assert (row["topic"], row["partition"]) == (topic, partition)
        assert [row["key"], row["value"]] == [key, value]  # b"" and NULL are told apart
        *own, (name, origin_value) = [(one["key"], bytes(one["value"])) for one in row["headers"]]
        assert own == given_headers
        assert name == stamp.header
        decoded = origin.decode(origin_value)
        assert decoded is not None
        numbers[decoded.lane] = numbers.get(decoded.lane, 0) + 1
        assert decoded == Origin(
            stamp.incarnation, record_id, stamp.term, decoded.lane, stamp.producer, numbers[decoded.lane], created_us
        )
    assert set(numbers) <= {0, 1}  # local[2]


def test_an_ansi_session_is_refused_when_the_rows_are_made(spark: SparkSession) -> None:
    frame, headers = outbox(spark, [(1, b"k", b"v", "t", None, 0, [])])
    with pytest.raises(AnalysisException):
        sink_rows(frame, STAMP, headers, NEVER_MS)


def test_the_deadline_is_looked_at_for_every_row(plain: SparkSession) -> None:
    many = plain.range(0, 200_000_000, 1, 2).select(
        "id", F.lit(b"k").alias("key"), F.lit(b"v").alias("value"), F.lit("t").alias("topic"),
        F.lit(None).cast("int").alias("partition"), F.lit(0).cast("bigint").alias("created_us"),
    )  # fmt: skip
    sunk = sink_rows(many, STAMP, (0, 0), int(time.time() * 1000) + 1_500)
    # It begins in time, so that nothing which is decided once for the whole job would end it.
    with pytest.raises(PySparkException, match=LATE):
        sunk.write.format("noop").mode("overwrite").save()


def test_java_puts_keys_where_the_relay_does(spark: SparkSession) -> None:
    partitioner = spark.sparkContext._jvm.org.apache.kafka.clients.producer.internals.BuiltInPartitioner  # type: ignore[union-attr]
    keys = [b"", *(b"x" * size for size in range(1, 9)), *(str(n).encode() for n in range(150)), b"\xff\x80\x00\x7f"]
    for key in keys:
        for partitions in (1, 3, 64):
            assert partitioner.partitionForKey(bytearray(key), partitions) == murmur2(key) % partitions, key


def varint(number: int) -> bytes:
    """As in Kafka's records: zigzag, seven bits to a byte."""
    number, out = (number << 1) ^ (number >> 63), bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes((number,))


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def batch(key: bytes | None, value: bytes | None, headers: list[tuple[bytes, bytes]]) -> bytes:
    """One record in a batch of its own: https://kafka.apache.org/documentation/#record."""
    body = b"\0" + varint(0) + varint(0) + sized(key) + sized(value) + varint(len(headers))
    body += b"".join(sized(name) + sized(content) for name, content in headers)
    return bytes(61) + sized(body)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (None, None, []),
        (3, 60, [(1, 2)]),
        (0, 70_000, [(64, 8_200), (2, 0)]),
        (200, 0, []),
        (63, 8_191, [(63, 64)]),
        (64, 8_192, [(64, 63)] * 70),
    ],
)
def test_sizes_are_those_of_kafka(key: int | None, value: int | None, named: list[tuple[int, int]]) -> None:
    whole = batch(
        None if key is None else bytes(key),
        None if value is None else bytes(value),
        [(bytes(name), bytes(size)) for name, size in named],
    )
    assert batch_bytes(key, value, named) == len(whole)

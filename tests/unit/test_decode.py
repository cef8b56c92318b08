"""Rows that are no records, one by one, and the bytes they come as."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.decode import decode
from harvester.errors import UndecodableRecord

POSTGRES_EPOCH_US = 946_684_800_000_000
TEXT_OID = 25


def field(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def array(elements: Sequence[bytes | None], dimensions: int = 1) -> bytes:
    """text[] as the server sends it; the elements lie in the last of the dimensions."""
    if not elements:
        return struct.pack(">iii", 0, 0, TEXT_OID)
    sizes = [1] * (dimensions - 1) + [len(elements)]
    head = struct.pack(">iii", dimensions, None in elements, TEXT_OID)
    return head + b"".join(struct.pack(">ii", size, 1) for size in sizes) + b"".join(map(field, elements))


def row(
    *,
    topic: bytes | None = b"topic",
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    names: bytes | None = None,
    values: bytes | None = None,
    created: int | None = 0,
    partition: int | None = None,
) -> bytes:
    moment = None if created is None else struct.pack(">q", created)
    number = None if partition is None else struct.pack(">i", partition)
    columns = (key, topic, value, names, values, moment, number)
    return struct.pack(">hiq", 8, 8, 7) + b"".join(map(field, columns))


def test_a_full_row() -> None:
    names, values = array([b"h1", "\u00fc".encode()]), array([b"", "\u20ac".encode()])
    record = decode(row(names=names, values=values, created=5, partition=3))
    assert (record.id, record.topic, record.key, record.value, record.partition) == (7, "topic", b"k", b"v", 3)
    assert record.headers == [("h1", b""), ("\u00fc", "\u20ac".encode())]
    assert record.created_us == POSTGRES_EPOCH_US + 5


def test_an_empty_row() -> None:
    record = decode(row(key=None, value=None, created=None))
    assert (record.key, record.value, record.headers, record.partition, record.created_us) == (None, None, [], -1, 0)


def test_an_empty_key_and_value_are_not_missing() -> None:
    record = decode(row(key=b"", value=b""))
    assert (record.key, record.value) == (b"", b"")


@pytest.mark.parametrize(("names", "values"), [(None, None), ([], []), (None, []), ([], None)])
def test_no_headers(names: list[bytes] | None, values: list[bytes] | None) -> None:
    raw = row(names=None if names is None else array(names), values=None if values is None else array(values))
    assert decode(raw).headers == []


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (array([b"a"]), array([]), "1 header keys but 0 header values"),
        (array([]), array([b"a", b"b"]), "0 header keys but 2 header values"),
        (array([b"a"]), None, "1 header keys but 0 header values"),
        (array([b"a", None]), array([b"a", b"b"]), "kafka_header_keys has a NULL element"),
        (array([b"a"]), array([None]), "kafka_header_values has a NULL element"),
        (array([b"a"], 2), array([b"a"]), "kafka_header_keys has 2 dimensions"),
        (array([b"a"]), array([b"a"], 3), "kafka_header_values has 3 dimensions"),
        (array([b"\xff"]), array([b"a"]), "kafka_header_keys has an element that is not UTF-8"),
    ],
)
def test_impossible_headers(names: bytes | None, values: bytes | None, message: str) -> None:
    with pytest.raises(UndecodableRecord, match=message):
        decode(row(names=names, values=values))


@pytest.mark.parametrize(
    "topic",
    [None, b"", b".", b"..", b"a b", b"a/b", b"x" * 250, "t\u00f6pic".encode(), b"topic\n", b"\xff", b"a\0b"],
)
def test_impossible_topics(topic: bytes | None) -> None:
    with pytest.raises(UndecodableRecord, match="invalid topic name"):
        decode(row(topic=topic))


@pytest.mark.parametrize("topic", ["a", "...", "a.b-c_D9", "x" * 249])
def test_possible_topics(topic: str) -> None:
    assert decode(row(topic=topic.encode())).topic == topic


@pytest.mark.parametrize("partition", [-1, -(2**31)])
def test_impossible_partitions(partition: int) -> None:
    with pytest.raises(UndecodableRecord, match=f"invalid partition {partition}"):
        decode(row(partition=partition))


def test_partition_zero_is_one() -> None:
    assert decode(row(partition=0)).partition == 0


def test_a_long_topic_is_not_repeated_in_full() -> None:
    with pytest.raises(UndecodableRecord) as caught:
        decode(row(topic=b"?" * 10_000))
    assert len(caught.value.message) < 200


@given(
    st.none() | st.binary(max_size=50),
    st.none() | st.binary(max_size=200),
    st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=20)), max_size=5),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | st.integers(-(2**62), 2**62),
)
def test_what_goes_in_comes_out(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    partition: int | None,
    created: int | None,
) -> None:
    names, values = array([name.encode() for name, _ in headers]), array([content for _, content in headers])
    raw = row(key=key, value=value, names=names, values=values, partition=partition, created=created)
    record = decode(raw)
    assert (record.key, record.value, record.headers) == (key, value, headers)
    assert record.partition == (-1 if partition is None else partition)
    assert record.created_us == (0 if created is None else created + POSTGRES_EPOCH_US)

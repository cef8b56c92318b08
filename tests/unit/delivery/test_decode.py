"""Rows that are no records, one by one, and the bytes they come as."""

from __future__ import annotations

import struct
import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.decode import NO_PARTITION, Broken, Oversize, decode
from harvester.errors import WireError
from harvester.record import KafkaRecord
from tests.support.rows import TEXT_OID, VARCHAR_OID, array, broken_one, decode_one, field, row

POSTGRES_EPOCH_US = 946_684_800_000_000
OIDS = pytest.mark.parametrize("oid", [TEXT_OID, VARCHAR_OID])


def test_the_sum_of_each_row() -> None:
    """Of all its bytes but the xmin, which is another one on each server.

    Also of one that can be no record, which has its place among the others. A large one is summed up in parts.
    """
    xmin = 0x01020304
    rows = [
        row(record_id=1, xmin=xmin),
        row(record_id=2, topic=b"no topic", created=2**32 + 5, xmin=xmin),
        row(record_id=3, key=None, value=b"x" * 2000, created=-1, xmin=xmin),
        row(record_id=4, value=None, created=2**63 - 1, xmin=xmin),
    ]
    found: list[int] = []
    assert [record.id for record in decode(b"".join(rows), found)] == [1, 2, 3, 4]
    assert found == [zlib.crc32(raw.replace(struct.pack(">iI", 4, xmin), b"")) for raw in rows]


def test_a_full_row() -> None:
    names, values = array([b"h1", "\u00fc".encode()]), array([b"", "\u20ac".encode()])
    record = decode_one(row(names=names, values=values, created=5, partition=3))
    assert (record.id, record.topic, record.key, record.value, record.partition) == (7, "topic", b"k", b"v", 3)
    assert record.headers == [("h1", b""), ("\u00fc", "\u20ac".encode())]
    assert record.created_us == POSTGRES_EPOCH_US + 5


def test_an_empty_row() -> None:
    record = decode_one(row(key=None, value=None))
    assert (record.key, record.value, record.headers, record.partition) == (None, None, [], -1)


def test_an_empty_key_and_value_are_not_missing() -> None:
    record = decode_one(row(key=b"", value=b""))
    assert (record.key, record.value) == (b"", b"")


@pytest.mark.parametrize(("names", "values"), [(None, None), ([], []), (None, []), ([], None)])
def test_no_headers(names: list[bytes] | None, values: list[bytes] | None) -> None:
    raw = row(names=None if names is None else array(names), values=None if values is None else array(values))
    assert decode_one(raw).headers == []


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (array([b"a"]), array([]), "1 header keys but 0 header values"),
        (array([]), array([b"a", b"b"]), "0 header keys but 2 header values"),
        (array([b"a"]), None, "1 header keys but 0 header values"),
        (None, array([b"a"]), "0 header keys but 1 header values"),
        (array([b"a", b"b"]), array([b"a"]), "2 header keys but 1 header values"),
        (array([b"a"]), array([b"a", b"b"]), "1 header keys but 2 header values"),
        (array([b"a", None]), array([b"a", b"b"]), "kafka_header_keys has a NULL element"),
        (array([b"a"]), array([None]), "kafka_header_values has a NULL element"),
        (array([b"a"], 2), array([b"a"]), "kafka_header_keys has 2 dimensions"),
        (array([b"a"]), array([b"a"], 3), "kafka_header_values has 3 dimensions"),
        (array([b"\xff"]), array([b"a"]), "kafka_header_keys has an element that is not UTF-8"),
    ],
)
def test_impossible_headers(names: bytes | None, values: bytes | None, message: str) -> None:
    found = broken_one(row(names=names, values=values))
    assert (found.id, found.key) == (7, b"k")
    assert message in found.reason


@pytest.mark.parametrize(
    "topic",
    [None, b"", b".", b"..", b"a b", b"a/b", b"x" * 250, "t\u00f6pic".encode(), b"topic\n", b"\xff", b"a\0b"],
)
def test_impossible_topics(topic: bytes | None) -> None:
    assert broken_one(row(topic=topic)).reason.startswith("invalid topic name")


@pytest.mark.parametrize("topic", ["a", "...", "a.b-c_D9", "x" * 249])
def test_possible_topics(topic: str) -> None:
    assert decode_one(row(topic=topic.encode())).topic == topic


@pytest.mark.parametrize("partition", [-1, -(2**31), NO_PARTITION + 1])
def test_impossible_partitions(partition: int) -> None:
    assert broken_one(row(partition=partition)).reason == f"invalid partition {partition}"


def test_partition_zero_is_one() -> None:
    assert decode_one(row(partition=0)).partition == 0


def test_a_long_topic_is_not_repeated_in_full() -> None:
    assert len(broken_one(row(topic=b"?" * 10_000)).reason) < 200


@OIDS
@pytest.mark.parametrize("has_nulls", [False, True])
@pytest.mark.parametrize("lower", [1, 0, 5, -3])
@pytest.mark.parametrize("value", [b"", b"x", b"\xff" * 300])
def test_a_single_header(oid: int, has_nulls: bool, lower: int, value: bytes) -> None:
    """One of a usual form is not looked into; every other form means the same."""
    plain = array([b"h"])
    other_names = array([b"h"], oid=oid, lower=lower, has_nulls=has_nulls)
    other_values = array([value], oid=oid, lower=lower, has_nulls=has_nulls)
    for names, values in [(plain, other_values), (other_names, array([value])), (other_names, other_values)]:
        assert decode_one(row(names=names, values=values)).headers == [("h", value)]


@OIDS
def test_a_single_header_without_a_value(oid: int) -> None:
    found = broken_one(row(names=array([b"h"], oid=oid), values=array([None], oid=oid)))
    assert found.reason == "kafka_header_values has a NULL element"


@OIDS
def test_several_headers_of_any_array(oid: int) -> None:
    names, values = array([b"a", b"b"], oid=oid, lower=5), array([b"c", b""], oid=oid, lower=-2, has_nulls=True)
    assert decode_one(row(names=names, values=values)).headers == [("a", b"c"), ("b", b"")]


def test_a_value_that_looks_like_a_single_header_stays_a_value() -> None:
    assert decode_one(row(value=array([b"h"]))).headers == []


# -- several rows


def test_nothing_is_no_row() -> None:
    assert decode(b"") == []


def test_several_rows_one_after_the_other() -> None:
    one = array([b"h"])
    rows = [
        row(record_id=1, names=one, values=array([b"x"])),
        row(record_id=2, key=None, value=None, partition=4),
        row(record_id=-3, topic=b"other", key=b"", value=b"", created=-1),
    ]
    assert decode(b"".join(rows)) == [
        KafkaRecord(1, b"k", "topic", b"v", [("h", b"x")], -1, POSTGRES_EPOCH_US),
        KafkaRecord(2, None, "topic", None, [], 4, POSTGRES_EPOCH_US),
        KafkaRecord(-3, b"", "other", b"", [], -1, POSTGRES_EPOCH_US - 1),
    ]


def test_a_row_that_is_no_record_does_not_disturb_its_neighbours() -> None:
    before, after = row(record_id=1), row(record_id=3, key=None, value=b"w" * 500)
    for wrong in (
        row(record_id=2, key=b"x", topic=b"no topic"),
        row(record_id=2, key=b"x", partition=-1),
        row(record_id=2, key=b"x", names=array([b"\xff"])),
        row(record_id=2, key=b"x", names=array([b"h"]), values=array([None])),
    ):
        first, second, third = decode(before + wrong + after)
        assert (first, third) == (decode_one(before), decode_one(after))
        assert isinstance(second, Broken)
        assert (second.id, second.key) == (2, b"x")


def test_rows_of_one_address_share_nothing_else() -> None:
    """Topic and names are remembered together: one that is broken by its names is not by its topic."""
    good, bad = array([b"h"]), array([b"\xff"])
    addresses = [(b"t", good), (b"t", bad), (b"u", good), (b"t", None), (b"u", bad), (b"t", good)]
    found = decode(b"".join(row(topic=topic, names=names, values=names) for topic, names in addresses))
    assert [None if isinstance(one, Broken) else (one.topic, one.headers) for one in found] == [
        ("t", [("h", b"h")]), None, ("u", [("h", b"h")]), ("t", []), None, ("t", [("h", b"h")]),
    ]  # fmt: skip


def test_data_that_is_cut_off_anywhere() -> None:
    names, values = array([b"a", b"b"]), array([b"c", b"d"])
    rows = [
        row(names=names, values=values),
        row(topic=b"?", names=names, values=values),
        row(key=None, value=None),
        row(names=array([]), value=b""),
    ]
    data = b"".join(rows)
    ends = [0, *accumulate(map(len, rows))]
    whole = decode(data)
    for cut in range(len(data) + 1):
        if cut in ends:
            assert decode(data[:cut]) == whole[: ends.index(cut)]
        else:
            with pytest.raises(WireError, match=f"^{cut} bytes are not whole rows"):
                decode(data[:cut])


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        row() + b"\0",
        row() + struct.pack(">h", -1),  # how a COPY ends
        row(names=array([b"a"])[:-2], values=array([b"b"]))[:-1],
    ],
)
def test_what_is_no_row(data: bytes) -> None:
    with pytest.raises(WireError, match="not whole rows"):
        decode(data)


@pytest.mark.parametrize(
    "odd",
    [
        row(record_id=1, names=b""),  # too short for an array
        row(record_id=1, names=array([b"a"]), values=struct.pack(">iiiii", 1, 0, TEXT_OID, 2, 1) + field(b"a")),
    ],
)
def test_a_row_that_cannot_be_read_is_broken_and_others_are_not(odd: bytes) -> None:
    """P33."""
    found = decode(row(record_id=2) + odd + row(record_id=3))
    assert [one.id for one in found] == [2, 1, 3]
    assert [isinstance(one, Broken) for one in found] == [False, True, False]
    assert "cannot be decoded" in found[1].reason  # type: ignore[union-attr]


@given(
    st.none() | st.binary(max_size=50),
    st.none() | st.binary(max_size=200),
    st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=20)), max_size=5),
    st.none() | st.integers(0, 2**31 - 1),
    st.integers(-(2**62), 2**62),
)
def test_what_goes_in_comes_out(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    partition: int | None,
    created: int,
) -> None:
    names, values = array([name.encode() for name, _ in headers]), array([content for _, content in headers])
    raw = row(key=key, value=value, names=names, values=values, partition=partition, created=created)
    record = decode_one(raw)
    assert (record.key, record.value, record.headers) == (key, value, headers)
    assert record.partition == (-1 if partition is None else partition)
    assert record.created_us == created + POSTGRES_EPOCH_US


@pytest.mark.parametrize("xmin", [3, 2**31, 2**32 - 1])
def test_whatever_becomes_of_a_row_its_version_is_known(xmin: int) -> None:
    """P50. It is unsigned, and stands beside the time in what is broken, or too large, as well."""
    for found in (
        decode_one(row(created=5, xmin=xmin)),
        broken_one(row(created=5, xmin=xmin, topic=b"?")),
        Oversize(7, b"k", decode_one(row(created=5, xmin=xmin))),
    ):
        assert (found.id, found.xmin, found.created_us) == (7, xmin, POSTGRES_EPOCH_US + 5)

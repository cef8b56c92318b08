"""What a record carries in place of its value, and what a consumer makes of it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.claim_check.reference import (
    BYTES_HEADER,
    DIGEST_HEADER,
    HEADER,
    Reference,
    read,
    refer,
    replaced,
)
from harvester.delivery.decode import Broken, Oversize, set_apart, size_of
from harvester.errors import StoredValueChanged
from harvester.record import KafkaRecord

VALUE = b"x" * 1000
DIGEST = sha256(VALUE).hexdigest()
RECORD = KafkaRecord(7, b"key", "orders", VALUE, [("source", b"shop")], -1, 0)


def test_a_record_carries_place_length_and_digest_in_headers_and_the_place_as_its_value() -> None:
    published = replaced(RECORD, refer(RECORD), "s3://bucket/prefix")
    url = f"s3://bucket/prefix/orders/7-{DIGEST}"
    assert published.headers == [
        ("source", b"shop"),
        (HEADER, url.encode()),
        (BYTES_HEADER, b"1000"),
        (DIGEST_HEADER, DIGEST.encode()),
    ]
    assert published.value == url.encode()
    assert published[:3] == RECORD[:3]


def test_the_same_row_gives_the_same_object_and_another_row_another() -> None:
    assert refer(RECORD) == refer(RECORD)
    names = {refer(RECORD._replace(**other)).name for other in ({}, {"id": 8}, {"topic": "paid"}, {"value": b"y"})}
    assert len(names) == 4


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.binary(min_size=1, max_size=200),
    st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True),
)
def test_what_is_written_is_read(record_id: int, value: bytes, topic: str) -> None:
    record = KafkaRecord(record_id, None, topic, value, [], -1, 0)
    reference = refer(record)
    published = replaced(record, reference, "file:///srv/values")
    found = read(published.value, published.headers)
    assert found == reference
    assert found.check(value) == value


def test_a_record_without_the_header_has_its_own_value() -> None:
    assert read(None, None) is None
    assert read(b"own", [("source", b"shop"), (BYTES_HEADER, b"1")]) is None


def test_headers_copied_from_another_record_are_no_reference() -> None:
    published = replaced(RECORD, refer(RECORD), "s3://bucket/prefix")
    value = published.value or b""
    for own in (None, b"", b"own", value + b"/", value[:-1], value.decode()[1:]):
        assert read(own, published.headers) is None
    as_in_spark: Any = bytearray(value)
    for same in (value, as_in_spark, value.decode()):
        assert read(same, published.headers) == refer(RECORD)


@pytest.mark.parametrize(
    ("url", "length", "digest"),
    [
        ("s3://bucket/../secrets", "1000", DIGEST),
        (f"s3://bucket/../7-{DIGEST}", "1000", DIGEST),
        (f"s3://bucket/./7-{DIGEST}", "1000", DIGEST),
        (f"s3://bucket/orders/7-{DIGEST}", "1000", "0" * 64),
        (f"s3://bucket/orders/7-{DIGEST}", "-1", DIGEST),
        (f"s3://bucket/orders/7-{DIGEST}\n", "1000", DIGEST),
        (f"s3://bucket/orders/7-{DIGEST}", "", DIGEST),
        ("\udcff", "1000", DIGEST),
    ],
)
def test_headers_that_name_no_object_are_an_error(url: str, length: str, digest: str) -> None:
    headers = [
        (HEADER, url.encode("utf-8", "surrogateescape")),
        (BYTES_HEADER, length.encode()),
        (DIGEST_HEADER, digest.encode()),
    ]
    with pytest.raises(StoredValueChanged, match="do not name an object"):
        read(headers[0][1], headers)
    assert read(b"own", headers) is None


@pytest.mark.parametrize(("value", "reason"), [(VALUE[1:], "has 999 bytes instead of 1,000"), (b"y" * 1000, "SHA-256")])
def test_another_value_is_an_error(value: bytes, reason: str) -> None:
    with pytest.raises(StoredValueChanged, match=reason):
        Reference(f"orders/7-{DIGEST}", 1000, DIGEST).check(value)


def test_key_value_and_headers_count_and_what_is_not_larger_stays() -> None:
    size = len(b"key") + 1000 + len("source") + len(b"shop")
    broken = Broken(8, None, "no headers")
    assert size_of(RECORD) == size
    assert set_apart([RECORD, broken], size) == [RECORD, broken]
    assert set_apart([RECORD, broken], size - 1) == [Oversize(7, b"key", RECORD), broken]


def test_a_record_without_a_value_cannot_be_helped() -> None:
    tombstone = RECORD._replace(value=None, key=b"k" * 1000)
    assert set_apart([tombstone], 10) == [tombstone]

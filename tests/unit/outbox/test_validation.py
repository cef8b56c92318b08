"""Which records the stasher refuses, and that it says why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harvester.errors import RecordRejected
from harvester.outbox.shape import ColumnShape
from harvester.outbox.validation import CheckedRow, check
from harvester.record import OutboxRecord

TEXT = ColumnShape(
    key_type="text",
    key_nullable=True,
    value_type="text",
    value_nullable=True,
    has_partition=True,
    topic_max=249,
    key_max=None,
    value_max=None,
)
BYTES = dataclasses.replace(TEXT, key_type="bytea", value_type="bytea")
# The table of the original guide.
SEED = dataclasses.replace(TEXT, key_nullable=False, has_partition=False, key_max=100, value_max=10_000)


def record(**fields: Any) -> OutboxRecord:
    return OutboxRecord(**{"topic": "t", "key": "k", "value": "v", **fields})


def test_a_full_record_becomes_a_row() -> None:
    full = record(headers=[("a", "1"), ("a", "2")], partition=3)
    assert check(full, TEXT) == CheckedRow("t", "k", "v", ["a", "a"], ["1", "2"], 3)


def test_a_tombstone_without_key_is_fine_where_the_columns_allow_it() -> None:
    assert check(OutboxRecord("t", None), TEXT) == CheckedRow("t", None, None, [], [], None)


def test_text_and_bytes_are_the_same_bytes_on_the_wire() -> None:
    assert check(record(key="ü", value="ß"), BYTES).key == "ü".encode()
    assert check(record(value="ß"), BYTES).value == "ß".encode()
    assert check(record(value=b"\x00\xff"), BYTES).value == b"\x00\xff"
    assert check(record(value="ß".encode()), TEXT).value == "ß"
    assert check(record(key="\x00"), BYTES).key == b"\x00"


@pytest.mark.parametrize("topic", ["a", "A.b_c-9", "x" * 249, "...", ".a"])
def test_topics(topic: str) -> None:
    assert check(record(topic=topic), TEXT).topic == topic


def test_lengths_up_to_the_limit_pass() -> None:
    row = check(record(key="ü" * 100, value="ß" * 10_000), SEED)
    assert (len(row.key or ""), len(row.value or "")) == (100, 10_000)


@pytest.mark.parametrize(
    ("shape", "fields", "said"),
    [
        (TEXT, {"topic": ""}, "topic '' is not a valid topic name"),
        (TEXT, {"topic": "."}, "topic '.' is not a valid topic name"),
        (TEXT, {"topic": ".."}, "topic '..' is not a valid topic name"),
        (TEXT, {"topic": "a b"}, "topic 'a b' is not a valid topic name"),
        (TEXT, {"topic": "a\n"}, "topic 'a\\n' is not a valid topic name"),
        (TEXT, {"topic": "ü"}, "topic 'ü' is not a valid topic name"),
        (TEXT, {"topic": "x" * 250}, "topic has 250 characters, its column accepts 249"),
        (dataclasses.replace(TEXT, topic_max=3), {"topic": "four"}, "topic has 4 characters, its column accepts 3"),
        (TEXT, {"topic": None}, "topic is None, not a str"),
        (TEXT, {"topic": b"t"}, "topic is a bytes, not a str"),
        (TEXT, {"key": 7}, "key is an int, not a str or None"),
        (TEXT, {"key": b"k"}, "key is a bytes, not a str or None"),
        (TEXT, {"key": "a\x00b"}, "key contains a NUL character"),
        (TEXT, {"key": "\ud800"}, "key cannot be encoded as utf-8 (at character 0)"),
        (BYTES, {"key": "a\ud800"}, "key cannot be encoded as utf-8 (at character 1)"),
        (SEED, {"key": None}, "key is None, but the column kafka_key is NOT NULL"),
        (SEED, {"key": "k" * 101}, "key has 101 characters, its column accepts 100"),
        (SEED, {"value": "v" * 10_001}, "value has 10001 characters, its column accepts 10000"),
        (SEED, {"value": b"v" * 10_001}, "value has 10001 characters, its column accepts 10000"),
        (TEXT, {"value": 1.5}, "value is a float, not a str, bytes or None"),
        (TEXT, {"value": {"a": 1}}, "value is a dict, not a str, bytes or None"),
        (TEXT, {"value": "\x00"}, "value contains a NUL character"),
        (TEXT, {"value": b"\x00"}, "value contains a NUL character"),
        (TEXT, {"value": b"\xff"}, "value is bytes that are not UTF-8"),
        (TEXT, {"value": "\udfff"}, "value cannot be encoded"),
        (BYTES, {"value": "\udfff"}, "value cannot be encoded"),
        (dataclasses.replace(TEXT, value_nullable=False), {"value": None}, "value is None, but the column"),
        (TEXT, {"headers": None}, "headers is None, not a sequence"),
        (TEXT, {"headers": {"a": "b"}}, "headers is a dict, not a sequence"),
        (TEXT, {"headers": "ab"}, "headers is a str, not a sequence"),
        (TEXT, {"headers": ["ab"]}, "headers[0] is not a pair"),
        (TEXT, {"headers": [("a", "b"), ("a",)]}, "headers[1] is not a pair"),
        (TEXT, {"headers": [("a", None)]}, "headers[0]: the value is None, not a str"),
        (TEXT, {"headers": [("a", b"b")]}, "headers[0]: the value is a bytes, not a str"),
        (TEXT, {"headers": [(None, "b")]}, "headers[0]: the name is None, not a str"),
        (TEXT, {"headers": [("a", "b"), ("a\x00", "b")]}, "headers[1]: the name contains a NUL character"),
        (BYTES, {"headers": [("a", "\x00")]}, "headers[0]: the value contains a NUL character"),
        (TEXT, {"headers": [("a", "\ud800")]}, "headers[0]: the value cannot be encoded"),
        (TEXT, {"partition": -1}, "partition is -1, not between 0 and 2147483647"),
        (TEXT, {"partition": 2**31}, "partition is 2147483648, not between"),
        (TEXT, {"partition": True}, "partition is a bool, not an int or None"),
        (TEXT, {"partition": "1"}, "partition is a str, not an int or None"),
        (SEED, {"partition": 0}, "partition is 0, but the outbox has no column kafka_partition"),
    ],
)
def test_refusals_name_the_field(shape: ColumnShape, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordRejected) as refused:
        check(record(**fields), shape)
    assert said in refused.value.message


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(RecordRejected, match="a dict, not an OutboxRecord"):
        check({"topic": "t"}, TEXT)  # type: ignore[arg-type]


def test_the_place_in_a_batch_is_named() -> None:
    with pytest.raises(RecordRejected, match=r"^record 7 of the batch refused: topic"):
        check(record(topic=""), TEXT, index=7)


def test_a_session_in_another_encoding_is_respected() -> None:
    assert check(record(value="ü"), TEXT, encoding="latin-1").value == "ü"
    with pytest.raises(RecordRejected, match="value cannot be encoded as latin-1"):
        check(record(value="ł"), TEXT, encoding="latin-1")


def test_a_refusal_shows_no_value() -> None:
    with pytest.raises(RecordRejected) as refused:
        check(record(value="secret\x00"), TEXT)
    assert "secret" not in refused.value.message

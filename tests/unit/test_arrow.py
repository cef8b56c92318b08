"""Records as Arrow batches: types, what is missing, headers, and which records a batch or a part of one has."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, Message

from harvester.arrow import SCHEMA, places, record_batch
from harvester.errors import ConfigurationError

FULL = Message(
    topic="t", partition=3, offset=2**40, key=b"k", value=b"v", timestamp=(TIMESTAMP_CREATE_TIME, 1_700_000_000_123),
    headers=[("a", b"1"), ("a", None), ("b", b"\xff")],
)  # fmt: skip
BARE = Message(topic="u", partition=0, offset=0, timestamp=(TIMESTAMP_NOT_AVAILABLE, -1))


def test_a_record_is_a_row() -> None:
    batch = record_batch([FULL, BARE, FULL])
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    full, bare, again = batch.to_pylist()
    assert full == again == {
        "topic": "t", "partition": 3, "offset": 2**40, "key": b"k", "value": b"v",
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
        "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "b", "value": b"\xff"}],
    }  # fmt: skip
    assert bare == {
        "topic": "u", "partition": 0, "offset": 0, "key": None, "value": None, "timestamp": None, "headers": [],
    }  # fmt: skip


def test_no_records_are_a_batch_without_rows() -> None:
    assert record_batch([]).schema == SCHEMA
    assert record_batch([]).num_rows == 0


def test_places_are_those_of_the_rows_that_are_left() -> None:
    records = [Message(topic="t", partition=number % 2, offset=number) for number in range(6)]
    batch = record_batch(records)
    assert places(batch) == {("t", 0): [0, 2, 4], ("t", 1): [1, 3, 5]}
    assert places(batch.slice(1, 2)) == {("t", 1): [1], ("t", 0): [2]}
    some = batch.filter(pa.array([True, False, False, False, True, False])).select(["offset", "partition", "topic"])
    assert places(some) == {("t", 0): [0, 4]}


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "harvester.arrow")
    with pytest.raises(ConfigurationError, match="consume_arrow: needs pyarrow") as caught:
        __import__("harvester.arrow")
    assert caught.value.hint == "pip install 'outbox-harvester[arrow]'"

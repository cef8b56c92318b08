"""Statements and batches of the stasher."""

from __future__ import annotations

import dataclasses

import pytest

from harvester.errors import OutboxError, RecordRejected
from harvester.outbox.shape import ColumnShape
from harvester.outbox.sql.insert import CHUNK_BYTES, CHUNK_RECORDS, Insertion
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

SHAPE = ColumnShape(
    key_type="text",
    key_nullable=True,
    value_type="text",
    value_nullable=True,
    has_partition=True,
    topic_max=249,
    key_max=None,
    value_max=None,
)
INSERTION = Insertion.build(OutboxTable.parse("outbox"), SHAPE, "utf-8")


def sizes(records: list[OutboxRecord]) -> list[int]:
    return [len(parameters[0]) for parameters in INSERTION.batches(records)]


def test_batches_are_bounded_by_count() -> None:
    record = OutboxRecord("t", "k", "v")
    assert sizes([]) == []
    assert sizes([record] * CHUNK_RECORDS) == [CHUNK_RECORDS]
    assert sizes([record] * (2 * CHUNK_RECORDS + 1)) == [CHUNK_RECORDS, CHUNK_RECORDS, 1]


def test_batches_are_bounded_by_size_but_hold_a_record_at_least() -> None:
    small, half, huge = (OutboxRecord("t", "k", "v" * n) for n in (1, CHUNK_BYTES // 2, CHUNK_BYTES * 2))
    assert sizes([half, half, small]) == [1, 2]
    assert sizes([huge, huge]) == [1, 1]


def test_nothing_is_left_out_or_reordered() -> None:
    records = [OutboxRecord("t", str(n), "v") for n in range(CHUNK_RECORDS + 7)]
    keys = [key for parameters in INSERTION.batches(records) for key in parameters[1]]
    assert keys == [record.key for record in records]


def test_one_bad_record_refuses_the_batch() -> None:
    with pytest.raises(RecordRejected, match="record 1 of the batch"):
        INSERTION.batches([OutboxRecord("t", "k"), OutboxRecord("", "k")])


def test_without_the_column_no_partition_is_named() -> None:
    plain = Insertion.build(OutboxTable.parse("outbox"), dataclasses.replace(SHAPE, has_partition=False), "utf-8")
    assert "partition" not in plain.one_sql + plain.many_sql
    assert "partition" in INSERTION.one_sql
    assert "partition" in INSERTION.many_sql


def test_ids_come_back_in_the_order_of_the_records() -> None:
    parameters = INSERTION.batches([OutboxRecord("t", "k")] * 3)[0]
    assert INSERTION.many_ids([(9,), (7,), (8,)], parameters) == [7, 8, 9]
    with pytest.raises(OutboxError, match="2 of 3 rows"):
        INSERTION.many_ids([(7,), (8,)], parameters)
    with pytest.raises(OutboxError, match="was not inserted"):
        INSERTION.one_id(None)

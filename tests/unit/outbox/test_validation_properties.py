"""Whatever is handed in becomes a row that PostgreSQL can take, or RecordRejected; nothing else."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import RecordRejected
from harvester.outbox.shape import ColumnShape
from harvester.outbox.sql.insert import array_literal
from harvester.outbox.validation import check
from harvester.record import OutboxRecord

kinds = st.sampled_from(["text", "bytea"])
limits = st.none() | st.integers(1, 20)
shapes = st.builds(
    ColumnShape,
    key_type=kinds,
    key_nullable=st.booleans(),
    value_type=kinds,
    value_nullable=st.booleans(),
    has_partition=st.booleans(),
    topic_max=limits,
    key_max=limits,
    value_max=limits,
)
# With surrogates and NUL, which st.text() alone leaves out or seldom finds.
texts = st.text(st.characters() | st.sampled_from(["\x00", "\ud800", "\udfff", "ü", "x"]), max_size=30)
junk: st.SearchStrategy[Any] = st.none() | texts | st.binary(max_size=30) | st.integers() | st.booleans() | st.floats()
records = st.builds(
    OutboxRecord,
    topic=st.from_regex(r"[a-z._-]{0,25}", fullmatch=True) | junk,
    key=texts | junk,
    value=texts | junk,
    headers=st.lists(st.tuples(texts, texts), max_size=4) | st.lists(st.lists(junk, max_size=3), max_size=3) | junk,
    partition=st.none() | st.integers() | junk,
)


@given(record=records, shape=shapes)
def test_a_row_fits_its_columns_or_the_record_is_refused(record: OutboxRecord, shape: ColumnShape) -> None:
    try:
        row = check(record, shape)
    except RecordRejected:
        return
    assert re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", row.topic)
    assert row.topic not in (".", "..")
    assert shape.topic_max is None or len(row.topic) <= shape.topic_max
    for field, kind, nullable, limit in (
        (row.key, shape.key_type, shape.key_nullable, shape.key_max),
        (row.value, shape.value_type, shape.value_nullable, shape.value_max),
    ):
        if field is None:
            assert nullable
        elif kind == "bytea":
            assert isinstance(field, bytes)
        else:
            assert isinstance(field, str)
            assert "\x00" not in field
            field.encode()
            assert limit is None or len(field) <= limit
    assert len(row.header_keys) == len(row.header_values) == len(record.headers)
    for text in (*row.header_keys, *row.header_values):
        assert "\x00" not in text
        text.encode()
    assert row.partition is None or (shape.has_partition and 0 <= row.partition < 2**31)


@given(record=records, shape=shapes)
def test_a_row_publishes_the_bytes_of_its_record(record: OutboxRecord, shape: ColumnShape) -> None:
    try:
        row = check(record, shape)
    except RecordRejected:
        return

    def wire(field: str | bytes | None) -> bytes | None:
        return field.encode() if isinstance(field, str) else field

    assert wire(row.key) == wire(record.key)
    assert wire(row.value) == wire(record.value)
    assert list(zip(row.header_keys, row.header_values, strict=True)) == [tuple(pair) for pair in record.headers]


@given(st.lists(st.text()))
def test_array_literals_read_back(texts: list[str]) -> None:
    literal = array_literal(texts)
    assert literal[0] == "{"
    assert literal[-1] == "}"
    # The manual's grammar for quoted elements: anything but quote and backslash, which a backslash escapes.
    elements = re.findall(r'"((?:[^"\\]|\\.)*)"', literal[1:-1], re.DOTALL)
    assert [re.sub(r"\\(.)", r"\1", element, flags=re.DOTALL) for element in elements] == texts

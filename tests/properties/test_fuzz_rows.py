"""Rows that a writer may have left in the outbox: a record, or a reason for the quarantine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.decode import decode
from harvester.errors import UndecodableRecord
from tests.unit.test_decode import array, row

BYTES = st.binary(max_size=20)
ARRAYS = st.none() | st.builds(array, st.lists(st.none() | BYTES, max_size=4), st.integers(1, 6))
TOPICS = st.none() | st.binary(max_size=300) | st.sampled_from([b".", b"..", b"a/b", b"\xff", b"a\n", b"a" * 250])


@given(
    topic=TOPICS, key=st.none() | BYTES, value=st.none() | BYTES, names=ARRAYS, values=ARRAYS,
    created=st.none() | st.integers(-(2**63), 2**63 - 1), partition=st.none() | st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
def test_any_row(
    topic: bytes | None,
    key: bytes | None,
    value: bytes | None,
    names: bytes | None,
    values: bytes | None,
    created: int | None,
    partition: int | None,
) -> None:
    raw = row(topic=topic, key=key, value=value, names=names, values=values, created=created, partition=partition)
    try:
        record = decode(raw)
    except UndecodableRecord:
        return
    assert (record.key, record.value) == (key, value)
    assert record.topic.encode() == topic
    assert record.partition == (-1 if partition is None else partition)

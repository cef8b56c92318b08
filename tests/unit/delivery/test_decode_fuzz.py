"""Rows that a writer may have left in the outbox: a record, or a reason for the quarantine; and bytes that are none."""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.decode import Broken, decode
from harvester.errors import WireError
from tests.support.rows import TEXT_OID, VARCHAR_OID, array, decode_one, row

IDS = st.integers(-(2**63), 2**63 - 1)
BYTES = st.binary(max_size=20)
OIDS = st.sampled_from([TEXT_OID, VARCHAR_OID])
LOWER_BOUNDS = st.just(1) | st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.none() | st.builds(
    array, st.lists(st.none() | BYTES, max_size=4), st.integers(1, 6), oid=OIDS, lower=LOWER_BOUNDS
)
TOPICS = st.none() | st.binary(max_size=300) | st.sampled_from([b".", b"..", b"a/b", b"\xff", b"a\n", b"a" * 250])
GOOD_TOPICS = st.text("abcXYZ019._-", min_size=1, max_size=30).filter(lambda topic: topic not in {".", ".."})
TIMES = st.integers(-(2**63), 2**63 - 1)
ANY_ROWS = st.builds(
    row, record_id=IDS, topic=st.just(b"t") | TOPICS, key=st.none() | BYTES, value=st.none() | BYTES,
    names=ARRAYS, values=ARRAYS, created=TIMES, partition=st.none() | st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
MIXES = st.lists(ANY_ROWS, max_size=6)


@st.composite
def header_arrays(draw: st.DrawFn) -> tuple[bytes | None, bytes | None]:
    """Arrays of as many names as values, in any of the forms that a server may send them in."""
    pairs = draw(st.lists(st.tuples(st.text(max_size=10), BYTES), max_size=3))
    if not pairs and draw(st.booleans()):
        return None, None
    names, values = (
        array(elements, oid=draw(OIDS), lower=draw(LOWER_BOUNDS), has_nulls=bool(draw(st.integers(0, 1))))
        for elements in ([name.encode() for name, _ in pairs], [value for _, value in pairs])
    )
    return names, values


@st.composite
def good_rows(draw: st.DrawFn) -> bytes:
    """Rows that are records, whatever stands beside them."""
    names, values = draw(header_arrays())
    partition = draw(st.none() | st.integers(0, 2**31 - 1))
    return row(
        record_id=draw(IDS), topic=draw(GOOD_TOPICS).encode(), key=draw(st.none() | BYTES), created=draw(TIMES),
        value=draw(st.none() | BYTES), names=names, values=values, partition=partition,
    )  # fmt: skip


@given(
    record_id=IDS, topic=TOPICS, key=st.none() | BYTES, value=st.none() | BYTES, names=ARRAYS, values=ARRAYS,
    created=TIMES, partition=st.none() | st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
def test_any_row(
    record_id: int,
    topic: bytes | None,
    key: bytes | None,
    value: bytes | None,
    names: bytes | None,
    values: bytes | None,
    created: int,
    partition: int | None,
) -> None:
    [found] = decode(
        row(
            record_id=record_id, topic=topic, key=key, value=value, names=names, values=values, created=created,
            partition=partition,
        )
    )  # fmt: skip
    assert (found.id, found.key) == (record_id, key)
    if isinstance(found, Broken):
        assert found.reason
        return
    assert found.value == value
    assert found.topic.encode() == topic
    assert found.partition == (-1 if partition is None else partition)


@given(MIXES)
def test_rows_do_not_disturb_their_neighbours(rows: list[bytes]) -> None:
    assert decode(b"".join(rows)) == [found for raw in rows for found in decode(raw)]


@given(good_rows(), MIXES, good_rows(), MIXES)
def test_good_rows_are_records_among_any_others(
    first: bytes, between: list[bytes], last: bytes, behind: list[bytes]
) -> None:
    found = decode(b"".join([first, *between, last, *behind]))
    assert len(found) == len(between) + len(behind) + 2
    assert (found[0], found[1 + len(between)]) == (decode_one(first), decode_one(last))


@given(st.text(max_size=10), BYTES, st.tuples(OIDS, OIDS), st.tuples(LOWER_BOUNDS, LOWER_BOUNDS), st.booleans())
def test_a_single_header_in_any_array(
    name: str, value: bytes, oids: tuple[int, int], lowers: tuple[int, int], has_nulls: bool
) -> None:
    names = array([name.encode()], oid=oids[0], lower=lowers[0])
    values = array([value], oid=oids[1], lower=lowers[1], has_nulls=has_nulls)
    assert decode_one(row(names=names, values=values)).headers == [(name, value)]


@given(st.lists(ANY_ROWS, min_size=1, max_size=4), st.data())
def test_data_that_is_cut_off(rows: list[bytes], data: st.DataObject) -> None:
    """It is noticed, unless the cut is exactly between two rows."""
    raw = b"".join(rows)
    ends = [0, *accumulate(map(len, rows))]
    cut = data.draw(st.integers(0, len(raw)) | st.sampled_from(ends))
    if cut in ends:
        assert decode(raw[:cut]) == decode(raw)[: ends.index(cut)]
        return
    with pytest.raises(WireError, match="not whole rows"):
        decode(raw[:cut])


@given(st.lists(ANY_ROWS, min_size=1, max_size=3), st.data())
def test_another_byte_anywhere(rows: list[bytes], data: st.DataObject) -> None:
    """Other rows, or WireError and nothing else."""
    raw = bytearray(b"".join(rows))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(WireError):
        decode(bytes(raw))


@given(st.binary(max_size=200))
def test_junk(data: bytes) -> None:
    with suppress(WireError):
        decode(data)

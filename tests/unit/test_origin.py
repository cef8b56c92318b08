"""The header by which records are recognised: layout, limits, foreign bytes."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harvester.origin import SIZE, SMALLEST, VERSION, Origin, decode, encode, find, head, stamp, version

INCARNATION = UUID("00112233-4455-6677-8899-aabbccddeeff")
ORIGIN = Origin(INCARNATION, 258, term=7, lane=3, producer=2, sequence=5, created_us=1_000_000, low_water=257)

longs = st.integers(-(2**63), 2**63 - 1)
words = st.integers(0, 2**32 - 1)


@st.composite
def origins(draw: st.DrawFn) -> Origin:
    record_id = draw(longs)
    low_water = draw(st.none() | st.integers(SMALLEST + 1, record_id)) if record_id > SMALLEST else None
    sequence = draw(st.integers(1, 2**63 - 1))
    return Origin(draw(st.uuids()), record_id, draw(longs), draw(words), draw(words), sequence, draw(longs), low_water)


def test_the_layout_is_as_documented() -> None:
    assert encode(ORIGIN).hex(" ") == (
        "b5 01 00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff"
        " 00 00 00 00 00 00 00 07 00 00 00 03 00 00 00 02 00 00 00 00 00 00 01 01"
        " 00 00 00 00 00 00 01 02 00 00 00 00 00 00 00 05 00 00 00 00 00 0f 42 40"
    )
    assert len(encode(ORIGIN)) == SIZE == 66


@given(origins())
def test_what_is_encoded_is_decoded(origin: Origin) -> None:
    assert decode(encode(origin)) == origin


def test_a_head_serves_many_records() -> None:
    common = head(INCARNATION, 7, 3, 2, 257)
    assert stamp(common, 258, 5, 1_000_000) == encode(ORIGIN)
    assert decode(stamp(common, 259, 6, 1)) == Origin(INCARNATION, 259, 7, 3, 2, 6, 1, 257)


def test_no_low_water() -> None:
    origin = decode(stamp(head(INCARNATION, 1, 0, 0), 1, 1, 0))
    assert origin is not None
    assert origin.low_water is None


def test_creation_time() -> None:
    assert ORIGIN.created_at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


@given(st.none() | st.binary(max_size=SIZE + 2))
@example(b"")
@example(b"\xb5")
@example(bytes(SIZE))
@example(b"\xb5\x01" + bytes(SIZE - 2))  # sequence 0
def test_foreign_bytes_are_no_origin(value: bytes | None) -> None:
    found = decode(value)
    assert found is None or encode(found) == value


@given(st.integers(0, SIZE - 1), st.integers(0, 255), origins())
def test_a_changed_byte_is_never_more_than_another_origin(at: int, byte: int, origin: Origin) -> None:
    value = bytearray(encode(origin))
    value[at] = byte
    found = decode(bytes(value))
    assert found is None or encode(found) == value


def test_a_low_water_above_the_record_is_refused() -> None:
    # Consumers would take the record itself, and all before it, for seen.
    assert decode(stamp(head(INCARNATION, 7, 3, 2, 259), 258, 5, 0)) is None


@pytest.mark.parametrize("sequence", [0, -1])
def test_sequences_begin_with_1(sequence: int) -> None:
    assert decode(stamp(head(INCARNATION, 7, 3, 2), 258, sequence, 0)) is None


def test_versions_are_told_from_foreign_bytes() -> None:
    assert version(encode(ORIGIN)) == VERSION
    newer = b"\xb5\x02" + encode(ORIGIN)[2:]
    assert decode(newer) is None
    assert version(newer) == 2
    for foreign in (None, b"", b"\xb5", b"hello", "größer".encode(), bytes(SIZE)):
        assert version(foreign) is None


@given(st.text(min_size=1))
def test_text_has_no_version(text: str) -> None:
    assert version(text.encode("utf-8", "surrogatepass")) is None


def test_the_last_header_of_the_name_counts() -> None:
    assert find([("a", b"1"), ("harvester", b"copied"), ("harvester", b"ours"), ("b", b"2")]) == b"ours"
    assert find([("x", b"1")], name="x") == b"1"
    assert find([]) is None
    assert find(None) is None


def test_numbers_without_room_are_refused() -> None:
    with pytest.raises(struct.error):
        head(INCARNATION, 1, 2**32, 0)

"""A progress record's bytes: their layout is what older and newer harvesters meet in the topic."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from harvester.delivery.progress import Progress, decode, encode, most_ids, same_rows
from harvester.errors import WireError
from tests.support.rows import array, progress_of, row, versions

INCARNATION = UUID(int=0x0123456789ABCDEF0123456789ABCDEF)
HEAD = struct.Struct(">BBq16sIq")
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def head(*, version: int = 1, width: int = 4, count: int = 0, first: int = 0) -> bytes:
    return HEAD.pack(version, width, 7, INCARNATION.bytes, count, first)


def test_the_layout() -> None:
    value, header = encode(Progress(7, INCARNATION, (10, 12, 15)))
    assert value == head(count=3, first=10) + bytes([0, 0, 0, 2, 0, 0, 0, 3])
    assert header == b""


def test_the_layout_of_versions() -> None:
    """In a header, so that older harvesters read the value as ever (P49, P50)."""
    progress = Progress(7, INCARNATION, (10, 12), (800, 2**32 - 1), (2**32 + 5, -1), (1, 2**32 - 2))
    value, header = encode(progress)
    assert value == encode(Progress(7, INCARNATION, (10, 12))).value
    assert header == bytes.fromhex("00000320 ffffffff 00000005 ffffffff 00000001 fffffffe")
    assert decode(value, header) == replace(progress, created_us=(5, 2**32 - 1))
    assert decode(value, None) == decode(value, b"") == Progress(7, INCARNATION, (10, 12))


@pytest.mark.parametrize("size", [1, 8, 16, 23, 25, 36])
def test_versions_of_another_number_of_rows(size: int) -> None:
    value, _ = encode(Progress(7, INCARNATION, (10, 12)))
    with pytest.raises(WireError, match="versions"):
        decode(value, bytes(size))


def test_nothing_to_name() -> None:
    assert encode(Progress(7, INCARNATION)) == (head(), b"")
    assert decode(head()) == Progress(7, INCARNATION, ())


@pytest.mark.parametrize(
    ("ids", "width"),
    [
        ((1,), 4),
        ((SMALLEST,), 4),
        ((0, 2**32 - 1), 4),
        ((0, 2**32), 8),
        ((SMALLEST, LARGEST), 8),
        ((SMALLEST, 0, 1, LARGEST), 8),
        ((-3, -2, 5), 4),
    ],
)
def test_a_distance_that_needs_more_room_widens_them_all(ids: tuple[int, ...], width: int) -> None:
    value, _ = encode(Progress(1, INCARNATION, ids))
    assert value[1] == width
    assert len(value) == HEAD.size + (len(ids) - 1) * width
    assert decode(value).ids == ids


@pytest.mark.parametrize("term", [0, 1, LARGEST, SMALLEST])
def test_any_term(term: int) -> None:
    assert decode(*encode(Progress(term, INCARNATION, [1]))).term == term


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [1, 3, 2], [5, 5, 6]])
def test_ids_must_ascend(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        encode(Progress(1, INCARNATION, ids))


def test_a_record_has_room_for_what_is_allowed() -> None:
    """As brokers come, it is some fifty thousand ids, however far they are apart."""
    most, apart = most_ids(1_000_000), 1 << 32
    assert most > 49_000
    ids = range(0, most * apart, apart)
    value, header = encode(Progress(1, INCARNATION, ids, [800] * most, [5] * most, [6] * most))
    assert len(value) + len(header) + 200 < 1_000_000
    assert len(decode(value, header).ids) == most


@pytest.mark.parametrize("size", [0, 1, 255, 256, 263])
def test_a_record_that_is_too_small_names_nothing(size: int) -> None:
    assert most_ids(size) == 0


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        head()[:-1],
        head() + b"x",
        head(count=2),
        head(count=2) + bytes(8),
        head(count=1) + bytes(4),
        head(version=2),
        head(version=0),
        head(width=2, count=2) + bytes(2),
        head(width=0, count=2),
        head(width=8, count=2) + bytes(4),
        head(count=2**32 - 1),
    ],
)
def test_what_is_no_progress_record(value: bytes) -> None:
    with pytest.raises(WireError):
        decode(value)


@pytest.mark.parametrize(
    "value",
    [
        head(count=2, first=5) + bytes(4),
        head(count=2, first=LARGEST) + bytes([0, 0, 0, 1]),
        head(width=8, count=2, first=1) + struct.pack(">Q", 2**64 - 1),
    ],
    ids=["an id twice", "above the largest id", "far above it"],
)
def test_ids_that_no_outbox_has(value: bytes) -> None:
    """They would fail far from here, in the DELETE."""
    with pytest.raises(WireError):
        decode(value)


# -- the sums of rows (P49)

SUM = 221_505_928

ROW: dict[str, Any] = {
    "topic": b"t", "key": b"k", "value": b"v", "names": array([b"h"]), "values": array([b"w"]), "created": 9,
}  # fmt: skip


def test_the_sum_of_a_row_stays_what_it_is() -> None:
    """Another version has to find it as well, and whichever transaction has written it.

    A sum made otherwise needs a header with another name.
    """
    assert [*versions([row(record_id=3, xmin=xmin, **ROW) for xmin in (0, 800)]).sums] == [SUM, SUM]


def test_a_row_is_the_same_only_if_all_of_it_is() -> None:
    """Also the time at which it was created, which tells it from one that was written again."""
    was = row(record_id=3, **ROW)
    progress = progress_of([was, row(record_id=5, **ROW)])
    others = [
        row(record_id=3, **{**ROW, **change})
        for change in (
            {"topic": b"u"}, {"key": b"l"}, {"key": None}, {"value": b"w"}, {"value": None}, {"names": array([b"i"])},
            {"values": array([b"x"])}, {"values": None}, {"created": 10}, {"partition": 0},
        )
    ]  # fmt: skip
    assert same_rows(progress, [(3, b"k", was)]).ids == [3]
    assert [other for other in others if same_rows(progress, [(3, b"k", other)]).ids] == []
    assert same_rows(progress, [(4, b"k", row(record_id=4, **ROW))]).ids == []
    assert same_rows(Progress(7, INCARNATION, (3, 5)), [(3, b"k", was)]).ids == []


def test_rows_that_are_the_same_are_deleted_as_they_are_now() -> None:
    """On another server, other transactions have written them."""
    named = progress_of([row(record_id=3, xmin=800, **ROW)])
    found = same_rows(named, [(3, b"k", row(record_id=3, xmin=5, **ROW))])
    assert (found.ids, found.xmins) == ([3], [5])

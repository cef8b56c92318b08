"""A progress record's bytes: their layout is what older and newer harvesters meet in the topic."""

from __future__ import annotations

import struct
from uuid import UUID

import pytest

from harvester.delivery.progress import Progress, decode, encode, most_ids
from harvester.errors import WireError

INCARNATION = UUID(int=0x0123456789ABCDEF0123456789ABCDEF)
HEAD = struct.Struct(">BBq16sIq")
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def head(*, version: int = 1, width: int = 4, count: int = 0, first: int = 0) -> bytes:
    return HEAD.pack(version, width, 7, INCARNATION.bytes, count, first)


def test_the_layout() -> None:
    value, versions = encode(Progress(7, INCARNATION, (10, 12, 15)))
    assert value == head(count=3, first=10) + bytes([0, 0, 0, 2, 0, 0, 0, 3])
    assert versions == b""


def test_the_layout_of_versions() -> None:
    """In a header, so that older harvesters read the value as ever (P50)."""
    progress = Progress(7, INCARNATION, (10, 12), (800, 2**32 - 1), (2**32 + 5, -1))
    value, versions = encode(progress)
    assert value == encode(Progress(7, INCARNATION, (10, 12))).value
    assert versions == bytes.fromhex("00000320 ffffffff 00000005 ffffffff")
    assert decode(value, versions) == Progress(7, INCARNATION, (10, 12), (800, 2**32 - 1), (5, 2**32 - 1))
    assert decode(value, None) == decode(value, b"") == Progress(7, INCARNATION, (10, 12))


@pytest.mark.parametrize("size", [1, 8, 15, 17, 24])
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
    """As brokers come, it is more than sixty thousand ids, however far they are apart."""
    most, apart = most_ids(1_000_000), 1 << 32
    assert most > 60_000
    value, versions = encode(Progress(1, INCARNATION, range(0, most * apart, apart), [800] * most, [5] * most))
    assert len(value) + len(versions) + 200 < 1_000_000
    assert len(decode(value, versions).ids) == most


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

"""Leases as values, the numbers that are given out under one, and what refusals say."""

from __future__ import annotations

from typing import Any

import pytest

import harvester
from harvester.errors import (
    HarvesterError,
    LeaseError,
    LeaseExpired,
    LeaseFenced,
    LeaseUnknown,
    OutboxError,
    SequenceGap,
)
from harvester.outbox.leases import Course, Lease, Stashed, checked_names, checked_position

LEASE = Lease(7, 3, 10, "reader")


def answer(previous: int, generation: int = 3, ids: Any = None, *, expired: bool = False) -> tuple[Any, ...]:
    return ("(0,1)", ids, previous, generation, expired)


def test_numbers_are_given_once_until_somebody_goes_back() -> None:
    course = Course(LEASE)
    assert course.give(1) == (11, 11)
    assert course.give(3) == (12, 14)
    assert course.lease == Lease(7, 3, 14, "reader")
    course.seek(10)
    assert course.give(1) == (11, 11)
    with pytest.raises(LeaseError, match="no sequence -1"):
        course.seek(-1)


def test_answers_that_are_good() -> None:
    course = Course(LEASE)
    assert course.decided(course.give(1), answer(10, ids=501)) == [Stashed(501, 11)]
    assert course.hoped(course.give(1), ("(0,2)", 502)) == [Stashed(502, 12)]
    assert course.at == "(0,2)"
    assert course.hoped(course.give(2), ("(0,3)", [505, 504])) == [Stashed(504, 13), Stashed(505, 14)]


def test_repeats_are_told_from_what_is_new() -> None:
    course = Course(LEASE)
    [repeat] = course.decided(course.give(1), answer(11))
    assert (repeat.id, repeat.sequence, repeat.repeated) == (None, 11, True)
    found = course.decided(course.give(3), answer(12, ids=[900, 899]))
    assert found == [Stashed(None, 12), Stashed(899, 13), Stashed(900, 14)]
    assert [stashed.repeated for stashed in found] == [True, False, False]


@pytest.mark.parametrize(
    ("row", "error", "said", "hint"),
    [
        (None, LeaseExpired, "lease 7 of 'reader' (generation 3) does not exist", "noted elsewhere"),
        (answer(10, expired=True), LeaseExpired, "has expired; record 11 was not written", "continue after the"),
        (answer(10, 4), LeaseFenced, "was taken over: its generation is 4 now", "stop"),
        (answer(10, 1), LeaseUnknown, "has generation 1 and never gave this one out", "older copy"),
        (answer(8), SequenceGap, "record 11 came where 9 is next; it was not written", r"seek\(8\)"),
    ],
)
def test_refusals(row: tuple[Any, ...] | None, error: type[LeaseError], said: str, hint: str) -> None:
    course = Course(LEASE)
    with pytest.raises(error) as refused:
        course.decided(course.give(1), row)
    assert said in refused.value.message
    assert refused.value.hint is not None
    assert hint.replace("\\", "") in refused.value.hint
    assert isinstance(refused.value, LeaseError | OutboxError | HarvesterError)
    assert refused.value.lease == Lease(7, 3, 11, "reader")
    if isinstance(refused.value, SequenceGap):
        assert (refused.value.sequence, refused.value.expected) == (11, 9)
    assert course.give(1) == (12, 12), "a refused number is not given again by itself"


def test_a_stasher_of_the_same_generation_is_noticed() -> None:
    """Ours came through; a repeat after that can only be somebody else's record."""
    course = Course(LEASE)
    course.decided(course.give(1), answer(10, ids=1))
    with pytest.raises(LeaseFenced, match="another stasher uses the same generation"):
        course.decided(course.give(1), answer(12))
    course.seek(11)
    assert course.decided(course.give(1), answer(12))[0].repeated, "it was asked for"


@pytest.mark.parametrize("ids", [None, [], [1]])
def test_a_suppressed_row_is_noticed(ids: Any) -> None:
    course = Course(LEASE)
    with pytest.raises(OutboxError, match="of 2 rows under lease 7"):
        course.decided(course.give(2), answer(10, ids=ids))
    with pytest.raises(OutboxError, match="0 of 1 rows"):
        course.hoped(course.give(1), ("(0,1)", None))


def test_what_was_saved_goes_on() -> None:
    saved = Lease(7, 3, 10)
    assert Course(saved).give(1) == (11, 11)
    assert saved.raised() == Lease(7, 4, 10)
    assert str(saved) == "lease 7 (generation 3)"
    assert (Lease(7, 1, 0).resumed, saved.resumed) == (False, True)
    for bad in (Lease(0, 1, 0), Lease(1, 0, 0), Lease(1, 1, -1), Lease(1, 1, 2**63 - 1)):
        with pytest.raises(LeaseError, match="could not have come from a database"):
            Course(bad)


def test_names_and_positions() -> None:
    assert checked_names(["b", "a", "b"]) == ["b", "a"]
    assert checked_names(n for n in "xy") == ["x", "y"]
    for bad in ("", "x" * 256, "a\x00", 3):
        with pytest.raises(LeaseError, match="not a valid lease name"):
            checked_names([bad])  # type: ignore[list-item]
    assert (checked_position(None), checked_position("17")) == (None, "17")
    for position in (17, "a\x00"):
        with pytest.raises(LeaseError, match="not a valid upstream position"):
            checked_position(position)  # type: ignore[arg-type]


def test_the_public_names() -> None:
    for name in (
        "AsyncLeasedStasher", "Lease", "LeaseError", "LeaseExpired", "LeaseFenced", "LeaseUnknown", "LeasedStasher",
        "SequenceGap", "Stashed",
    ):  # fmt: skip
        assert name in harvester.__all__
        assert getattr(harvester, name).__name__ == name

"""Seen ids against a plain set, and what their memory and their stored form promise."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harvester.errors import CorruptSeenIds
from harvester.idempotence import SeenIds
from harvester.idempotence.intervals import Intervals

A, B = UUID(int=10), UUID(int=11)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
incarnations = st.sampled_from([A, B])
ids = st.integers(-3, 40)
pairs = st.lists(st.tuples(incarnations, ids), max_size=60)
anywhere = st.integers(LOWEST, HIGHEST) | st.sampled_from([LOWEST, LOWEST + 1, HIGHEST - 1, HIGHEST])


class AgainstASet(RuleBasedStateMachine):
    """Every operation in any order; the oracle has ids from -3 to 40 and below one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SeenIds()
        self.model: set[tuple[UUID, int]] = set()

    @rule(incarnation=incarnations, record_id=ids)
    def add(self, incarnation: UUID, record_id: int) -> None:
        assert self.seen.add(incarnation, record_id) == ((incarnation, record_id) not in self.model)
        self.model.add((incarnation, record_id))

    @rule(incarnation=incarnations, first=ids, last=ids)
    def add_range(self, incarnation: UUID, first: int, last: int) -> None:
        self.seen.add_range(incarnation, first, last)
        self.model.update((incarnation, one) for one in range(first, last + 1))

    @rule(incarnation=incarnations, record_id=ids)
    def low_water(self, incarnation: UUID, record_id: int) -> None:
        self.seen.low_water(incarnation, record_id)
        self.model.update((incarnation, below) for below in range(-10, record_id))

    @rule(incarnation=incarnations)
    def forget(self, incarnation: UUID) -> None:
        known = any(which == incarnation for which, _ in self.model)
        assert self.seen.forget(incarnation) == known
        self.model = {(which, record_id) for which, record_id in self.model if which != incarnation}

    @rule(more=pairs)
    def update(self, more: list[tuple[UUID, int]]) -> None:
        other = SeenIds()
        for pair in more:
            other.add(*pair)
        self.seen.update(other)
        self.model.update(more)

    @rule()
    def store(self) -> None:
        stored = self.seen.to_bytes()
        self.seen = SeenIds.from_bytes(stored)
        assert self.seen.to_bytes() == stored

    @invariant()
    def the_same_ids(self) -> None:
        for incarnation in (A, B):
            for record_id in range(-3, 42):
                known = (incarnation, record_id) in self.model
                assert self.seen.contains(incarnation, record_id) == known

    @invariant()
    def as_few_intervals_as_possible(self) -> None:
        for incarnation in (A, B):
            found = list(self.seen.intervals(incarnation))
            for (_, last), (first, _) in pairwise(found):
                assert last + 1 < first
            assert all(first <= last for first, last in found)

    @invariant()
    def overlaps_and_the_end(self) -> None:
        for incarnation in (A, B):
            found = list(self.seen.intervals(incarnation))
            assert self.seen.highest(incarnation) == (found[-1][1] if found else None)
            for low, high in ((-3, 3), (5, 5), (7, 40)):
                expected = [(first, last) for first, last in found if first <= high and last >= low]
                assert list(self.seen.overlapping(incarnation, low, high)) == expected

    @invariant()
    def the_contiguous_prefix(self) -> None:
        for incarnation in (A, B):
            expected = 0
            while (incarnation, expected + 1) in self.model:
                expected += 1
            assert self.seen.high_water(incarnation) == (expected or None)


TestAgainstASet = AgainstASet.TestCase


@given(st.lists(anywhere), st.lists(st.tuples(anywhere, anywhere)))
def test_intervals_far_apart(single: list[int], ranges: list[tuple[int, int]]) -> None:
    found = Intervals()
    for first, last in ranges:
        found.add_range(first, last)
    for number in single:
        known = number in found or any(first <= number <= last for first, last in ranges)
        assert found.add(number) != known
        assert number in found
    for number in single + [bound for pair in ranges for bound in pair]:
        covered = number in single or any(first <= number <= last for first, last in ranges)
        assert (number in found) == covered


@given(st.lists(st.tuples(incarnations, anywhere)))
def test_any_ids_can_be_stored(pairs: list[tuple[UUID, int]]) -> None:
    seen = SeenIds()
    for pair in pairs:
        seen.add(*pair)
    again = SeenIds.from_bytes(seen.to_bytes())
    assert again == seen
    assert all(again.contains(*pair) for pair in pairs)


@given(pairs, pairs)
def test_a_merge_does_not_depend_on_its_order(one: list[tuple[UUID, int]], two: list[tuple[UUID, int]]) -> None:
    left, right, both = SeenIds(), SeenIds(), SeenIds()
    for pair in one:
        left.add(*pair)
    for pair in two:
        right.add(*pair)
    for pair in one + two:
        both.add(*pair)
    merged = left.copy()
    merged.update(right)
    right.update(left)
    assert merged == right == both
    assert merged.to_bytes() == both.to_bytes()


def test_only_the_highest_id_would_lose_a_late_one() -> None:
    """Two transactions take ids 1 and 2 and commit in the other order."""
    log = [2, 1, 3, 2]

    highest, by_mark = 0, []
    for record_id in log:
        if record_id > highest:
            highest = record_id
            by_mark.append(record_id)
    assert by_mark == [2, 3]  # 1 is lost

    seen = SeenIds()
    assert [record_id for record_id in log if seen.add(A, record_id)] == [2, 1, 3]


def test_equal_ids_of_another_incarnation_are_new() -> None:
    seen = SeenIds()
    seen.low_water(A, 1000)
    assert not seen.add(A, 5)
    assert seen.add(B, 5)
    assert seen.high_water(A) == 999
    assert seen.high_water(B) is None


@given(st.data())
def test_corrupt_bytes_are_refused(data: st.DataObject) -> None:
    seen = SeenIds()
    for pair in data.draw(pairs):
        seen.add(*pair)
    stored = bytearray(seen.to_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "append"]))
    if how == "flip":
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del stored[data.draw(st.integers(0, len(stored) - 1)) :]
    else:
        stored += data.draw(st.binary(min_size=1, max_size=8))
    with pytest.raises(CorruptSeenIds):
        SeenIds.from_bytes(bytes(stored))


@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    import zlib

    body = b"\x01" + body
    sealed = body + zlib.crc32(body).to_bytes(4, "big")
    try:
        seen = SeenIds.from_bytes(sealed)
    except CorruptSeenIds:
        return
    assert seen.to_bytes() == sealed  # whatever is accepted has one form only


def test_an_unknown_version_says_so() -> None:
    with pytest.raises(CorruptSeenIds, match="version 9"):
        SeenIds.from_bytes(b"\x09" + SeenIds().to_bytes()[1:])


@given(pairs, st.integers(0, 12))
def test_shedding_drops_the_lowest_and_nothing_else(added: list[tuple[UUID, int]], most: int) -> None:
    seen = SeenIds()
    for pair in added:
        seen.add(*pair)
    before = {which: list(seen.intervals(which)) for which in (A, B)}
    count = len(seen)
    assert seen.shed(most) == max(0, count - most)
    assert len(seen) == min(count, most)
    for which in (A, B):
        left = list(seen.intervals(which))
        assert left == before[which][len(before[which]) - len(left) :]


def test_shedding_keeps_what_lies_below_a_low_water() -> None:
    seen = SeenIds()
    seen.low_water(A, 100)
    for record_id in range(102, 142, 2):
        seen.add(A, record_id)
    assert seen.shed(5) == 16
    assert seen.contains(A, 99)
    assert not seen.contains(A, 102)
    assert [first for first, _ in seen.intervals(A)] == [LOWEST, 134, 136, 138, 140]


def test_memory_grows_with_the_gaps_not_with_the_ids() -> None:
    seen = SeenIds()
    order = random.Random(7)
    window: list[int] = []
    most = 0
    for record_id in range(1, 50_001):
        window.append(record_id)
        if len(window) == 100:  # concurrent transactions commit in any order
            most = max(most, len(seen))
            assert seen.add(A, window.pop(order.randrange(100)))
    for record_id in window:
        assert seen.add(A, record_id)
    assert list(seen.intervals(A)) == [(1, 50_000)]
    assert most <= 101
    assert len(seen.to_bytes()) < 32


def test_a_gap_costs_16_bytes_and_one_stored() -> None:
    """The worst case: every second id, as of one of two partitions."""
    intervals = Intervals((record_id, record_id) for record_id in range(0, 200_000, 2))
    assert len(intervals) == 100_000
    assert sys.getsizeof(intervals._starts) + sys.getsizeof(intervals._ends) < 100_000 * 16 * 1.2 + 200
    seen = SeenIds()
    for record_id in range(0, 200_000, 2):
        seen.add(A, record_id)
    assert len(seen.to_bytes()) < 100_000 + 50


def test_a_low_water_bounds_it() -> None:
    seen = SeenIds()
    for record_id in range(0, 20_000, 2):
        seen.add(A, record_id)
        seen.low_water(A, record_id - 20)
        assert len(seen) <= 12

"""Where a record's number and low water come from (P25)."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from harvester.origin import Origin, Stamps, decode, timestamp_ms

INCARNATION = UUID(int=9)
LANE = 3


@pytest.fixture
def stamps() -> Stamps:
    made = Stamps("header", LANE)
    made.begin(5, str(INCARNATION), 7)
    return made


def read(stamps: Stamps, record_id: int = 100) -> Origin:
    origin = decode(stamps.stamp(record_id, 42))
    assert origin is not None
    return origin


def test_a_stamp_says_where_the_record_comes_from(stamps: Stamps) -> None:
    origin = read(stamps)
    assert (origin.incarnation, origin.term, origin.lane, origin.id) == (INCARNATION, 5, LANE, 100)
    assert (origin.sequence, origin.created_us, origin.low_water) == (1, 42, None)


def test_sequences_are_dense(stamps: Stamps) -> None:
    assert [read(stamps, record_id).sequence for record_id in (7, 3, 9, 3)] == [1, 2, 3, 4]


def test_what_an_aborted_transaction_used_up_is_used_again(stamps: Stamps) -> None:
    committed = [read(stamps).sequence for _ in range(2)][-1]
    for _ in range(3):
        read(stamps)
    stamps.rewind(committed)
    assert read(stamps).sequence == 3


def test_a_new_scope_begins_at_one_and_is_another(stamps: Stamps) -> None:
    before = read(stamps)
    stamps.begin(5, str(INCARNATION), random.getrandbits(32))
    after = read(stamps)
    assert after.sequence == before.sequence == 1
    assert (after.incarnation, after.term, after.lane) == (before.incarnation, before.term, before.lane)
    assert after.producer != before.producer


def test_low_water_is_as_it_was_set_last_and_costs_no_number(stamps: Stamps) -> None:
    found = []
    for low_water in (None, 5, 5, 8, None):
        stamps.set_low_water(low_water)
        origin = read(stamps)
        found.append((origin.low_water, origin.sequence))
    assert found == [(None, 1), (5, 2), (5, 3), (8, 4), (None, 5)]


def test_a_new_scope_knows_no_low_water(stamps: Stamps) -> None:
    """It may be one of another incarnation."""
    stamps.set_low_water(5)
    stamps.begin(6, str(INCARNATION), random.getrandbits(32))
    assert read(stamps).low_water is None
    stamps.set_low_water(5)
    assert read(stamps).low_water == 5


@pytest.mark.parametrize(("term", "incarnation"), [(None, None), (1, None), (None, str(INCARNATION))])
def test_without_a_leader_nothing_is_stamped(stamps: Stamps, term: int | None, incarnation: str | None) -> None:
    stamps.begin(term, incarnation, 7)
    stamps.set_low_water(5)
    stamps.rewind(7)
    assert stamps.stamp(1, 1) == b""


def test_before_the_first_scope_nothing_is_stamped() -> None:
    assert Stamps("header", 0).stamp(1, 1) == b""


@pytest.mark.parametrize(
    ("created_us", "carried"),
    [
        (2**63 - 1, 2**63 - 1),
        (2**63, 2**63 - 1),
        (2**63 - 1 + 946_684_800_000_000, 2**63 - 1),  # `infinity`, which PostgreSQL counts from 2000
        (-(2**63), -(2**63)),
        (-(2**63) - 1, -(2**63)),
    ],
)
def test_a_time_without_room_is_the_nearest_that_has_some(stamps: Stamps, created_us: int, carried: int) -> None:
    found = decode(stamps.stamp(7, created_us))
    assert found is not None
    assert (found.created_us, found.sequence) == (carried, 1)


@pytest.mark.parametrize(
    ("created_us", "at_ms"),
    [
        (1_582_979_696_789_123, 1_582_979_696_789),
        (999, 1),
        (-1, 1),
        (-62_135_596_800_000_000, 1),
        (-62_135_596_800_000_001, 0),
        (253_402_300_799_999_999, 253_402_300_799_999),
        (253_402_300_800_000_000, 0),
        (2**63 - 1 + 946_684_800_000_000, 0),
    ],
)
def test_a_record_of_no_sensible_time_is_dated_by_the_client(created_us: int, at_ms: int) -> None:
    assert timestamp_ms(created_us) == at_ms

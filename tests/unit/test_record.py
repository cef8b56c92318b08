"""P50: which of the rows that stand under some ids now are the ones that were read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.record import RowVersions

AT_US = 1_700_000_000_123_456
NOON_US = 1_700_000_000_000_000
INFINITY_US = 2**63 - 1
NOTHING = RowVersions(())


def judged(asked: tuple[int, int], found: tuple[int, int]) -> str:
    """What becomes of record 7, read with this xmin and time, when this is what stands there now."""
    same, others = RowVersions((7,), (asked[0],), (asked[1],)).compare({7: found})
    if others:
        assert (same, others) == (NOTHING, [7])
        return "another"
    assert same == RowVersions([7], [found[0]], [found[1]])
    return "the same"


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ((800, AT_US), (800, AT_US), "the same"),
        ((800, NOON_US), (800, NOON_US), "the same"),
        ((800, AT_US), (900, AT_US), "the same"),  # updated, or written anew with the whole table
        ((800, AT_US & 0xFFFF_FFFF), (900, AT_US), "the same"),  # as a progress record has it
        ((800, AT_US), (900, AT_US + 1), "another"),
        ((800, AT_US), (900, AT_US - 1), "another"),
        ((800, NOON_US), (900, NOON_US), "another"),  # a time that is not from a clock
        ((800, 0), (900, 0), "another"),  # no time at all
        ((800, INFINITY_US), (900, INFINITY_US), "another"),
        ((800, 1 << 53), (900, 1 << 53), "another"),  # what the server says of that, and of all that is later
        ((800, -AT_US), (900, -AT_US), "another"),
    ],
)
def test_a_row_is_told_by_its_xmin_or_by_its_time(
    asked: tuple[int, int], found: tuple[int, int], expected: str
) -> None:
    assert judged(asked, found) == expected


def test_what_is_gone_is_neither() -> None:
    assert RowVersions((1, 2), (800, 800), (AT_US, AT_US)).compare({}) == (NOTHING, [])


def test_rows_without_versions_are_compared_with_nothing() -> None:
    assert RowVersions(()).compare({1: (800, AT_US)}) == (NOTHING, [])


ROWS = st.dictionaries(st.integers(1, 30), st.tuples(st.integers(3, 6), st.integers(AT_US, AT_US + 3)), max_size=10)


@given(ROWS, ROWS)
def test_each_row_that_stands_there_is_one_or_the_other(
    asked: dict[int, tuple[int, int]], found: dict[int, tuple[int, int]]
) -> None:
    ids = sorted(asked)
    rows = RowVersions(ids, [asked[i][0] for i in ids], [asked[i][1] for i in ids])
    same, others = rows.compare(found)
    assert sorted([*same.ids, *others]) == [i for i in ids if i in found]
    for record_id, xmin, created_us in zip(same.ids, same.xmins, same.created_us, strict=True):
        assert (xmin, created_us) == found[record_id]
        assert xmin == asked[record_id][0] or created_us == asked[record_id][1]
    for record_id in others:
        assert found[record_id][0] != asked[record_id][0]
        assert found[record_id][1] != asked[record_id][1]


def test_columns_are_cut_together() -> None:
    rows = RowVersions([1, 2], [800, 801], [AT_US, AT_US])
    assert rows.without({1}) == RowVersions([2], [801], [AT_US])
    assert rows.without({1, 2}) == RowVersions([], [], [])
    assert RowVersions((1, 2, 3)).without({2}) == RowVersions([1, 3])

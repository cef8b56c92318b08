"""Single decisions of the scan; its histories are in tests/unit/relay/test_scan_properties.py."""

from __future__ import annotations

from harvester.relay.core.scan import LOWEST, Bookmark, Scan


def test_a_gap_closes_when_those_who_could_fill_it_are_gone_whoever_came_since() -> None:
    """Under load somebody always holds a lock."""
    scan = Scan()
    scan.read([1, 3], 10)
    scan.listed({"a": 1, "b": None}, 3)
    scan.listed({"b": 2, "c": 3}, 4)
    scan.listed({"c": 3, "d": 4}, 5)
    scan.read([], 10)
    assert scan.ranges() == [(4, 5)], "what was given out meanwhile"


def test_a_gap_waits_for_each_of_them() -> None:
    scan = Scan()
    scan.read([1, 3], 10)
    scan.listed({"a": None, "b": None}, 3)
    for holders in ({"a": None}, {"a": None, "c": 1}):
        scan.listed(holders, 3)
        scan.read([], 10)
        assert scan.ranges()[-1] == (2, 2)


def test_a_gap_rests_while_the_transaction_that_it_waits_for_goes_on() -> None:
    scan = Scan(awake=1, young=3)
    scan.read([1, 3, 5], 10)
    for _ in range(5):
        scan.listed({"idle": 7, "other": 8}, 5)
        scan.read([], 10)
    assert scan.ranges() == []
    assert list(scan.watched) == [7, 8]
    assert scan.floor == LOWEST
    scan.ended([8])
    assert scan.ranges() == [(LOWEST, 0), (2, 2), (4, 4)]
    scan.read([], 10)
    scan.listed({"idle": 7}, 5)
    assert scan.ranges() == []
    assert list(scan.watched) == [7]
    scan.ended([7])
    scan.read([4], 10)
    assert scan.floor == 6
    assert not scan.resting
    assert not scan.watched


def test_an_empty_table_is_read_from_its_head_once() -> None:
    """However many dead rows are there: what was given out is a gap, and rests."""
    scan = Scan()
    scan.listed({"idle": 7}, 500_000)
    scan.read([], 10)
    assert (scan.high, scan.ranges()) == (500_000, [])


def test_a_look_wakes_the_gap_in_which_it_finds_a_row() -> None:
    """Its id was fetched by a session that nobody waits for."""
    scan = Scan(young=3)
    scan.listed({"idle": 7}, 9)
    scan.read([1, 5, 9], 10)
    for _ in range(3):
        scan.listed({"idle": 7}, 9)
    assert scan.ranges() == []
    assert scan.passed_over([1, 3, 9]) == [1, 9]
    assert scan.ranges() == [(2, 4)]


def test_a_bookmark_ends_below_what_is_not_settled_and_keeps_what_is_open() -> None:
    bookmark = Bookmark(100, ((3, 5), (40, 60), (80, 81)))
    assert bookmark.below(None) == bookmark.below(101) == bookmark
    assert bookmark.below(50) == Bookmark(49, ((3, 5), (40, 49)))
    assert bookmark.below(2) == Bookmark(1)


def test_ids_that_the_sequence_has_yet_to_give_out_stay_open() -> None:
    scan = Scan()
    scan.read([1, 100], 10)
    for _ in range(3):
        scan.listed({}, 5)
        scan.read([], 10)
    assert scan.ranges() == [(6, 99)]


def test_without_a_sequence_every_gap_closes() -> None:
    scan = Scan()
    scan.read([1, 100], 10)
    scan.listed({}, None)
    scan.read([], 10)
    assert not scan.gaps


def test_only_ids_outside_of_gaps_are_passed_over() -> None:
    scan = Scan()
    scan.read([5, 6, 9], 10)
    assert scan.passed_over(range(4, 12)) == [5, 6, 9, 10, 11]

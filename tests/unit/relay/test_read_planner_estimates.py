"""What the next mark is expected to bring."""

from __future__ import annotations

from harvester.relay.core.ledger import Row
from harvester.relay.core.read_planner import MarkEstimate


def rows(count: int, size: int = 100) -> list[Row]:
    return [(number, b"key", b"." * size) for number in range(count)]


def test_while_nothing_is_known_rows_are_few_and_each_has_a_key_of_its_own() -> None:
    expected = MarkEstimate()
    assert (expected.rows(1000), expected.rows(7), expected.keys(50), expected.bound(10_000)) == (100, 7, 50, 10_000)


def test_where_all_keys_are_new_each_row_needs_a_place() -> None:
    expected = MarkEstimate()
    expected.learn(rows(1000), 1000)
    assert (expected.rows(400), expected.keys(400)) == (400, 400)


def test_where_no_key_is_new_more_rows_are_asked_for_and_some_places_stay_kept() -> None:
    expected = MarkEstimate()
    for _ in range(30):
        expected.learn(rows(1000), 0)
    assert 1_590 <= expected.rows(40) <= 1_600
    assert 25 <= expected.keys(1000) <= 26


def test_a_single_surprise_is_learnt_at_once() -> None:
    expected = MarkEstimate()
    for _ in range(30):
        expected.learn(rows(1000), 0)
    expected.learn(rows(1000), 1000)
    assert expected.keys(1000) > 300


def test_large_rows_are_bounded_by_their_bytes_and_one_is_always_allowed() -> None:
    expected = MarkEstimate()
    expected.learn(rows(4, size=1 << 20), 4)
    assert expected.bound(20_000) == 256
    expected = MarkEstimate()
    expected.learn([(1, None, bytes(1 << 29))], 1)
    assert expected.bound(20_000) == 1


def test_an_empty_mark_teaches_nothing() -> None:
    expected = MarkEstimate()
    expected.learn([], 0)
    assert expected.rows(1000) == 100

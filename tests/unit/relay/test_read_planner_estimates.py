"""What the next mark is expected to bring, and how much it may ask for."""

from __future__ import annotations

from harvester.relay.core.deferred import DeferredRows
from harvester.relay.core.ledger import Row
from harvester.relay.core.read_planner import MOST_GROWTH, FlowControl, MarkEstimate, Statements
from tests.support.relay_driver import Driver


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


def test_a_backlog_is_read_in_batches_that_grow() -> None:
    flow = FlowControl(100, Driver().machine.ledger, DeferredRows(), Statements())
    grown = []
    for _ in range(6):
        flow.marked(flow.batch, flow.batch)
        grown.append(flow.batch)
    assert grown == [200, 400, 800, 1_000, 1_000, 1_000]
    assert grown[-1] == MOST_GROWTH * 100
    flow.marked(50, 50)  # there was no room to ask for more, which says nothing
    assert flow.batch == 1_000
    flow.marked(999, 1_000)  # the table has no more
    assert flow.batch == 100
    flow.marked(30, 30)
    assert flow.batch == 100

"""What the next mark is expected to bring, and how much it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from harvester.relay.core import messages as c
from harvester.relay.core.deferred import DeferredRows
from harvester.relay.core.ledger import Row
from harvester.relay.core.read_planner import MOST_GROWTH, FlowControl, MarkEstimate, Statements
from tests.support.relay_driver import SETTINGS, Driver, sent
from tests.support.rows import row as raw_row


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


# At least once with default limits. A quarter of what fits into memory, 16 rows of 4 MB, is less than a usual batch.
DEFAULTS = replace(
    SETTINGS, max_in_flight_records=1_000, max_unsettled_records=6_000, mark_query_records=100, max_queued_per_key=100
)


class Table:
    """A table of rows of 4 MB, as far as anyone asks for their size, under a leader whose shards settle."""

    def __init__(self, rows: int, key: Callable[[int], bytes]) -> None:
        class Large(bytes):
            def __len__(self) -> int:
                return 4 << 20

        self.driver = Driver(DEFAULTS)
        self.left = {i: (i, key(i), Large(raw_row(record_id=i, key=key(i)))) for i in range(1, rows + 1)}
        self._high = 0
        self.driver.lead()

    def turn(self, now: float, *, fail: Container[int] = (), lock: Container[int] = ()) -> None:
        """Statements under way return; what was sent is settled, fails and will be retried, or stays locked."""
        machine, commands = self.driver.machine, list[c.Command]()
        for statement in list(machine.planner.statements.under_way.values()):
            match statement.asked:
                case c.Mark(number=number, limit=limit):
                    found = [self.left[i] for i in sorted(self.left) if i > self._high][:limit]
                    self._high = found[-1][0] if found else self._high
                    commands += machine.marked(number, found, now)
                case c.Fetch(number=number, ids=wanted):
                    commands += machine.fetched(number, [self.left[i] for i in wanted if i in self.left], now)
        for shard, ids in (item for command in commands for item in sent([command]).items()):
            for record_id in ids:
                if record_id in fail:
                    machine.parked(shard, machine.epoch, record_id, [], 1.0, False, now)
                elif record_id not in lock:
                    del self.left[record_id]
            machine.settled(shard, [i for i in ids if i not in fail and i not in lock], now)
        for shard in (0, 1):
            machine.heard(shard, now)
        machine.tick(now)


def test_a_large_record_that_is_retried_stops_no_other() -> None:
    table = Table(500, lambda i: b"k%d" % i)
    for turn in range(1_000):
        table.turn(turn * 0.1, fail={5} if turn < 200 else ())
    assert not table.left


def test_a_large_row_of_a_hot_key_that_is_locked_stops_only_its_key() -> None:
    """The rows behind it take all the memory there is for rows, as many small ones would take all the places."""
    table = Table(1_000, lambda i: b"hot" if i <= 150 else b"k%d" % i)
    for turn in range(1_000):
        table.turn(turn * 0.1, lock={1})
    assert not [i for i in table.left if i > 150]


# -- statements that take too long


def carry(driver: Driver, most: int, left: dict[int, Row], turns: int) -> list[int]:
    """The sizes requested, of marks and fetches, on a link that carries this many rows within a statement's time."""
    machine, high, sizes = driver.machine, 0, list[int]()
    for _ in range(turns):
        commands: list[c.Command] = machine.tick(driver.now)
        for statement in list(machine.planner.statements.under_way.values()):
            asked = statement.asked
            if not machine.planner.knows(asked.number):
                continue
            assert isinstance(asked, c.Mark | c.Fetch)
            if isinstance(asked, c.Fetch):
                found = [left[i] for i in asked.ids if i in left]
                sizes.append(len(asked.ids))
            else:
                found = [left[i] for i in sorted(left) if i > high][: asked.limit]
                sizes.append(asked.limit)
            if len(found) > most:
                machine.statement_failed(asked.number, "statement timeout", driver.now)
                commands, high = driver.answer(), 0
            elif isinstance(asked, c.Fetch):
                commands += machine.fetched(asked.number, found, driver.now)
            else:
                high = found[-1][0] if found else high
                commands += machine.marked(asked.number, found, driver.now)
        for shard, ids in (item for command in commands for item in sent([command]).items()):
            for record_id in ids:
                del left[record_id]
            machine.settled(shard, ids, driver.now)
    return sizes


def test_a_mark_that_takes_too_long_is_not_repeated_as_it_was() -> None:
    """It would take too long again, and nothing would ever be published."""
    for most in (1, 7, 60):
        driver = Driver(DEFAULTS)
        driver.lead()
        left: dict[int, Row] = {i: (i, b"k%d" % i, raw_row(record_id=i, key=b"k%d" % i)) for i in range(1, 301)}
        sizes = carry(driver, most, left, 1_500)
        assert not left
        assert sum(size > most for size in sizes if size) < len(sizes) / 2


def test_a_failure_bounds_fetches_and_marks_alike() -> None:
    driver = Driver(DEFAULTS)
    driver.lead()
    driver.machine.statement_failed(driver.under_way(c.Mark), "statement timeout", driver.now)
    driver.answer()
    shards = driver.machine.planner.shards
    shards[0].ready = shards[1].ready = False
    left = {i: (i, b"k%d" % i, raw_row(record_id=i, key=b"k%d" % i)) for i in range(1, 201)}
    while len(left) > driver.machine.planner.deferred.rows:
        at = driver.machine.planner.deferred.rows
        driver.mark(*[left[i] for i in range(at + 1, at + 26)])
    shards[0].ready = shards[1].ready = True
    driver.machine.proceed(driver.now)
    asked = driver.machine.planner.statements.under_way[driver.under_way(c.Fetch)].asked
    assert isinstance(asked, c.Fetch)
    assert len(asked.ids) <= 60, "the limit, raised by the marks that filled it"
    driver.machine.statement_failed(asked.number, "statement timeout", driver.now)
    driver.answer()
    again = driver.machine.planner.statements.under_way[driver.under_way(c.Mark)].asked
    assert isinstance(again, c.Mark)
    assert again.limit == len(asked.ids) // 4


def test_a_failure_leaves_a_limit_that_statements_which_fill_it_raise() -> None:
    flow = FlowControl(100, Driver().machine.ledger, DeferredRows(), Statements())
    for _ in range(4):
        flow.marked(flow.batch, flow.batch)
    flow.failed(1_000)
    assert flow.batch == 250
    flow.failed(250)
    flow.failed(60)
    flow.failed(15)
    flow.failed(3)
    flow.failed(1)
    assert flow.batch == 1
    flow.marked(0, 1)
    assert flow.batch == 1, "it proves nothing about more rows"
    grown = []
    while flow.batch < 1_000:
        flow.brought(flow.batch - 1)
        flow.marked(flow.batch, flow.batch)
        grown.append(flow.batch)
    assert grown[:9] == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert len(grown) < 60
    flow.marked(1_000, 1_000)
    assert flow.batch == 1_000

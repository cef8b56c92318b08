"""Single decisions of the relay machine; the interplay is in tests/properties/test_machine.py."""

from __future__ import annotations

from uuid import UUID

import pytest

from harvester.delivery.decode import decode
from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay import commands as c
from harvester.relay import frames as f
from harvester.relay.ledger import Row
from harvester.relay.machine import Phase, Relay, Settings
from tests.support.rows import row as raw_row

SETTINGS = Settings(
    shards=2,
    max_in_flight_records=32,
    max_unsettled_records=64,
    mark_query_records=8,
    send_buffer=2,
    max_queued_per_key=4,
    records_per_shard=0,
    most_shards=8,
    answer_timeout_s=5,
    silence_timeout_s=20,
)


class Driver:
    """A relay whose shards answer at once, and everything that it commanded since it was last asked."""

    def __init__(self, settings: Settings = SETTINGS, *, ready: bool = True) -> None:
        self._made = 0
        self.relay = Relay(settings, self._new_id)
        self.now = 0.0
        if ready:
            for shard in range(settings.shards):
                self.relay.shard_ready(shard, self.now)

    def _new_id(self) -> UUID:
        self._made += 1
        return UUID(int=self._made)

    def answer(self, wire: dict[int, list[int]] | None = None) -> list[c.Command]:
        """All shards answer the current epoch."""
        said: list[c.Command] = []
        for shard in range(len(self.relay.intake.slices)):
            ids = (wire or {}).get(shard, [])
            said += self.relay.remarked(shard, self.relay.epoch, ids, self.now)
        return said

    def lead(self, term: int = 1, server: str | None = "one") -> list[c.Command]:
        self.relay.acquire(self.now)
        self.answer()
        assert self.relay.holder is not None
        self.relay.term_taken(self.relay.holder, term, server, self.now)
        return self.answer()

    def mark(self, *rows: Row) -> list[c.Command]:
        """The oldest mark under way returns these rows."""
        return self.relay.marked(self.under_way(c.Mark), rows, self.now)

    def fetch(self, *rows: Row) -> list[c.Command]:
        """The fetch under way returns these rows."""
        return self.relay.fetched(self.under_way(c.Fetch), rows, self.now)

    def under_way(self, kind: type[c.Command]) -> int:
        statements = self.relay.intake._under_way.items()
        return min(number for number, statement in statements if isinstance(statement.asked, kind))


def row(record_id: int) -> Row:
    """A keyless row of shard `record_id % 2`."""
    return (record_id, None, raw_row(record_id=record_id, key=None))


def only(commands: list[c.Command], kind: type[c.Command]) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kind)]


def killed(commands: list[c.Command]) -> list[int]:
    return [command.shard for command in commands if isinstance(command, c.Kill)]


def test_leadership_begins_when_all_shards_have_answered_twice() -> None:
    driver = Driver()
    relay = driver.relay
    assert [type(command) for command in relay.acquire(0)] == [c.CloseTrust, c.Send, c.Send]
    holder = relay.holder
    assert holder is not None
    assert driver.answer() == [c.TakeTerm(holder)]
    told = relay.term_taken(holder, 7, "one", 0)
    assert told == [c.Send(shard, f.Remark(relay.epoch, 7, str(holder), "one")) for shard in (0, 1)]
    assert relay.term is None
    assert [type(command) for command in driver.answer()] == [c.OpenTrust, c.Announce, c.Mark]
    assert relay.leader_id == holder


def test_the_term_is_asked_for_once() -> None:
    driver = Driver()
    driver.relay.acquire(0)
    assert len(only(driver.answer(), c.TakeTerm)) == 1
    later = [*driver.relay.settled(0, [1], 0)[1], *driver.relay.shard_ready(1, 0), *driver.relay.shard_died(0, 0)]
    assert not only(later, c.TakeTerm)


def test_without_shards_the_term_is_taken_all_the_same() -> None:
    driver = Driver(ready=False)
    assert driver.relay.acquire(0) == [c.CloseTrust(), c.TakeTerm(UUID(int=1))]
    assert only(driver.relay.term_taken(UUID(int=1), 1, "one", 0), c.Mark)


def test_a_fence_before_the_lead_is_not_announced() -> None:
    driver = Driver()
    driver.relay.acquire(0)
    driver.answer()
    driver.relay.term_taken(UUID(int=1), 1, "one", 0)
    assert not only(driver.relay.fence("late", 0), c.Announce)


def test_a_fence_is_announced_and_closes_trust_first() -> None:
    driver = Driver()
    driver.lead()
    said = driver.relay.fence("late", 0)
    assert said[0] == c.CloseTrust()
    assert said[-1] == c.Announce(LeaderFenced("late"))


def test_a_lost_term_is_taken_again_under_a_new_holder() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.term_lost(True, 0)
    assert driver.answer() == [c.TakeTerm(UUID(int=2))]


def test_a_lost_term_without_trust_fences() -> None:
    driver = Driver()
    driver.lead()
    assert isinstance(driver.relay.term_lost(False, 0)[-1], c.Announce)
    assert driver.relay.phase is Phase.IDLE


def test_a_remark_goes_on_under_the_same_term_and_a_new_leader_id() -> None:
    driver = Driver()
    acquired = only(driver.lead(term=3), c.Announce)
    driver.relay.remark("why not", 0)
    refreshed = only(driver.answer(), c.Announce)
    assert acquired == [c.Announce(LeaderAcquired(UUID(int=1), 3))]
    assert refreshed == [c.Announce(LeaderRefreshed(UUID(int=2), 3, "why not"))]


# -- P14 and the silence of shards


def test_a_shard_that_had_nothing_to_say_is_not_killed_for_it() -> None:
    driver = Driver()
    driver.lead()
    driver.now = 1000.0
    driver.mark(row(2))
    assert killed(driver.relay.tick(driver.now + 19)) == []


def test_a_shard_that_is_silent_with_work_is_killed() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    assert killed(driver.relay.tick(20)) == [0]


def test_any_frame_ends_the_silence() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.relay.heard(0, 15)
    assert not only(driver.relay.tick(34), c.Kill)
    assert only(driver.relay.tick(35), c.Kill)


def test_a_shard_that_does_not_answer_a_remark_is_killed() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.remark("x", 100)
    driver.relay.remarked(1, driver.relay.epoch, [], 100)
    assert driver.relay.tick(104.9) == []
    assert killed(driver.relay.tick(105)) == [0]


# -- shards that take nothing


def test_rows_of_a_congested_shard_wait_in_its_lane_beyond_the_buffer() -> None:
    """And nobody else's."""
    driver = Driver()
    driver.lead()
    driver.relay.congested(0)
    said = driver.mark(*map(row, (1, 2, 3, 4, 6, 8)))
    assert sent(said) == {0: [2, 4], 1: [1, 3]}
    assert list(driver.relay.intake.waiting.shards[0].ids) == [6, 8]
    assert not only(said, c.Fetch)
    assert only(driver.relay.uncongested(0, 0), c.Fetch) == [fetching(driver, 6, 8)]
    assert sent(driver.fetch(row(6), row(8))) == {0: [6, 8]}
    assert not driver.relay.intake.waiting.shards


def test_a_shard_that_is_not_ready_gets_nothing() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.shard_died(0, 0)
    assert sent(driver.mark(row(1), row(2))) == {1: [1]}
    assert only(driver.relay.shard_ready(0, 0), c.Fetch) == [fetching(driver, 2)]


# -- keys that wait


def park(driver: Driver, *behind: int, wait_s: float = 5.0) -> list[c.Command]:
    return driver.relay.parked(_shard(driver, 1), driver.relay.epoch, 1, behind, wait_s, False, driver.now)


def _shard(driver: Driver, record_id: int) -> int:
    return driver.relay.ledger._entries[record_id].shard


def keyed(*ids: int) -> list[Row]:
    return [(i, b"key", raw_row(record_id=i, key=b"key")) for i in ids]


def sent(commands: list[c.Command]) -> dict[int, list[int]]:
    """The ids of the rows that are sent, by shard."""
    frames = [(s.shard, s.frame) for s in commands if isinstance(s, c.Send)]
    return {shard: [r.id for r in decode(frame.rows)] for shard, frame in frames if isinstance(frame, f.Dispatch)}


def fetching(driver: Driver, *ids: int) -> c.Fetch:
    relay = driver.relay
    assert relay.term is not None
    assert relay.holder is not None
    return c.Fetch(driver.under_way(c.Fetch), relay.term, relay.holder, ids)


def test_a_parked_record_waits_with_what_stood_behind_it_and_is_not_in_flight() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    shard = _shard(driver, 1)
    assert c.Send(shard, f.Closed(driver.relay.epoch, 1)) in park(driver, 2, 3)
    assert not len(driver.relay.ledger)
    assert list(driver.relay.intake.waiting.lanes[b"key"].ids) == [1, 2, 3]
    assert sent(driver.mark(*keyed(4), row(6))) == {0: [6]}
    assert list(driver.relay.intake.waiting.lanes[b"key"].ids) == [1, 2, 3, 4]


def test_a_parked_record_is_tried_alone_and_not_before_its_time() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    shard = _shard(driver, 1)
    assert not only(park(driver, 2, wait_s=5.0), c.Fetch)
    assert not only(driver.relay.tick(4.9), c.Fetch)
    assert only(driver.relay.tick(5.0), c.Fetch) == [fetching(driver, 1)]
    assert sent(driver.fetch(*keyed(1))) == {shard: [1]}
    assert not only(driver.relay.tick(100.0), c.Fetch)
    assert only(driver.relay.settled(shard, [1], 100.0)[1], c.Fetch) == [fetching(driver, 2)]


def test_a_record_that_was_to_be_tried_and_is_gone_lets_its_key_go_on() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    park(driver, 2, wait_s=0.0)
    assert only(driver.fetch(), c.Fetch) == [fetching(driver, 2)]


def test_a_key_with_too_much_under_way_waits_until_it_has_come_down() -> None:
    driver = Driver()
    driver.lead()
    shard = next(iter(sent(driver.mark(*keyed(1, 2, 3, 4, 5, 6)))))
    assert not only(driver.relay.settled(shard, [1, 2], 0)[1], c.Fetch)
    assert only(driver.relay.settled(shard, [3], 0)[1], c.Fetch) == [fetching(driver, 5, 6)]
    assert sent(driver.fetch(*keyed(5, 6))) == {shard: [5, 6]}
    assert not driver.relay.intake.waiting.lanes
    assert not driver.relay.ledger.watched


def test_what_a_parked_key_refuses_joins_its_lane_without_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    shard = _shard(driver, 1)
    assert not only(park(driver, 2, wait_s=0.0), c.Fetch)  # 3 is still on its way
    said = driver.relay.refused(shard, driver.relay.epoch, [3], 0)
    assert only(said, c.Fetch) == [fetching(driver, 1)]
    assert list(driver.relay.intake.waiting.lanes[b"key"].ids)[1:] == [2, 3]
    assert driver.relay.phase is Phase.LEADING


def test_a_key_that_is_refused_without_being_parked_needs_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    assert driver.relay.refused(0, driver.relay.epoch, [2], 0)
    assert driver.relay.phase is Phase.REMARKING


def test_a_remark_forgets_what_waits() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    park(driver, 2)
    driver.relay.remark("x", 0)
    assert not driver.relay.intake.waiting.lanes
    assert not len(driver.relay.intake.waiting)


# -- a look at the whole table


def look(driver: Driver) -> c.Look:
    said = [command for command in driver.relay.tick(60.0) if isinstance(command, c.Look)]
    assert len(said) == 1
    return said[0]


def test_the_whole_table_is_looked_at_now_and_then_and_what_is_unknown_is_fetched() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2), row(4), *keyed(5))
    driver.relay.settled(0, [4], 0)
    asked = look(driver)
    found, said = driver.relay.looked(asked.number, [2, 3, 5], 60.0)
    assert found == 1
    assert only(said, c.Fetch) == [fetching(driver, 3)]
    assert sent(driver.fetch(row(3))) == {1: [3]}


def test_a_look_knows_what_waits_and_what_is_being_fetched() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    park(driver, 2, wait_s=0.0)
    asked = look(driver)
    assert driver.relay.looked(asked.number, [1, 2], 60.0)[0] == 0


# -- P9


def test_another_server_kills_all_shards_and_takes_the_term_anew() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    said = driver.relay.server_changed("gone back", 0)
    assert [command for command in said if isinstance(command, c.Kill)] == [
        c.Kill(shard, "gone back", own_fault=False) for shard in (0, 1)
    ]
    assert driver.relay.phase is Phase.TAKING
    driver.relay.shard_died(0, 0)
    assert driver.relay.shard_died(1, 0) == [c.TakeTerm(UUID(int=2))]
    assert not len(driver.relay.ledger)


def test_another_server_kills_the_shards_of_a_standby_too() -> None:
    driver = Driver()
    assert killed(driver.relay.server_changed("x", 0)) == [0, 1]
    assert driver.relay.phase is Phase.IDLE


def test_a_term_that_is_taken_on_another_server_than_the_last_kills_all_shards() -> None:
    """What they have yet to purge is of the old one."""
    driver = Driver()
    driver.lead(server="one")
    driver.relay.fence("late", 0)
    driver.answer()
    driver.relay.acquire(0)
    assert driver.relay.holder is not None
    driver.answer({0: [2]})
    assert killed(driver.relay.term_taken(driver.relay.holder, 2, "two", 0)) == [0, 1]


@pytest.mark.parametrize("servers", [("one", "one"), (None, "one"), ("one", None)])
def test_a_server_that_is_the_same_or_unknown_kills_nobody(servers: tuple[str | None, str | None]) -> None:
    driver = Driver()
    driver.lead(server=servers[0])
    driver.relay.fence("late", 0)
    driver.relay.acquire(0)
    driver.answer()
    assert driver.relay.holder is not None
    assert killed(driver.relay.term_taken(driver.relay.holder, 2, servers[1], 0)) == []


# -- unknown fate


def test_records_of_unknown_fate_stay_in_the_ledger_until_their_shard_is_dead() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.relay.fate_unknown(0, driver.relay.epoch, [2], "fatal", 0)
    assert (driver.relay.phase, list(driver.relay.ledger.ids)) == (Phase.REMARKING, [2])
    driver.relay.shard_died(0, 0)
    assert not len(driver.relay.ledger)


def test_a_drain_does_not_end_before_a_shard_of_unknown_fate_is_dead() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.relay.drain(0)
    driver.answer({0: [2]})
    assert driver.relay.fate_unknown(0, driver.relay.epoch, [2], "fatal", 0) == []
    assert driver.relay.shard_died(0, 0) == [c.Drained()]


# -- results


def test_what_was_settled_while_the_mark_was_under_way_is_not_taken_again() -> None:
    """P3: after a remark a mark shows again what is on the wire."""
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.relay.remark("x", 0)
    driver.answer({0: [2]})
    driver.relay.settled(0, [2], 0)
    assert not only(driver.mark(row(2)), c.Send)
    assert not len(driver.relay.ledger)


def test_an_old_result_is_discarded() -> None:
    driver = Driver()
    driver.lead()
    number = driver.under_way(c.Mark)
    driver.relay.remark("x", 0)
    driver.answer()
    assert driver.relay.marked(number, [row(2)], 0) == []


def test_an_empty_mark_says_that_the_outbox_is_empty() -> None:
    driver = Driver()
    driver.lead()
    assert c.Emptied() in driver.mark()


@pytest.mark.parametrize("what", ["unsettled", "a lane", "a fetch", "a shard's lane"])
def test_an_empty_mark_says_nothing_while_something_is_left(what: str) -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1))
    if what == "a lane":
        park(driver)
    elif what == "a fetch":
        park(driver, wait_s=0.0)
    elif what == "a shard's lane":
        driver.relay.settled(_shard(driver, 1), [1], 0)
        driver.relay.shard_died(0, 0)
        driver.mark(row(2))
    assert c.Emptied() not in driver.mark()


def test_a_failed_statement_needs_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.statement_failed(driver.under_way(c.Mark), "it broke", 0)
    assert driver.relay.phase is Phase.REMARKING
    assert not driver.relay.intake.under_way

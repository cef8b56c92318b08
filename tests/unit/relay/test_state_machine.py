"""Single decisions of the relay machine; the interplay is in tests/simulated/test_relay.py."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from harvester.delivery.decode import decode
from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core.ledger import Row
from harvester.relay.core.scan import LOWEST, Bookmark
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from tests.support.relay_driver import SETTINGS, Driver, keyed, killed, only, row, sent


def test_leadership_begins_when_all_shards_have_answered_twice() -> None:
    driver = Driver()
    machine = driver.machine
    assert [type(command) for command in machine.acquire(0)] == [c.CloseTrust, c.Send, c.Send]
    holder = machine.tenure.holder
    assert holder is not None
    assert driver.answer() == [c.TakeTerm(holder)]
    told = machine.term_taken(holder, 7, "one", 0)
    assert told == [c.Send(shard, f.Remark(machine.epoch, 7, str(holder), "one")) for shard in (0, 1)]
    assert machine.tenure.term is None
    assert [type(command) for command in driver.answer()] == [c.OpenTrust, c.Announce, c.Mark]
    assert machine.tenure.leader_id == holder


def test_the_term_is_asked_for_once() -> None:
    driver = Driver()
    driver.machine.acquire(0)
    assert len(only(driver.answer(), c.TakeTerm)) == 1
    later = [
        *driver.machine.settled(0, [1], 0)[1],
        *driver.machine.shard_ready(1, 0),
        *driver.machine.shard_died(0, 0),
    ]
    assert not only(later, c.TakeTerm)


def test_without_shards_the_term_is_taken_all_the_same() -> None:
    driver = Driver(ready=False)
    assert driver.machine.acquire(0) == [c.CloseTrust(), c.TakeTerm(UUID(int=1))]
    assert only(driver.machine.term_taken(UUID(int=1), 1, "one", 0), c.Mark)


def test_nobody_leads_whose_trust_has_ended_while_it_took_the_term() -> None:
    """It hung before the last shard had replied: another one may lead by now."""
    driver = Driver()
    driver.machine.acquire(0)
    driver.answer()
    driver.machine.term_taken(UUID(int=1), 1, "one", 0)
    driver.machine.vouched_for = False
    assert driver.answer() == driver.machine.tick(1) == []
    assert driver.machine.phase is LeadershipPhase.TAKING
    driver.machine.vouched_for = True
    assert [type(command) for command in driver.machine.tick(2)] == [c.OpenTrust, c.Announce, c.Mark]


def test_a_fence_before_the_lead_is_not_announced() -> None:
    driver = Driver()
    driver.machine.acquire(0)
    driver.answer()
    driver.machine.term_taken(UUID(int=1), 1, "one", 0)
    assert not only(driver.machine.fence("late", 0), c.Announce)


def test_a_fence_is_announced_and_closes_trust_first() -> None:
    driver = Driver()
    driver.lead()
    said = driver.machine.fence("late", 0)
    assert said[0] == c.CloseTrust()
    assert said[-1] == c.Announce(LeaderFenced("late"))


@pytest.mark.parametrize("begin_again", ["server_changed", "term_lost"])
def test_a_fence_is_announced_to_whom_a_lead_was_even_if_the_term_is_being_taken_anew(begin_again: str) -> None:
    driver = Driver()
    driver.lead()
    taking = (
        driver.machine.server_changed("x", 0) if begin_again == "server_changed" else driver.machine.term_lost(True, 0)
    )
    assert not only(taking, c.Announce)
    assert driver.machine.fence("late", 0)[-1] == c.Announce(LeaderFenced("late"))
    driver.machine.acquire(0)
    assert not only(driver.machine.fence("late", 0), c.Announce), "it had been told of no lead since"


def test_a_lost_term_is_taken_again_under_a_new_holder() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.term_lost(True, 0)
    assert driver.answer() == [c.TakeTerm(UUID(int=2), lost=1)]


def test_terms_that_are_lost_in_a_row_are_counted() -> None:
    driver = Driver()
    driver.lead()
    brief_s = driver.machine.settings.expiry_s / 2
    for lost in (1, 2, 3, 4):
        driver.now += brief_s
        driver.machine.term_lost(True, driver.now)
        assert driver.answer() == [c.TakeTerm(UUID(int=lost + 1), lost)]
        driver.machine.term_taken(UUID(int=lost + 1), lost + 1, "one", driver.now)
        driver.answer()
    driver.now += 3 * brief_s
    driver.machine.term_lost(True, driver.now)
    assert driver.answer() == [c.TakeTerm(UUID(int=6), 1)]  # it was held for long: no row any more
    driver.machine.term_lost(True, driver.now)
    assert driver.machine.tenure.lost == 1  # none was taken since


@pytest.mark.parametrize("end", [lambda machine: machine.fence("late", 0), lambda machine: machine.drain(0)])
def test_who_gives_up_leadership_has_lost_no_terms_in_a_row(end: Callable[[StateMachine], object]) -> None:
    driver = Driver()
    driver.lead()
    driver.machine.term_lost(True, 0)
    end(driver.machine)
    driver.answer()
    driver.machine.acquire(0)
    assert driver.answer() == [c.TakeTerm(UUID(int=3))]


def test_a_lost_term_without_trust_fences() -> None:
    driver = Driver()
    driver.lead()
    assert isinstance(driver.machine.term_lost(False, 0)[-1], c.Announce)
    assert driver.machine.phase is LeadershipPhase.IDLE


def test_a_remark_goes_on_under_the_same_term_and_a_new_leader_id() -> None:
    driver = Driver()
    acquired = only(driver.lead(term=3), c.Announce)
    driver.machine.remark("why not", 0)
    refreshed = only(driver.answer(), c.Announce)
    assert acquired == [c.Announce(LeaderAcquired(UUID(int=1), 3))]
    assert refreshed == [c.Announce(LeaderRefreshed(UUID(int=2), 3, "why not"))]


# -- pauses


def test_who_is_paused_gives_back_what_is_queued_and_marks_nothing() -> None:
    driver = Driver()
    driver.lead()
    number = driver.under_way(c.Mark)
    assert only(driver.machine.pause(0), c.Send) == [
        c.Send(shard, f.Remark(driver.machine.epoch, 1, str(UUID(int=1)), "one")) for shard in (0, 1)
    ]
    assert driver.machine.marked(number, [row(2)], 0) == []  # it was under way
    assert driver.answer() == []
    assert driver.machine.tick(1000.0) == []
    assert driver.machine.pause(0) == []


def test_who_is_resumed_marks_from_the_head_under_a_new_leader_id() -> None:
    driver = Driver()
    driver.lead(term=3)
    driver.machine.pause(0)
    driver.answer()
    announced, mark = driver.machine.resume(0)
    assert announced == c.Announce(LeaderRefreshed(UUID(int=2), 3, "resumed"))
    assert isinstance(mark, c.Mark)
    assert mark.leader_id == UUID(int=2)
    assert driver.machine.resume(0) == []


def test_who_is_resumed_at_once_still_waits_for_all_answers() -> None:
    """P5."""
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.pause(0)
    assert driver.machine.resume(0) == []
    assert only(driver.answer({0: [2]}), c.Mark)


def test_what_was_on_the_wire_settles_during_a_pause() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.pause(0)
    driver.answer({0: [2]})
    assert driver.machine.settled(0, [2], 0) == (1, [])
    assert not len(driver.machine.ledger)


def test_an_outbox_is_not_said_to_be_empty_during_a_pause() -> None:
    driver = Driver()
    driver.lead()
    number = driver.under_way(c.Mark)
    driver.machine.pause(0)
    driver.answer()
    assert driver.machine.marked(number, [], 0) == []
    driver.machine.resume(0)
    assert c.Emptied() in driver.mark()


def test_who_stands_by_and_is_paused_leads_without_marking() -> None:
    driver = Driver()
    assert driver.machine.pause(0) == []
    said = driver.lead(term=3)
    assert said == [c.OpenTrust(), c.Announce(LeaderAcquired(UUID(int=1), 3))]
    assert driver.machine.tenure.term == 3
    assert only(driver.machine.resume(0), c.Mark)


@pytest.mark.parametrize("wire", [[], [2]])
def test_a_paused_leader_drains(wire: list[int]) -> None:
    driver = Driver()
    driver.lead(term=3)
    driver.mark(row(2))
    driver.machine.pause(0)
    driver.answer({0: wire})
    driver.machine.drain(0)
    said = driver.answer({0: wire})
    for record_id in wire:
        assert said == []
        said = driver.machine.settled(0, [record_id], 0)[1]
    assert said == [c.ReleaseTerm(3, UUID(int=1)), c.Drained()]


def test_a_paused_leader_that_is_scaled_stays_paused() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.pause(0)
    driver.answer()
    driver.machine.scale(1, 10.0, 0)
    assert driver.answer() == [c.Resize(1)]
    assert driver.machine.tick(1.0) == []
    assert only(driver.machine.resume(1.0), c.Mark)


def test_the_last_record_is_parked_in_a_shard_that_its_parking_retires() -> None:
    """The answer to that shard is commanded before the change, and performed when the machine has already changed."""
    driver = Driver()
    driver.lead()
    driver.mark(row(3))
    driver.machine.scale(1, 10.0, 0)
    driver.answer({1: [3]})
    commands = driver.machine.parked(1, driver.machine.epoch, 3, [], 5.0, False, 0)
    assert commands[:2] == [c.Send(1, f.ParkAcknowledged(driver.machine.epoch, 3)), c.Resize(1)]
    assert not driver.machine.is_congested(1)
    driver.machine.congested(1)  # its pipe may be full at that moment


def test_a_record_in_doubt_that_another_leader_has_settled_binds_its_key_no_longer() -> None:
    """P36. Nothing here would ever settle it, and a smaller number of shards would be refused for ever."""
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1), floor=1)
    shard = driver.machine.ledger.shard_of_key(b"key")
    assert shard is not None
    driver.machine.in_doubt(shard, 1, 0)
    driver.machine.fence("late", 0)
    driver.answer()
    driver.now = 100.0
    driver.lead(term=3)
    driver.mark(floor=1)
    driver.machine.tick(driver.now)
    assert driver.machine.ledger.pinned() == [1], "it may stand in the table"
    driver.now = 200.0
    driver.mark(floor=2)
    driver.machine.tick(driver.now)
    assert driver.machine.ledger.pinned() == []


def test_a_record_in_doubt_that_was_found_below_the_low_watermark_stays_with_its_producer() -> None:
    """P36, P10: an id that was fetched long before its row was inserted. The watermark says nothing about it."""
    driver = Driver()
    driver.lead()
    driver.mark(floor=10)
    driver.now = 100.0
    looked = only(driver.machine.tick(driver.now), c.Look)
    assert isinstance(looked[0], c.Look)
    driver.machine.looked(looked[0].number, [5], driver.now)
    driver.fetch(*keyed(5))
    shard = driver.machine.ledger.shard_of_key(b"key")
    assert shard is not None
    driver.machine.in_doubt(shard, 5, driver.now)
    driver.now = 200.0
    driver.machine.tick(driver.now)
    assert driver.machine.ledger.pinned() == [5]
    driver.machine.settled(shard, [5], driver.now)
    assert driver.machine.ledger.pinned() == []


def test_a_paused_leader_whose_term_is_lost_takes_it_again_and_stays_paused() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.pause(0)
    driver.answer()
    driver.machine.term_lost(True, 0)
    assert driver.answer() == [c.TakeTerm(UUID(int=2), lost=1)]
    driver.machine.term_taken(UUID(int=2), 5, "one", 0)
    assert not only(driver.answer(), c.Mark)
    assert only(driver.machine.resume(0), c.Mark)


def test_a_shard_that_dies_during_a_pause_is_accounted_for() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.pause(0)
    driver.answer({0: [2]})
    driver.machine.shard_died(0, 0)
    assert not len(driver.machine.ledger)
    assert not only(driver.answer(), c.Mark)
    assert only(driver.machine.resume(0), c.Mark)


# -- P14 and the silence of shards


def test_a_shard_that_had_nothing_to_say_is_not_killed_for_it() -> None:
    driver = Driver()
    driver.lead()
    driver.now = 1000.0
    driver.mark(row(2))
    assert killed(driver.machine.tick(driver.now + 19)) == []


def test_a_shard_that_is_silent_with_work_is_killed() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    assert killed(driver.machine.tick(20)) == [0]


def test_any_frame_ends_the_silence() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.heard(0, 15)
    assert not only(driver.machine.tick(34), c.Kill)
    assert only(driver.machine.tick(35), c.Kill)


def test_a_shard_that_does_not_answer_a_remark_is_killed() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.remark("x", 100)
    driver.machine.remarked(1, driver.machine.epoch, [], 100)
    assert driver.machine.tick(104.9) == []
    assert killed(driver.machine.tick(105)) == [0]


# -- shards that take nothing


def test_rows_of_a_congested_shard_wait_in_its_lane_beyond_the_buffer() -> None:
    """And nobody else's."""
    driver = Driver()
    driver.lead()
    driver.machine.congested(0)
    said = driver.mark(*map(row, (1, 2, 3, 4, 6, 8)))
    assert sent(said) == {0: [2, 4], 1: [1, 3]}
    assert list(driver.machine.planner.deferred.by_shard[0].ids) == [6, 8]
    assert not only(said, c.Fetch)
    assert only(driver.machine.uncongested(0, 0), c.Fetch) == [fetching(driver, 6, 8)]
    assert sent(driver.fetch(row(6), row(8))) == {0: [6, 8]}
    assert not driver.machine.planner.deferred.by_shard


def test_a_shard_that_is_not_ready_gets_nothing() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.shard_died(0, 0)
    assert sent(driver.mark(row(1), row(2))) == {1: [1]}
    assert only(driver.machine.shard_ready(0, 0), c.Fetch) == [fetching(driver, 2)]


# -- keys that wait


def park(driver: Driver, *behind: int, wait_s: float = 5.0) -> list[c.Command]:
    return driver.machine.parked(_shard(driver, 1), driver.machine.epoch, 1, behind, wait_s, False, driver.now)


def _shard(driver: Driver, record_id: int) -> int:
    return driver.machine.ledger._entries[record_id].shard


def fetching(driver: Driver, *ids: int) -> c.Fetch:
    machine = driver.machine
    assert machine.tenure.term is not None
    assert machine.tenure.holder is not None
    return c.Fetch(driver.under_way(c.Fetch), machine.tenure.term, machine.tenure.holder, ids)


def test_a_parked_record_waits_with_what_stood_behind_it_and_is_not_in_flight() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    shard = _shard(driver, 1)
    assert c.Send(shard, f.ParkAcknowledged(driver.machine.epoch, 1)) in park(driver, 2, 3)
    assert not len(driver.machine.ledger)
    assert list(driver.machine.planner.deferred.by_key[b"key"].ids) == [1, 2, 3]
    assert sent(driver.mark(*keyed(4), row(6))) == {0: [6]}
    assert list(driver.machine.planner.deferred.by_key[b"key"].ids) == [1, 2, 3, 4]


def test_a_parked_record_is_tried_alone_and_not_before_its_time() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    shard = _shard(driver, 1)
    assert not only(park(driver, 2, wait_s=5.0), c.Fetch)
    assert not only(driver.machine.tick(4.9), c.Fetch)
    assert only(driver.machine.tick(5.0), c.Fetch) == [fetching(driver, 1)]
    assert sent(driver.fetch(*keyed(1))) == {shard: [1]}
    assert not only(driver.machine.tick(100.0), c.Fetch)
    assert only(driver.machine.settled(shard, [1], 100.0)[1], c.Fetch) == [fetching(driver, 2)]


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
    assert not only(driver.machine.settled(shard, [1, 2], 0)[1], c.Fetch)
    assert only(driver.machine.settled(shard, [3], 0)[1], c.Fetch) == [fetching(driver, 5, 6)]
    assert sent(driver.fetch(*keyed(5, 6))) == {shard: [5, 6]}
    assert not driver.machine.planner.deferred.by_key
    assert not driver.machine.ledger.watched


def test_what_a_parked_key_refuses_joins_its_lane_without_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    shard = _shard(driver, 1)
    assert not only(park(driver, 2, wait_s=0.0), c.Fetch)  # 3 is still on its way
    said = driver.machine.refused(shard, driver.machine.epoch, [3], 0)
    assert only(said, c.Fetch) == [fetching(driver, 1)]
    assert list(driver.machine.planner.deferred.by_key[b"key"].ids)[1:] == [2, 3]
    assert driver.machine.phase is LeadershipPhase.LEADING


def test_a_key_that_is_refused_without_being_parked_needs_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    assert driver.machine.refused(0, driver.machine.epoch, [2], 0)
    assert driver.machine.phase is LeadershipPhase.REMARKING


def test_a_remark_forgets_what_waits() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    park(driver, 2)
    driver.machine.remark("x", 0)
    assert not driver.machine.planner.deferred.by_key
    assert not driver.machine.planner.deferred.rows


# -- a look at the whole table


def look_at(driver: Driver, now: float) -> c.Look:
    said = [command for command in driver.machine.tick(now) if isinstance(command, c.Look)]
    assert len(said) == 1
    return said[0]


def look(driver: Driver) -> c.Look:
    return look_at(driver, 60.0)


def test_the_whole_table_is_looked_at_now_and_then_and_what_is_unknown_is_fetched() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2), row(4), *keyed(5))
    driver.machine.settled(0, [4], 0)
    asked = look(driver)
    found, said = driver.machine.looked(asked.number, [2, 3, 5], 60.0)
    assert found == 1
    assert only(said, c.Fetch) == [fetching(driver, 3)]
    assert sent(driver.fetch(row(3))) == {1: [3]}


def test_a_look_that_takes_too_long_goes_on_in_portions_with_marks_in_between() -> None:
    """Dead rows that vacuum may not remove: a statement reads past 200,000 of them in the time a look may take."""
    driver = Driver()
    driver.lead()
    leader = driver.machine.tenure.leader_id
    driver.mark()
    driver.now, high = 60.0, 10**10
    missed, read, found, worst = {-3, 7, 10**9, high - 3_000_000, high - 5}, list[tuple[int, int]](), set[int](), 0
    for _ in range(500):
        portions = [command for command in driver.machine.tick(driver.now) if isinstance(command, c.Look)]
        for portion in portions:
            top = high if portion.high is None else portion.high
            low = LOWEST if portion.width is None else max(LOWEST, top - portion.width + 1)
            dead = max(0, top - max(low, high - 4_000_000))
            if dead > 200_000:
                worst += 1
                driver.machine.statement_failed(portion.number, "it took too long", driver.now)
            else:
                read.append((low, top))
                ids = sorted(i for i in missed if low <= i <= top)
                rest = low - 1 if low > LOWEST else None
                driver.machine.looked(portion.number, ids, driver.now, rest)
                found.update(ids)
        assert driver.machine.planner.statements.marks()
        if read and read[-1][0] == LOWEST:
            break
        driver.now += 0.5
    assert found == missed
    assert [top for _, top in read] == [high, *(low - 1 for low, _ in read[:-1])], "no id is left out"
    assert worst < len(read)
    assert (driver.machine.phase, driver.machine.tenure.leader_id) == (LeadershipPhase.LEADING, leader), "no remark"
    driver.now += 60.0
    again = look_at(driver, driver.now)
    assert (again.high, again.width) == (None, None)


def test_a_look_waits_for_the_one_before_and_begins_at_the_top_under_a_new_leader_id() -> None:
    driver = Driver()
    driver.lead()
    first = look_at(driver, 60.0)
    assert not only(driver.machine.tick(200.0), c.Look)
    driver.machine.statement_failed(first.number, "it took too long", 200.0)
    second = look_at(driver, 300.0)
    assert second.width is not None
    driver.machine.looked(second.number, [], 300.0, 5_000)
    driver.machine.remark("why not", 300.0)
    driver.answer()
    third = look_at(driver, 400.0)
    assert (third.high, third.width) == (None, None)


def test_a_look_knows_what_waits_and_what_is_being_fetched() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    park(driver, 2, wait_s=0.0)
    asked = look(driver)
    assert driver.machine.looked(asked.number, [1, 2], 60.0)[0] == 0


# -- P9


def test_another_server_kills_all_shards_and_takes_the_term_anew() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    said = driver.machine.server_changed("gone back", 0)
    assert [command for command in said if isinstance(command, c.Kill)] == [
        c.Kill(shard, "gone back", own_fault=False) for shard in (0, 1)
    ]
    assert driver.machine.phase is LeadershipPhase.TAKING
    driver.machine.shard_died(0, 0)
    assert driver.machine.shard_died(1, 0) == [c.TakeTerm(UUID(int=2))]
    assert not len(driver.machine.ledger)


def test_another_server_kills_the_shards_of_a_standby_too() -> None:
    driver = Driver()
    assert killed(driver.machine.server_changed("x", 0)) == [0, 1]
    assert driver.machine.phase is LeadershipPhase.IDLE


def test_a_term_that_is_taken_on_another_server_than_the_last_kills_all_shards() -> None:
    """What they have yet to purge is of the old one."""
    driver = Driver()
    driver.lead(server="one")
    driver.machine.fence("late", 0)
    driver.answer()
    driver.machine.acquire(0)
    assert driver.machine.tenure.holder is not None
    driver.answer({0: [2]})
    assert killed(driver.machine.term_taken(driver.machine.tenure.holder, 2, "two", 0)) == [0, 1]


@pytest.mark.parametrize("servers", [("one", "one"), (None, "one"), ("one", None)])
def test_a_server_that_is_the_same_or_unknown_kills_nobody(servers: tuple[str | None, str | None]) -> None:
    driver = Driver()
    driver.lead(server=servers[0])
    driver.machine.fence("late", 0)
    driver.machine.acquire(0)
    driver.answer()
    assert driver.machine.tenure.holder is not None
    assert killed(driver.machine.term_taken(driver.machine.tenure.holder, 2, servers[1], 0)) == []


# -- unknown fate


def test_records_of_unknown_fate_stay_in_the_ledger_until_their_shard_is_dead() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.fate_unknown(0, driver.machine.epoch, [2], "fatal", 0)
    assert (driver.machine.phase, list(driver.machine.ledger.ids)) == (LeadershipPhase.REMARKING, [2])
    driver.machine.shard_died(0, 0)
    assert not len(driver.machine.ledger)


def test_a_drain_does_not_end_before_a_shard_of_unknown_fate_is_dead() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    assert driver.machine.fate_unknown(0, driver.machine.epoch, [2], "fatal", 0) == []
    assert driver.machine.shard_died(0, 0) == [c.Drained()]


def test_a_drain_for_a_loan_ends_though_a_purge_is_held_up() -> None:
    """Somebody has locked the row: its shard is alive and has it on the wire for as long."""
    driver = Driver()
    driver.lead()
    driver.mark(row(2), row(3))
    driver.machine.drain(0, trusted=True)
    driver.answer({0: [2], 1: [3]})
    driver.machine.settled(1, [3], 0)
    expiry_s = SETTINGS.expiry_s
    driver.machine.forgive(5.0)
    for shard in (0, 1):
        driver.machine.heard(shard, expiry_s)
    assert killed(driver.machine.tick(expiry_s + 4.9)) == []
    assert killed(driver.machine.tick(expiry_s + 5.0)) == [0], "only the shard that still has something"
    assert killed(driver.machine.tick(expiry_s + 5.1)) == []
    assert driver.machine.shard_died(0, expiry_s + 6.0) == [c.Drained()], "its term is not released"


def test_a_drain_for_the_end_is_bounded_by_its_caller() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    for now in (10.0, 20.0, 30.0):
        driver.machine.heard(0, now)
        driver.machine.heard(1, now)
        assert killed(driver.machine.tick(now)) == []


# -- results


def test_what_was_settled_while_the_mark_was_under_way_is_not_taken_again() -> None:
    """P3: after a remark a mark shows again what is on the wire."""
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.remark("x", 0)
    driver.answer({0: [2]})
    driver.machine.settled(0, [2], 0)
    assert not only(driver.mark(row(2)), c.Send)
    assert not len(driver.machine.ledger)


def test_an_old_result_is_discarded() -> None:
    driver = Driver()
    driver.lead()
    number = driver.under_way(c.Mark)
    driver.machine.remark("x", 0)
    driver.answer()
    assert driver.machine.marked(number, [row(2)], 0) == []


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
        driver.machine.settled(_shard(driver, 1), [1], 0)
        driver.machine.shard_died(0, 0)
        driver.mark(row(2))
    assert c.Emptied() not in driver.mark()


def test_a_failed_statement_needs_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.statement_failed(driver.under_way(c.Mark), "it broke", 0)
    assert driver.machine.phase is LeadershipPhase.REMARKING
    assert not len(driver.machine.planner.statements)


# -- rows that are large together


def test_they_reach_a_shard_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one, 100 rows of 11 MB would be more than a shard takes."""
    monkeypatch.setattr(f, "_MANY_BYTES", 3 * len(row(2)[2]))
    driver = Driver()
    driver.lead()
    said = driver.mark(*[row(i) for i in range(2, 18, 2)])
    frames = [command.frame for command in said if isinstance(command, c.Send)]
    assert [len(decode(frame.rows)) for frame in frames if isinstance(frame, f.Dispatch)] == [3, 3, 2]
    assert sent(said) == {0: [2, 4, 6, 8, 10, 12, 14, 16]}


def test_a_row_that_came_without_its_content_is_fetched_before_what_follows_it() -> None:
    driver = Driver()
    driver.lead()
    (first, key, _), second = keyed(5, 6)
    said = driver.mark((first, key, b""), second, row(8))
    assert sent(said) == {0: [8]}
    assert only(said, c.Fetch) == [fetching(driver, 5, 6)]
    said = driver.fetch(keyed(5)[0], (6, key, b""))
    assert list(sent(said).values()) == [[5]]
    assert only(said, c.Fetch) == [fetching(driver, 6)]
    assert list(sent(driver.fetch(keyed(6)[0])).values()) == [[6]]


# -- the bookmark


def _mark_to(driver: Driver, high: int, *rows: Row) -> None:
    """The oldest mark under way returns these rows, and has come so far."""
    number = driver.under_way(c.Mark)
    driver.machine.marked(number, rows, driver.now, high + 1, Bookmark(high, ((2, 3),)))


def _saved(commands: list[c.Command]) -> list[Bookmark]:
    return [command.bookmark for command in commands if isinstance(command, c.SaveBookmark)]


def test_a_bookmark_is_saved_at_once_and_then_after_many_ids_and_some_time() -> None:
    driver = Driver()
    driver.lead()
    _mark_to(driver, 100)
    assert _saved(driver.machine.tick(1.0)) == [Bookmark(100, ((2, 3),))]
    _mark_to(driver, 60_000)
    assert _saved(driver.machine.tick(5.0)) == []
    assert _saved(driver.machine.tick(12.0)) == [Bookmark(60_000, ((2, 3),))]
    _mark_to(driver, 60_100)
    assert _saved(driver.machine.tick(40.0)) == []
    assert _saved(driver.machine.drain(41.0)) == [Bookmark(60_100, ((2, 3),))]


def test_a_bookmark_lies_below_what_is_not_settled() -> None:
    driver = Driver()
    driver.lead()
    _mark_to(driver, 100, row(50), row(60))
    assert _saved(driver.machine.tick(1.0)) == [Bookmark(49, ((2, 3),))]
    driver.machine.remark("for a test", 2.0)
    driver.answer()
    assert _saved(driver.machine.tick(60.0)) == [], "what was read is forgotten, and not settled"


def test_another_incarnation_forgets_the_bookmark() -> None:
    driver = Driver()
    driver.lead(incarnation=UUID(int=1))
    _mark_to(driver, 100)
    driver.machine.tick(1.0)
    driver.machine.server_changed("another", 2.0)
    driver.machine.phase = LeadershipPhase.IDLE
    driver.lead(term=2, server="two", incarnation=UUID(int=2))
    assert _saved(driver.machine.drain(3.0)) == []

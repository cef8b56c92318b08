"""Single decisions of the relay machine in exactly-once mode; the interplay is in tests/simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from harvester.events import LeaderRefreshed
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core.leadership import RelaySettings
from harvester.relay.core.ledger import Row
from harvester.relay.core.state_machine import LeadershipPhase
from tests.support.relay_driver import SETTINGS, Driver, keyed, killed, only, row, sent

ONCE = replace(SETTINGS, exactly_once=True)
INCARNATION, ANOTHER = UUID(int=77), UUID(int=78)
BOTH = [SETTINGS, ONCE]
MODES = pytest.mark.parametrize("settings", BOTH, ids=["at least once", "exactly once"])


def leading(settings: RelaySettings = ONCE) -> Driver:
    driver = Driver(settings)
    driver.machine.tenure.lanes = settings.shards
    driver.lead(incarnation=INCARNATION)
    return driver


def take_term(driver: Driver, term: int = 7, incarnation: UUID = INCARNATION) -> list[c.Command]:
    holder = driver.machine.tenure.holder
    assert holder is not None
    return driver.machine.term_taken(holder, term, "one", driver.now, incarnation=incarnation)


def answer(driver: Driver, shard: int, *ids: int) -> list[c.Command]:
    """This shard has done what the last remark asked for; these ids are still to be purged."""
    return driver.machine.remarked(shard, driver.machine.epoch, ids, driver.now)


def remarks(commands: list[c.Command]) -> dict[int, f.Remark]:
    return {s.shard: s.frame for s in commands if isinstance(s, c.Send) and isinstance(s.frame, f.Remark)}


# -- P19: the take-over


def test_shards_are_told_all_that_they_need_to_open_their_lanes() -> None:
    driver = Driver(ONCE)
    driver.machine.tenure.lanes = 5
    driver.machine.acquire(0)
    driver.answer()
    told = remarks(take_term(driver))
    expected = f.Remark(driver.machine.epoch, 7, str(driver.machine.tenure.holder), "one", str(INCARNATION), 5, 2)
    assert told == {0: expected, 1: expected}


def test_there_are_two_lanes_for_each_shard_at_least() -> None:
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    driver.answer()
    assert {frame.lanes for frame in remarks(take_term(driver)).values()} == {4}


def test_a_take_over_waits_for_shards_that_are_being_started() -> None:
    driver = Driver(ONCE, ready=False)
    assert only(driver.machine.acquire(0), c.TakeTerm)
    assert take_term(driver) == []
    assert driver.machine.phase is LeadershipPhase.TAKING
    assert remarks(driver.machine.shard_ready(0, 0))[0].term == 7
    assert answer(driver, 0) == []
    driver.machine.shard_ready(1, 0)
    assert [type(command) for command in answer(driver, 1)] == [c.OpenTrust, c.Announce, c.Mark]


def test_a_shard_that_dies_before_its_lane_is_fenced_is_waited_for() -> None:
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    driver.answer()
    take_term(driver)
    assert driver.machine.shard_died(1, 0) == []
    assert answer(driver, 0) == []
    driver.machine.shard_ready(1, 0)
    assert driver.machine.phase is LeadershipPhase.TAKING
    assert only(answer(driver, 1), c.OpenTrust)


def test_one_that_dies_after_it_has_fenced_its_lane_is_not_waited_for() -> None:
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    driver.answer()
    take_term(driver)
    answer(driver, 1)
    driver.machine.shard_died(1, 0)
    assert only(answer(driver, 0), c.OpenTrust)
    assert sent(driver.mark(row(1), row(2))) == {0: [2]}


def test_before_the_term_is_taken_dead_shards_are_not_waited_for() -> None:
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    answer(driver, 0)
    assert only(driver.machine.shard_died(1, 0), c.TakeTerm)


def test_a_fence_during_the_take_over_waits_for_nobody() -> None:
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    driver.answer()
    take_term(driver)
    driver.machine.fence("late", 0)
    assert driver.machine.phase is LeadershipPhase.IDLE
    assert driver.machine.acquire(0)


# -- P21: a shard that died


def test_the_ids_of_a_dead_shard_stay_until_its_successor_has_answered() -> None:
    driver = leading()
    driver.mark(row(2), row(3), row(4))
    said = driver.machine.shard_died(0, 0)
    assert driver.machine.phase is LeadershipPhase.LEADING
    assert not remarks(said)
    assert sorted(driver.machine.ledger.ids) == [2, 3, 4]
    assert remarks(driver.machine.shard_ready(0, 0))[0].term == 1
    assert sorted(driver.machine.ledger.ids) == [2, 3, 4]


def test_what_its_successor_found_published_is_settled_and_the_rest_is_marked_again() -> None:
    driver = leading()
    driver.mark(row(2), row(3), row(4))
    leader_id = driver.machine.tenure.leader_id
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    assert driver.machine.settled(0, [2], 0)[0] == 1
    assert remarks(answer(driver, 0)).keys() == {0, 1}
    assert (driver.machine.phase, list(driver.machine.ledger.ids)) == (LeadershipPhase.REMARKING, [3])
    answer(driver, 0)
    said = answer(driver, 1, 3)
    assert driver.machine.tenure.leader_id not in {leader_id, None}
    assert driver.machine.tenure.leader_id is not None
    reason = "shard 0 was replaced"
    assert only(said, c.Announce) == [c.Announce(LeaderRefreshed(driver.machine.tenure.leader_id, 1, reason))]
    assert sent(driver.mark(row(3), row(4))) == {0: [4]}


def test_where_all_was_published_nothing_is_marked_again() -> None:
    driver = leading()
    driver.mark(row(2), row(4))
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    driver.machine.settled(0, [2, 4], 0)
    assert not remarks(answer(driver, 0))
    assert driver.machine.phase is LeadershipPhase.LEADING


def test_the_ids_stay_though_the_successor_dies_as_well() -> None:
    driver = leading()
    driver.mark(row(2))
    for _ in range(3):
        driver.machine.shard_died(0, 0)
        driver.machine.shard_ready(0, 0)
    assert list(driver.machine.ledger.ids) == [2]
    answer(driver, 0)
    assert not len(driver.machine.ledger)


def test_the_others_go_on_meanwhile() -> None:
    driver = leading()
    driver.mark(row(2))
    driver.machine.shard_died(0, 0)
    assert sent(driver.mark(row(3), row(4))) == {1: [3]}


@pytest.mark.parametrize("ready_before", [True, False])
def test_a_remark_does_not_let_go_of_them(ready_before: bool) -> None:
    driver = leading()
    driver.mark(row(2), row(3))
    driver.machine.shard_died(0, 0)
    if ready_before:
        driver.machine.shard_ready(0, 0)
    driver.machine.remark("why not", 0)
    answer(driver, 1)
    assert 2 in driver.machine.ledger
    assert (driver.machine.phase is LeadershipPhase.LEADING) is not ready_before
    if not ready_before:
        driver.machine.shard_ready(0, 0)
    answer(driver, 0)
    assert 2 not in driver.machine.ledger


def test_without_a_leader_nothing_waits_for_them_and_the_next_take_over_fences_the_lane() -> None:
    driver = leading()
    driver.mark(row(2))
    driver.machine.shard_died(0, 0)
    driver.machine.fence("late", 0)
    answer(driver, 1)
    driver.machine.acquire(0)
    answer(driver, 1)
    driver.machine.shard_ready(0, 0)
    assert not len(driver.machine.ledger)
    take_term(driver)
    answer(driver, 1)
    assert only(answer(driver, 0), c.OpenTrust)


def test_an_answer_of_an_older_epoch_is_no_answer() -> None:
    driver = leading()
    driver.mark(row(2))
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    epoch = driver.machine.epoch
    driver.machine.remark("why not", 0)
    assert driver.machine.remarked(0, epoch, [], 0) == []
    assert list(driver.machine.ledger.ids) == [2]


# -- a shard that is opening its lane


def test_it_gets_nothing_before_it_has_answered() -> None:
    driver = leading()
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    assert sent(driver.mark(row(1), row(2), row(4))) == {1: [1]}
    fetches = [command for command in answer(driver, 0) if isinstance(command, c.Fetch)]
    assert [fetch.ids for fetch in fetches] == [(2, 4)]
    assert sent(driver.fetch(row(2), row(4))) == {0: [2, 4]}


def test_it_is_opening_again_after_each_remark_that_it_has_not_answered() -> None:
    driver = leading()
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    driver.machine.remark("why not", 0)
    answer(driver, 1)
    assert driver.machine.phase is LeadershipPhase.REMARKING
    answer(driver, 0)
    assert sent(driver.mark(row(2))) == {0: [2]}


def test_in_at_least_once_mode_a_new_shard_gets_records_at_once() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    assert sent(driver.mark(row(2))) == {0: [2]}


# -- patience


def test_a_slow_answer_is_waited_for_as_long_as_the_shard_lives() -> None:
    driver = leading()
    driver.machine.remark("why not", 0)
    for now in range(1, 60):
        driver.machine.heard(0, now)
        driver.machine.heard(1, now)
        assert not killed(driver.machine.tick(now + 0.5))


def test_a_shard_that_neither_answers_nor_lives_is_killed() -> None:
    driver = leading()
    driver.machine.remark("why not", 0)
    driver.machine.heard(1, 3)
    assert not killed(driver.machine.tick(4.9))
    assert killed(driver.machine.tick(5)) == [0]
    assert killed(driver.machine.tick(8)) == [0, 1]


def test_in_at_least_once_mode_a_sign_of_life_is_no_answer() -> None:
    driver = Driver()
    driver.lead()
    driver.machine.remark("why not", 0)
    driver.machine.heard(0, 5)
    driver.machine.remarked(1, driver.machine.epoch, [], 5)
    assert killed(driver.machine.tick(5)) == [0]


def test_one_that_is_only_being_started_is_not_killed() -> None:
    driver = Driver(ONCE, ready=False)
    driver.machine.acquire(0)
    take_term(driver)
    assert driver.machine.tick(1000) == []


def test_a_new_shard_has_as_much_time_as_others_for_its_answer() -> None:
    driver = leading()
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 100)
    assert not killed(driver.machine.tick(104.9))
    assert killed(driver.machine.tick(105)) == [0]


# -- drains


@MODES
def test_a_drain_that_settles_everything_releases_the_term(settings: RelaySettings) -> None:
    driver = leading(settings)
    holder = driver.machine.tenure.holder
    assert holder is not None
    driver.mark(row(2), row(3))
    assert remarks(driver.machine.drain(0))[0].term is None
    assert driver.answer({0: [2], 1: [3]}) == []
    assert driver.machine.settled(0, [2], 0)[1] == []
    assert driver.machine.settled(1, [3], 0)[1] == [c.ReleaseTerm(1, holder), c.Drained()]


@MODES
def test_what_was_only_queued_does_not_keep_the_term(settings: RelaySettings) -> None:
    driver = leading(settings)
    driver.mark(row(2), row(3))
    driver.machine.drain(0)
    assert [type(command) for command in driver.answer()] == [c.ReleaseTerm, c.Drained]


@pytest.mark.parametrize(("rows", "released"), [([], True), ([row(2)], False)])
def test_exactly_once_what_a_shard_may_have_committed_keeps_the_term(rows: list[Row], released: bool) -> None:
    """Its lanes are not open again since its last commit, or since that of the shard before it."""
    driver = leading(ONCE)
    driver.mark(*rows)
    driver.machine.drain(0)
    epoch = driver.machine.epoch
    driver.machine.remarked(1, epoch, [], 0)
    said = [type(command) for command in driver.machine.remarked(0, epoch, [], 0, in_doubt=True)]
    assert said == ([c.ReleaseTerm, c.Drained] if released else [c.Drained])


def test_exactly_once_a_term_whose_lanes_were_not_opened_is_not_released() -> None:
    """What its predecessor has committed may still be in the outbox."""
    driver = Driver(ONCE)
    driver.machine.acquire(0)
    driver.answer()
    assert driver.machine.tenure.holder is not None
    driver.machine.term_taken(driver.machine.tenure.holder, 1, "one", 0)
    driver.machine.drain(0)
    assert [type(command) for command in driver.answer()] == [c.Drained]


@MODES
def test_a_shard_that_dies_during_a_drain_with_records_keeps_it_from_being_released(settings: RelaySettings) -> None:
    driver = leading(settings)
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    assert driver.machine.shard_died(0, 0) == [c.Drained()]


@MODES
def test_a_shard_that_dies_during_a_drain_without_records_does_not(settings: RelaySettings) -> None:
    driver = leading(settings)
    driver.machine.drain(0)
    answer(driver, 1)
    assert [type(command) for command in driver.machine.shard_died(0, 0)] == [c.ReleaseTerm, c.Drained]


def test_a_record_that_failed_on_the_wire_during_a_drain_keeps_it_from_being_released() -> None:
    driver = leading(SETTINGS)
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    assert driver.machine.dropped(0, [2], 0, in_doubt=True) == [c.Drained()]


def test_a_record_that_was_not_sent_does_not() -> None:
    """It was about to be when the drain began, so the shard has it among those on the wire, and drops it then."""
    driver = leading(SETTINGS)
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    assert [type(command) for command in driver.machine.dropped(0, [2], 0)] == [c.ReleaseTerm, c.Drained]


@MODES
def test_a_drain_before_the_term_is_taken_releases_nothing(settings: RelaySettings) -> None:
    driver = Driver(settings)
    driver.machine.acquire(0)
    driver.machine.drain(0)
    assert driver.answer() == [c.Drained()]


@MODES
def test_a_drain_without_leadership_releases_nothing(settings: RelaySettings) -> None:
    driver = leading(settings)
    driver.machine.fence("late", 0)
    driver.answer()
    driver.machine.drain(0)
    assert driver.answer() == [c.Drained()]


@MODES
def test_what_kept_one_term_does_not_keep_the_next(settings: RelaySettings) -> None:
    driver = leading(settings)
    driver.mark(row(2))
    driver.machine.drain(0)
    driver.answer({0: [2]})
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    driver.lead(term=2, incarnation=INCARNATION)
    driver.machine.drain(settings.expiry_s)
    assert [type(command) for command in driver.answer()] == [c.ReleaseTerm, c.Drained]


def _died(driver: Driver) -> None:
    driver.machine.shard_died(0, 0)
    driver.machine.shard_ready(0, 0)
    driver.answer()


def _cannot_tell(driver: Driver) -> None:
    driver.machine.fate_unknown(0, driver.machine.epoch, [2], "why", 0)
    driver.answer()


def _parked(driver: Driver) -> None:
    driver.machine.parked(0, driver.machine.epoch, 2, [], 60.0, False, 0)


def _out_of_trust(driver: Driver) -> None:
    driver.machine.dropped(0, [2], 0, in_doubt=True)
    driver.answer()


@pytest.mark.parametrize(("after_s", "released"), [(SETTINGS.expiry_s - 0.1, False), (SETTINGS.expiry_s, True)])
@pytest.mark.parametrize("happens", [_died, _cannot_tell, _parked, _out_of_trust])
def test_what_a_shard_left_in_doubt_keeps_the_term_until_it_has_expired(
    happens: Callable[[Driver], None], after_s: float, released: bool
) -> None:
    """At least once: it may still be on its way to Kafka, and nothing fences it (P24)."""
    driver = leading(SETTINGS)
    driver.mark(row(2))
    happens(driver)
    driver.machine.drain(after_s)
    said = [type(command) for command in driver.answer()]
    assert said == [c.ReleaseTerm, c.Drained] if released else [c.Drained]


def test_so_does_what_a_shard_held_for_another_attempt() -> None:
    driver = leading(SETTINGS)
    driver.mark(row(2))
    driver.machine.drain(0)
    epoch = driver.machine.epoch
    driver.machine.remarked(1, epoch, [], 0)
    assert driver.machine.remarked(0, epoch, [], 0, in_doubt=True) == [c.Drained()]


@pytest.mark.parametrize(("in_doubt", "expected"), [(True, [c.Drained]), (False, [c.ReleaseTerm, c.Drained])])
def test_so_does_the_debt_of_a_leader_that_was_killed(in_doubt: bool, expected: list[type]) -> None:
    driver = Driver(SETTINGS)
    driver.machine.acquire(0)
    driver.answer()
    assert driver.machine.tenure.holder is not None
    driver.machine.term_taken(driver.machine.tenure.holder, 1, "one", 0, in_doubt=in_doubt)
    driver.answer()
    driver.machine.drain(1.0)
    assert [type(command) for command in driver.answer()] == expected


@MODES
@pytest.mark.parametrize("before_its_successor_is_ready", [True, False])
def test_a_drain_after_a_shard_died_ends_and_releases_nothing_that_is_not_certain(
    settings: RelaySettings, before_its_successor_is_ready: bool
) -> None:
    """Its successor opens no lane any more: whoever leads next does it."""
    driver = leading(settings)
    driver.mark(row(2))
    driver.machine.shard_died(0, 0)
    if settings is SETTINGS:
        answer(driver, 1)
    said: list[c.Command] = []
    if not before_its_successor_is_ready:
        said += driver.machine.shard_ready(0, 0)
    said += driver.machine.drain(0)
    said += answer(driver, 1)
    if before_its_successor_is_ready:
        said += driver.machine.shard_ready(0, 0)
    said += answer(driver, 0)
    assert c.Drained() in said


def test_one_who_was_fenced_after_a_shard_died_drains_at_once() -> None:
    """It stands by then, and stops: nothing of that is its to wait for."""
    driver = leading()
    driver.mark(row(2))
    driver.machine.shard_died(0, 0)
    driver.machine.fence("late", 0)
    driver.machine.shard_ready(0, 0)
    driver.answer()
    driver.machine.drain(0)
    assert driver.answer() == [c.Drained()]


# -- the number of shards


def test_new_shards_get_nothing_before_they_have_opened_their_lanes() -> None:
    driver = leading()
    driver.machine.scale(3, 100, 0)
    said = driver.answer()
    assert c.Resize(3) in said
    assert driver.machine.phase is LeadershipPhase.LEADING
    frame = remarks(driver.machine.shard_ready(2, 0))[2]
    assert (frame.term, frame.lanes, frame.shards) == (1, 6, 3)
    assert sent(driver.mark(row(1), row(2))) == {1: [1]}
    answer(driver, 2)
    assert sent(driver.fetch(row(2))) == {2: [2]}


def test_the_number_of_shards_changes_when_the_last_record_is_settled() -> None:
    driver = leading()
    driver.mark(row(2))
    driver.machine.scale(1, 100, 0)
    assert driver.answer({0: [2]}) == []
    assert c.Resize(1) in driver.machine.settled(0, [2], 0)[1]


def test_it_waits_for_the_successor_of_a_shard_that_died() -> None:
    driver = leading()
    driver.mark(row(2))
    driver.machine.scale(1, 100, 0)
    answer(driver, 1)
    assert driver.machine.shard_died(0, 0) == []
    driver.machine.shard_ready(0, 0)
    assert driver.machine.phase is LeadershipPhase.SCALING
    assert c.Resize(1) in answer(driver, 0)


# -- I3: records, not keys


def test_rows_of_one_key_count_each() -> None:
    driver = Driver(replace(ONCE, max_in_flight_records=6))
    driver.lead(incarnation=INCARNATION)
    driver.mark(*keyed(1, 2, 3, 4, 5, 6))
    assert driver.machine.ledger.in_flight == 6
    assert driver.machine.ledger.queued == 0
    assert not driver.machine.planner.statements.marks()


def test_one_key_may_have_all_the_room() -> None:
    """Nothing waits for another of its key, so the bound of a key is that of all."""
    driver = leading()
    assert sum(map(len, sent(driver.mark(*keyed(1, 2, 3, 4, 5, 6, 7, 8))).values())) == 8


# -- P25: low water


def low_water_at(driver: Driver, now: float) -> int | None:
    driver.machine.tick(now)
    return driver.machine.low_water.known


@MODES
def test_low_water_is_the_floor_where_nothing_below_is_unsettled(settings: RelaySettings) -> None:
    driver = leading(settings)
    assert low_water_at(driver, 0) is None
    driver.mark(row(2), row(4), floor=3)
    assert low_water_at(driver, 2) == 2
    driver.machine.settled(0, [2], 2)
    assert low_water_at(driver, 4) == 3
    driver.mark(floor=9)
    assert low_water_at(driver, 6) == 4
    driver.machine.settled(0, [4], 6)
    assert low_water_at(driver, 8) == 9


def test_records_carry_it() -> None:
    driver = leading()
    driver.mark(row(2), floor=3)
    driver.machine.settled(0, [2], 0)
    low_water_at(driver, 2)
    frames = [command.frame for command in driver.mark(row(4)) if isinstance(command, c.Send)]
    assert [frame.low_water for frame in frames if isinstance(frame, f.Dispatch)] == [3]


def test_without_a_floor_there_is_none() -> None:
    driver = leading()
    driver.mark(row(2))
    assert low_water_at(driver, 2) is None


@pytest.mark.parametrize("floor", [1, 0, -(2**63)])
def test_a_floor_below_all_ids_says_nothing(floor: int) -> None:
    driver = leading()
    driver.mark(row(2), floor=floor)
    assert low_water_at(driver, 2) is None


def test_what_waits_holds_it_down() -> None:
    driver = leading()
    driver.mark(*keyed(2, 3), floor=9)
    shard = driver.machine.ledger.shard_of_key(b"key")
    assert shard is not None
    driver.machine.parked(shard, driver.machine.epoch, 2, [3], 5.0, False, 0)
    assert low_water_at(driver, 2) == 2
    driver.machine.tick(5.0)  # it is being fetched
    assert low_water_at(driver, 7) == 2
    driver.fetch(*keyed(2))
    assert low_water_at(driver, 9) == 2
    driver.machine.settled(shard, [2], 9)
    assert low_water_at(driver, 11) == 3


def test_what_waits_for_its_shard_holds_it_down() -> None:
    driver = leading()
    driver.machine.shard_died(0, 0)
    driver.mark(row(2), row(4), floor=9)
    assert low_water_at(driver, 2) == 2


def test_what_a_look_found_holds_it_down() -> None:
    driver = leading()
    driver.mark(row(20))
    look = [command for command in driver.machine.tick(60.0) if isinstance(command, c.Look)]
    driver.machine.looked(look[0].number, [3], 60.0)
    driver.mark(floor=15)
    assert low_water_at(driver, 62) == 3


def test_the_ids_of_a_dead_shard_hold_it_down() -> None:
    driver = leading()
    driver.mark(row(2), row(3), floor=9)
    driver.machine.shard_died(0, 0)
    driver.machine.settled(1, [3], 0)
    assert low_water_at(driver, 2) == 2


def test_a_remark_forgets_the_floor_and_not_the_low_water() -> None:
    """Rows that were forgotten lie below the old floor; they do not lie below the low water."""
    driver = leading()
    driver.mark(row(2), row(4), floor=5)
    driver.machine.settled(0, [2], 0)
    assert low_water_at(driver, 2) == 4
    driver.machine.remark("why not", 2)
    driver.answer()
    assert not len(driver.machine.ledger)
    assert low_water_at(driver, 4) == 4
    driver.mark(row(4), floor=-(2**63))
    assert low_water_at(driver, 6) == 4
    driver.mark(floor=5)
    driver.machine.settled(0, [4], 6)
    assert low_water_at(driver, 8) == 5


def test_a_lower_floor_does_not_lower_it() -> None:
    """The scan starts from the head at every reconnect."""
    driver = leading()
    driver.mark(floor=50)
    assert low_water_at(driver, 2) == 50
    driver.mark(floor=10)
    assert low_water_at(driver, 4) == 50


@pytest.mark.parametrize(("incarnation", "expected"), [(INCARNATION, 50), (ANOTHER, None)], ids=["the same", "another"])
def test_another_term_keeps_it_and_another_incarnation_does_not(incarnation: UUID, expected: int | None) -> None:
    driver = leading()
    driver.mark(floor=50)
    low_water_at(driver, 2)
    driver.machine.fence("late", 2)
    driver.answer()
    driver.lead(term=2, incarnation=incarnation)
    assert low_water_at(driver, 4) == expected
    frames = [command.frame for command in driver.mark(row(60)) if isinstance(command, c.Send)]
    assert [frame.low_water for frame in frames if isinstance(frame, f.Dispatch)] == [expected]


def test_the_floor_of_another_incarnation_is_forgotten_too() -> None:
    driver = leading()
    driver.mark(floor=50)
    driver.machine.server_changed("another one", 0)
    driver.machine.shard_died(0, 0)
    driver.machine.shard_died(1, 0)
    take_term(driver, 8, ANOTHER)
    for shard in (0, 1):
        driver.machine.shard_ready(shard, 0)
        answer(driver, shard)
    assert driver.machine.phase is LeadershipPhase.LEADING
    assert low_water_at(driver, 2) is None


# -- P9


def test_another_server_kills_all_shards_and_their_lanes_are_opened_anew() -> None:
    driver = leading()
    driver.mark(row(2))
    assert killed(driver.machine.server_changed("another one", 0)) == [0, 1]
    driver.machine.shard_died(0, 0)
    assert not len(driver.machine.ledger)
    assert only(driver.machine.shard_died(1, 0), c.TakeTerm)
    assert take_term(driver, 2, ANOTHER) == []
    driver.machine.shard_ready(0, 0)
    answer(driver, 0)
    assert driver.machine.phase is LeadershipPhase.TAKING
    driver.machine.shard_ready(1, 0)
    assert only(answer(driver, 1), c.OpenTrust)

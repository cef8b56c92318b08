"""Single decisions of the relay machine; the interplay is in tests/properties/test_machine.py."""

from __future__ import annotations

from uuid import UUID

import pytest

from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay import commands as c
from harvester.relay import frames as f
from harvester.relay.intake import Row
from harvester.relay.machine import Phase, Relay, Settings

SETTINGS = Settings(
    shards=2,
    max_in_flight_records=8,
    mark_query_records=8,
    send_buffer=2,
    max_queued_per_key=4,
    queue_timeout_s=10,
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

    def lead(self, term: int = 1) -> list[c.Command]:
        self.relay.acquire(self.now)
        self.answer()
        assert self.relay.holder is not None
        self.relay.term_taken(self.relay.holder, term, self.now)
        return self.answer()

    def mark(self, *rows: Row) -> list[c.Command]:
        """The outstanding mark returns these rows."""
        return self.relay.marked(min(self.relay.intake._marks), rows, self.now)


def row(record_id: int) -> Row:
    """A keyless row of shard `record_id % 2`."""
    return (record_id, None, b"row %d" % record_id)


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
    told = relay.term_taken(holder, 7, 0)
    assert told == [c.Send(shard, f.Remark(relay.epoch, 7, str(holder))) for shard in (0, 1)]
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
    assert only(driver.relay.term_taken(UUID(int=1), 1, 0), c.Mark)


def test_a_fence_before_the_lead_is_not_announced() -> None:
    driver = Driver()
    driver.relay.acquire(0)
    driver.answer()
    driver.relay.term_taken(UUID(int=1), 1, 0)
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
    assert driver.relay.tick(driver.now + 19) == []


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


def test_rows_for_a_congested_shard_are_held_up_to_the_buffer_and_then_its_slice_is_closed() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.congested(0)
    said = driver.mark(*map(row, (1, 2, 3, 4, 6, 8)))
    assert only(said, c.Send) == [c.Send(1, f.Dispatch(driver.relay.epoch, [b"row 1", b"row 3"]))]
    assert [reset.ids for reset in said if isinstance(reset, c.Reset)] == [(6, 8)]
    assert [mark.closed_shards for mark in said if isinstance(mark, c.Mark)] == [{0}]
    said = driver.relay.uncongested(0, 0)
    assert only(said, c.Send) == [c.Send(0, f.Dispatch(driver.relay.epoch, [b"row 2", b"row 4"]))]


def test_rows_that_are_held_for_too_long_are_marked_again() -> None:
    driver = Driver()
    driver.lead()
    driver.relay.congested(0)
    driver.mark(row(2))
    assert driver.relay.tick(9.9) == []
    assert only(driver.relay.tick(10), c.Send)
    assert (driver.relay.phase, len(driver.relay.ledger)) == (Phase.REMARKING, 0)


# -- giving back


def park(driver: Driver, *behind: int) -> list[c.Command]:
    return driver.relay.parked(_shard(driver, 1), driver.relay.epoch, 1, behind, 0)


def _shard(driver: Driver, record_id: int) -> int:
    return next(s for s in (0, 1) if driver.relay.ledger._entries[record_id][0] == s)


def keyed(*ids: int) -> list[Row]:
    return [(i, b"key", b"row") for i in ids]


def test_a_parked_record_closes_its_key_and_gives_back_what_stood_behind_it() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    said = park(driver, 2, 3)
    assert [reset.ids for reset in said if isinstance(reset, c.Reset)] == [(2, 3)]
    assert c.Send(_shard(driver, 1), f.Closed(driver.relay.epoch, 1)) in said
    assert driver.relay.ledger.closed == {b"key"}


def test_what_a_parked_key_refuses_goes_back_without_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2, 3))
    park(driver, 2)
    said = driver.relay.refused(_shard(driver, 1), driver.relay.epoch, [3], 0)
    assert [reset.ids for reset in said if isinstance(reset, c.Reset)] == [(3,)]
    assert driver.relay.phase is Phase.LEADING


def test_a_key_that_is_refused_without_being_parked_needs_a_remark() -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    assert driver.relay.refused(0, driver.relay.epoch, [2], 0)
    assert driver.relay.phase is Phase.REMARKING


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
    number = min(driver.relay.intake._marks, default=0)
    driver.relay.remark("x", 0)
    driver.answer()
    assert driver.relay.marked(number, [row(2)], 0) == []


def test_an_empty_mark_says_that_the_outbox_is_empty() -> None:
    driver = Driver()
    driver.lead()
    assert c.Emptied() in driver.mark()


@pytest.mark.parametrize("what", ["unsettled", "closed key", "given back", "closed shard"])
def test_an_empty_mark_says_nothing_when_it_left_something_out(what: str) -> None:
    driver = Driver()
    driver.lead()
    driver.mark(*keyed(1, 2))
    if what == "closed key":
        park(driver, 2)
        driver.mark()
    elif what == "given back":  # and its key open again before the result comes
        park(driver, 2)
        driver.relay.settled(_shard(driver, 1), [1], 0)
        assert not len(driver.relay.ledger)
    elif what == "closed shard":
        driver.relay.settled(_shard(driver, 1), [1, 2], 0)
        driver.relay.congested(0)
        driver.mark(row(2), row(4), row(6))
        driver.relay.settled(0, [2, 4], 0)
    assert c.Emptied() not in driver.mark()

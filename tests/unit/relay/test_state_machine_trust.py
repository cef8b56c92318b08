"""The relay machine while trust has lapsed and no fence has come."""

from __future__ import annotations

from uuid import UUID

from harvester.events import LeaderFenced, LeaderRefreshed
from harvester.relay.core import messages as c
from tests.support.relay_driver import Driver, only, row


def _without_trust(driver: Driver) -> None:
    """A shard drops what it is given, the others have answered the remark."""
    driver.lead(term=3)
    driver.mark(row(2))
    assert only(driver.machine.dropped(0, [2], 0), c.Send)
    assert driver.answer() == []


def test_a_remark_for_lack_of_trust_waits_until_there_is_trust() -> None:
    driver = Driver()
    _without_trust(driver)
    for now in (1.0, 2.0, 3.0):
        assert driver.machine.tick(now, trusted=False) == []
        assert driver.machine.proceed(now) == []
    announced, mark = driver.machine.tick(4.0, trusted=True)
    assert announced == c.Announce(LeaderRefreshed(UUID(int=2), 3, "shard 0 ran out of trust"))
    assert isinstance(mark, c.Mark)
    assert not only(driver.machine.tick(4.1, trusted=True), c.Announce)


def test_a_remark_for_lack_of_trust_waits_for_all_answers_as_well() -> None:
    """P5."""
    driver = Driver()
    driver.lead()
    driver.mark(row(2))
    driver.machine.dropped(0, [2], 0)
    assert driver.machine.tick(1.0, trusted=True) == []
    assert only(driver.answer(), c.Mark)


def test_a_fence_ends_the_wait_for_trust() -> None:
    driver = Driver()
    _without_trust(driver)
    said = driver.machine.fence("late", 0)
    assert said[-1] == c.Announce(LeaderFenced("late"))
    driver.answer()
    assert driver.machine.tick(1.0, trusted=True) == []
    assert only(driver.lead(term=4), c.Mark)
    driver.machine.remark("why not", 0)
    assert only(driver.answer(), c.Mark)  # of the lapse before, nothing is left


def test_who_is_paused_without_trust_goes_on_with_both() -> None:
    driver = Driver()
    _without_trust(driver)
    driver.machine.pause(0)
    assert driver.machine.resume(0) == []
    assert only(driver.machine.tick(1.0, trusted=True), c.Mark)


def test_shards_are_scaled_without_trust() -> None:
    driver = Driver()
    _without_trust(driver)
    driver.machine.scale(3, 10.0, 0)
    assert driver.answer() == [c.Resize(3)]
    assert driver.machine.tick(1.0, trusted=False) == []
    assert only(driver.machine.tick(2.0, trusted=True), c.Mark)

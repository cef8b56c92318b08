"""Consumers of one group that count by different heartbeat intervals, or consume in different modes."""

from __future__ import annotations

import pytest

from harvester.coordination.core.claim import Append, ClaimTiming, StopHandingOut
from harvester.coordination.core.coordinator import Coordinator, Outcome, Refuse, Stage, Warn
from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    encode,
)
from harvester.coordination.core.world import LogTiming, World
from harvester.coordination.errors import CoordinationError, OtherInterval, OtherMode
from harvester.coordination.settings import ConsumerSettings

TIMING, PACE = LogTiming(interval_ms=1000, clock_step_ms=250), ClaimTiming(1.0, margin_s=0.5)
PLACE, OTHER = GroupPartition("billing", "orders", 0), Client("old", "1")
CLAIM = ClaimingPartition(PLACE, OTHER, 1, None, None, 5000)


def beat(number: int, interval_ms: int | None = 5000) -> Heartbeat:
    return Heartbeat(PLACE, OTHER, number, 0, 0, None, interval_ms)


class Newcomer:
    """Counts by one second; reads what is given of a log with one partition."""

    def __init__(self, *past: tuple[int, Message], at_most_once: bool = False) -> None:
        settings = ConsumerSettings(
            kafka={}, group="billing", topics=("orders",), coordination_partitions=1, heartbeat_interval_s=1.0,
            at_most_once=at_most_once,
        )  # fmt: skip
        assert (settings.timing, settings.pace) == (TIMING, PACE)
        self.coordinator = Coordinator(settings, Client("new", "2"), {0: World.begin(TIMING)})
        self.coordinator.consume({"orders": 2})
        self.coordinator.begin({0: len(past)}, 0.0)
        self.offset = 0
        for at_ms, message in past:
            self.read(at_ms, message, 0.0)

    def read(self, at_ms: int, message: Message, now: float) -> list[Outcome]:
        self.offset += 1
        return self.coordinator.read(0, self.offset - 1, at_ms, encode(message), now)

    def claims(self, now: float) -> int:
        said = self.coordinator.tick(now)
        return sum(isinstance(each, Append) and isinstance(each.message, ClaimingPartition) for each in said)


def refused(said: list[Outcome]) -> CoordinationError:
    (refusal,) = said
    assert isinstance(refusal, Refuse)
    return refusal.error


def test_who_may_live_is_listened_for_as_long_as_it_may_be_silent() -> None:
    newcomer = Newcomer((1000, CLAIM), (1001, beat(2)))
    assert [newcomer.claims(now) for now in (0.1, 5.0, 9.9)] == [0, 0, 0]
    assert newcomer.coordinator.stage is Stage.LISTENING
    assert newcomer.claims(10.0) > 0


def test_a_sign_of_its_life_ends_the_newcomer() -> None:
    newcomer = Newcomer((1000, CLAIM), (1001, beat(2)))
    newcomer.claims(0.1)
    error = refused(newcomer.read(3501, beat(3), 2.5))
    assert isinstance(error, OtherInterval)
    assert (error.client_id, error.theirs_s) == (OTHER.id, 5.0)
    assert newcomer.claims(60.0) == 0


@pytest.mark.parametrize(
    "past",
    [
        [(1000, CLAIM), (1001, beat(2)), (1500, ReleasingPartition(PLACE, OTHER, 3, 0, 1, None))],
        [
            (1000, CLAIM),
            (1001, beat(2)),
            (12_000, ClaimingPartition(GroupPartition("x", "y", 0), OTHER, 1, None, None, 1000)),
        ],
        [(1000, CLAIM), (1001, beat(2, 1000))],
        [(1000, ClaimingPartition(PLACE, OTHER, 1, None, None))],
    ],
    ids=["it has left", "it has been silent for long", "it counts alike", "it does not say"],
)
def test_nobody_else_is_waited_for(past: list[tuple[int, Message]]) -> None:
    assert Newcomer(*past).claims(0.0) > 0


def test_who_has_begun_warns_once_of_a_newcomer() -> None:
    first = Newcomer()
    first.claims(0.0)
    other = GroupPartition("billing", "orders", 1)
    late = ClaimingPartition(other, OTHER, 1, None, None, 5000)
    said = first.read(2000, late, 1.0)
    assert [type(each) for each in said] == [Warn]
    assert first.read(2100, Heartbeat(other, OTHER, 2, 0, 0, None, 5000), 1.1) == []
    assert first.coordinator.stage is Stage.ACTIVE


def said_by(*, at_most_once: bool) -> list[tuple[int, Message]]:
    """A claim of the other client, which counts alike, and its first heartbeat."""
    claim = ClaimingPartition(PLACE, OTHER, 1, None, None, 1000, at_most_once)
    return [(1000, claim), (1001, Heartbeat(PLACE, OTHER, 2, 0, 0, None, 1000, at_most_once))]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_sign_of_life_in_the_other_mode_ends_the_newcomer(at_most_once: bool) -> None:
    past = said_by(at_most_once=not at_most_once)
    newcomer = Newcomer(*past, at_most_once=at_most_once)
    assert newcomer.claims(0.1) == 0
    beat = Heartbeat(PLACE, OTHER, 3, 0, 1, None, 1000, not at_most_once)
    error = refused(newcomer.read(1501, beat, 0.5))
    assert isinstance(error, OtherMode)
    assert (error.client_id, error.at_most_once) == (OTHER.id, at_most_once)
    assert newcomer.claims(60.0) == 0
    waited = Newcomer(*past, at_most_once=at_most_once)
    assert waited.claims(1.9) == 0
    assert waited.claims(2.0) > 0


def test_a_message_claim_tells_the_mode() -> None:
    newcomer = Newcomer(*said_by(at_most_once=False))
    newcomer.read(1400, Heartbeat(PLACE, Client("x", "1"), 3, 9, 9, None), 0.1)  # refused: it says nothing
    assert newcomer.coordinator.stage is Stage.LISTENING
    error = refused(newcomer.read(1501, ClaimingMessages(PLACE, OTHER, 3, 0, 1, 9), 0.1))
    assert isinstance(error, OtherMode)
    assert error.client_id == OTHER.id


def test_of_two_that_began_together_the_one_at_least_once_ends() -> None:
    careful, repeating = Newcomer(at_most_once=True), Newcomer()
    for each in (careful, repeating):
        assert each.claims(0.0) > 0
    ours = ClaimingPartition(PLACE, Client("new", "2"), 1, None, None, 1000)
    assert isinstance(repeating.read(1000, ours, 0.1)[0], Append)
    other = GroupPartition("billing", "orders", 1)
    said = repeating.read(1001, ClaimingPartition(other, OTHER, 1, None, None, 1000, at_most_once=True), 0.2)
    assert [type(each) for each in said] == [StopHandingOut, Refuse]
    assert isinstance(refused(said[1:]), OtherMode)
    said = careful.read(1000, ClaimingPartition(other, OTHER, 1, None, None, 1000), 0.2)
    assert [type(each) for each in said] == [Warn]
    assert careful.coordinator.stage is Stage.ACTIVE

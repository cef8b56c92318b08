"""What follows from the time that passes in a partition of the log where nobody writes."""

from __future__ import annotations

from harvester.coordination.core.claim import ClaimPhase, ClaimState, ClaimTiming
from harvester.coordination.core.fair_share import Choice, log_partition
from harvester.coordination.core.messages import (
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    encode,
)
from harvester.coordination.core.world import ClaimVerdict, LogTiming, World
from harvester.coordination.settings import ConsumerSettings

TIMING, PACE = LogTiming(1000, 250), ClaimTiming(1.0, 0.5)
US, OTHER, DEAD = Client("us", "1"), Client("other", "1"), Client("dead", "1")


def place_in(partition: int) -> GroupPartition:
    return next(
        each for each in (GroupPartition("g", "t", n) for n in range(99)) if log_partition(each, 2) == partition
    )


STILL, OURS = place_in(0), place_in(1)


class Log:
    """Two partitions: in the first nobody writes any more. What is said is read at once, at the same local time."""

    def __init__(self) -> None:
        self.worlds = {0: World.begin(TIMING), 1: World.begin(TIMING)}
        settings = ConsumerSettings(
            kafka={}, group="g", topics=("t",), coordination_partitions=2, heartbeat_interval_s=1.0
        )
        assert (settings.timing, settings.pace) == (TIMING, PACE)
        self.choice = Choice(settings, US, self.worlds, {OURS: ClaimState(OURS, US, ClaimPhase.HELD)})
        self.choice.consume((STILL, OURS))
        assert self.say(OURS, ClaimingPartition(OURS, US, 1, None, None), 1.0) is ClaimVerdict.WON
        self.choice.ready(0.0)
        self.choice.active(0.0)

    def say(self, place: GroupPartition, message: Message, at: float, ahead_s: float = 0.0) -> ClaimVerdict:
        partition = log_partition(place, 2)
        world = self.worlds[partition]
        (reading,) = world.read(world.next_offset, round(1000 * (at + ahead_s)), encode(message))
        self.choice.read(partition, world.now_ms, at)
        self.choice.heard(place, at)
        return reading.verdict

    def beat(self, at: float, ahead_s: float = 0.0) -> None:
        assert self.say(OURS, Heartbeat(OURS, US, 2, 0, 0, None), at, ahead_s) is ClaimVerdict.ACCEPTED

    def chosen(self, at: float) -> list[GroupPartition]:
        return self.choice.to_claim(self.choice.roster(at), at)


def test_what_is_released_where_the_log_stands_still_is_claimed() -> None:
    """A campaign found this: one that asked, and was killed, kept everybody from what was released in its last log."""
    log = Log()
    assert log.say(STILL, ClaimingPartition(STILL, OTHER, 1, None, None), 1.0) is ClaimVerdict.WON
    assert log.say(STILL, Heartbeat(STILL, OTHER, 2, 0, 0, None), 1.0) is ClaimVerdict.ACCEPTED
    assert log.say(STILL, ClaimingPartition(STILL, DEAD, 1, 0, None), 1.0) is ClaimVerdict.LOST  # it asks
    assert log.say(STILL, ReleasingPartition(STILL, OTHER, 3, 0, 1, None), 1.0) is ClaimVerdict.ACCEPTED
    assert log.chosen(1.1) == []  # who asks has less
    log.beat(3.0)
    assert log.chosen(3.1) == [STILL]


def test_time_goes_on_where_only_the_dead_wrote() -> None:
    """Who has just read that counts from when it was written, not from when it was read."""
    log = Log()
    assert log.say(STILL, ClaimingPartition(STILL, DEAD, 1, None, None), 1.0) is ClaimVerdict.WON
    log.choice.ready(2.9)
    log.choice.heard(STILL, 2.9)
    log.beat(2.9)
    assert log.chosen(2.95) == []
    assert log.chosen(3.01) == [STILL]


def test_a_claim_that_only_came_too_early_is_tried_when_the_log_allows_it() -> None:
    """The brokers' clocks differ: that of the other partition is ahead."""
    log = Log()
    assert log.say(STILL, ClaimingPartition(STILL, DEAD, 1, None, None), 1.0) is ClaimVerdict.WON
    log.beat(2.9, ahead_s=0.2)
    assert log.chosen(2.91) == [STILL]
    assert log.say(STILL, ClaimingPartition(STILL, US, 3, 0, None), 2.91) is ClaimVerdict.LOST
    log.choice.missed(STILL, 2.91)
    assert log.chosen(2.99) == []
    assert log.chosen(3.01) == [STILL]
    assert log.say(STILL, ClaimingPartition(STILL, US, 4, 0, None), 3.01) is ClaimVerdict.WON


def test_a_claim_that_another_was_quicker_with_is_not_tried_at_once() -> None:
    log = Log()
    assert log.say(STILL, ClaimingPartition(STILL, OTHER, 1, None, None), 1.0) is ClaimVerdict.WON
    assert log.say(STILL, ClaimingPartition(STILL, US, 3, None, None), 1.0) is ClaimVerdict.LOST
    log.choice.missed(STILL, 1.0)
    assert log.say(STILL, ReleasingPartition(STILL, OTHER, 3, 0, 1, None), 1.1) is ClaimVerdict.ACCEPTED
    assert log.chosen(1.4) == []
    assert log.chosen(1.0 + PACE.beat_every_s) == [STILL]


def test_who_asked_and_is_gone_is_forgotten_by_the_log() -> None:
    log = Log()
    world = log.worlds[0]
    assert log.say(STILL, ClaimingPartition(STILL, OTHER, 1, None, None), 1.0) is ClaimVerdict.WON
    for number in range(100):
        at = 1.0 + number / 10
        asking = Client(f"asking-{number}", "1")
        assert log.say(STILL, Heartbeat(STILL, OTHER, 2 + number, 0, 0, None), at) is ClaimVerdict.ACCEPTED
        assert log.say(STILL, ClaimingPartition(STILL, asking, 1, 0, None), at) is ClaimVerdict.LOST
        assert log.say(STILL, ClaimingPartition(STILL, DEAD, 1, 0, None), at) is ClaimVerdict.LOST  # it does not die
    waiting = set(world.waiting("g"))
    assert {client for _, client in world.presence} == waiting
    assert {"dead", "asking-99", "asking-79"} <= waiting
    assert "asking-78" not in waiting


def test_who_has_just_given_does_not_ask_for_what_others_are_giving() -> None:
    """A campaign found this: what it asked for was released at that moment, so it won, and had to give again."""
    places = [GroupPartition("g", "t", number) for number in range(11)]
    holders = {place: US if number < 5 else OTHER for number, place in enumerate(places)}
    world, holdings, generations = World.begin(TIMING), dict[GroupPartition, ClaimState](), dict[GroupPartition, int]()
    settings = ConsumerSettings(kafka={}, group="g", topics=("t",), coordination_partitions=1, heartbeat_interval_s=1.0)
    choice = Choice(settings, US, {0: world}, holdings)
    choice.consume(places)
    choice.ready(0.0)
    choice.active(0.0)

    def say(message: Message, at: float) -> None:
        world.read(world.next_offset, round(1000 * at), encode(message))
        choice.read(0, world.now_ms, at)
        choice.heard(message.place, at)

    def live_on(at: float) -> None:
        """Both say that they hold what they hold; who has nothing asks the other."""
        for place, generation in generations.items():
            say(Heartbeat(place, holders[place], 2, generation, generation, None), at)
        say(ClaimingPartition(places[-1], Client("new", "1"), 1, generations[places[-1]], None), at)

    for place, client in holders.items():
        generations[place] = world.next_offset
        say(ClaimingPartition(place, client, 1, None, None), 1.0)
        if client == US:
            holdings[place] = ClaimState(place, US, ClaimPhase.HELD)
    live_on(1.5)
    assert choice.to_shed(choice.roster(1.5), 1.5) == []
    live_on(2.0)
    live_on(2.5)
    (given,) = choice.to_shed(choice.roster(2.5), 2.5)
    holdings[given] = ClaimState(given, US, ClaimPhase.LEAVING)
    live_on(3.0)
    say(ReleasingPartition(given, US, 3, generations[given], generations[given], None), 3.5)
    holdings[given] = ClaimState(given, US)
    live_on(3.5)
    assert choice.to_claim(choice.roster(3.6), 3.6) == []
    live_on(4.0)
    assert choice.to_claim(choice.roster(4.4), 4.4) == []
    live_on(4.5)
    (asked,) = choice.to_claim(choice.roster(4.55), 4.55)
    assert holders[asked] == OTHER

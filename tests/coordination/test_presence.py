"""Who asked last in a partition of the log where nobody writes any more does not ask for ever."""

from __future__ import annotations

from harvester.coordination.choice import Choice, Look, Settings
from harvester.coordination.holding import Holding, Pace, Phase
from harvester.coordination.messages import (
    ClaimingPartition,
    Client,
    Heartbeat,
    Message,
    Place,
    ReleasingPartition,
    encode,
)
from harvester.coordination.placement import log_partition
from harvester.coordination.rationalizer import Verdict, read
from harvester.coordination.world import Timing, World

TIMING, PACE = Timing(1000, 250), Pace(1.0, 0.5)
US, OTHER, DEAD = Client("us", "1"), Client("other", "1"), Client("dead", "1")


def test_what_is_released_where_the_log_stands_still_is_claimed() -> None:
    """A campaign found this: one that asked, and was killed, kept everybody from what was released in its last log."""
    still, ours = (
        next(place for place in (Place("g", "t", number) for number in range(99)) if log_partition(place, 2) == each)
        for each in (0, 1)
    )
    worlds = {0: World.begin(TIMING), 1: World.begin(TIMING)}

    def said(place: Place, message: Message) -> Verdict:
        world = worlds[log_partition(place, 2)]
        return read(world, world.next_offset, 1_000, encode(message)).verdict

    assert said(ours, ClaimingPartition(ours, US, 1, None, None)) is Verdict.WON
    assert said(still, ClaimingPartition(still, OTHER, 1, None, None)) is Verdict.WON
    assert said(still, Heartbeat(still, OTHER, 2, 0, 0, None)) is Verdict.ACCEPTED
    assert said(still, ClaimingPartition(still, DEAD, 1, 0, None)) is Verdict.LOST  # it asks
    assert said(still, ReleasingPartition(still, OTHER, 3, 0, 1, None)) is Verdict.ACCEPTED
    settings = Settings("g", US, 2, TIMING, PACE)
    choice = Choice(settings)
    choice.ready(0.0)
    choice.active(0.0)
    choice.heard(still, 1.0)
    look = Look(settings, (still, ours), worlds, {ours: Holding(ours, US, Phase.HELD)})
    assert choice.to_claim(look, 1.1) == []  # who asks has less
    choice.heard(ours, 3.0)
    assert choice.to_claim(look, 3.1) == [still]

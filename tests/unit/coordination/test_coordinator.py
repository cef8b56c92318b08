"""Whole consumers on a log without Kafka: start, sharing, hand-over, what an administrator does."""

from __future__ import annotations

import pytest

from harvester.coordination.core.claim import ReleaseClaim
from harvester.coordination.core.coordinator import Stage
from harvester.coordination.core.fair_share import Roster, Shedding, preferred
from harvester.coordination.core.messages import (
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    SettingPosition,
    Unreadable,
    decode,
)
from harvester.coordination.core.world import World
from tests.support.coordination import GROUP, INTERVAL_S, TIMING, TOPIC, Actor, Sim
from tests.support.longs import long

# Daily what lies farthest apart.
few_or_most = pytest.mark.parametrize("before", [1, pytest.param(2, marks=long), pytest.param(4, marks=long), 7])


def spread(sim: Sim) -> list[int]:
    return sorted(sim.held().values(), reverse=True)


def restarted(sim: Sim, index: int, client_id: str | None = None) -> Actor:
    """The successor of an actor that is killed, with all of the log read."""
    old = sim.actors[index]
    sim.actors[index] = sim.born(index, client_id=client_id or old.client.id)
    return sim.actors[index]


# -- heartbeats


@pytest.mark.parametrize("places", [10, 60])
def test_heartbeats_cost_the_partitions_of_the_log_and_not_the_places(places: int) -> None:
    sim = Sim(actors=2, places=places, log_partitions=2)
    sim.settle(4 * INTERVAL_S)
    assert sum(spread(sim)) == places
    before = sum(map(len, sim.logs.values()))
    sim.settle(10 * INTERVAL_S)
    assert sum(map(len, sim.logs.values())) - before == pytest.approx(2 * 2 * 2 * 10, abs=8)  # 2 an interval


def test_heartbeats_go_alone_while_a_client_is_there_that_would_not_read_them() -> None:
    sim = Sim(actors=1, places=6, log_partitions=1)
    sim.settle(4 * INTERVAL_S)
    assert sim.together > 3
    log = sim.logs[0]
    older = sim.born(1, older=True)
    sim.actors.append(older)
    while not any(part.client == older.client for part in parts(log[-1])):
        sim.settle(0.05)
    heard, together = len(log), sim.together
    sim.settle(0.1)
    beats = [part.place for record in log[heard:] for part in parts(record) if isinstance(part, Heartbeat)]
    assert len(set(beats)) == 6  # at once, for the newcomer
    sim.settle(6 * INTERVAL_S)
    assert (spread(sim), sim.together) == ([3, 3], together)
    sim.actors.remove(older)
    sim.settle(1.4 * INTERVAL_S)  # its last message may be half an interval old
    assert sim.together == together
    sim.settle(2.6 * INTERVAL_S)
    assert spread(sim) == [6]
    assert sim.together > together


def test_an_older_client_is_heeded_in_every_partition_of_the_log() -> None:
    """It is silent in partitions where it holds nothing, yet does not read heartbeats that go together there."""
    sim = Sim(actors=0, places=8, log_partitions=8, blind=True)
    for older in (True, False):
        sim.actors.append(sim.born(len(sim.actors), older=older))
        sim.settle(4 * INTERVAL_S)
    assert spread(sim) == [4, 4]
    won = sim.claims_won
    sim.settle(8 * INTERVAL_S)
    assert (spread(sim), sim.together, sim.claims_won) == ([4, 4], 0, won)


def parts(record: tuple[int, bytes]) -> tuple[Message, ...]:
    said = decode(record[1])
    assert not isinstance(said, Unreadable)
    return said.parts


# -- sharing


def test_one_consumer_takes_everything() -> None:
    sim = Sim(actors=1, places=5)
    sim.settle(0.2)
    assert spread(sim) == [1]
    sim.settle(0.5 * INTERVAL_S)
    assert spread(sim) == [5]


def test_consumers_that_start_together_share_at_once() -> None:
    sim = Sim(actors=8, places=32)
    sim.settle(3 * INTERVAL_S)
    assert spread(sim) == [4] * 8


@pytest.mark.parametrize(
    ("actors", "places", "expected"), [(3, 8, [3, 3, 2]), (4, 10, [3, 3, 2, 2]), (4, 3, [1, 1, 1, 0])]
)
def test_nobody_has_two_more_than_another(actors: int, places: int, expected: list[int]) -> None:
    sim = Sim(actors=actors, places=places)
    sim.settle(5 * INTERVAL_S)
    assert spread(sim) == expected


def test_who_joins_gets_a_share_within_three_intervals_and_nothing_moves_twice() -> None:
    sim = Sim(actors=7, places=32)
    sim.settle(3 * INTERVAL_S)
    won = sim.claims_won
    sim.actors.append(sim.born(7))
    sim.settle(3 * INTERVAL_S)
    assert max(spread(sim)) - min(spread(sim)) <= 1
    assert sim.claims_won - won == 4


def test_what_a_killed_consumer_held_is_claimed_within_two_intervals_and_two_seconds() -> None:
    sim = Sim(actors=4, places=8)
    sim.settle(3 * INTERVAL_S)
    del sim.actors[0]
    sim.settle(2 * INTERVAL_S + 2)
    assert sum(spread(sim)) == 8
    assert spread(sim) == [3, 3, 2]


@pytest.mark.parametrize(
    ("killed", "born_after"),
    [
        pytest.param(killed, born_after, marks=() if killed + 10 * born_after == 6 else long)  # daily one of each
        for killed in (1, 3, 5)
        for born_after in (0.1, 0.3, 0.5)
    ],
)
def test_successors_of_the_dead_do_not_hold_their_places_up(killed: int, born_after: float) -> None:
    """A campaign found this: while the successors asked, the others gave them places, and then claimed nothing."""
    sim = Sim(actors=8, places=32, log_partitions=8)
    sim.settle(3.3 * INTERVAL_S)
    assert spread(sim) == [4] * 8
    del sim.actors[:killed]
    sim.settle(born_after * INTERVAL_S)
    sim.actors += [sim.born(8 + each) for each in range(killed)]
    sim.settle((2.3 - born_after) * INTERVAL_S)
    assert sum(spread(sim)) == 32
    assert sum(len(actor.coordinator.holds) for actor in sim.actors) == 32


def test_what_is_left_when_all_were_killed_is_claimed_although_the_log_stands_still() -> None:
    sim = Sim(actors=2, places=4)
    sim.settle(3 * INTERVAL_S)
    for index in range(2):
        restarted(sim, index, client_id=f"new-{index}")
    sim.settle(2 * INTERVAL_S + 2)
    assert spread(sim) == [2, 2]


def test_a_place_nobody_can_ask_for_is_claimed_when_it_was_silent_for_two_intervals() -> None:
    sim = Sim(actors=1, places=1)
    sim.settle(INTERVAL_S)
    restarted(sim, 0, client_id="another")
    sim.settle(1.9 * INTERVAL_S)
    assert spread(sim) == [0]
    sim.settle(0.5 * INTERVAL_S)
    assert spread(sim) == [1]


def test_shedding_one_place_an_interval_where_that_is_asked_for() -> None:
    sim = Sim(actors=1, places=8, shed_at_once=1)
    sim.settle(INTERVAL_S)
    sim.actors += [sim.born(1), sim.born(2)]
    sim.settle(2.5 * INTERVAL_S)
    assert sim.held()[sim.actors[0].client.id] == 6
    sim.settle(6 * INTERVAL_S)
    assert spread(sim) == [3, 3, 2]


@few_or_most
def test_seven_places_in_eight_move_within_three_intervals_and_none_twice(before: int) -> None:
    sim = Sim(actors=before, places=32)
    sim.settle(3 * INTERVAL_S)
    assert sum(spread(sim)) == 32
    won = sim.claims_won
    sim.actors += [sim.born(index) for index in range(before, 8)]
    sim.settle(3 * INTERVAL_S)
    assert spread(sim) == [4] * 8
    assert sim.claims_won - won == 32 - 4 * before


@few_or_most
def test_places_of_which_something_is_in_hand_for_an_interval_move_once_as_well(before: int) -> None:
    """A campaign found this: what a client was giving was its own no more and nobody's yet, so it gave more."""
    sim = Sim(actors=before, places=32, lets_go_after_s=INTERVAL_S)
    sim.settle(3 * INTERVAL_S)
    won = sim.claims_won
    sim.actors += [sim.born(index) for index in range(before, 8)]
    sim.settle(3 * INTERVAL_S)
    assert spread(sim) == [4] * 8
    sim.settle(2 * INTERVAL_S)
    assert sim.claims_won - won == 32 - 4 * before


def test_what_was_given_is_not_taken_back_before_the_release_is_read() -> None:
    """A campaign found this: until then the log says that it is ours."""
    sim = Sim(actors=1, places=4, lets_go_after_s=INTERVAL_S)
    sim.settle(INTERVAL_S)
    giving = sim.actors[0]
    sim.actors.append(sim.born(1))
    while not any(isinstance(message, ReleasingPartition) for message, _ in giving.unsent):
        sim.now += 0.05
        sim.turn(sim.actors[1])
        sim.tick(giving)
        sim.flush(giving)
        for partition in sim.logs:
            sim.read(giving, partition)
        sim.finish(giving)
    sim.now += 0.1
    sim.tick(giving)
    assert not any(isinstance(message, ClaimingPartition) for message, _ in giving.unsent)


@pytest.mark.parametrize("left", [1, 4])
def test_what_leavers_had_is_shared_within_three_intervals(left: int) -> None:
    sim = Sim(actors=8, places=32)
    sim.settle(3 * INTERVAL_S)
    for leaving in sim.actors[:left]:
        sim.perform(leaving, leaving.coordinator.close(sim.local(leaving)))
        sim.turn(leaving)
    del sim.actors[:left]
    sim.settle(3 * INTERVAL_S)
    assert sum(spread(sim)) == 32
    assert max(spread(sim)) - min(spread(sim)) <= 1


@pytest.mark.parametrize("killed", [1, 4])
def test_what_the_dead_had_is_shared_within_three_intervals(killed: int) -> None:
    sim = Sim(actors=8, places=32)
    sim.settle(3 * INTERVAL_S)
    del sim.actors[:killed]
    sim.settle(3 * INTERVAL_S)
    assert sum(spread(sim)) == 32
    assert max(spread(sim)) - min(spread(sim)) <= 1


def test_somebody_has_fewer() -> None:
    sim = Sim(actors=2, places=3)
    sim.settle(3 * INTERVAL_S)
    more = [actor for actor in sim.actors if len(actor.coordinator.holds) == 2]
    assert len(more) == 1
    assert [actor.coordinator.choice.fewer_elsewhere(sim.local(actor)) for actor in sim.actors] == [
        actor in more for actor in sim.actors
    ]


def test_who_asks_is_given_its_share_and_not_what_others_fall_behind_with_besides() -> None:
    """A campaign found this: a client gave for both reasons, and what was too much lay there for an interval."""
    sim = Sim(actors=2, places=4)
    sim.settle(3 * INTERVAL_S)
    sim.actors.append(sim.born(2))
    sim.settle(0.5 * INTERVAL_S)
    assert spread(sim) == [2, 2, 0]
    assert not any(actor.coordinator.choice.fewer_elsewhere(sim.local(actor)) for actor in sim.actors)


def late_reader(tail: int) -> tuple[Sim, Actor]:
    """Of so many records, half an interval apart, about another place; its own places were held long ago."""
    sim = Sim(actors=1, places=2, log_partitions=1)
    sim.settle(INTERVAL_S)
    sim.actors.clear()
    sim.settle(3 * INTERVAL_S)
    other = Client("other", "x")
    for _ in range(10):
        sim.now += INTERVAL_S / 2
        sim.append(Heartbeat(GroupPartition(GROUP, "elsewhere", 0), other, 1, 0, None, None), sim.now)
    late = sim.born(9, {0: World.begin(TIMING, len(sim.logs[0]) - tail)})
    sim.actors.append(late)
    return sim, late


def test_who_reads_a_tail_that_is_long_enough_claims_what_was_silent_at_once() -> None:
    sim, _ = late_reader(tail=7)
    sim.settle(0.9 * INTERVAL_S)
    assert spread(sim) == [2]


def test_who_reads_a_tail_that_is_too_short_says_nothing_yet() -> None:
    sim, late = late_reader(tail=3)
    sim.settle(0.9 * INTERVAL_S)
    assert not late.coordinator.holdings


def test_one_claim_at_a_time() -> None:
    sim = Sim(actors=1, places=6, greedy=False)
    for actor in sim.actors:
        for _ in range(3):
            sim.now += INTERVAL_S / 2
            sim.tick(actor)
        assert len(actor.unsent) == 1
    sim.settle(INTERVAL_S)
    assert spread(sim) == [6]


def test_a_maximum_of_claims_leaves_the_rest_to_others() -> None:
    sim = Sim(actors=3, places=9, max_claims=2)
    sim.settle(5 * INTERVAL_S)
    assert spread(sim) == [2, 2, 2]


def test_new_partitions_are_claimed() -> None:
    sim = Sim(actors=2, places=2)
    sim.settle(2 * INTERVAL_S)
    for actor in sim.actors:
        actor.coordinator.consume({TOPIC: 6})
    sim.settle(3 * INTERVAL_S)
    assert spread(sim) == [3, 3]


def test_whole_topics() -> None:
    sim = Sim(actors=2, whole_topics=True, topics={"orders": 3, "refunds": 3, "returns": 3, "bills": 3})
    sim.settle(4 * INTERVAL_S)
    assert spread(sim) == [6, 6]
    for actor in sim.actors:
        topics = {place.topic for place in actor.coordinator.holds}
        assert len(topics) == 2


def outage(sim: Sim, seconds: float) -> None:
    """Nothing arrives and nothing is read; what was sent is given up."""
    for _ in range(round(seconds / 0.05)):
        sim.now += 0.05
        for actor in sim.actors:
            sim.tick(actor)
            while actor.unsent:
                sim.lose(actor, arrived=False)


def test_after_an_outage_everybody_has_its_own_again() -> None:
    """A campaign found this: who was connected first took everything, and gave it back an interval or two later."""
    sim = Sim(actors=4, places=16)
    sim.settle(3 * INTERVAL_S)
    before = [actor.coordinator.holds for actor in sim.actors]
    won = sim.claims_won
    outage(sim, 4 * INTERVAL_S)
    assert sum(spread(sim)) == 0
    sim.settle(0.4 * INTERVAL_S, actors=sim.actors[:1])  # it is connected first
    sim.settle(0.2 * INTERVAL_S)
    assert [sorted(actor.coordinator.holds) for actor in sim.actors] == [sorted(held) for held in before]
    assert sim.claims_won - won == 16


def test_after_an_outage_what_the_dead_had_is_claimed_soon() -> None:
    sim = Sim(actors=4, places=16)
    sim.settle(3 * INTERVAL_S)
    sim.actors.pop()
    outage(sim, 4 * INTERVAL_S)
    sim.settle(0.8 * INTERVAL_S)
    assert spread(sim) == [6, 5, 5]


def test_a_short_freeze_moves_nothing() -> None:
    sim = Sim(actors=3, places=6)
    sim.settle(3 * INTERVAL_S)
    won = sim.claims_won
    sim.settle(0.9 * INTERVAL_S, actors=sim.actors[:2])
    sim.settle(2 * INTERVAL_S)
    assert sim.claims_won == won


# -- coming and going


def test_a_close_hands_everything_over() -> None:
    sim = Sim(actors=2, places=4)
    sim.settle(2 * INTERVAL_S)
    leaving = sim.actors[0]
    sim.perform(leaving, leaving.coordinator.close(sim.local(leaving)))
    sim.turn(leaving)
    assert leaving.coordinator.holds == ()
    sim.settle(0.5 * INTERVAL_S)
    assert sim.held()[sim.actors[1].client.id] >= 3
    sim.settle(2 * INTERVAL_S)
    assert sim.held()[sim.actors[1].client.id] == 4


def test_a_claim_that_is_under_way_at_a_close_is_waited_for_and_released() -> None:
    sim = Sim(actors=1, places=1)
    (leaving,) = sim.actors
    while not leaving.unsent:
        sim.now += 0.05
        sim.tick(leaving)
    assert leaving.coordinator.holds == ()
    sim.perform(leaving, leaving.coordinator.close(sim.local(leaving)))
    left = [leaving.coordinator.left]
    sim.turn(leaving)
    assert sim.claims_won == 1
    assert [*left, leaving.coordinator.left] == [False, True]
    assert all(claim.holder is None for world in sim.full.values() for claim in world.claims.values())


def test_a_claim_that_was_lost_before_the_close_is_not_waited_for() -> None:
    sim = Sim(actors=1, places=1)
    (leaving,) = sim.actors
    while not leaving.unsent:
        sim.now += 0.05
        sim.tick(leaving)
    sim.lose(leaving, arrived=False)
    sim.perform(leaving, leaving.coordinator.close(sim.local(leaving)))
    assert leaving.coordinator.left


def test_the_next_life_of_a_client_id_takes_its_claims_over_at_once() -> None:
    sim = Sim(actors=2, places=4, stable=True)
    sim.settle(2 * INTERVAL_S)
    before = sim.actors[0].coordinator.holds
    restarted(sim, 0)
    sim.settle(INTERVAL_S)
    assert sim.actors[0].coordinator.holds == before


def test_a_second_live_process_with_the_same_client_id_is_refused() -> None:
    sim = Sim(actors=2, places=4, stable=True)
    sim.settle(2 * INTERVAL_S)
    sim.actors.append(sim.born(0, client_id="c0"))
    sim.settle(INTERVAL_S)
    assert [actor.refused for actor in sim.actors] == [False, False, True]
    assert spread(sim)[0] == 2


def test_a_process_taken_for_dead_is_refused_when_it_comes_back() -> None:
    sim = Sim(actors=1, places=2, stable=True)
    sim.settle(2 * INTERVAL_S)
    frozen = sim.actors.pop()
    sim.actors.append(sim.born(0, client_id="c0"))
    sim.settle(1.2 * INTERVAL_S)
    assert len(sim.actors[0].coordinator.holds) == 2
    sim.turn(frozen)
    assert frozen.refused
    assert frozen.coordinator.stage is Stage.REFUSED
    assert not sim.actors[0].refused


def test_of_two_that_begin_together_one_stays() -> None:
    sim = Sim(actors=1, places=2, stable=True)
    sim.actors.append(sim.born(0, client_id="c0"))
    for actor in sim.actors:
        sim.tick(actor)
        sim.tick(actor)
    sim.settle(INTERVAL_S)
    assert [actor.refused for actor in sim.actors] == [False, True]


# -- an administrator


def test_a_position_that_is_set_ends_the_claim_and_is_where_the_next_begins() -> None:
    sim = Sim(actors=1, places=1, at_most_once=True)
    sim.settle(2 * INTERVAL_S)
    place, actor = GroupPartition(GROUP, TOPIC, 0), sim.actors[0]
    before = actor.tenures[place]
    sim.append(SettingPosition(place, Client("admin", "x"), 1, None, None, 10_000), sim.now)
    sim.settle(0.5 * INTERVAL_S)
    after = actor.tenures[place]
    assert after.generation > before.generation
    assert after.next_offset > 10_000 > before.next_offset


def test_a_claim_can_be_released_for_its_client() -> None:
    sim = Sim(actors=1, places=1)
    sim.settle(INTERVAL_S)
    place, actor = GroupPartition(GROUP, TOPIC, 0), sim.actors[0]
    generation = actor.coordinator.holdings[place].generation
    sim.append(ReleasingPartition(place, actor.client, 0, generation, None, None), sim.now)
    for partition in sim.logs:
        sim.read(actor, partition)
    assert actor.coordinator.holds == ()


def test_a_place_can_be_let_go() -> None:
    sim = Sim(actors=2, places=2)
    sim.settle(2 * INTERVAL_S)
    actor = sim.actors[0]
    (place,) = actor.coordinator.holds
    sim.perform(actor, actor.coordinator.tell(place, ReleaseClaim("it falls behind"), sim.local(actor)))
    sim.turn(actor)
    assert place not in actor.coordinator.holds


def test_nothing_is_claimed_before_the_log_is_read() -> None:
    sim = Sim(actors=1, places=1)
    sim.settle(INTERVAL_S)
    late = sim.born(1, {partition: World.begin(TIMING) for partition in sim.logs})
    sim.tick(late)
    assert late.coordinator.stage is Stage.READING
    assert not late.unsent


# -- shares


def roster(counts: dict[str, int], asking: set[str], free: int = 0) -> Roster:
    return Roster(counts, asking, free, sum(counts.values()) + free)


def test_the_place_of_one_that_is_silent_does_not_have_to_be_given_by_another() -> None:
    """Whoever gave one would claim nothing for an interval, and what the dead one had would wait for it."""
    counts = {"a": 4, "dead": 4, "new": 0}
    assert Roster(counts, {"new"}, 0, 8, doubtful={"dead": 4}).moves() == {}
    assert Roster(counts, {"new"}, 0, 8, doubtful={"dead": 1}).moves() == {"a": 1}
    assert Roster(counts, {"new"}, 0, 8).moves() == {"a": 1, "dead": 1}


@pytest.mark.parametrize(("mine", "least", "may"), [
    (0, 3, True), (1, 0, True), (2, 2, True), (2, 1, False), (3, 3, False),
])  # fmt: skip
def test_what_everybody_can_have_is_taken_whatever_the_others_have(mine: int, least: int, may: bool) -> None:
    assert Roster({"a": mine, "b": least, "c": 2}, {"b"}, 3, 8).may_claim(mine) is may  # 2, 3 and 3


@pytest.mark.parametrize(("counts", "asking", "free", "moves"), [
    ({"a": 5, "b": 5, "c": 0}, {"c"}, 0, {"a": 2, "b": 1}),
    ({"a": 3, "b": 1, "c": 1}, {"b"}, 0, {"a": 1}),
    ({"a": 3, "b": 1, "c": 1}, set(), 0, {}),
    ({"a": 2, "b": 1}, {"b"}, 0, {}),
    ({"a": 4, "b": 0}, {"b"}, 4, {}),
    ({"a": 4, "b": 0}, {"b"}, 1, {"a": 1}),
])  # fmt: skip
def test_who_has_to_give(counts: dict[str, int], asking: set[str], free: int, moves: dict[str, int]) -> None:
    assert dict(roster(counts, asking, free).moves()) == moves


def test_shedding_takes_a_full_interval_of_reason_and_an_interval_between_two() -> None:
    shedding = Shedding(1.0)
    assert not shedding.due(True, 10)
    assert not shedding.due(True, 10.9)
    assert not shedding.due(False, 10.95)
    assert not shedding.due(True, 11)
    assert shedding.due(True, 12)
    assert not shedding.may_claim(12.9)
    assert not shedding.due(True, 12.9)
    assert shedding.due(True, 13)


def test_clients_begin_with_different_places() -> None:
    places = [GroupPartition(GROUP, TOPIC, number) for number in range(12)]
    orders = [preferred(client, places) for client in "abcdef"]
    assert all(sorted(order) == places for order in orders)
    assert len({tuple(order) for order in orders}) == 6

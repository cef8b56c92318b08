"""Any schedule of consumers that stop anywhere, any place to begin reading: what coordination promises is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.coordination import log as coordination_log
from harvester.coordination.core import claim as claims
from harvester.coordination.core import world as worlds
from harvester.coordination.core.claim import ClaimedBatch, ClaimState, ClaimTiming, ProcessBatch, ReleaseClaim
from harvester.coordination.core.messages import (
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    Unreadable,
    decode,
)
from harvester.coordination.core.world import Claim, ClaimVerdict, Freshness, World
from harvester.coordination.log import LogBackfill
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordination import GROUP, INTERVAL_S, TIMING, TOPIC, Broken, Sim, scheduled, seen
from tests.support.longs import some_of

Patch = pytest.MonkeyPatch
SCHEDULES = st.binary(min_size=120, max_size=600)


@pytest.fixture(autouse=True, scope="module")
def _decoded_once() -> Iterator[None]:
    """A message is read by many, and most of the time goes into its text."""
    with Patch.context() as patch:
        patch.setattr(worlds, "decode", lru_cache(100_000)(decode))
        yield


@settings(max_examples=some_of(60), deadline=None)
@given(SCHEDULES, st.booleans(), st.booleans())
def test_at_least_once(data: bytes, stable: bool, older: bool) -> None:
    scheduled(Sim(stable=stable, older=older), data)


@settings(max_examples=some_of(60), deadline=None)
@given(SCHEDULES, st.booleans())
def test_at_most_once(data: bytes, stable: bool) -> None:
    scheduled(Sim(at_most_once=True, stable=stable), data)


def history(seed: int, *, at_most_once: bool) -> Sim:
    """A long one; every second with client ids that survive a crash."""
    sim = Sim(places=2, at_most_once=at_most_once, stable=bool(seed % 2))
    return scheduled(sim, random.Random(seed).randbytes(1200))


def histories(seeds: Iterable[int], *, at_most_once: bool) -> list[Sim]:
    return [history(seed, at_most_once=at_most_once) for seed in seeds]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_long_histories_with_many_take_overs(at_most_once: bool) -> None:
    sims = histories(range(some_of(60)), at_most_once=at_most_once)
    assert sum(sim.take_overs for sim in sims) > len(sims)
    assert sum(len(sim.work) for sim in sims) > 10 * len(sims)
    assert at_most_once or sum(sim.repeats for sim in sims) > len(sims) / 2


@pytest.mark.parametrize("older", [False, True])
def test_heartbeats_that_go_together_count_as_if_each_stood_alone(older: bool) -> None:
    sims = []
    for seed in range(some_of(30)):
        sim = Sim(actors=2, places=6, log_partitions=1, stable=bool(seed % 2), older=older)
        sims.append(scheduled(sim, random.Random(seed).randbytes(1200)))
    assert sum(sim.together for sim in sims) > 5 * len(sims)
    assert sum(compare_readers(sim) for sim in sims) > 600 * len(sims)
    assert sum(sim.take_overs for sim in sims) > len(sims)


def hand_overs(seed: int) -> Sim:
    """At most once; consumers are closed and places let go at any time, and otherwise nothing happens."""
    rng = random.Random(seed)
    sim = Sim(places=3, at_most_once=True, orderly=True)
    for _ in range(80):
        sim.now += rng.uniform(0.02, 0.2)
        actor = rng.choice(sim.actors)
        match rng.randrange(12):
            case 0:
                held = [place for place in actor.tenures if place not in actor.draining]
                for place in held[:1]:
                    sim.perform(actor, actor.coordinator.tell(place, ReleaseClaim("on request"), sim.local(actor)))
            case 1:
                sim.perform(actor, actor.coordinator.close(sim.local(actor)))
                sim.settle(1.0)
                sim.restart(sim.actors.index(actor), 255)
            case 2 | 3:
                sim.take(actor, rng.randrange(1, 6))
            case 4 | 5:
                sim.finish(actor, 1)
            case _:
                sim.tick(actor)
                sim.flush(actor)
        for each in sim.actors:
            for partition in sim.logs:
                sim.read(each, partition)
            sim.tick(each)
            sim.look_back(each)
            sim.flush(each)
        sim.check()
    return sim


def test_hand_overs_at_most_once_keep_the_order_and_lose_nothing() -> None:
    sims = [hand_overs(seed) for seed in range(some_of(40))]
    assert sum(sim.returned for sim in sims) > len(sims) / 2
    assert sum(len(sim.work) for sim in sims) > 10 * len(sims)


def test_the_judges_notice_what_is_claimed_and_not_returned(monkeypatch: Patch) -> None:
    inner = claims._left
    monkeypatch.setattr(
        claims, "_left", lambda state, last_offset, now, pace: inner(state, state.last_offset, now, pace)
    )
    with pytest.raises(Broken, match="were never processed"):
        sum(hand_overs(seed).returned for seed in range(40))


def compare_readers(sim: Sim) -> int:
    """Let a reader begin at each record; returns how often one was certain about a place that is held."""
    certain = 0
    for partition, log in sim.logs.items():
        truths = sim.truths[partition]
        for start in range(1, len(log)):
            world = World.begin(TIMING, start)
            for offset in range(start, min(len(log), start + 60)):
                for reading in world.read(offset, *log[offset]):
                    message = reading.message
                    assert message is not None
                    assert not isinstance(message, Unreadable)
                    claim, truth = world.claim(message.place), truths[offset][message.place]
                    if claim.exact and seen(claim) != seen(truth):
                        raise Broken(f"from {start}, at {offset}: {seen(claim)}, from the beginning {seen(truth)}")
                    if claim.exact and claim.positioned and claim.last_offset != truth.last_offset:
                        raise Broken(f"from {start}, at {offset}: {claim.last_offset}, truly {truth.last_offset}")
                    certain += claim.exact and claim.holder is not None
    return certain


def test_readers_that_begin_anywhere_agree() -> None:
    sims = histories(range(some_of(30)), at_most_once=False) + histories(range(some_of(15)), at_most_once=True)
    assert sum(compare_readers(sim) for sim in sims) > 600 * len(sims)


def search(sim: Sim, patch: Patch) -> tuple[int, int]:
    """Have `LogBackfill` look for the position of each claim that won: how many, and for how many the beginning of the
    log was not read.
    """
    won, in_part = 0, 0
    patch.setattr(coordination_log, "_NEAR", 3)
    patch.setattr(coordination_log, "_FURTHER", 4)

    def read(_: LogBackfill, partition: int, past: Any, generation: int) -> None:
        for offset in range(past.world.next_offset, generation + 1):
            past.world.read(offset, *sim.logs[partition][offset])

    patch.setattr(LogBackfill, "_read", read)
    of_group = ConsumerSettings(kafka={}, group=GROUP, topics=(TOPIC,), heartbeat_interval_s=INTERVAL_S)
    for partition, truths in sim.truths.items():
        for offset, claims_there in enumerate(truths):
            for place, truth in claims_there.items():
                if truth.generation == offset and truth.holder is not None:
                    world = LogBackfill(of_group, lambda *_: None)._search(partition, place, offset)
                    assert world is not None
                    won, in_part = won + 1, in_part + (not world.complete)
                    if world.claim(place).last_offset != truth.last_offset:
                        raise Broken(f"the claim at {offset}: {world.claim(place)}, truly {truth}")
    return won, in_part


def test_a_position_is_found_in_the_last_part_of_the_log_that_tells_it(monkeypatch: Patch) -> None:
    sims = histories(range(some_of(30)), at_most_once=False) + histories(range(some_of(15)), at_most_once=True)
    found = [search(sim, monkeypatch) for sim in sims]
    won, in_part = map(sum, zip(*found, strict=True))
    assert in_part > won / 10 > 0


def test_the_search_notices_a_position_that_is_not_certain(monkeypatch: Patch) -> None:
    _any_position_is_found(monkeypatch)
    with pytest.raises(Broken):
        sum(search(history(seed, at_most_once=False), monkeypatch)[0] for seed in range(30))


# -- the rules, written down a second time by somebody who does not care for speed


def holder_of(log: list[tuple[int, bytes]], place: GroupPartition) -> tuple[Client | None, int]:
    """Who holds a place at the end of the log, and under which generation."""
    holder: Client | None = None
    generation, alive_ms, now_ms = -1, 0, 0
    for offset, (at_ms, value) in enumerate(log):
        now_ms = max(now_ms, at_ms)
        record = decode(value)
        assert not isinstance(record, Unreadable)
        message = next((part for part in record.parts if part.place == place), None)
        if message is None:
            continue
        if isinstance(message, ClaimingPartition):
            knows = message.generation is None or message.generation >= generation
            ours = holder is not None and holder.id == message.client.id and message.generation == generation
            vacant = holder is None or now_ms > alive_ms + 2 * TIMING.interval_ms
            if ours or (knows and vacant):
                holder, generation, alive_ms = message.client, offset, now_ms
        elif (message.client, message.generation) == (holder, generation):
            alive_ms = now_ms
            if isinstance(message, ReleasingPartition):
                holder = None
    return holder, generation


@settings(max_examples=some_of(60), deadline=None)
@given(SCHEDULES)
def test_the_world_is_what_the_plain_rules_say(data: bytes) -> None:
    sim = scheduled(Sim(), data)
    for partition, log in sim.logs.items():
        for place, claim in sim.full[partition].claims.items():
            assert holder_of(log, place) == (claim.holder, claim.generation)


# -- a test that cannot fail is a defect

Judge = Callable[[Claim, Message, World], tuple[Claim, ClaimVerdict]]


def _heartbeats_take_claims(patch: Patch) -> None:
    """As in the original protocol: whoever sends a heartbeat holds the claim."""
    inner = worlds._under_claim

    def lenient(claim: Claim, message: Message, at: World) -> tuple[Claim, ClaimVerdict]:
        if isinstance(message, Heartbeat):
            claim = claim._replace(holder=message.client, generation=message.generation or 0)
        return inner(claim, message, at)

    patch.setattr(worlds, "_under_claim", lenient)


def _late_readers_judge(patch: Patch) -> None:
    """A reader without the beginning judges claims by what it happens to know."""
    inner = worlds._claiming
    patch.setattr(worlds, "_claiming", lambda claim, message, at: inner(claim._replace(exact=True), message, at))


def _anything_confirms(patch: Patch) -> None:
    patch.setattr(worlds, "_is_confirmed", lambda claim, message, at: True)


def _any_position_is_found(patch: Patch) -> None:
    """The search for a position ends in the first part of the log that it reads."""
    patch.setattr(World, "knows_position", lambda self, place: True)


def _unknown_is_stale(patch: Patch) -> None:
    def hasty(self: Claim, now_ms: int, timing: object) -> Freshness:
        return Freshness.FREE if self.holder is None or now_ms - self.beat_ms > 1000 else Freshness.FRESH

    patch.setattr(Claim, "freshness", hasty)


def _belief_without_end(patch: Patch) -> None:
    patch.setattr(ClaimTiming, "trust_s", property(lambda self: 10 * self.interval_s))


def _handed_out_while_trusted(patch: Patch) -> None:
    patch.setattr(ClaimState, "hand_out_until", ClaimState.trusted_until)


def _processed_when_proposed(patch: Patch) -> None:
    """At most once without waiting for the heartbeat: the message claim suffices."""

    def hasty(state: ClaimState, batch: ClaimedBatch, now: float, pace: ClaimTiming) -> claims.Next:
        state, commands = claims._append(state, claims._heartbeat(state, batch.last_offset, pace), now, pace)
        state = state._replace(batch=None, last_offset=batch.last_offset)
        return state, (*commands, ProcessBatch(state.place, state.generation, batch.last_offset))

    patch.setattr(claims, "_commit", hasty)


def _a_sent_heartbeat_suffices(patch: Patch) -> None:
    """At most once with an unknown outcome taken for a success."""

    def trusting(state: ClaimState, number: int, now: float, pace: ClaimTiming) -> claims.Next:
        batch = state.batch
        if batch is None or number != batch.number:
            return state, ()
        return state._replace(batch=None), (ProcessBatch(state.place, state.generation, batch.last_offset),)

    patch.setattr(claims, "_not_sent", trusting)


def _unprocessed_is_reported(patch: Patch) -> None:
    """A heartbeat reports a record more than is processed."""
    inner = claims._heartbeat

    def eager(state: ClaimState, last_offset: int | None, pace: ClaimTiming) -> Heartbeat:
        return inner(state, None if last_offset is None else last_offset + 1, pace)

    patch.setattr(claims, "_heartbeat", eager)


@pytest.mark.parametrize(("at_most_once", "mutation"), [
    (True, _heartbeats_take_claims),
    (False, _late_readers_judge),
    (False, _unknown_is_stale),
    (False, _belief_without_end),
    (False, _handed_out_while_trusted),
    (True, _processed_when_proposed),
    (True, _a_sent_heartbeat_suffices),
    (False, _unprocessed_is_reported),
])  # fmt: skip
def test_the_judges_notice(at_most_once: bool, mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    # Where the search begins: what found the rarer ones when they were last looked for. All seeds follow.
    found_by: dict[Callable[[Patch], None], int] = {_heartbeats_take_claims: 47, _processed_when_proposed: 33}
    mutation(monkeypatch)
    with pytest.raises(Broken):
        histories((found_by.get(mutation, 0), *range(200)), at_most_once=at_most_once)


@pytest.mark.parametrize("mutation", [_late_readers_judge, _anything_confirms])
def test_the_comparison_of_readers_notices(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    def compare(seed: int) -> int:
        sim = history(seed, at_most_once=False)
        with monkeypatch.context() as patch:
            mutation(patch)
            return compare_readers(sim)

    with pytest.raises(Broken):
        sum(map(compare, range(30)))

"""The relay in exactly-once mode, where everything may go wrong; what holds is listed in `tests.support.relay_once`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.longs import some_of
from tests.support.once_scenes import (
    SCENES,
    Play,
    perform,
    the_purge_of_a_keys_first_record_is_lost_with_the_server,
)
from tests.support.relay_once import ONCE_FAULTS, OnceWorld


@settings(max_examples=some_of(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=600))
def test_any_history(data: bytes) -> None:
    OnceWorld(data).run()


@settings(max_examples=some_of(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=600), st.sets(st.sampled_from(ONCE_FAULTS)))
def test_any_history_with_some_faults(data: bytes, faults: set[str]) -> None:
    OnceWorld(data, tuple(sorted(faults))).run()


@pytest.mark.parametrize("part", range(4))
def test_long_histories(part: int) -> None:
    for seed in range(part * 100, part * 100 + some_of(100)):
        chance = random.Random(f"once {seed}")
        OnceWorld(chance.randbytes(chance.randrange(200, 1000))).run()


@pytest.mark.parametrize(
    "faults",
    [("zombie", "hand over"), ("shard death", "kafka"), ("harvester death", "hand over", "kafka"), ("scale", "zombie")],
)
def test_long_histories_around_a_few_faults(faults: tuple[str, ...]) -> None:
    for seed in range(some_of(60)):
        chance = random.Random(f"{faults} {seed}")
        OnceWorld(chance.randbytes(chance.randrange(200, 1000)), (*faults, "hand over")).run()


@pytest.mark.parametrize(
    "beside", [(), ("hand over", "kafka"), ("shard death", "harvester death"), ONCE_FAULTS], ids=len
)
def test_failovers(beside: tuple[str, ...]) -> None:
    """P49."""
    replaced = recognised = repeats = 0
    for seed in range(some_of(80)):
        chance = random.Random(f"failover {len(beside)} {seed}")
        random.seed(seed)  # retries are spread
        world = OnceWorld(chance.randbytes(chance.randrange(200, 1000)), ("server", *beside)).run()
        replaced += world.table.server - 1
        recognised += sum("are recognised" in note for note in world.trace)
        repeats += sum(count > 1 for count in world.appended.values())
    assert replaced
    if not beside:  # among other faults they are rare
        assert recognised
        assert repeats


def test_values_that_are_put_away_keep_all_of_it() -> None:
    words: set[object] = set()
    for seed in range(some_of(100)):
        chance = random.Random(f"store {seed}")
        faults = (*ONCE_FAULTS, "store") if seed % 2 else ("store", "kafka", "poison", "hand over")
        world = OnceWorld(chance.randbytes(chance.randrange(200, 1000)), faults).run()
        words |= {part for note in world.trace for part in note if isinstance(part, str)}
    assert {"is put away", "is not put away"} <= words


@pytest.mark.parametrize("beside", [(), ("hand over", "kafka", "timeouts")], ids=["alone", "among others"])
def test_a_stray_commit_repeats_records_and_loses_none(beside: tuple[str, ...]) -> None:
    """P46. What the broker refuses would be committed here, so that fault is none of these."""
    arrived, repeats = 0, 0
    for seed in range(some_of(60)):
        chance = random.Random(f"stray {seed}")
        random.seed(seed)  # retries are spread
        world = OnceWorld(chance.randbytes(chance.randrange(200, 1000)), ("stray", *beside)).run()
        arrived += sum("a stray commit arrives" in note for note in world.trace)
        repeats += sum(count > 1 for count in world.appended.values())
    assert arrived
    assert repeats


@pytest.mark.parametrize(
    "scene",
    [scene for scene, _, _ in SCENES],
)
def test_a_scene(scene: Callable[[Play], None]) -> None:
    """Each record is committed once; tests of mutations show what each of them is about."""
    world = perform(scene)
    assert set(world.appended.values()) == {1}


def test_a_record_behind_one_that_is_repeated_is_repeated_too() -> None:
    """P49. The one of another key is not."""
    world = perform(the_purge_of_a_keys_first_record_is_lost_with_the_server)
    assert sorted(world.appended.items()) == [(1, 2), (2, 1), (3, 2)]


# -- the world itself


def test_the_same_bytes_make_the_same_history() -> None:
    data = random.Random(0).randbytes(500)
    histories = []
    for _ in range(2):
        random.seed(0)  # retries are spread
        histories.append([str(note) for note in OnceWorld(data).run().trace])
    assert histories[0] == histories[1]


def test_histories_are_not_trivial() -> None:
    """They reach what they are for: recovery, fencing, deposed shards, parking, remarks, quarantine, scaling."""
    kinds = {
        "Parked", "Refused", "Dropped", "Remarked", "QueueTimedOut", "Settled", "Quarantined", "Mark", "Fetch", "Look",
        "TakeTerm", "Kill", "Drained", "ReleaseTerm", "Emptied", "Resize", "its transaction expires", "aborts",
        "awaits an empty record", "is a zombie from now on",
    }  # fmt: skip
    said: set[str] = set()
    recovered = quarantined = low_waters = 0
    for seed in range(90):
        if kinds <= said and recovered and quarantined and low_waters:
            break
        faults = ONCE_FAULTS if seed % 3 else ("scale", "hand over", "kafka", "poison", "timeouts")
        world = OnceWorld(random.Random(seed).randbytes(600), faults).run()
        said |= {type(part).__name__ for note in world.trace for part in note}
        said |= {part for note in world.trace for part in note if isinstance(part, str)}
        recovered += sum("has purged" in str(note) for note in world.trace)
        low_waters += sum(harvester.machine.low_water.known is not None for harvester in world.harvesters)
        quarantined += len(world.table.quarantined)
    assert kinds <= said
    assert recovered
    assert quarantined
    assert low_waters

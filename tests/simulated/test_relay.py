"""The relay in a world where everything may go wrong; what has to hold is listed in `tests.support.relay_world`."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.longs import some_of
from tests.support.relay_world import FAULTS, Broken, Script, World

PLANNED = ("hand over", "congestion", "scale", "poison", "pause", "loan")  # nothing of this may repeat a record (I8)


@settings(max_examples=some_of(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=600))
def test_any_history(data: bytes) -> None:
    World(data).run()


@settings(max_examples=some_of(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=600), st.sets(st.sampled_from(FAULTS)))
def test_any_history_with_some_faults(data: bytes, faults: set[str]) -> None:
    World(data, tuple(sorted(faults))).run()


@pytest.mark.parametrize("part", range(4))
def test_long_histories(part: int) -> None:
    for seed in range(part * 100, part * 100 + some_of(100)):
        chance = random.Random(f"long {seed}")
        World(chance.randbytes(chance.randrange(200, 1000))).run()


def test_nothing_planned_repeats_a_record() -> None:
    for seed in range(some_of(100)):
        chance = random.Random(f"planned {seed}")
        world = World(chance.randbytes(chance.randrange(200, 1000)), PLANNED).run()
        assert set(world.appended.values()) <= {1}


def test_values_that_are_put_away_keep_all_of_it() -> None:
    words: set[object] = set()
    for seed in range(some_of(100)):
        chance = random.Random(f"store {seed}")
        faults = (*FAULTS, "store") if seed % 2 else ("store", "kafka", "hand over")
        world = World(chance.randbytes(chance.randrange(200, 1000)), faults).run()
        words |= {part for note in world.trace for part in note if isinstance(part, str)}
    assert {"is put away", "is not put away"} <= words


# -- the world itself


def test_the_same_bytes_make_the_same_history() -> None:
    data = random.Random(0).randbytes(500)
    assert [str(note) for note in World(data).run().trace] == [str(note) for note in World(data).run().trace]


def test_histories_are_not_trivial() -> None:
    """They reach what they are for: parking, remarks, repeats, hand-overs, quarantine, scaling, crashes."""
    kinds = {
        "Parked", "Refused", "Dropped", "Remarked", "FateUnknown", "QueueTimedOut", "Settled", "ShardServerChanged",
        "Poisoned", "Mark", "Fetch", "Look", "TakeTerm", "Kill", "Drained", "Emptied", "Resize",
    }  # fmt: skip
    steps = {"pauses", "resumes", "is asked for the term"}
    said: set[str] = set()
    words: set[object] = set()
    repeated = quarantined = undone = 0
    for seed in range(120):
        if kinds <= said and steps <= words and repeated and quarantined and undone:
            break
        faults = FAULTS if seed % 3 else ("timeouts", "hand over", "kafka", "poison")
        world = World(random.Random(seed).randbytes(600), faults).run()
        said |= {type(part).__name__ for note in world.trace for part in note}
        words |= {part for note in world.trace for part in note if isinstance(part, str)}
        repeated += sum(count - 1 for count in world.appended.values())
        quarantined += len(world.table.quarantined)
        undone += len(world.undone)
    assert kinds <= said
    assert steps <= words
    assert repeated
    assert quarantined
    assert undone


def test_a_failure_shows_the_history() -> None:
    world = World(bytes(20))
    world.run()
    with pytest.raises(Broken, match=r"(?s)I2.*history:.*elected.*I2"):
        world.fail("I2")


def test_a_script_ends_in_zeros() -> None:
    script = Script(b"\x05")
    assert [script.next(), script.next(), script.over] == [5, 0, True]

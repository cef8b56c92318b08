"""A short campaign with a fixed seed, by the code of scripts/faults: what chance brings must hold as well."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign.relay.judge import judge
from tests.campaign.relay.load import Pace
from tests.campaign.relay.run import Campaign, run
from tests.campaign.relay.schedule import KINDS, REPEATING, kinds_of, plan, repeats
from tests.campaign.relay.setup import AT_LEAST_ONCE, BOTH, EXACTLY_ONCE, Setup, first_setup
from tests.campaign.schedule import Strike
from tests.support.class_data import prepared
from tests.support.longs import long
from tests.support.servers import in_memory

# Those that are done in a moment: a broker takes half a minute to start on a machine that is busy with other tests.
QUICK = kinds_of(AT_LEAST_ONCE) - {"stop kafka", "kill kafka", "rolling restart", "half-open postgres link", "join"}
AIMED = {kind for kind in kinds_of(EXACTLY_ONCE) if kind.startswith("kill") and kind.endswith((" a commit", " lane"))}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the account of PostgreSQL can reach (pytest's own cannot be)."""
    with tempfile.TemporaryDirectory(prefix="harvester-faults-", dir=in_memory()) as name, prepared():
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.timeout(400)
def test_a_short_campaign_holds(place: Path) -> None:
    campaign = Campaign(seed=64, seconds=12.0, harvesters=2, pace=Pace(keys=60), kinds=QUICK, gap_s=1.0)
    outcome = run(campaign, place)
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.committed > 1000
    assert sum(outcome.struck.values()) >= 5


@long  # test_relay_judge shows every day that the judge can fail, and tests/faults/test_process_kill.py counts repeats
@pytest.mark.timeout(400)
def test_a_leader_that_dies_with_a_full_wire_repeats_and_the_judge_counts_it(place: Path) -> None:
    """At least once. The same history would break exactly-once mode: its judge can fail."""
    kinds = {"kill leader with a full wire"}
    outcome = run(Campaign(seed=3, seconds=8.0, harvesters=2, pace=Pace(keys=60), kinds=kinds, gap_s=4.0), place)
    assert outcome.struck, "nobody came to the place"
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.repeats > 0
    assert judge(replace(outcome.history, delivery=EXACTLY_ONCE)).sentence.startswith("broken: I6")


@long  # tests/faults/test_exactly_once.py kills at each of these every day
@pytest.mark.timeout(400)
def test_killed_at_the_worst_moments_nothing_is_repeated_in_exactly_once_mode(place: Path) -> None:
    kinds = AIMED | {"unknown outcomes"}
    outcome = run(
        Campaign(seed=5, seconds=12.0, delivery=EXACTLY_ONCE, harvesters=2, pace=Pace(keys=60), kinds=kinds, gap_s=1.0),
        place,
    )
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.repeats == 0
    assert outcome.judgement.committed > 1000
    assert sum(outcome.struck.values()) >= 3


def test_a_plan_follows_from_its_seed() -> None:
    one, other = plan(3, 600.0), plan(4, 600.0)
    assert one == plan(3, 600.0)
    assert one != other
    assert {each.kind for each in plan(3, 7200.0)} == set(KINDS)
    assert [each.at_s for each in one] == sorted(each.at_s for each in one)
    assert all(0 < each.at_s < 600.0 for each in one)
    assert {each.kind for each in plan(3, 600.0, ["leave", "join"])} == {"leave", "join"}
    assert plan(3, 600.0, []) == []


def test_only_some_kinds_explain_repeats() -> None:
    assert set(KINDS) >= REPEATING
    assert not repeats(Strike("leave", 0.0, 1))
    assert repeats(Strike("kill shard", 0.0, 1))
    assert repeats(Strike("freeze leader", 2.0, 1))
    assert not repeats(Strike("freeze leader", 0.5, 1))


def test_each_mode_has_its_kinds() -> None:
    once, both = kinds_of(EXACTLY_ONCE), kinds_of(BOTH)
    assert kinds_of(AT_LEAST_ONCE) | both == set(KINDS)
    assert not any(
        " a commit" in kind or "switch" in kind or "transactions" in kind for kind in kinds_of(AT_LEAST_ONCE)
    )
    assert "acknowledgements turned into failures" not in both
    assert both - once == {"switch mode", "kill and switch mode", "kill leader with a full wire"}
    assert {"kill leader after a commit", "unknown outcomes", "switch shards"} <= once


def test_setups_alternate_and_change() -> None:
    assert [first_setup(BOTH, 4, slot).delivery for slot in (1, 2, 3)] == [AT_LEAST_ONCE, EXACTLY_ONCE, AT_LEAST_ONCE]
    assert first_setup(EXACTLY_ONCE, 4, 1) == Setup(EXACTLY_ONCE, 4)
    setup = Setup(EXACTLY_ONCE, 4)
    assert setup.other_mode() == Setup(AT_LEAST_ONCE, 4)
    assert setup.other_mode().other_mode() == setup
    assert {setup.other_shards(4, random.Random(seed)).shards for seed in range(20)} == {2, 8}
    assert Setup(EXACTLY_ONCE, 8).other_shards(4, random.Random(1)).shards in (2, 4)

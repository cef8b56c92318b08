"""A short campaign with a fixed seed, by the code of scripts/faults: what chance brings must hold as well."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign.load import Pace
from tests.faults.campaign.run import Campaign, run
from tests.faults.campaign.schedule import KINDS, REPEATING, Planned, plan

# Those that are done in a moment: a broker takes half a minute to start on a machine that is busy with other tests.
QUICK = frozenset(KINDS) - {"stop kafka", "kill kafka", "rolling restart", "half-open postgres link", "join"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the account of PostgreSQL can reach (pytest's own cannot be)."""
    with tempfile.TemporaryDirectory(prefix="harvester-faults-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.timeout(400)
def test_a_short_campaign_holds(place: Path) -> None:
    campaign = Campaign(seed=64, seconds=20.0, harvesters=2, pace=Pace(keys=60), kinds=QUICK, gap_s=1.5)
    outcome = run(campaign, place)
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.committed > 1000
    assert sum(outcome.injected.values()) >= 5


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
    assert not Planned(1.0, "leave", 0.0, 1).repeats
    assert Planned(1.0, "kill shard", 0.0, 1).repeats
    assert Planned(1.0, "freeze leader", 2.0, 1).repeats
    assert not Planned(1.0, "freeze leader", 0.5, 1).repeats

"""A short campaign, by the code of scripts/coordination-faults: what chance brings must hold as well."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from harvester.errors import ConfigurationError
from tests.campaign.coordination.history import Limits, Processed
from tests.campaign.coordination.notes import Notebook, Reader
from tests.campaign.coordination.run import Campaign, run
from tests.campaign.coordination.schedule import KINDS, strikes
from tests.support.longs import long
from tests.support.servers import Servers

# The suite runs beside others: what is said of records is strict, what is said of times is for a campaign alone.
BUSY = Limits(interval_s=1.0, slack_s=1.0, wakes_within_s=2.0, claimed_extra_s=30.0, fair_intervals=30.0)


# By day, the next one delivers at least once.
@pytest.mark.parametrize(
    "at_most_once",
    [pytest.param(False, id="at least once", marks=long), pytest.param(True, id="at most once")],
)
@pytest.mark.timeout(300)
def test_a_short_campaign_holds(servers: Servers, tmp_path: Path, at_most_once: bool) -> None:
    campaign = Campaign(
        seed=3, seconds=12.0, at_most_once=at_most_once, consumers=3, partitions=6, records=1500,
        kinds={"kill", "freeze", "cut", "leave and come back"}, limits=BUSY,
    )  # fmt: skip
    outcome = run(campaign, tmp_path, servers.bootstrap)
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.records == 1500
    assert sum(outcome.struck.values()) >= 2


@pytest.mark.timeout(300)
def test_a_short_campaign_with_workers_that_fail_holds(servers: Servers, tmp_path: Path) -> None:
    campaign = Campaign(
        seed=5, seconds=12.0, consumers=3, partitions=6, records=3000, workers=8,
        kinds={"kill", "kill and come back"}, limits=BUSY,
    )  # fmt: skip
    outcome = run(campaign, tmp_path, servers.bootstrap)
    assert outcome.judgement.sentence == "held", outcome.summary()
    assert outcome.judgement.records == 3000
    assert sum(outcome.struck.values()) >= 2


def test_settings_that_no_consumer_takes_are_refused_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at most once"):
        run(Campaign(seed=5, seconds=1.0, at_most_once=True, workers=8), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_strikes_follows_from_the_seed() -> None:
    one, again, other = (list(islice(strikes(seed, KINDS, 1.0), 200)) for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert {strike.kind for episode in one for strike in episode} == set(KINDS)
    assert {len(episode) for episode in one} == {1, 2}
    assert all(0 <= strike.hold_s <= 4.0 for episode in one for strike in episode)
    slow = list(islice(strikes(3, KINDS, 5.0), 200))
    assert max(strike.hold_s for episode in slow for strike in episode) > 10


def test_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    reader = Reader(path)
    reader.read()
    assert reader.claims == {}
    notes = Notebook(path)
    notes.begins()
    notes.holds({3: 77, 0: 55})
    notes.has(3, 1041, 77)
    notes.loses(3, 77)
    reader.read()
    assert reader.claims == {0: 55, 3: 77}
    with path.open("a") as file:
        file.write("R 5.0 1 2")  # the rest is still to come
    reader.read()
    with path.open("a") as file:
        file.write(" 4\nE 6.0\n")
    reader.read()
    member = reader.member("a", killed=5.5)
    assert (member.born > 0, member.ended) == (True, 5.5)
    assert [each.offset for each in member.processed] == [1041, 2]
    assert member.lost == {(3, 77)}
    assert member.processed[1] == Processed(5.0, 1, 2, 4)

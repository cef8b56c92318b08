"""A coordinated consumer that is killed in the middle of each step, on a real broker, and the next life of its id."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.settings import ConsumerSettings
from tests.support.consuming import read_topic
from tests.support.coordinated import settings
from tests.support.handled import Handled, Start, fill_keys, start
from tests.support.killed import POISON
from tests.support.wait import eventually
from tests.support.warm import run_command

__all__ = ["settings", "start"]

KEYS, EACH = 8, 10
ALL = [f"{key}-{number}" for key in range(KEYS) for number in range(EACH)]
BATCH = 5


def killed(settings: ConsumerSettings, step: str, taken: Path) -> list[str]:
    """What the first life has taken when it died at this step."""
    given = {each.name: getattr(settings, each.name) for each in fields(settings)}
    done = run_command(["tests.support.killed", json.dumps(given), step, str(taken)], os.environ, kind="module")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return taken.read_text().split() if taken.exists() else []


def of_key(values: list[str], key: int) -> list[str]:
    """The values of a key, each where it came first."""
    return list(dict.fromkeys(value for value in values if value.startswith(f"{key}-")))


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("step", [
    "handling", "handled", "parked", "before dead letter", "after dead letter", "before Heartbeat", "after Heartbeat",
    "before ReleasingPartition", "after ReleasingPartition",
])  # fmt: skip
def test_at_least_once_nothing_is_lost_wherever_it_is_killed(
    settings: ConsumerSettings, start: Start, tmp_path: Path, step: str, workers: int
) -> None:
    fill_keys(settings, KEYS, EACH)
    parked = step == "parked"  # for ever: the poison is still being tried when the consumer dies
    policy: dict[str, Any] = {"on_error": "dead-letter", "attempts": 1000 if parked else 2, "backoff_s": 0.05}
    settings = replace(settings, client_id="same", workers=workers, **policy)
    first = killed(settings, step, tmp_path / "taken")
    handled = Handled(lambda value: value == POISON)
    start(handled, client_id="same", workers=workers, **policy | {"attempts": 2})
    wanted = {value for value in ALL if value != POISON}
    eventually(lambda: wanted <= {*first, *handled.values}, what="all records")
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    eventually(lambda: [letter.value for letter in topic.read()] == [POISON.encode()], what="one dead letter")
    for key in range(KEYS):
        taken = of_key(first + handled.values, key)
        assert taken == [value for value in ALL if value.startswith(f"{key}-") and value != POISON]


@pytest.mark.parametrize(("step", "most"), [
    ("handling", BATCH), ("handled", BATCH), ("before ClaimingMessages", 0), ("after ClaimingMessages", 0),
    ("before Heartbeat", 0), ("after Heartbeat", BATCH), ("before ReturningMessages", BATCH),
    ("after ReturningMessages", BATCH), ("before ReleasingPartition", BATCH), ("after ReleasingPartition", BATCH),
])  # fmt: skip
def test_at_most_once_nothing_is_repeated_wherever_it_is_killed(
    settings: ConsumerSettings, start: Start, tmp_path: Path, step: str, most: int
) -> None:
    """Lost may be what is its own then: the rest of a batch and the next one, of each partition."""
    fill_keys(settings, KEYS, EACH)
    policy: dict[str, Any] = {"at_most_once": True, "on_error": "skip", "batch_records": BATCH}
    first = killed(replace(settings, client_id="same", **policy), step, tmp_path / "taken")
    handled = Handled(lambda value: value == POISON)
    runner = start(handled, client_id="same", **policy)
    topic = settings.topics[0]
    ends = Counter(record.partition for record in read_topic(str(settings.kafka["bootstrap.servers"]), topic))
    eventually(
        lambda: all(runner.consumer.position(topic, partition) == end for partition, end in ends.items()),
        what="the end of all partitions",
    )
    runner.stop()  # which waits for the record in hand
    taken = Counter(first + handled.values)
    assert max(taken.values()) == 1
    missing = {value for value in ALL if value != POISON} - taken.keys()
    assert len(missing) <= 2 * most * 4, missing

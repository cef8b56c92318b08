"""P41: a heartbeat that Kafka refuses is told once, with its remedy, in log, status and readiness.

Each of these is broken once, too: a test that cannot fail is a defect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaError

from harvester.lifecycle import Life
from harvester.neli import member
from harvester.neli import topic as leader_topic
from harvester.neli.member import KafkaGroup
from harvester.telemetry.repeats import Repeats
from tests.conftest import MakeTopic
from tests.support.harvesting import Scene
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

Patch = pytest.MonkeyPatch
REFUSALS = 4


@dataclass(frozen=True)
class Told:
    """All that people see of heartbeats that are refused again and again."""

    log: bool = True  # by one line
    error: bool = True  # which is an error: it lasts until somebody acts
    status: bool = True
    remedy: bool = True  # there
    readiness: bool = True


NOTHING = Told(False, False, False, False, False)


def _as_it_is(_: Patch) -> None:
    """The rule holds."""


def _nobody_looks_at_the_report(patch: Patch) -> None:
    patch.setattr(KafkaGroup, "_delivered", lambda *_: None)


def _nobody_records_what_the_member_says(patch: Patch) -> None:
    patch.setattr(Life, "trouble", lambda *_: None)


def _no_remedy_is_known(patch: Patch) -> None:
    patch.setattr(leader_topic, "_REMEDIES", {})


def _it_might_pass(patch: Patch) -> None:
    patch.setattr(member, "needs_somebody", lambda _: False)


def _each_refusal_is_worth_a_line(patch: Patch) -> None:
    patch.setattr(Repeats, "report", lambda *_, **__: 0)


def _readiness_does_not_ask_the_member(patch: Patch) -> None:
    patch.setattr(KafkaGroup, "missing", lambda _: None)


@pytest.mark.parametrize(
    ("mutation", "told"),
    [
        (_as_it_is, Told()),
        (_nobody_looks_at_the_report, NOTHING),
        (_nobody_records_what_the_member_says, NOTHING),
        (_no_remedy_is_known, Told(error=False, remedy=False)),
        (_it_might_pass, Told(error=False)),
        (_each_refusal_is_worth_a_line, Told(log=False)),
        (_readiness_does_not_ask_the_member, Told(readiness=False)),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
def test_a_refused_heartbeat_is_told(
    mutation: Callable[[Patch], None],
    told: Told,
    scene: Scene,
    make_topic: MakeTopic,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutation(monkeypatch)
    reported, refused = KafkaGroup._delivered, list[KafkaError]()

    def count(group: KafkaGroup, error: KafkaError | None, message: Any) -> None:
        reported(group, error, message)
        if error is not None:
            refused.append(error)

    monkeypatch.setattr(KafkaGroup, "_delivered", count)
    topic = make_topic(partitions=1, config={"max.message.bytes": "100"})
    words = f"the leader topic {topic!r} accepts no heartbeats"
    with caplog.at_level(logging.WARNING, "harvester"), scene.member_here(leader_topic=topic) as running:
        eventually(lambda: len(refused) >= REFUSALS, what="refusals")
        problem, unready = running.harvester.status().problem or "", running.harvester.unready() or ""
        assert running.leadership() == []
    lines = [record for record in caplog.records if words in record.getMessage()]
    levels = {record.levelno for record in lines}
    found = Told(
        len(lines) == 1, levels == {logging.ERROR}, words in problem, "max.message.bytes" in problem, words in unready
    )
    assert found == told, (lines, problem, unready)

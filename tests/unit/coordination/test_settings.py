"""What a coordinated consumer can be told, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from harvester.coordination.settings import ConsumerSettings
from harvester.errors import ConfigurationError


def settings(**given: Any) -> ConsumerSettings:
    return ConsumerSettings(**{"kafka": {}, "group": "g", "topics": ("t",), **given})


@pytest.mark.parametrize(("given", "path"), [
    ({"heartbeat_interval_s": 0.9}, "heartbeat_interval_s"),
    ({"heartbeat_interval_s": float("nan")}, "heartbeat_interval_s"),
    ({"coordination_partitions": 0}, "coordination_partitions"),
    ({"batch_records": 0}, "batch_records"),
    ({"max_claims": 0}, "max_claims"),
    ({"shed_at_once": 0}, "shed_at_once"),
    ({"group": ""}, "group"),
    ({"topics": ()}, "topics"),
    ({"topics": ("t", "__marshal")}, "topics"),
    ({"out_of_range": "now"}, "out_of_range"),
])  # fmt: skip
def test_what_is_refused(given: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(**given).check_subscription()
    assert [problem.path for problem in caught.value.problems] == [path]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(batch_records=-1, max_claims=0)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("interval_s", [1.0, 5.0, 60.0])
def test_the_bounds_of_a_claim_hang_together(interval_s: float) -> None:
    made = settings(heartbeat_interval_s=interval_s)
    pace, timing = made.pace, made.timing
    assert pace.trust_s + timing.clock_step_ms / 1000 < 2 * interval_s  # a holder has stopped before another can win
    assert pace.interval_s <= pace.trust_s
    assert made.tail_ms > 2 * timing.interval_ms + timing.clock_step_ms  # makes certain of silence
    assert pace.beat_every_s < pace.interval_s


def test_by_default_all_that_is_too_much_goes_at_once() -> None:
    assert settings().shed_at_once is None


def test_passwords_are_not_shown() -> None:
    assert "secret" not in repr(settings(kafka={"sasl.password": "secret"}))

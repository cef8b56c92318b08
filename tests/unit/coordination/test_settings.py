"""What a coordinated consumer can be told, and what follows from it."""

from __future__ import annotations

import tomllib
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


@pytest.mark.parametrize("given", [
    {"group": "billing:eu"},
    {"group": "billing service"},
    {"group": "g" * 237},
    {"dead_letter_topic": ".."},
])  # fmt: skip
def test_a_dead_letter_topic_that_kafka_would_refuse_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(on_error="dead-letter", **given).check_subscription()
    (problem,) = caught.value.problems
    assert problem.path == "dead_letter_topic"
    settings(**given).check_subscription()  # nothing is written there
    settings(**given | {"on_error": "dead-letter", "dead_letter_topic": "billing.dead"}).check_subscription()


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


def test_a_table_of_toml_has_the_names_of_the_keyword_arguments() -> None:
    table = tomllib.loads("""
        group = "billing"
        topics = ["orders", "refunds"]
        heartbeat_interval_s = 2
        kafka."bootstrap.servers" = "k:9092"
    """)
    expected = ConsumerSettings(
        kafka={"bootstrap.servers": "k:9092"}, group="billing", topics=("orders", "refunds"), heartbeat_interval_s=2
    )
    assert ConsumerSettings.from_table(table) == expected


def test_a_table_is_refused_with_everything_that_is_wrong_in_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ConsumerSettings.from_table({"group": "g", "kafka": {}, "topic": ["t"]})
    assert [str(problem) for problem in caught.value.problems] == [
        "topic: is not a setting of a consumer (allowed: topics?)",
        "topics: is missing",
    ]
    with pytest.raises(ConfigurationError, match="heartbeat_interval_s: is '5s'"):
        settings(heartbeat_interval_s="5s")


def test_a_topic_alone_is_no_sequence_of_letters() -> None:
    assert settings(topics="orders").topics == ("orders",)


@pytest.mark.parametrize(("reset", "policy"), [("earliest", "earliest"), ("smallest", "earliest"), ("error", "error")])
def test_options_of_a_plain_client(reset: str, policy: str) -> None:
    options = {"bootstrap.servers": "k:9092", "group.id": "billing", "auto.offset.reset": reset}
    made = ConsumerSettings.from_kafka(options, ["orders"], max_claims=2)
    assert (made.group, made.topics, made.out_of_range, made.max_claims) == ("billing", ("orders",), policy, 2)
    assert made.kafka == {"bootstrap.servers": "k:9092"}


def test_a_callback_that_would_never_be_called_is_refused() -> None:
    options = {"group.id": "billing", "on_commit": lambda _error, _places: None}
    with pytest.raises(ConfigurationError) as caught:
        ConsumerSettings.from_kafka(options, ["orders"])
    assert [problem.path for problem in caught.value.problems] == ["on_commit"]


def test_a_group_that_would_begin_at_the_end_is_refused() -> None:
    options = {"group.id": "billing", "auto.offset.reset": "latest"}
    with pytest.raises(ConfigurationError, match="a new group begins with the first existing record"):
        ConsumerSettings.from_kafka(options, ["orders"])
    assert ConsumerSettings.from_kafka(options, ["orders"], out_of_range="latest").out_of_range == "latest"

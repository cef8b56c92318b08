"""What errors of the client mean for the coordination topic."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.coordination import dead_letters, topic
from harvester.coordination.topic import failed
from harvester.errors import BrokerError, BrokerUnavailable, ExitCode


@pytest.mark.parametrize(
    "name",
    ["_TRANSPORT", "_TIMED_OUT", "_ALL_BROKERS_DOWN", "_UNKNOWN_PARTITION", "LEADER_NOT_AVAILABLE",
     "NOT_LEADER_FOR_PARTITION", "UNKNOWN_TOPIC_OR_PART", "NOT_CONTROLLER"],
)  # fmt: skip
def test_what_brokers_say_that_start_is_worth_another_attempt(name: str) -> None:
    error = failed("marshal", {"bootstrap.servers": "one:9092"}, _exception(name))
    assert isinstance(error, BrokerUnavailable)
    assert error.exit_code is ExitCode.UNAVAILABLE
    assert "one:9092" in str(error) or "try again" in str(error.hint)


def test_a_missing_right_is_not() -> None:
    error = failed("marshal", {}, _exception("TOPIC_AUTHORIZATION_FAILED"))
    assert not isinstance(error, BrokerUnavailable)
    assert "describe, read and write" in str(error.hint)


class SilentController:
    """An admin client whose brokers answer for metadata, and never for topics."""

    def __init__(self, _options: Any) -> None: ...

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={}, brokers={1: None})

    def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[None]]:
        return {topics[0].topic: Future()}


@pytest.mark.parametrize(
    ("module", "ensure"),
    [
        (topic, lambda: topic.ensure_coordination_topic("marshal", {}, 8, 5000)),
        (dead_letters, lambda: dead_letters.ensure_dead_letter_topic("g.dead-letters", {})),
    ],
)
def test_a_controller_that_does_not_answer_is_worth_another_attempt(
    module: ModuleType, ensure: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AdminClient", SilentController)
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.05)
    with pytest.raises(BrokerUnavailable, match="no answer within"):
        ensure()


@pytest.mark.parametrize("name", ["TOPIC_EXCEPTION", "INVALID_REPLICATION_FACTOR", "POLICY_VIOLATION"])
def test_a_dead_letter_topic_that_the_controller_refuses_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(SilentController):
        def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[None]]:
            refused: Future[None] = Future()
            refused.set_exception(_exception(name))
            return {topics[0].topic: refused}

    monkeypatch.setattr(dead_letters, "AdminClient", Refusing)
    with pytest.raises(BrokerError, match=r"the dead-letter topic 'g\.dead-letters' cannot be used") as caught:
        dead_letters.ensure_dead_letter_topic("g.dead-letters", {})
    assert not isinstance(caught.value, BrokerUnavailable)


def _exception(name: str) -> KafkaException:
    return KafkaException(KafkaError(getattr(KafkaError, name)))

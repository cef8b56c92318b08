"""What errors of the client mean for the coordination topic."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.coordination.topic import failed
from harvester.errors import BrokerUnavailable, ExitCode


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


def _exception(name: str) -> KafkaException:
    return KafkaException(KafkaError(getattr(KafkaError, name)))

"""Errors of the client that end a consumer, and those that do not."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from harvester.coordination.topic import passes


@pytest.mark.parametrize(
    "name",
    ["NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "_TRANSPORT", "_TIMED_OUT",
     "_ALL_BROKERS_DOWN", "_RESOLVE", "_AUTHENTICATION", "LEADER_NOT_AVAILABLE", "UNKNOWN_TOPIC_OR_PART",
     "FENCED_LEADER_EPOCH"],
)  # fmt: skip
def test_what_comes_and_goes_with_brokers_passes(name: str) -> None:
    assert passes(KafkaError(getattr(KafkaError, name)))


@pytest.mark.parametrize("name", ["TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "_FATAL"])
def test_a_missing_right_does_not(name: str) -> None:
    assert not passes(KafkaError(getattr(KafkaError, name)))


def test_nor_does_what_the_client_calls_fatal() -> None:
    assert not passes(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "it has given up", True))

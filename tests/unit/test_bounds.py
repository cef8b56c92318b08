"""The bounds of a partition, asked for until they are told; errors of the client that pass, and those that do not."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.bounds import existing_topics, passes, read_bounds


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


class Client:
    """Answers in turn: bounds, nothing in time, or an error by its name."""

    def __init__(self, answers: Iterable[tuple[int, int] | str | None]) -> None:
        self._answers = iter(answers)
        self.listed: list[str] = []

    def get_watermark_offsets(self, _: Any, *, timeout: float) -> tuple[int, int] | None:
        assert timeout > 0
        answer = next(self._answers)
        if isinstance(answer, str):
            raise KafkaException(KafkaError(getattr(KafkaError, answer)))
        return answer

    def list_topics(self, topic: str, *, timeout: float) -> None:
        assert timeout > 0
        self.listed.append(topic)
        if len(self.listed) == 1:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))


def test_a_client_that_does_not_know_the_leader_is_made_to_ask_who_leads() -> None:
    client = Client(["_UNKNOWN_PARTITION", "NOT_LEADER_FOR_PARTITION", None, (3, 7)])
    assert read_bounds(client, "orders", 2, 10.0) == (3, 7)
    assert client.listed == ["orders"] * 3


def test_nobody_waits_for_what_lasts() -> None:
    client = Client(["TOPIC_AUTHORIZATION_FAILED", (3, 7)])
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        read_bounds(client, "orders", 2, 10.0)


@pytest.mark.parametrize(("answer", "error"), [(None, "TIMED_OUT"), ("_UNKNOWN_PARTITION", "UNKNOWN_PARTITION")])
def test_the_last_error_is_raised_when_the_time_is_over(answer: str | None, error: str) -> None:
    with pytest.raises(KafkaException, match=error):
        read_bounds(Client([answer] * 100), "orders", 2, 0.2)


class Cluster:
    """Has topics, and two that it denies or forbids; `asked` are the questions."""

    def __init__(self, *topics: str) -> None:
        self._topics = {name: SimpleNamespace(error=None) for name in topics}
        self.asked: list[str | None] = []

    def list_topics(self, topic: str | None, *, timeout: float) -> Any:
        self.asked.append(topic)
        if topic is None:
            return SimpleNamespace(topics=self._topics)
        code = KafkaError.TOPIC_AUTHORIZATION_FAILED if topic == "secret" else KafkaError.UNKNOWN_TOPIC_OR_PART
        return SimpleNamespace(topics={topic: self._topics.get(topic, SimpleNamespace(error=KafkaError(code)))})


def test_a_few_topics_are_asked_for_by_name() -> None:
    cluster = Cluster("a", "b", "c")
    assert existing_topics(cluster, ["a", "secret", "missing", "b"], 1.0).keys() == {"a", "b"}
    assert cluster.asked == ["a", "secret", "missing", "b"]


def test_many_topics_are_one_question() -> None:
    cluster = Cluster(*"abcdefghijk")
    assert existing_topics(cluster, ["missing", *"abcdefghi"], 1.0).keys() == set("abcdefghi")
    assert cluster.asked == [None]


def test_a_broker_that_does_not_know_yet_is_believed_in_that() -> None:
    cluster = Cluster("a")
    cluster._topics["a"].error = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)
    assert existing_topics(cluster, ["a"], 1.0)["a"].error.code() == KafkaError.LEADER_NOT_AVAILABLE

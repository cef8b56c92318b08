"""A shard's watch over its producer. What strands a real one is in test_no_brokers_told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.relay.shard import ProducerWatch

LONELY, DEAF = KafkaError._TRANSPORT, KafkaError._TIMED_OUT


class Client:
    """Answers with brokers, or with this error."""

    def __init__(self, error: int | None = None, brokers: int = 1) -> None:
        self.error, self.brokers, self.asked = error, brokers, 0

    def list_topics(self, timeout: float) -> Any:
        self.asked += 1
        if self.error is not None:
            raise KafkaException(KafkaError(self.error))
        return SimpleNamespace(brokers=dict.fromkeys(range(self.brokers)))


Looks = Callable[..., list[float]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Looks for a minute, each as soon as the one before allows; returns the times, up to when it is stranded."""

    def looks(
        own: Client, other: Client, acked_at: Callable[[float], float] = lambda _: 0.0, unsettled: int = 1
    ) -> Any:
        watch, now, times = ProducerWatch(own, {}), 100.0, list[float]()
        monkeypatch.setattr(watch, "_another", lambda: other)
        while now < 160:
            wait_s = watch.look(now, acked_at(now), unsettled)
            times.append(now - 100)
            if wait_s is None:
                return times
            now += wait_s
        return []

    return looks


def test_a_producer_without_a_connection_is_stranded_when_others_have_one(looks: Looks) -> None:
    assert looks(Client(LONELY), Client()) == [0, 5, 10, 15, 20, 25]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (Client(), Client()),  # something else takes long
        (Client(DEAF), Client()),  # what it has sent may be under way (P36)
        (Client(brokers=0), Client()),
        (Client(LONELY), Client(LONELY)),  # Kafka is down
        (Client(LONELY), Client(brokers=0)),  # or names nobody
    ],
)
def test_any_other_is_kept(looks: Looks, own: Client, other: Client) -> None:
    assert looks(own, other) == []


def test_one_that_is_acknowledged_now_and_then_is_not_asked(looks: Looks) -> None:
    own = Client(LONELY)
    assert looks(own, Client(), acked_at=lambda now: now // 10) == []
    assert not own.asked


def test_nor_is_one_that_has_nothing_to_send(looks: Looks) -> None:
    own = Client(LONELY)
    assert looks(own, Client(), unsettled=0) == []
    assert not own.asked


def test_one_that_finds_a_broker_meanwhile_begins_anew(looks: Looks) -> None:
    own = Client(LONELY)

    def acked_at(now: float) -> float:
        own.error = None if now == 120 else LONELY
        return 0.0

    assert looks(own, Client(), acked_at) == []

"""A standby hears of a silent leader, and a member of brokers that cannot be reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from harvester.neli import reach
from harvester.neli.election import ElectionTiming
from harvester.neli.reach import Pulse, Reaching, Stranded
from tests.support.wait import eventually

TIMING = ElectionTiming(
    heartbeat_interval_s=1.0,
    heartbeat_timeout_s=5.0,
    session_limit_s=20.0,
    rebalance_limit_s=40.0,
    revoke_limit_s=20.0,
    missed_heartbeats_s=3.0,
)


@pytest.fixture
def pulse() -> Pulse:
    return Pulse("leaders", "relays", 30.0, TIMING)


def test_nothing_is_waited_for_while_heartbeats_arrive(pulse: Pulse) -> None:
    assert pulse.missing(0.0) is None
    for second in range(20):
        pulse.seen(100 + second, float(second))
        assert pulse.missing(second + 4.9) is None


def test_a_silent_leader_is_waited_for_until_its_session_must_have_ended(pulse: Pulse) -> None:
    pulse.seen(100, 10.0)
    pulse.seen(100, 14.0)  # the end has not moved
    assert pulse.missing(14.9) is None
    missing = pulse.missing(15.0)
    assert missing is not None
    assert missing.is_member
    # It may have died just before its next heartbeat was due; of the end of its session, this one hears later.
    assert missing.within_s == 10.0 + 1.0 + 30.0 + 3.0 - 15.0
    late = pulse.missing(100.0)
    assert late is not None
    assert late.within_s == 0.0
    pulse.seen(101, 16.0)
    assert pulse.missing(16.5) is None


class Asked:
    """A client whose answers come when the test wants them."""

    def __init__(self) -> None:
        self.answers: list[Future[Any]] = []

    def list_offsets(self, places: Mapping[TopicPartition, Any], request_timeout: float) -> dict[Any, Future[Any]]:
        self.answers.append(Future())
        return dict.fromkeys(places, self.answers[-1])


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(reach, "clock_s", lambda: clock[0])
    return clock


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._TRANSPORT])
def test_nothing_is_known_where_the_topic_cannot_be_asked(pulse: Pulse, now: list[float], code: int) -> None:
    client = Asked()
    pulse.seen(100, 0.0)
    pulse.look(client)
    client.answers[0].set_exception(KafkaException(KafkaError(code)))
    assert pulse.missing(1e9) is not None
    assert pulse.look(client) is (code > 0)  # another one may find a broker
    assert pulse.missing(1e9) is None
    now[0] = 1.0
    assert pulse.look(client)


def test_it_asks_once_in_a_heartbeats_interval_and_one_question_at_a_time(pulse: Pulse, now: list[float]) -> None:
    client = Asked()
    for _ in range(100):
        pulse.look(client)
    now[0] = 1.0
    pulse.look(client)
    assert len(client.answers) == 1
    client.answers[0].set_result(SimpleNamespace(offset=7))
    now[0] = 2.0
    pulse.look(client)
    assert len(client.answers) == 2
    assert pulse.missing(7.0) is not None


def test_a_broker_that_does_not_answer_says_nothing_of_the_leader(pulse: Pulse, now: list[float]) -> None:
    client = Asked()
    pulse.seen(100, 0.0)
    pulse.look(client)
    now[0] = 1.0
    pulse.look(client)
    assert pulse.missing(1e9) is None


def test_brokers_are_lost_until_one_is_connected_again() -> None:
    told: list[str | None] = []
    reaching = Reaching(told.append)
    lost = []
    for error, states in (
        (None, ["UP"]),
        (KafkaError._TRANSPORT, ["UP"]),
        (KafkaError._ALL_BROKERS_DOWN, ["DOWN"]),
        (None, ["APIVERSION_QUERY", "DOWN"]),
        (None, ["DOWN", "UP"]),
    ):
        if error is not None:
            reaching.heard(KafkaError(error))
        reaching.read({"brokers": {str(number): {"state": state} for number, state in enumerate(states)}})
        lost.append(reaching.is_lost)
    assert lost == [False, False, True, True, False]
    assert told == ["Kafka: no broker can be reached", None]


def report(second: float, *sources: str) -> dict[str, Any]:
    return {
        "ts": int(second * 1e6),
        "brokers": {str(number): {"source": source} for number, source in enumerate(sources)},
    }


def test_kinds_of_brokers_that_are_not_known_strand_nobody() -> None:
    stranded = Stranded()
    for second in range(9):
        stranded.read(report(second, "logical", "discovered"))
    assert not stranded.is_so


def test_who_has_no_broker_for_seconds_is_stranded_for_good() -> None:
    stranded = Stranded()
    seen = []
    for second, sources in enumerate([
        ("configured",), ("learned", "logical"), ("logical",), (), ("configured",),  # found in time
        ("logical",), ("logical",), ("logical",), ("learned",),
    ]):  # fmt: skip
        stranded.read(report(second, *sources))
        seen.append(stranded.is_so)
    assert seen == [False] * 7 + [True] * 2


def test_statistics_of_the_real_client_are_understood() -> None:
    reports: list[str] = []
    client = Consumer({
        "bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0,
        "statistics.interval.ms": 50, "stats_cb": reports.append,
    })  # fmt: skip
    eventually(lambda: client.poll(0.01) or reports, what="statistics")
    client.close()
    statistics = json.loads(reports[0])
    assert {broker["source"] for broker in statistics["brokers"].values()} == {"configured", "logical"}
    stranded = Stranded()
    stranded.read(statistics)
    assert not stranded.is_so

"""What a standby knows of a leader that is silent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.neli.election import ElectionTiming
from harvester.neli.reach import Pulse

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


def test_nothing_is_known_where_the_topic_cannot_be_asked(pulse: Pulse) -> None:
    def refuse(_place: object, timeout: float) -> None:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    pulse.seen(100, 10.0)
    pulse.look(SimpleNamespace(get_watermark_offsets=refuse))
    assert pulse.missing(1e9) is None


def test_it_asks_once_in_a_heartbeats_interval(pulse: Pulse) -> None:
    asked = []

    def watermarks(_place: object, timeout: float) -> tuple[int, int]:
        asked.append(timeout)
        return 0, 7

    for _ in range(100):
        pulse.look(SimpleNamespace(get_watermark_offsets=watermarks))
    assert len(asked) == 1

"""Lanes on the real broker: fencing, progress, what calls come to; and the topic that progress stands in."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.delivery.lane import Lanes, LaneSettings, Outcome
from harvester.delivery.progress import Progress, encode
from harvester.delivery.progress_topic import ensure_progress_topic, find_progress_topic
from harvester.errors import BrokerError, BrokerUnavailable
from tests.conftest import MakeTopic
from tests.support.consuming import read_topic
from tests.support.lanes import opened
from tests.support.servers import Servers

pytest_plugins = ["tests.support.lane_scene"]

INCARNATION = uuid4()


def named(term: int, *ids: int) -> bytes:
    return encode(Progress(term, INCARNATION, ids))


def test_the_last_committed_record_is_the_progress(lanes: Lanes, topic: str, servers: Servers) -> None:
    lane = opened(lanes)
    assert lanes.progress(0, 5.0) is None
    for number in range(1, 4):
        assert lane.begin() is Outcome.DONE
        lane.produce(topic, b"%d" % number, b"key")
        assert lane.commit(named(1, *range(1, number + 1))) is Outcome.DONE
    assert lane.begin() is Outcome.DONE
    lane.produce(topic, b"4", b"key")
    assert lane.flush(5.0)
    assert lane.abort() is Outcome.DONE
    assert lanes.progress(0, 5.0) == Progress(1, INCARNATION, (1, 2, 3))
    assert lanes.progress(1, 5.0) is None
    assert [record.value for record in read_topic(servers.bootstrap, topic)] == [b"1", b"2", b"3"]


def test_progress_is_found_behind_many_transactions_that_were_given_up(
    lanes: Lanes, lane_settings: LaneSettings
) -> None:
    lane = opened(lanes)
    lane.begin()
    assert lane.commit(named(1, 7)) is Outcome.DONE
    for _ in range(40):
        lane.begin()
        lane.produce(lane_settings.topic, b"never", b"0", 0)
        lane.produce(lane_settings.topic, b"never", b"0", 0)
        assert lane.flush(5.0)
        assert lane.abort() is Outcome.DONE
    assert lanes.progress(0, 10.0) == Progress(1, INCARNATION, (7,))


def test_a_successor_fences_and_nothing_of_the_open_transaction_counts(
    lanes: Lanes, lane_settings: LaneSettings, topic: str, servers: Servers
) -> None:
    zombie = opened(lanes)
    zombie.begin()
    zombie.produce(topic, b"zombie", b"key")
    assert zombie.flush(5.0)
    zombie.produce(
        lane_settings.topic, b"hidden", b"0", 0
    )  # as it stands before its commit: it hides what comes behind it
    assert zombie.flush(5.0)
    with pytest.raises(BrokerUnavailable, match="was not reached in time"):
        lanes.progress(0, 3.0)
    heir = opened(lanes)
    assert lanes.progress(0, 5.0) is None
    assert zombie.commit(named(1, 1)) is Outcome.UNCLEAR
    heir.begin()
    heir.produce(topic, b"heir", b"key")
    assert heir.commit(named(2, 1)) is Outcome.DONE
    assert [record.value for record in read_topic(servers.bootstrap, topic)] == [b"heir"]
    assert lanes.progress(0, 5.0) == Progress(2, INCARNATION, (1,))
    zombie.close()
    heir.close()


def test_a_fenced_lane_whose_records_are_called_back_about_is_unclear(lanes: Lanes, topic: str) -> None:
    """The client calls back with its fatal error still to be raised, which makes the callback fail (P23)."""
    zombie = opened(lanes)
    failed: list[str] = []
    zombie.begin()
    zombie.produce(topic, b"first", b"key")
    assert zombie.flush(5.0)
    heir = opened(lanes)
    for _ in range(100):
        # A callback that called nothing written in C would not fail.
        zombie.produce(topic, b"later", b"key", -1, lambda error, _: failed.append(error.name()))
    assert zombie.commit(named(1, 1)) is Outcome.UNCLEAR
    assert "fenced" in zombie.error or "epoch" in zombie.error
    zombie.close()
    heir.close()


def test_a_record_that_fails_refuses_the_transaction_and_the_next_one_goes_on(lanes: Lanes, topic: str) -> None:
    lane = opened(lanes)
    failed: list[KafkaError] = []
    lane.begin()
    lane.produce(topic, b"good", b"key", -1, lambda error, _: failed.append(error))
    lane.produce("no such topic!", b"bad", b"key", -1, lambda error, _: failed.append(error))
    assert lane.commit(named(1, 1, 2)) is Outcome.REFUSED
    assert lane.abort() is Outcome.DONE
    assert "TOPIC_EXCEPTION" in [error.name() for error in failed]
    lane.begin()
    with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
        lane.produce(topic, b"x" * 2_000_000, b"key")
    lane.produce(topic, b"good", b"key")
    assert lane.commit(named(1, 1)) is Outcome.DONE


def test_the_topic_is_made_widened_and_found(options: dict[str, Any], group: str) -> None:
    name = f"{group}.progress"
    assert find_progress_topic(name, options) is None
    made = ensure_progress_topic(name, options, 2)
    assert (made.name, made.lanes) == (name, 2)
    assert ensure_progress_topic(name, options, 1) == made
    wide = ensure_progress_topic(name, options, 5)
    assert (wide.id, wide.lanes) == (made.id, 5)
    assert find_progress_topic(name, options) == wide


def test_a_topic_whose_records_expire_is_refused(options: dict[str, Any], make_topic: MakeTopic) -> None:
    name = make_topic(2, {"cleanup.policy": "compact,delete"})
    with pytest.raises(BrokerError, match=r"cleanup\.policy=compact,delete") as refused:
        ensure_progress_topic(name, options, 2)
    assert name in (refused.value.hint or "")


def test_a_broker_that_is_away_is_said_so() -> None:
    away = {"bootstrap.servers": "127.0.0.1:1", "broker.address.family": "v4"}
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        find_progress_topic("any", away)

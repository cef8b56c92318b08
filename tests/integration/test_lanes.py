"""Lanes on the real broker: fencing, progress, what calls come to; and the topic that progress stands in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from harvester.delivery.lane import Lanes, LaneSettings, TransactionOutcome
from harvester.delivery.progress import EncodedProgress, Progress, encode, most_ids
from harvester.delivery.progress_topic import ensure_progress_topic, find_progress_topic, why_refused
from harvester.errors import BrokerError, BrokerUnavailable, SchemaError
from tests.conftest import MakeTopic
from tests.support.consuming import read_topic
from tests.support.lanes import opened
from tests.support.servers import Servers

pytest_plugins = ["tests.support.lane_scene"]

INCARNATION = uuid4()


def named(term: int, *ids: int) -> EncodedProgress:
    return encode(Progress(term, INCARNATION, ids))


def test_the_last_committed_record_is_the_progress(lanes: Lanes, topic: str, servers: Servers) -> None:
    lane = opened(lanes)
    assert lanes.progress(0, 5.0) is None
    for number in range(1, 4):
        assert lane.begin() is TransactionOutcome.DONE
        lane.produce(topic, b"%d" % number, b"key")
        assert lane.commit(named(1, *range(1, number + 1))) is TransactionOutcome.DONE
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"4", b"key")
    assert lane.flush(5.0)
    assert lane.abort() is TransactionOutcome.DONE
    assert lanes.progress(0, 5.0) == Progress(1, INCARNATION, (1, 2, 3))
    assert lanes.progress(1, 5.0) is None
    assert [record.value for record in read_topic(servers.bootstrap, topic)] == [b"1", b"2", b"3"]


def test_progress_is_found_behind_many_transactions_that_were_given_up(
    lanes: Lanes, lane_settings: LaneSettings
) -> None:
    lane = opened(lanes)
    lane.begin()
    assert lane.commit(named(1, 7)) is TransactionOutcome.DONE
    for _ in range(40):
        lane.begin()
        lane.produce(lane_settings.topic, b"never", b"0", 0)
        lane.produce(lane_settings.topic, b"never", b"0", 0)
        assert lane.flush(5.0)
        assert lane.abort() is TransactionOutcome.DONE
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
    assert zombie.commit(named(1, 1)) is TransactionOutcome.UNCLEAR
    heir.begin()
    heir.produce(topic, b"heir", b"key")
    assert heir.commit(named(2, 1)) is TransactionOutcome.DONE
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
    assert zombie.commit(named(1, 1)) is TransactionOutcome.UNCLEAR
    assert "fenced" in zombie.error or "epoch" in zombie.error
    zombie.close()
    heir.close()


def test_a_record_that_fails_refuses_the_transaction_and_the_next_one_goes_on(lanes: Lanes, topic: str) -> None:
    lane = opened(lanes)
    reported: list[KafkaError | None] = []
    lane.begin()
    lane.produce(topic, b"good", b"key", -1, lambda error, _: reported.append(error))
    lane.produce("no such topic!", b"bad", b"key", -1, lambda error, _: reported.append(error))
    assert lane.commit(named(1, 1, 2)) is TransactionOutcome.REFUSED
    assert lane.abort() is TransactionOutcome.DONE
    assert "TOPIC_EXCEPTION" in [error.name() for error in reported if error]
    lane.begin()
    with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
        lane.produce(topic, b"x" * 2_000_000, b"key")
    lane.produce(topic, b"good", b"key")
    assert lane.commit(named(1, 1)) is TransactionOutcome.DONE


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


def test_of_another_topic_than_the_recorded_one_nothing_else_is_said(
    options: dict[str, Any], make_topic: MakeTopic
) -> None:
    """P22: brokers recreate one with their own defaults, and altering these would not bring the former one back."""
    name = make_topic(2, {"cleanup.policy": "delete"})
    with pytest.raises(SchemaError, match="recorded, is a different one"):
        ensure_progress_topic(name, options, 2, "recorded")


def test_a_topic_that_takes_no_progress_is_refused(options: dict[str, Any], make_topic: MakeTopic) -> None:
    name = make_topic(2, {"cleanup.policy": "compact", "max.message.bytes": "4095"})
    with pytest.raises(BrokerError, match=r"max\.message\.bytes=4095") as refused:
        ensure_progress_topic(name, options, 2)
    assert name in (refused.value.hint or "")


def test_the_topic_is_made_to_keep_what_it_acknowledged(options: dict[str, Any], group: str) -> None:
    name = f"{group}.progress"
    ensure_progress_topic(name, options, 1)
    resource = ConfigResource(ResourceType.TOPIC, name)
    admin = AdminClient(options)
    found = admin.describe_configs([resource])[resource].result(10)
    assert found["unclean.leader.election.enable"].value == "false"
    assert found["cleanup.policy"].value == "compact"


def test_a_record_has_room_for_as_many_ids_as_the_topic_takes(
    lane_settings: LaneSettings, make_topic: MakeTopic
) -> None:
    """However far they are apart; one that is larger is refused, and the remedy is named (P41)."""
    far_apart = 1 << 32

    def versions(count: int) -> EncodedProgress:
        ids = range(0, count * far_apart, far_apart)
        return encode(Progress(1, INCARNATION, ids, [2**32 - 1] * count, [-1] * count))

    lanes = Lanes(replace(lane_settings, topic=make_topic(1, {"max.message.bytes": "4096"})), Producer)
    lane = opened(lanes)
    assert lanes.room() == most_ids(4096)
    assert lane.begin() is TransactionOutcome.DONE
    assert lane.commit(versions(lanes.room())) is TransactionOutcome.DONE
    assert lane.begin() is TransactionOutcome.DONE
    assert lane.commit(versions(256)) is TransactionOutcome.REFUSED
    assert "max.message.bytes=" in lanes.explain(lane)
    assert lane.abort() is TransactionOutcome.DONE


def test_a_client_that_sends_small_records_only_names_few_ids(lane_settings: LaneSettings) -> None:
    small = replace(lane_settings, producer={**lane_settings.producer, "message.max.bytes": "5000"})
    assert Lanes(small, Producer).room() == most_ids(5000)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("_MSG_TIMED_OUT", "has 1 of 1 copies in sync, min.insync.replicas is 2: add replicas"),
        ("NOT_ENOUGH_REPLICAS", "has 1 of 1 copies in sync, min.insync.replicas is 2: add replicas"),
        ("MSG_SIZE_TOO_LARGE", "--add-config max.message.bytes="),
        ("TOPIC_AUTHORIZATION_FAILED", "allow this user to write to"),
        ("INVALID_RECORD", "check the state of the topic"),
    ],
)
def test_a_refusal_is_said_with_its_remedy(
    options: dict[str, Any], make_topic: MakeTopic, name: str, remedy: str
) -> None:
    """Of copies that are missing the client says no more than that the record timed out."""
    topic = make_topic(1, {"min.insync.replicas": "2"})
    said = why_refused(topic, 0, KafkaError(getattr(KafkaError, name)), options)
    assert name in said
    assert remedy in said
    assert topic in said


def test_a_lane_whose_partition_is_gone_is_said_so(options: dict[str, Any], make_topic: MakeTopic) -> None:
    said = why_refused(make_topic(1), 3, KafkaError(KafkaError._MSG_TIMED_OUT), options)
    assert "has no partition 3" in said


def test_a_broker_that_is_away_is_said_so() -> None:
    away = {"bootstrap.servers": "127.0.0.1:1", "broker.address.family": "v4"}
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        find_progress_topic("any", away)

"""The doctor's judges of Kafka and its topics: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from harvester.config import Config
from harvester.doctor import CheckLevel
from harvester.doctor.facts import GroupFacts, TopicFacts
from harvester.doctor.judge_kafka import judge_kafka, judge_topics, topics_of, version_of
from harvester.neli.topic import refusal
from tests.support.doctor import BROKER, CONFIG, DATABASE, EXACTLY, KAFKA, kafka_with, text_of, topic, worst


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"brokers": 1}, "kafka.brokers", CheckLevel.WARNING),
        ({"settings": {**BROKER, "group.min.session.timeout.ms": "6001"}}, "kafka.session_timeout", CheckLevel.PROBLEM),
        ({"settings": {**BROKER, "group.max.session.timeout.ms": "5999"}}, "kafka.session_timeout", CheckLevel.PROBLEM),
        ({"settings": {**BROKER, "transaction.max.timeout.ms": "9999"}}, "kafka.transactions", CheckLevel.PROBLEM),
        ({"brokers": 2}, "kafka.transactions", CheckLevel.PROBLEM),
        ({"settings": {**BROKER, "transaction.state.log.min.isr": "1"}}, "kafka.transactions", CheckLevel.WARNING),
        ({"group": GroupFacts("stable", 1, frozenset({"DESCRIBE"}))}, "kafka.group", CheckLevel.PROBLEM),
        ({"settings": None, "unread": {"broker's settings": "denied"}}, "kafka.settings", CheckLevel.SKIPPED),
    ],
)
def test_the_cluster(change: Mapping[str, Any], check: str, level: CheckLevel) -> None:
    found = worst(judge_kafka(replace(KAFKA, **change), EXACTLY))
    assert found[check] is level
    if "brokers" not in change:
        assert found == {check: level}


def test_transactions_matter_to_exactly_once_only() -> None:
    settings = {**BROKER, "transaction.max.timeout.ms": "1"}
    assert worst(judge_kafka(replace(KAFKA, settings=settings), CONFIG)) == {}


def test_versions_of_brokers() -> None:
    assert version_of({"inter.broker.protocol.version": "3.9-IV0"}) == "3.9"
    assert version_of({}) == "4.0 or newer"


@pytest.mark.parametrize(
    ("changed", "level", "part"),
    [
        (topic("orders", replicas=1, min_insync_replicas="1"), CheckLevel.WARNING, "a single copy"),
        (topic("orders", replicas=1), CheckLevel.PROBLEM, "lower it to 1"),
        (topic("orders", min_insync_replicas="4"), CheckLevel.PROBLEM, "lower it to 2"),
        (topic("orders", min_insync_replicas="3"), CheckLevel.WARNING, "set it to 2"),
        (topic("orders", min_insync_replicas="1"), CheckLevel.WARNING, "set it to 2"),
        (topic("orders", unclean_leader_election_enable="true"), CheckLevel.PROBLEM, "unclean"),
        (topic("orders", in_sync=1), CheckLevel.PROBLEM, "fewer than 2 copies in sync: 0"),
        (topic("orders", in_sync=2), CheckLevel.WARNING, "lag behind: 0"),
        (topic("orders", leader=-1), CheckLevel.PROBLEM, "without a leader: 0"),
        (topic("orders", operations=frozenset({"DESCRIBE"})), CheckLevel.PROBLEM, "WRITE"),
    ],
)
def test_a_topic_of_records(changed: TopicFacts, level: CheckLevel, part: str) -> None:
    found = list(judge_topics(kafka_with(changed), CONFIG, ["orders"]))
    assert worst(found) == {"topic.orders": level}
    assert part in text_of(found, "topic.orders")


@pytest.mark.parametrize("changed", [{"min_insync_replicas": "3"}, {"in_sync": 1}, {"leader": -1}])
@pytest.mark.parametrize(("delivery", "stops"), [("at-least-once", "its records"), ("exactly-once", "all records")])
def test_exactly_once_a_topic_without_replicas_stops_all(changed: Any, delivery: Any, stops: str) -> None:
    config = Config(leader_group_id="billing", delivery=delivery)
    found = list(judge_topics(kafka_with(topic("orders", **changed)), config, ["orders"]))
    assert stops in text_of(found, "topic.orders")


CLAIM_CHECK = {"policy": "claim-check", "store": "file:///srv"}


@pytest.mark.parametrize(
    ("limit", "given", "parts"),
    [
        (100_000, {}, ("records of 98976 to 998976 bytes are sent and refused", "message.max.bytes in producer")),
        (100_000, {"oversize": CLAIM_CHECK}, ("records of 98976 to 998976 bytes", "lower oversize.above to 98976")),
        (100_000, {"oversize": {**CLAIM_CHECK, "above": 98_977}}, ("records of 98976 to 98977 bytes",)),
        (100_000, {"oversize": {**CLAIM_CHECK, "above": 98_976}}, ("batches of up to 1000000", "batch.size=100000")),
        (5_000_000, {}, ("refuses what exceeds its message.max.bytes=1000000", "set message.max.bytes=5000000")),
    ],
)
def test_a_topic_that_takes_less_or_more_than_the_client(limit: int, given: Any, parts: tuple[str, ...]) -> None:
    config = Config(leader_group_id="billing", **given)
    found = list(judge_topics(kafka_with(topic("orders", max_message_bytes=str(limit))), config, ["orders"]))
    assert worst(found) == {"topic.orders": CheckLevel.WARNING}
    assert len([each for each in found if each.check == "topic.orders"]) == 1
    assert [part for part in parts if part not in text_of(found, "topic.orders")] == []


@pytest.mark.parametrize(
    ("limit", "given"),
    [
        (1_048_588, {}),  # the defaults of both
        (100_000, {"producer_kafka_config": {"message.max.bytes": "100000"}}),
        (100_000, {"oversize": {**CLAIM_CHECK, "above": 90_000}, "producer_kafka_config": {"batch.size": "100000"}}),
        (5_000_000, {"base_kafka_config": {"message.max.bytes": "5000000"}}),
        (5_000_000, {"oversize": CLAIM_CHECK}),
    ],
)
def test_a_topic_that_takes_what_the_client_sends(limit: int, given: Any) -> None:
    config = Config(leader_group_id="billing", **given)
    found = list(judge_topics(kafka_with(topic("orders", max_message_bytes=str(limit))), config, ["orders"]))
    assert worst(found) == {}


def test_topics_that_do_not_exist() -> None:
    assert worst(judge_topics(KAFKA, CONFIG, ["none"])) == {"topics.missing": CheckLevel.PROBLEM}
    creates = replace(KAFKA, settings={**BROKER, "auto.create.topics.enable": "true"})
    assert worst(judge_topics(creates, CONFIG, ["none"])) == {"topics.missing": CheckLevel.WARNING}


def test_the_leader_topic() -> None:
    wide = kafka_with(topic("billing.neli", partitions=2))
    found = list(judge_topics(wide, CONFIG, []))
    assert worst(found) == {"topics.leader": CheckLevel.WARNING}
    assert "delete" not in text_of(found, "topics.leader")  # it may be somebody else's
    # Heartbeats need no copies.
    single = kafka_with(topic("billing.neli", replicas=1, min_insync_replicas="1"))
    assert worst(judge_topics(single, CONFIG, [])) == {}
    assert worst(judge_topics(replace(KAFKA, topics={}), CONFIG, [])) == {}


@pytest.mark.parametrize(
    ("settings", "level", "part"),
    [
        ({"max_message_bytes": "4095"}, CheckLevel.PROBLEM, "too small"),
        ({"max_message_bytes": "4096"}, CheckLevel.WARNING, "at most 192 records"),
        ({"min_insync_replicas": "1"}, CheckLevel.WARNING, "set it to 2"),
        ({"replicas": 1, "min_insync_replicas": "1"}, CheckLevel.WARNING, "a single copy"),
        ({"min_insync_replicas": "4"}, CheckLevel.PROBLEM, "nothing can be written"),
        ({"in_sync": 1}, CheckLevel.PROBLEM, "fewer than 2 copies in sync"),
        ({"unclean_leader_election_enable": "true"}, CheckLevel.PROBLEM, "unclean"),
    ],
)
def test_the_progress_topic(settings: Mapping[str, Any], level: CheckLevel, part: str) -> None:
    found = list(judge_topics(kafka_with(topic("billing.progress", **settings)), EXACTLY, []))
    assert worst(found) == {"topics.progress": level}
    assert part in text_of(found, "topics.progress")


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (topic("billing.neli", max_message_bytes="300"), "raise it to 20000"),
        (topic("billing.neli", cleanup_policy="compact"), "set it to delete"),
        (topic("billing.neli", cleanup_policy="compact,delete"), "set it to delete"),
        (topic("billing.neli", operations=frozenset({"READ", "DESCRIBE"})), "WRITE"),
    ],
)
def test_a_leader_topic_that_takes_no_heartbeats(changed: TopicFacts, part: str) -> None:
    found = list(judge_topics(kafka_with(changed), CONFIG, []))
    assert worst(found) == {"topics.leader": CheckLevel.PROBLEM}
    assert part in text_of(found, "topics.leader")


def test_a_leader_topic_that_is_kafkas_own() -> None:
    config = Config(leader_group_id="billing", leader_topic="__consumer_offsets")
    found = list(judge_topics(kafka_with(topic("__consumer_offsets", partitions=50)), config, []))
    assert worst(found) == {"topics.leader": CheckLevel.PROBLEM}
    text = text_of(found, "topics.leader")
    assert "set another leader_topic" in text
    assert "billing.neli" in text
    assert "delete" not in text


def test_what_is_said_of_a_heartbeat_that_may_not_be_written() -> None:
    text = refusal("billing.neli", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert text.startswith("the leader topic 'billing.neli' accepts no heartbeats, so nobody can lead: ")
    assert text.endswith("allow this user to write to the topic")


@pytest.mark.parametrize("config", [CONFIG, EXACTLY])
def test_a_progress_topic_that_is_not_the_recorded_one(config: Config) -> None:
    made = topic("billing.progress")
    for kafka, level in (
        (kafka_with(replace(made, id="a")), None),
        (kafka_with(made), None),  # its id cannot be read
        (kafka_with(replace(made, id="b")), CheckLevel.PROBLEM),
        (KAFKA, CheckLevel.PROBLEM),
    ):
        found = list(judge_topics(kafka, config, [], "a"))
        assert worst(found).get("topics.progress") is level
        assert ("SET progress_topic = NULL" in text_of(found, "topics.progress")) == (level is not None)
    assert "billing.progress" in topics_of(config, [], "a")


def test_whose_last_term_needs_the_progress_topic() -> None:
    for last, delivery, needed in (
        ("exactly-once", "at-least-once", "a"), ("exactly-once", "exactly-once", "a"),
        ("at-least-once", "exactly-once", "a"), ("at-least-once", "at-least-once", None),
    ):  # fmt: skip
        assert replace(DATABASE, delivery=last, progress_topic="a").needed_progress(delivery) == needed
    assert DATABASE.needed_progress("exactly-once") is None


def test_topics_that_may_not_be_created() -> None:
    nothing = replace(KAFKA, topics={}, operations=frozenset({"DESCRIBE"}))
    found = list(judge_topics(nothing, EXACTLY, []))
    assert worst(found) == dict.fromkeys(("topics.leader", "topics.progress"), CheckLevel.WARNING)
    assert "allow this user CREATE" in text_of(found, "topics.leader")
    assert worst(judge_topics(replace(nothing, operations=None), EXACTLY, [])) == {}


def test_the_progress_topic_matters_to_exactly_once_only() -> None:
    expiring = kafka_with(topic("billing.progress", cleanup_policy="delete"))
    assert worst(judge_topics(expiring, CONFIG, [])) == {}
    assert worst(judge_topics(expiring, EXACTLY, [])) == {"topics.progress": CheckLevel.PROBLEM}
    assert topics_of(EXACTLY, ["orders"]) == ["billing.neli", "billing.progress", "orders"]

"""Creates the coordination topic, rejects unsafe ones, and explains errors. Thin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from harvester.bounds import SILENT, answer
from harvester.coordination.core.messages import MAX_BYTES
from harvester.coordination.errors import CoordinationTopicError, UnknownTopic
from harvester.delivery.progress_topic import durable
from harvester.errors import BrokerError, BrokerUnavailable

_TIMEOUT_S = 10.0
_LEAST_INTERVALS = 100  # for which the log is retained
_LEAST_RETENTION_MS = 86_400_000
_REPLICAS = 3
_AWAY = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN})
# Errors of a topic while brokers start, or leaders and controllers change.
_STARTING = frozenset({
    KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.BROKER_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_CONTROLLER,
})  # fmt: skip
# Errors caused by the topic's own settings: repeated for each message, until somebody changes them.
_REFUSED = frozenset({
    KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_TIMESTAMP,
})  # fmt: skip


def ensure_coordination_topic(name: str, options: Mapping[str, Any], partitions: int, interval_ms: int) -> None:
    """Raises CoordinationTopicError for an unsuitable topic, BrokerError or BrokerUnavailable."""
    admin = AdminClient({**options, **SILENT})
    try:
        metadata = admin.list_topics(timeout=_TIMEOUT_S)  # of all topics: requesting one by name might create it
        found = metadata.topics.get(name)
        if found is None or found.error is not None:
            _create(admin, name, partitions, len(metadata.brokers), interval_ms)
            return
        resource = ConfigResource(ResourceType.TOPIC, name)
        entries = answer(admin.describe_configs([resource], request_timeout=_TIMEOUT_S)[resource], _TIMEOUT_S * 2)
    except KafkaException as error:
        raise failed(name, options, error) from error
    replicas = min((len(partition.replicas) for partition in found.partitions.values()), default=0)
    settings = {key: entry.value for key, entry in entries.items()}
    problems = misfits(len(found.partitions), replicas, settings, partitions, interval_ms)
    if problems:
        raise CoordinationTopicError(
            f"the coordination topic {name!r} does not fit: {'; '.join(problems)}",
            hint="correct the settings, or name another coordination topic for all consumers of the group at once",
        )


def require_topics(topics: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raises UnknownTopic for the first topic that does not exist, BrokerError or BrokerUnavailable."""
    try:
        found = AdminClient({**options, **SILENT}).list_topics(timeout=_TIMEOUT_S).topics
    except KafkaException as error:
        raise failed(topics[0], options, error) from error
    for topic in topics:
        if topic not in found:
            raise UnknownTopic(topic, get_close_matches(topic, [name for name in found if name[:2] != "__"], n=2))


def misfits(
    found_partitions: int, replicas: int, settings: Mapping[str, str | None], partitions: int, interval_ms: int
) -> list[str]:
    """The problems of an existing topic, in words."""
    problems = []
    if found_partitions != partitions:
        problems.append(
            f"it has {found_partitions} partitions, but {partitions} are configured; the number is fixed for its life"
        )
    for key, needed in (
        ("message.timestamp.type", "LogAppendTime"),
        ("cleanup.policy", "delete"),
        ("unclean.leader.election.enable", "false"),
    ):
        if settings.get(key) != needed:
            problems.append(f"{key} is {settings.get(key)}, not {needed}")
    retention_ms, least_ms = int(settings.get("retention.ms") or -1), _LEAST_INTERVALS * interval_ms
    if 0 <= retention_ms < least_ms:
        problems.append(
            f"retention.ms is {retention_ms}, less than {_LEAST_INTERVALS} heartbeat intervals ({least_ms})"
        )
    if int(settings.get("max.message.bytes") or MAX_BYTES) < MAX_BYTES:
        problems.append(f"max.message.bytes is {settings['max.message.bytes']}, less than {MAX_BYTES}")
    if replicas >= _REPLICAS and int(settings.get("min.insync.replicas") or 1) < 2:
        problems.append("min.insync.replicas is less than 2")
    return problems


def failed(
    name: str, options: Mapping[str, Any], error: KafkaException, *, kind: str = "coordination topic"
) -> BrokerError:
    """This library's error for one of the client."""
    problem = error.args[0]
    if problem.code() in _AWAY:
        text = f"Kafka at {options.get('bootstrap.servers', '')} does not answer: {problem.str()}"
        return BrokerUnavailable(text, hint=BrokerUnavailable.NO_ANSWER)
    if problem.code() in _STARTING:
        return BrokerUnavailable(
            f"the {kind} {name!r} cannot be used now: {problem.str()}",
            hint="brokers answer like this while starting or stopping: try again, and check that all of them run",
        )
    return BrokerError(
        f"the {kind} {name!r} cannot be used: {problem.str()}",
        hint="this user needs to describe, read and write it, and to create it if it is missing",
    )


def refused(name: str, error: KafkaError) -> CoordinationTopicError:
    """The error for a message that the topic's settings reject."""
    return CoordinationTopicError(
        f"the coordination topic {name!r} accepts no messages: {error.str()}",
        hint="correct the topic's settings (max.message.bytes, message.timestamp.type), and restart the consumer",
    )


def refuses(error: KafkaError) -> bool:
    """Whether the topic's settings are the reason for rejecting a message."""
    return error.code() in _REFUSED


def _create(admin: AdminClient, name: str, partitions: int, brokers: int, interval_ms: int) -> None:
    replicas, kept = durable(brokers)
    config = {
        **kept,
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": str(max(_LEAST_RETENTION_MS, _LEAST_INTERVALS * interval_ms)),
    }
    topic = NewTopic(name, partitions, replicas, config=config)
    try:
        answer(admin.create_topics([topic], operation_timeout=_TIMEOUT_S)[name], _TIMEOUT_S * 2)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another consumer was faster
            raise

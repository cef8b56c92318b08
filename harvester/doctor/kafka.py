"""Reads what the doctor needs to know about Kafka, with an admin client; for `--probe` also with a producer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewTopic

from harvester.bounds import SILENT, admin_client
from harvester.config import Config
from harvester.config.kafka_options import get, scrub
from harvester.doctor.facts import Clock, GroupFacts, Kafka, PartitionFacts, TopicFacts
from harvester.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")

_TIMEOUT_S = 10.0
_PROBES = 5
_NOT_YET = {
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
}
_FAILURES = (KafkaException, FutureTimeoutError, TimeoutError)


def read_kafka(config: Config, topics: Sequence[str]) -> Kafka:
    """What this user may see of the cluster, of those `topics` that exist, and of the leader group.

    Raises BrokerUnavailable, with the reason for a refusal if the client knows one; BrokerError if the client itself
    refuses the options.
    """
    options = config.common_options()
    try:
        client, refusals = admin_client(options)
    except KafkaException as error:
        raise BrokerError(
            f"the Kafka client refuses its options: {scrub(_text(error), options)}",
            hint="correct them; `harvester config check` reports the same",
        ) from error
    nothing: dict[str, Any] = {}
    unread: dict[str, str] = {}

    def part(name: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except _FAILURES as error:
            unread[name] = _text(error)
            return otherwise

    try:
        metadata = client.list_topics(timeout=_TIMEOUT_S)  # of all topics: requesting one by name could create it
    except KafkaException as error:
        client.poll(0)
        reason = refusals[-1] if refusals else _text(error)
        servers = get(config.base_kafka_config, "bootstrap.servers")
        raise BrokerUnavailable(f"Kafka at {servers} cannot be used: {reason}") from error
    found = {name: metadata.topics[name] for name in topics if name in metadata.topics}
    settings = part("topics' settings", lambda: _topic_settings(client, list(found)), nothing)
    described = part("rights on topics", lambda: _described(client, list(found)), nothing)
    cluster = part("cluster", lambda: _wait(client.describe_cluster(include_authorized_operations=True)), None)
    broker = next(iter(sorted(metadata.brokers)), None)
    return Kafka(
        brokers=len(metadata.brokers),
        cluster=metadata.cluster_id,
        settings=part("broker's settings", lambda: _broker_settings(client, broker), None),
        topics={
            name: TopicFacts(
                name,
                tuple(
                    PartitionFacts(each.leader, tuple(each.replicas), tuple(each.isrs))
                    for _, each in sorted(topic.partitions.items())
                ),
                settings.get(name),
                *described.get(name, (None, None)),
            )
            for name, topic in found.items()
        },
        group=part("group", lambda: _group(client, config.leader_group_id), None),
        operations=_operations(cluster.authorized_operations) if cluster is not None else None,
        unread=unread,
    )


def probe_clock(config: Config) -> Clock:
    """The brokers' clock, from the timestamp of a record in a temporary topic, which is deleted again.

    Raises BrokerError. The first record waits for the topic, so the fastest of several counts.
    """
    topic = f"harvester-doctor-{uuid.uuid4().hex[:8]}"
    client, _ = admin_client(config.common_options())
    try:
        stamped = {"message.timestamp.type": "LogAppendTime", "retention.ms": "60000"}
        _wait(client.create_topics([NewTopic(topic, 1, -1, config=stamped)])[topic])
        try:
            return _probe(config, topic)
        finally:
            _wait(client.delete_topics([topic])[topic])
    except _FAILURES as error:
        raise BrokerError(f"the probe failed: {_text(error)}") from error


def _probe(config: Config, topic: str) -> Clock:
    producer = Producer({**config.producer_options(), **SILENT})
    looks: list[Clock] = []
    errors: list[KafkaError] = []
    for _ in range(_PROBES):
        before = time.time()

        def delivered(error: KafkaError | None, message: Message, before: float = before) -> None:
            after = time.time()
            if error is not None:
                errors.append(error)
            else:
                # Truncated to milliseconds: half of one is unknown.
                theirs = message.timestamp()[1] / 1000 + 0.0005
                looks.append(Clock(theirs - (before + after) / 2, (after - before) / 2 + 0.0005))

        producer.produce(topic, b"", on_delivery=delivered)
        producer.flush(_TIMEOUT_S)
    if not looks:
        raise BrokerError(f"the probe failed: {errors[-1].str() if errors else 'no acknowledgement arrived'}")
    return min(looks, key=lambda look: look.uncertainty_s)


def _wait(future: Future[T]) -> T:
    return future.result(_TIMEOUT_S)


def _text(error: Exception) -> str:
    if isinstance(error, KafkaException):
        problem = error.args[0]
        text = str(problem.str())
        return text if text.strip().rstrip(":") else str(problem.name())
    return str(error) or "no answer"


def _broker_settings(client: AdminClient, broker: int | None) -> dict[str, str]:
    resource = ConfigResource(ResourceType.BROKER, str(broker))
    return _values(_wait(client.describe_configs([resource])[resource]))


def _topic_settings(client: AdminClient, topics: Sequence[str]) -> dict[str, dict[str, str]]:
    if not topics:
        return {}
    resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in topics}
    futures = client.describe_configs(list(resources.values()))
    return {name: _values(_wait(futures[resource])) for name, resource in resources.items()}


def _described(client: AdminClient, topics: Sequence[str]) -> dict[str, tuple[frozenset[str] | None, str]]:
    """Of each topic, what this user may do with it, and its id."""
    if not topics:
        return {}
    futures = client.describe_topics(TopicCollection(list(topics)), include_authorized_operations=True)
    found = {name: _wait(future) for name, future in futures.items()}
    return {name: (_operations(each.authorized_operations), str(each.topic_id)) for name, each in found.items()}


def _group(client: AdminClient, name: str) -> GroupFacts:
    for pause_s in (0.2, 0.4, 0.8, 1.6, 0.0):
        futures = client.describe_consumer_groups([name], include_authorized_operations=True)
        try:
            group = _wait(futures[name])
            break
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return GroupFacts("dead", 0, None)
            # The first request about any group makes the brokers create the topic for groups.
            if error.args[0].code() not in _NOT_YET or not pause_s:
                raise
            time.sleep(pause_s)
    return GroupFacts(group.state.name.lower(), len(group.members), _operations(group.authorized_operations))


def _operations(given: Any) -> frozenset[str] | None:
    return frozenset(operation.name for operation in given) if given else None


def _values(entries: Mapping[str, Any]) -> dict[str, str]:
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}

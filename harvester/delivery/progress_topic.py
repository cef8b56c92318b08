"""The progress topic of exactly-once mode: made if it is missing, one partition for each lane. Thin.

The term row keeps the topic's id (P22): in a topic that was deleted and made anew nothing stands of what was committed,
and a harvester that read it would publish once more what waits for its DELETE. For the same reason a topic whose
records expire is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from harvester.errors import BrokerError, BrokerUnavailable

_TIMEOUT_S = 5.0
_TURN_S = 0.05  # between two looks for a change that was made
# Compacted: of each lane only the last record counts. Small segments, since what compaction has not reached is kept.
_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
}


@dataclass(frozen=True, slots=True)
class ProgressTopic:
    """`id` is Kafka's own, which a topic that is made anew does not share."""

    name: str
    id: str
    lanes: int


def find_progress_topic(name: str, options: Mapping[str, Any]) -> ProgressTopic | None:
    """None when there is none. Raises BrokerUnavailable or BrokerError."""
    return _Admin(name, options).find()


def ensure_progress_topic(name: str, options: Mapping[str, Any], lanes: int) -> ProgressTopic:
    """The topic with at least so many lanes. Raises BrokerUnavailable or BrokerError."""
    admin = _Admin(name, options)
    found = admin.find()
    if found is None:
        admin.create(lanes)
    else:
        admin.check_policy()
        if found.lanes >= lanes:
            return found
        admin.widen(lanes)
    return admin.await_lanes(lanes)


class _Admin:
    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._servers = name, options.get("bootstrap.servers", "")
        self._admin = AdminClient({**options, "log_level": "0"})

    def find(self) -> ProgressTopic | None:
        try:
            future = self._admin.describe_topics(TopicCollection([self._name]), request_timeout=_TIMEOUT_S)[self._name]
            topic = future.result(_TIMEOUT_S * 2)
        except (KafkaException, TimeoutError) as error:
            if _code(error) in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}:
                return None
            raise self._failed("described", error) from error
        return ProgressTopic(self._name, str(topic.topic_id), len(topic.partitions))

    def check_policy(self) -> None:
        """Of each lane the last record has to stay."""
        resource = ConfigResource(ResourceType.TOPIC, self._name)
        try:
            entries = self._admin.describe_configs([resource], request_timeout=_TIMEOUT_S)[resource]
            policy = entries.result(_TIMEOUT_S * 2)["cleanup.policy"].value
        except (KafkaException, TimeoutError) as error:
            if _code(error) in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
                return  # whoever keeps that to himself has made the topic as he was told
            if _code(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._not_yet() from error
            raise self._failed("described", error) from error
        if policy != "compact":
            raise BrokerError(
                f"the progress topic {self._name!r} has cleanup.policy={policy}: records of it may expire",
                hint=f"kafka-configs --alter --entity-type topics --entity-name {self._name}"
                " --add-config cleanup.policy=compact",
            )

    def create(self, lanes: int) -> None:
        try:
            made = self._admin.create_topics(
                [NewTopic(self._name, lanes, -1, config=_CONFIG)], operation_timeout=_TIMEOUT_S
            )
            made[self._name].result(_TIMEOUT_S * 2)
        except (KafkaException, TimeoutError) as error:
            if _code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._failed("created", error) from error

    def widen(self, lanes: int) -> None:
        try:
            self._admin.create_partitions([NewPartitions(self._name, lanes)], operation_timeout=_TIMEOUT_S)[
                self._name
            ].result(_TIMEOUT_S * 2)
        except (KafkaException, TimeoutError) as error:
            if _code(error) != KafkaError.INVALID_PARTITIONS:  # another harvester was quicker
                raise self._failed(f"given {lanes} partitions", error) from error

    def await_lanes(self, lanes: int) -> ProgressTopic:
        """The change is made, but the broker that is asked may not have heard of it yet."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (found := self.find()) is None or found.lanes < lanes:
            if time.monotonic() > deadline:
                raise self._not_yet()
            time.sleep(_TURN_S)
        return found

    def _not_yet(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"the progress topic {self._name!r} is not there yet")

    def _failed(self, what: str, error: Exception) -> BrokerError:
        text = error.args[0].str() if isinstance(error, KafkaException) else str(error) or "no answer"
        if _code(error) in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT, None}:
            return BrokerUnavailable(f"Kafka at {self._servers} does not answer: {text}")
        return BrokerError(
            f"the progress topic {self._name!r} cannot be {what}: {text}",
            hint="exactly-once mode needs it: allow it to this user, or create it with cleanup.policy=compact",
        )


def _code(error: Exception) -> int | None:
    return error.args[0].code() if isinstance(error, KafkaException) else None

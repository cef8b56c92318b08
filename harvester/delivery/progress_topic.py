"""The progress topic of exactly-once mode: created if missing, one partition per lane. Thin.

The term row stores the topic's id (P22): a topic that was deleted and recreated does not tell what was committed, and a
harvester that read it would republish records that still wait for their DELETE. For the same reason a new topic gets
enough replicas to survive the loss of a broker, and a topic whose records expire, or that accepts only small records,
is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from harvester.bounds import SILENT, answer
from harvester.delivery.progress import LEAST_RECORD_BYTES
from harvester.errors import BrokerError, BrokerUnavailable, SchemaError

_REPLICAS = 3
_TIMEOUT_S = 5.0
_TURN_S = 0.05  # between checks for a requested change
# Compacted, since only the last record of each lane matters. Small segments, since uncompacted data is kept.
_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
}


_DENIED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
_TOO_FEW = frozenset({"_MSG_TIMED_OUT", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND"})


@dataclass(frozen=True, slots=True)
class ProgressTopic:
    """`id` is Kafka's own; a recreated topic has a different one."""

    name: str
    id: str
    lanes: int


def find_progress_topic(name: str, options: Mapping[str, Any]) -> ProgressTopic | None:
    """None if it does not exist. Raises BrokerUnavailable or BrokerError."""
    return _Admin(name, options).find()


def ensure_progress_topic(
    name: str, options: Mapping[str, Any], lanes: int, recorded: str | None = None
) -> ProgressTopic:
    """The topic with at least this many lanes; `recorded`: see `check_recorded`.

    Raises BrokerUnavailable, BrokerError or SchemaError.
    """
    admin = _Admin(name, options)
    found = admin.find()
    if found is None:
        admin.create(lanes)
    else:
        check_recorded(found, recorded)  # first: another topic's settings are of no interest
        admin.check_settings()
        if found.lanes >= lanes:
            return found
        admin.widen(lanes)
    made = admin.await_lanes(lanes)
    check_recorded(made, recorded)
    return made


def check_recorded(found: ProgressTopic | None, recorded: str | None) -> None:
    """Raises SchemaError if this is not the topic with the id that the term row records.

    `recorded`: None if any is accepted; empty if the row, which a leader has filled, has been emptied since.
    """
    if recorded is None or (found is not None and found.id == recorded):
        return
    if not recorded:
        raise SchemaError("the term row no longer records a progress topic", hint="start the harvesters again")
    what = "is missing" if found is None else f"is a different one ({found.id})"
    raise SchemaError(
        f"the progress topic, {recorded}, {what}: records that are committed in Kafka and still in"
        " the outbox would be published again",
        hint="restore it; or, to accept repeats, run UPDATE <outbox>_term SET progress_topic = NULL, and start the"
        " harvesters again",
    )


def durable(brokers: int) -> tuple[int, dict[str, str]]:
    """The replication factor for acknowledged records to survive the loss of a broker, and the settings that this
    needs.
    """
    replicas = min(_REPLICAS, max(1, brokers))
    least = "2" if replicas >= _REPLICAS else "1"
    return replicas, {"min.insync.replicas": least, "unclean.leader.election.enable": "false"}


def largest_record_bytes(name: str, options: Mapping[str, Any]) -> int | None:
    """The topic's maximum batch size; None if this user may not know it. Raises BrokerUnavailable or BrokerError."""
    settings = _Admin(name, options).settings()
    return int(settings["max.message.bytes"]) if settings is not None else None


def why_refused(name: str, lane: int, error: KafkaError, options: Mapping[str, Any]) -> str:
    """Explains a progress record's delivery error, with a remedy."""
    said = f"the progress record of lane {lane} is refused: {error.name()}: {error.str()}"
    if error.name() in _TOO_LARGE:
        return f"{said}; {_Admin(name, options)._alter('max.message.bytes=1048588')}"
    if error.code() in _DENIED:
        return f"{said}; allow this user to write to {name}"
    if error.name() in _TOO_FEW:
        try:
            return f"{said}; {_Admin(name, options).copies_of(lane)}"
        except BrokerError as failed:
            return f"{said}; {failed.message}"
    return f"{said}; check the state of the topic {name}"


class _Admin:
    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._servers = name, options.get("bootstrap.servers", "")
        self._admin = AdminClient({**options, **SILENT})

    def find(self) -> ProgressTopic | None:
        topic = self._described()
        return ProgressTopic(self._name, str(topic.topic_id), len(topic.partitions)) if topic is not None else None

    def _described(self) -> Any:
        try:
            future = self._admin.describe_topics(TopicCollection([self._name]), request_timeout=_TIMEOUT_S)[self._name]
            return answer(future, _TIMEOUT_S * 2)
        except KafkaException as error:
            if error.args[0].code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}:
                return None
            raise self._failed("described", error) from error

    def copies_of(self, lane: int) -> str:
        """How many of the in-sync copies required by the topic the lane's partition has, in words."""
        topic, settings = self._described(), self.settings()
        if topic is None or lane >= len(topic.partitions):
            return f"{self._name} has no partition {lane}: it was deleted"
        here = topic.partitions[lane]
        least, copies, in_sync = int((settings or {}).get("min.insync.replicas", 1)), here.replicas, here.isr
        said = f"{self._name}/{lane} has {len(in_sync)} of {len(copies)} copies in sync, min.insync.replicas is {least}"
        if least > len(copies):
            return f"{said}: add replicas, or {self._alter(f'min.insync.replicas={max(1, len(copies) - 1)}')}"
        if least > len(in_sync):
            return f"{said}: bring the brokers back"
        return said

    def settings(self) -> dict[str, str] | None:
        """None if this user may not know them."""
        resource = ConfigResource(ResourceType.TOPIC, self._name)
        try:
            entries = self._admin.describe_configs([resource], request_timeout=_TIMEOUT_S)[resource]
            return {name: entry.value for name, entry in answer(entries, _TIMEOUT_S * 2).items()}
        except KafkaException as error:
            if error.args[0].code() in _DENIED:
                return None
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._not_yet() from error
            raise self._failed("described", error) from error

    def check_settings(self) -> None:
        """The last record of each lane must be kept, and the next one accepted."""
        settings = self.settings()
        if settings is None:
            return  # an administrator who hides them has created the topic as documented
        policy, most = settings["cleanup.policy"], settings["max.message.bytes"]
        if policy != "compact":
            raise self._misfit(f"cleanup.policy={policy}: its records may expire", "cleanup.policy=compact")
        if int(most) < LEAST_RECORD_BYTES:
            text = f"max.message.bytes={most}: a progress record needs at least {LEAST_RECORD_BYTES}"
            raise self._misfit(text, "max.message.bytes=1048588")

    def _misfit(self, what: str, remedy: str) -> BrokerError:
        return BrokerError(f"the progress topic {self._name!r} has {what}", hint=self._alter(remedy))

    def _alter(self, setting: str) -> str:
        return f"kafka-configs --alter --entity-type topics --entity-name {self._name} --add-config {setting}"

    def create(self, lanes: int) -> None:
        try:
            replicas, kept = durable(len(self._admin.list_topics(timeout=_TIMEOUT_S).brokers))
            topic = NewTopic(self._name, lanes, replicas, config={**_CONFIG, **kept})
            answer(self._admin.create_topics([topic], operation_timeout=_TIMEOUT_S)[self._name], _TIMEOUT_S * 2)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._failed("created", error) from error

    def widen(self, lanes: int) -> None:
        try:
            made = self._admin.create_partitions([NewPartitions(self._name, lanes)], operation_timeout=_TIMEOUT_S)
            answer(made[self._name], _TIMEOUT_S * 2)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_PARTITIONS:  # another harvester was faster
                raise self._failed(f"given {lanes} partitions", error) from error

    def await_lanes(self, lanes: int) -> ProgressTopic:
        """Wait until the change, which has been made, is visible to the broker that answers."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (found := self.find()) is None or found.lanes < lanes:
            if time.monotonic() > deadline:
                raise self._not_yet()
            time.sleep(_TURN_S)
        return found

    def _not_yet(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"the progress topic {self._name!r} does not exist yet")

    def _failed(self, what: str, error: KafkaException) -> BrokerError:
        text = error.args[0].str()
        if error.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}:
            text = f"Kafka at {self._servers} does not answer: {text}"
            return BrokerUnavailable(text, hint=BrokerUnavailable.NO_ANSWER)
        return BrokerError(
            f"the progress topic {self._name!r} cannot be {what}: {text}",
            hint="exactly-once mode needs it: allow it to this user, or create it with cleanup.policy=compact",
        )

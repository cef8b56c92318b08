"""Reads topics through Spark's Kafka source: converts client options, and queries brokers through its admin client."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from harvester.errors import BrokerUnavailable
from harvester.pipeline.errors import InputMissing
from harvester.pipeline.tables import java_class

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SAME = ("bootstrap.servers", "security.protocol", "ssl.endpoint.identification.algorithm", "client.id")
_UPPER = "security.protocol"

Place = tuple[str, int]
"""Topic and partition."""


def for_java(options: Mapping[str, object]) -> dict[str, str]:
    """librdkafka's options → those of Kafka's Java client; options without a counterpart are omitted.

    Covers addresses, TLS with a CA in a PEM file, and SASL with a password. A client certificate needs one PEM file
    with key and chain: pass it as the Java client's ssl.keystore.*.
    """
    found = {name: str(options[name]) for name in _SAME if options.get(name) not in (None, "")}
    if _UPPER in found:
        found[_UPPER] = found[_UPPER].upper()
    # "none" disables host name verification in librdkafka, an empty string in Java.
    if found.get("ssl.endpoint.identification.algorithm") == "none":
        found["ssl.endpoint.identification.algorithm"] = ""
    if ca := options.get("ssl.ca.location"):
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(ca)}
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms")
    user = options.get("sasl.username")
    if mechanism and user is not None:
        found["sasl.mechanism"] = str(mechanism)
        module = "scram.Scram" if str(mechanism).startswith("SCRAM") else "plain.Plain"
        found["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module}LoginModule required"
            f" username={_quoted(user)} password={_quoted(options.get('sasl.password', ''))};"
        )
    return found


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


_WAIT = {"default.api.timeout.ms": "30000", "request.timeout.ms": "10000"}
_READING = {
    # At the end of each partition Spark waits for a fetch that returns nothing: for 500 ms by default.
    "fetch.max.wait.ms": "10",
    # The next fetch is sent when the previous one is consumed, so a few large ones wait less than many small ones.
    "max.partition.fetch.bytes": str(4 * 2**20),
    "max.poll.records": "2000",
}


def options(kafka: Mapping[str, str]) -> dict[str, str]:
    """Options for Spark's Kafka source: committed records with headers, and an error if records were removed.

    `kafka`: options of Kafka's Java client, which override all defaults except the isolation level.
    """
    client = {**_READING, **kafka, "isolation.level": "read_committed"}
    return {f"kafka.{name}": value for name, value in client.items()} | {
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }


TUNING = ("minPartitions", "maxRecordsPerPartition", "minOffsetsPerTrigger", "maxTriggerDelay", "groupIdPrefix")
"""The options of Spark's Kafka source that users may set: the others decide what is read."""


def stream(
    spark: SparkSession, kafka: Mapping[str, str], topics: Iterable[str], most: int, tuning: Mapping[str, str]
) -> DataFrame:
    """Every committed record from the beginning, as schemas.KAFKA; at most `most` in a batch.

    The stream fails if Kafka has removed records with which the checkpoint continues, instead of skipping them.
    """
    range_ = {**tuning, "subscribe": ",".join(topics), "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(most)}
    return spark.readStream.format("kafka").options(**options(kafka), **range_).load()


_COMMON, _ADMIN = "org.apache.kafka.common", "org.apache.kafka.clients.admin"
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"  # Uuid.ZERO_UUID


@dataclass(frozen=True, slots=True)
class TopicAdmin:
    """Queries topics and their partitions through Kafka's Java admin client, over py4j."""

    _java: Callable[[str], Any]
    _client: Any

    def names(self) -> set[str]:
        """The topics that exist."""
        return set(self._client.listTopics().names().get())

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Kafka's ids of the existing ones of these topics; empty for brokers before 2.8, which have no ids."""
        found = self._client.listTopics().namesToListings().get()
        there = {topic: found.get(topic) for topic in topics}
        ids = {topic: str(one.topicId().toString()) for topic, one in there.items() if one is not None}
        return {topic: one for topic, one in ids.items() if one != _NO_ID}

    def places(self, topics: Iterable[str]) -> list[Place]:
        """The partitions of these topics, all of which must exist."""
        described = self._client.describeTopics(list(topics)).allTopicNames().get()
        return [(topic, info.partition()) for topic in topics for info in described[topic].partitions()]

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        """The first offsets of their logs."""
        return self._offsets(places, self._java(f"{_ADMIN}.OffsetSpec").earliest())

    def latest(self, places: Iterable[Place], *, committed: bool = False) -> dict[Place, int]:
        """The end offsets of their logs; `committed`: only up to the first open transaction."""
        return self._offsets(places, self._java(f"{_ADMIN}.OffsetSpec").latest(), committed=committed)

    def since(self, places: Iterable[Place], since: datetime, end: Mapping[Place, int]) -> dict[Place, int]:
        """The first offsets with this or a later timestamp, capped at those of `end`; where there are none, `end`."""
        spec = self._java(f"{_ADMIN}.OffsetSpec").forTimestamp(int(since.timestamp() * 1000))
        found = self._offsets(places, spec)
        return {place: end[place] if offset < 0 else min(offset, end[place]) for place, offset in found.items()}

    def compacted(self, topics: Iterable[str]) -> tuple[str, ...]:
        """The compacted ones of these topics."""
        kind = self._java(f"{_COMMON}.config.ConfigResource")
        topic_type = self._java(f"{_COMMON}.config.ConfigResource$Type").TOPIC
        named = {topic: kind(topic_type, topic) for topic in topics}
        configs = self._client.describeConfigs(list(named.values())).all().get()
        policies = {topic: str(configs[one].get("cleanup.policy").value()) for topic, one in named.items()}
        return tuple(topic for topic, policy in policies.items() if "compact" in policy)

    def _offsets(self, places: Iterable[Place], wanted: Any, *, committed: bool = False) -> dict[Place, int]:
        level = self._java(f"{_COMMON}.IsolationLevel")
        level = level.READ_COMMITTED if committed else level.READ_UNCOMMITTED
        partition = self._java(f"{_COMMON}.TopicPartition")
        named = {place: partition(*place) for place in places}
        request = self._java("java.util.HashMap")()
        for one in named.values():
            request.put(one, wanted)
        found = self._client.listOffsets(request, self._java(f"{_ADMIN}.ListOffsetsOptions")(level))
        return {place: int(found.partitionResult(one).get().offset()) for place, one in named.items()}


@contextmanager
def admin(spark: SparkSession, kafka: Mapping[str, str], wanted: str) -> Iterator[TopicAdmin]:
    """An admin client. Turns its errors into BrokerUnavailable with `wanted`, such as "topics", in the message."""
    from py4j.protocol import Py4JJavaError

    java = partial(java_class, spark)
    properties = java("java.util.Properties")()
    for name, value in {**_WAIT, **kafka}.items():
        properties.setProperty(name, value)
    try:
        client = java(f"{_ADMIN}.AdminClient").create(properties)
        try:
            yield TopicAdmin(java, client)
        finally:
            client.close()
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage() or error.java_exception.getClass().getName())
        raise BrokerUnavailable(
            f"no {wanted} from {kafka.get('bootstrap.servers')}: {said.splitlines()[0]}", hint="check the brokers"
        ) from error


def require_topics(spark: SparkSession, kafka: Mapping[str, str], topics: Iterable[str]) -> set[str]:
    """All topics that exist. Raises InputMissing, naming those of `topics` that do not, or BrokerUnavailable."""
    with admin(spark, kafka, "topics") as client:
        found = client.names()
    if missing := [topic for topic in topics if topic not in found]:
        raise InputMissing(
            f"no topic {', '.join(missing)} at {kafka.get('bootstrap.servers')}",
            hint="create it, or let the harvester publish its first record; `lake --retire-topic` drops a topic from a"
            " lake",
        )
    return found


def chosen_topics(
    spark: SparkSession,
    kafka: Mapping[str, str],
    named: Sequence[str],
    pattern: str | None = None,
    without: Collection[str] = (),
) -> tuple[str, ...]:
    """The named topics, and those others whose whole name matches the pattern, by name; none of `without`.

    Raises as `require_topics` does, and InputMissing if there are none.
    """
    found = require_topics(spark, kafka, named)
    matching = sorted(topic for topic in found if pattern is not None and re.fullmatch(pattern, topic))
    if chosen := tuple(topic for topic in dict.fromkeys([*named, *matching]) if topic not in without):
        return chosen
    raise InputMissing(
        f"no topic at {kafka.get('bootstrap.servers')} matches {pattern}",
        hint="correct the pattern, or let the harvester publish its first record",
    )

"""What the brokers say of topics before they are read: where they begin and end, and whether they drop records.

Offsets are places to read from and to, nothing more: between two of them there may be as many records as you like.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harvester.errors import BrokerUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Place = tuple[str, int]

_WAIT = {"default.api.timeout.ms": "30000", "request.timeout.ms": "10000"}
_OPEN_S = 60.0  # the default of brokers for transactions without a word from their producer
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """`start` and `end`: what to read of each partition. `earliest`: where its log begins now."""

    earliest: Mapping[Place, int]
    start: Mapping[Place, int]
    end: Mapping[Place, int]
    compacted: tuple[str, ...] = ()

    @property
    def truncated(self) -> tuple[Place, ...]:
        """Partitions of which the beginning has been removed, and which are read from what is left."""
        return tuple(place for place, first in self.earliest.items() if first > 0 and first >= self.start[place])

    def options(self) -> dict[str, str]:
        """For Spark's batch source."""
        topics = ",".join(sorted({topic for topic, _ in self.end}))
        return {
            "subscribe": topics, "startingOffsets": _by_topic(self.start), "endingOffsets": _by_topic(self.end),
        }  # fmt: skip


def topic_bounds(
    spark: SparkSession,
    kafka: Mapping[str, str],
    topics: Iterable[str],
    since: datetime | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> TopicBounds:
    """Ask the brokers. Everything that is in the topics now is within the bounds, also behind open transactions.

    These are waited for, since a reader of what is committed sees nothing behind them. Raises BrokerUnavailable.
    """
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm
    properties = jvm.java.util.Properties()
    for name, value in {**_WAIT, **kafka}.items():
        properties.setProperty(name, value)
    try:
        asked = _Asked(jvm, jvm.org.apache.kafka.clients.admin.AdminClient.create(properties))
        try:
            return _bounds(asked, list(dict.fromkeys(topics)), since, progress)
        finally:
            asked.admin.close()
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage() or error.java_exception.getClass().getName())
        raise BrokerUnavailable(
            f"no ends of topics from {kafka.get('bootstrap.servers')}: {said.splitlines()[0]}",
            hint="look after the brokers",
        ) from error


def _bounds(asked: _Asked, topics: list[str], since: datetime | None, progress: Callable[[str], None]) -> TopicBounds:
    places = asked.places(topics)
    end = asked.offsets(places, "latest", committed=False)
    earliest = asked.offsets(places, "earliest", committed=False)
    start = dict(earliest)
    if since is not None:
        # None has come since: then there is nothing to read.
        found = asked.offsets(places, "since", committed=False, at_ms=int(since.timestamp() * 1000))
        start = {place: min(end[place], found[place] if found[place] >= 0 else end[place]) for place in places}
    deadline, told = time.monotonic() + _OPEN_S, False
    while True:
        readable = asked.offsets(places, "latest", committed=True)
        held = [place for place in places if readable[place] < end[place]]
        if not held:
            return TopicBounds(earliest, start, end, asked.compacted(topics))
        name = f"{held[0][0]}[{held[0][1]}]"
        if not told:
            progress(f"waiting for the open transaction that hides the end of {name}")
            told = True
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"an open transaction hides the end of {name} ({_OPEN_S:g} s waited)",
                hint="wait until its producer or its timeout ends it",
            )
        time.sleep(_LOOK_S)


def _by_topic(offsets: Mapping[Place, int]) -> str:
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        found.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(found)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Kafka's admin client, through py4j."""

    jvm: Any
    admin: Any

    def places(self, topics: list[str]) -> list[Place]:
        described = self.admin.describeTopics(topics).allTopicNames().get()
        return [(topic, info.partition()) for topic in topics for info in described[topic].partitions()]

    def offsets(self, places: list[Place], which: str, *, committed: bool, at_ms: int = 0) -> dict[Place, int]:
        spec = self.jvm.org.apache.kafka.clients.admin.OffsetSpec
        wanted = {"latest": spec.latest, "earliest": spec.earliest, "since": lambda: spec.forTimestamp(at_ms)}[which]()
        level = self.jvm.org.apache.kafka.common.IsolationLevel
        level = level.READ_COMMITTED if committed else level.READ_UNCOMMITTED
        named = {place: self.jvm.org.apache.kafka.common.TopicPartition(*place) for place in places}
        request = self.jvm.java.util.HashMap()
        for one in named.values():
            request.put(one, wanted)
        found = self.admin.listOffsets(request, self.jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(level))
        return {place: int(found.partitionResult(one).get().offset()) for place, one in named.items()}

    def compacted(self, topics: list[str]) -> tuple[str, ...]:
        kind = self.jvm.org.apache.kafka.common.config.ConfigResource
        # A nested class, whose name Python cannot spell as an attribute of the outer one.
        topic_type = self.jvm.org.apache.kafka.common.config.ConfigResource.Type.TOPIC
        named = {topic: kind(topic_type, topic) for topic in topics}
        configs = self.admin.describeConfigs(list(named.values())).all().get()
        policies = {topic: str(configs[one].get("cleanup.policy").value()) for topic, one in named.items()}
        return tuple(topic for topic, policy in policies.items() if "compact" in policy)

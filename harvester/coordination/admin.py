"""Shows claims from outside, and does what an administrator may do about them. Thin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from harvester.bounds import SILENT, passes, refresh
from harvester.clock import clock_s
from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import (
    Client,
    GroupPartition,
    Message,
    ReleasingPartition,
    SettingPosition,
    Unreadable,
)
from harvester.coordination.core.overview import PartitionRow
from harvester.coordination.core.world import Claim, ClaimVerdict, Reading, World
from harvester.coordination.errors import CoordinationTopicError
from harvester.coordination.log import CoordinationLog
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import failed
from harvester.errors import BrokerError, BrokerUnavailable

_TIMEOUT_S = 30.0
_CALL_S = 10.0
_TURN_S = 0.1
_CLIENT_ID = "harvester-claims"
_TIMES = 5  # that a group offset is written against consumers that write theirs


class Observer:
    """Reads all of the coordination log as the consumers do, and claims nothing. Writes two messages:

    *Release* says ReleasingPartition in the holder's name, under the holder's generation. So it ends that claim and no
    later one, and leaves positions alone: what the holder says before it in the log counts, what it says after it is
    refused. A position set instead would take back what the holder commits in that moment; at most once would not hold.

    *Setting a position* says SettingPosition, and is done when that was read back: whoever claims next begins there,
    whatever the group's offset in Kafka says. That is written, too, for tools, and for the day on which retention has
    removed the log. A holder may write its own once more before it reads that its claim has ended; so it is looked at
    afterwards, as long as nobody has claimed the partition.

    The settings' interval has to be the consumers' own: verdicts depend on it.
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._admin = AdminClient({**settings.kafka, **SILENT})
        count = self.partitions().get(settings.coordination_topic, 0)
        if not count:
            raise CoordinationTopicError(
                f"there is no coordination topic {settings.coordination_topic!r}",
                hint="the first consumer makes it; --coordination-topic names another one",
            )
        self.worlds = {partition: World.begin(settings.timing) for partition in range(count)}
        self._lost: set[GroupPartition] = set()
        self._log = CoordinationLog(settings.coordination_topic, settings.kafka, lambda place, _: self._lost.add(place))
        ends = self._log.begin(self.worlds)
        self._until(lambda: all(self.worlds[each].next_offset >= end for each, end in ends.items()))

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close(_CALL_S)

    # -- looking

    def follow(self, timeout_s: float) -> None:
        """Read what has come, waiting so long for the first of it."""
        for _ in self._readings(timeout_s):
            pass

    def partitions(self) -> dict[str, int]:
        """How many partitions each topic has."""
        try:
            found = self._admin.list_topics(timeout=_CALL_S).topics  # asking for one by name might create it
        except KafkaException as error:
            raise self._failed(error) from error
        return {name: len(topic.partitions) for name, topic in found.items() if topic.error is None}

    def bounds(self, topics: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """First offset and end of each partition; topics that there are not are left out."""
        counts = self.partitions()
        places = [TopicPartition(name, each) for name in topics for each in range(counts.get(name, 0))]
        spec: Any = OffsetSpec
        firsts, ends = self._offsets(places, spec.earliest()), self._offsets(places, spec.latest())
        return {place: (first, ends[place]) for place, first in firsts.items()}

    # -- changing

    def release(self, rows: Sequence[PartitionRow]) -> dict[GroupPartition, bool]:
        """End these claims; false where the holder has changed since, and for what is not known for certain."""
        messages = [
            ReleasingPartition(row.place, row.holder, 0, row.generation, row.generation, row.last_offset)
            for row in rows
            if row.holder is not None and row.certain and self._positioned(row.place)
        ]
        accepted = self._say(messages)
        return {row.place: accepted.get(row.place) is ClaimVerdict.ACCEPTED for row in rows}

    def set_positions(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Whatever claims there are end, and the next ones begin with these offsets."""
        consumer = Consumer({**self._settings.kafka, **SILENT, "group.id": group, "enable.auto.commit": False})
        left = dict(offsets)
        try:
            consumer.commit(offsets=_partitions(left), asynchronous=False)
            self._say([setting_position(GroupPartition(group, *place), offset) for place, offset in offsets.items()])
            for _ in range(_TIMES):
                found = {
                    (each.topic, each.partition): each.offset for each in consumer.committed(_partitions(left), _CALL_S)
                }
                left = {
                    place: offset
                    for place, offset in left.items()
                    if found[place] != offset and self._claim(GroupPartition(group, *place)).holder is None
                }
                if not left:
                    return
                consumer.commit(offsets=_partitions(left), asynchronous=False)
        except KafkaException as error:
            raise self._failed(error) from error
        finally:
            consumer.close()

    # -- parts

    def _say(self, messages: Sequence[Message]) -> dict[GroupPartition, ClaimVerdict]:
        """Write these, one for a partition, and read on until all have come back."""
        self._lost.clear()
        verdicts: dict[GroupPartition, ClaimVerdict] = {}
        awaited = {message.place: message for message in messages}
        for message in messages:
            self._log.append(log_partition(message.place, len(self.worlds)), message)

        def answered() -> bool:
            if self._lost:
                raise BrokerUnavailable(
                    f"{len(self._lost)} of {len(messages)} messages may not have reached the coordination topic",
                    hint="look at the claims, and try again",
                )
            return verdicts.keys() == awaited.keys()

        self._until(answered, lambda reading: _note(reading, awaited, verdicts))
        return verdicts

    def _until(self, done: Callable[[], bool], note: Callable[[Reading], None] = lambda _: None) -> None:
        """Read until that; BrokerUnavailable when nothing comes any more."""
        deadline = clock_s() + _TIMEOUT_S
        while not done():
            if clock_s() > deadline:
                raise BrokerUnavailable(f"the coordination topic {self._log.topic!r} could not be read to its end")
            for reading in self._readings(_TURN_S):
                note(reading)
                deadline = clock_s() + _TIMEOUT_S

    def _readings(self, timeout_s: float) -> Iterator[Reading]:
        for partition, offset, at_ms, value in self._log.poll(timeout_s):
            yield self.worlds[partition].read(offset, at_ms, value)

    def _offsets(self, places: Sequence[TopicPartition], spec: Any) -> dict[tuple[str, int], int]:
        deadline = clock_s() + _CALL_S
        while True:
            try:
                asked = self._admin.list_offsets(dict.fromkeys(places, spec), request_timeout=_CALL_S) if places else {}
                return {(each.topic, each.partition): found.result(_TIMEOUT_S).offset for each, found in asked.items()}
            except KafkaException as error:
                if not passes(error.args[0]) or clock_s() > deadline:
                    raise self._failed(error) from error
                time.sleep(_TURN_S)  # a partition of a topic that has just been made may be led by nobody yet
                refresh(self._admin, None, _CALL_S)

    def _positioned(self, place: GroupPartition) -> bool:
        """Else a release would make a position of what is only the best that is known."""
        return self._claim(place).positioned

    def _claim(self, place: GroupPartition) -> Claim:
        return self.worlds[log_partition(place, len(self.worlds))].claim(place)

    def _failed(self, error: KafkaException) -> BrokerError:
        return failed(self._settings.coordination_topic, self._settings.kafka, error)


def _partitions(offsets: Mapping[tuple[str, int], int]) -> list[TopicPartition]:
    return [TopicPartition(topic, each, offset) for (topic, each), offset in offsets.items()]


def setting_position(place: GroupPartition, offset: int) -> SettingPosition:
    """The message that makes the next claim begin there."""
    return SettingPosition(place, Client(_CLIENT_ID, uuid4().hex), 1, None, None, offset - 1 if offset > 0 else None)


def _note(
    reading: Reading, awaited: Mapping[GroupPartition, Message], verdicts: dict[GroupPartition, ClaimVerdict]
) -> None:
    message = reading.message
    if message is None or isinstance(message, Unreadable):
        return
    if awaited.get(message.place) == message:
        verdicts[message.place] = reading.verdict

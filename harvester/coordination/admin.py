"""Shows people and scripts who holds what, and executes an administrator's requests.

What to show, and which positions are meant, is decided purely; `Observer` is thin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from harvester.bounds import SILENT, answer, passes, refresh
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
from harvester.coordination.core.world import (
    NO_GENERATION,
    SET_TO_START,
    Claim,
    ClaimVerdict,
    Freshness,
    Reading,
    World,
)
from harvester.coordination.errors import CoordinationError, CoordinationTopicError
from harvester.coordination.log import CoordinationLog
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import failed
from harvester.errors import BrokerError, BrokerUnavailable

Bounds = Mapping[tuple[str, int], tuple[int, int]]


_TIMEOUT_S = 30.0
_CALL_S = 10.0
_TURN_S = 0.1
_CLIENT_ID = "harvester-claims"
_TIMES = 5  # attempts to write a group offset while consumers write theirs


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """One partition of a group. `age_s`: since the holder's last accepted message; `lag`: records behind the last
    processed one.

    `certain`: a reader from offset 0 would say the same; otherwise the log begins too late, and two intervals resolve
    it.
    """

    place: GroupPartition
    holder: Client | None
    freshness: Freshness
    generation: int | None
    last_offset: int | None
    age_s: float | None
    lag: int | None
    certain: bool


def rows(worlds: Iterable[World], bounds: Bounds, now_ms: int, group: str | None = None) -> list[PartitionRow]:
    """The rows of one group, or of all, ordered by name.

    `bounds` are the first offset and the end of each partition; partitions that were never claimed get a row as well.
    `now_ms` is the local time. Freshness is decided by the log, whose time stops when nobody writes any more; so a
    claim is shown as a claim appended now would find it.
    """
    found: dict[GroupPartition, tuple[World, Claim]] = {}
    for world in worlds:
        for place, claim in world.claims.items():
            if group is None or place.group == group:
                found[place] = (world, claim)
    consumed = {(place.group, place.topic) for place in found}
    never = {
        GroupPartition(name, topic, partition)
        for name, known in consumed
        for topic, partition in bounds
        if topic == known and GroupPartition(name, topic, partition) not in found
    }
    shown = [_row(place, world, claim, bounds, now_ms) for place, (world, claim) in found.items()]
    shown += [
        PartitionRow(place, None, Freshness.FREE, None, None, None, _lag(bounds, place, None), certain=True)
        for place in never
    ]
    return sorted(shown, key=lambda row: row.place)


def _row(place: GroupPartition, world: World, claim: Claim, bounds: Bounds, now_ms: int) -> PartitionRow:
    log_ms = max(world.now_ms, now_ms)
    held = claim.holder is not None
    return PartitionRow(
        place,
        claim.holder,
        claim.freshness(log_ms, world.timing),
        claim.generation if claim.generation != NO_GENERATION else None,
        None if claim.last_offset == SET_TO_START else claim.last_offset,
        (log_ms - claim.beat_ms) / 1000 if held else None,
        _lag(bounds, place, claim.last_offset),
        certain=claim.exact,
    )


def _lag(bounds: Bounds, place: GroupPartition, last_offset: int | None) -> int | None:
    found = bounds.get((place.topic, place.partition))
    if found is None:
        return None  # the topic is gone
    first, end = found
    return max(0, end - max(first, 0 if last_offset is None else last_offset + 1))


def positions(bounds: Bounds, topic: str, partitions: Collection[int], offset: str) -> dict[tuple[str, int], int]:
    """Offsets by partition. `offset`: a number, `earliest` or `latest`; without partitions, all of the topic.

    Raises CoordinationError if something does not exist.
    """
    known = {partition: found for (name, partition), found in bounds.items() if name == topic}
    if not known:
        raise CoordinationError(f"there is no topic {topic!r}")
    chosen: dict[tuple[str, int], int] = {}
    for partition in sorted(set(partitions) or known):
        if partition not in known:
            raise CoordinationError(f"topic {topic!r} has no partition {partition}: {len(known)} from 0 on")
        first, end = known[partition]
        chosen[topic, partition] = _offset(f"{topic}[{partition}]", first, end, offset)
    return chosen


def _offset(where: str, first: int, end: int, offset: str) -> int:
    if offset == "earliest":
        return first
    if offset == "latest":
        return end
    if not offset.isdecimal():
        raise CoordinationError(f"{offset!r} is not an offset", hint="a number, earliest or latest")
    if not first <= int(offset) <= end:
        raise CoordinationError(
            f"{where} holds offsets {first:,} to {end:,}, not {int(offset):,}",
            hint="earliest and latest are valid for every partition",
        )
    return int(offset)


class Observer:
    """Reads the whole coordination log like a consumer, and claims nothing. Writes two kinds of message:

    *Release* writes ReleasingPartition in the holder's name, under the holder's generation. So it ends that claim and
    no later one, and leaves positions alone: what the holder wrote before it in the log counts, what it writes after it
    is refused. Setting a position instead would take back what the holder commits at that moment, breaking
    at-most-once.

    *Setting a position* writes SettingPosition, and is done when that has been read back: the next claim begins there,
    whatever the group's offset in Kafka is. That offset is written, too, for tools, and for the time when retention has
    removed the log. A holder may write its own offset once more before it reads that its claim has ended; so it is
    checked afterwards, as long as nobody has claimed the partition.

    The settings' interval must be the consumers' own: verdicts depend on it.
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._admin = AdminClient({**settings.kafka, **SILENT})
        count = self.partitions().get(settings.coordination_topic, 0)
        if not count:
            raise CoordinationTopicError(
                f"there is no coordination topic {settings.coordination_topic!r}",
                hint="the first consumer creates it; use --coordination-topic to name another one",
            )
        self.worlds = {partition: World.begin(settings.timing) for partition in range(count)}
        self._lost: set[GroupPartition] = set()
        self._log = CoordinationLog(settings.coordination_topic, settings.kafka, lambda place, _: self._lost.add(place))
        ends = self._log.begin(self.worlds)
        self._until(lambda: all(self.worlds[each].next_offset >= end for each, end in ends.items()))

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close(_CALL_S)

    # -- looking

    def follow(self, timeout_s: float) -> None:
        """Read what has arrived, waiting up to `timeout_s` for the first record."""
        for _ in self._readings(timeout_s):
            pass

    def partitions(self) -> dict[str, int]:
        """The number of partitions of each topic."""
        try:
            found = self._admin.list_topics(timeout=_CALL_S).topics  # requesting one by name might create it
        except KafkaException as error:
            raise self._failed(error) from error
        return {name: len(topic.partitions) for name, topic in found.items() if topic.error is None}

    def bounds(self, topics: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """First offset and end of each partition; topics that do not exist are left out."""
        counts = self.partitions()
        places = [TopicPartition(name, each) for name in topics for each in range(counts.get(name, 0))]
        spec: Any = OffsetSpec
        firsts, ends = self._offsets(places, spec.earliest()), self._offsets(places, spec.latest())
        return {place: (first, ends[place]) for place, first in firsts.items()}

    # -- changing

    def release(self, rows: Sequence[PartitionRow]) -> dict[GroupPartition, bool]:
        """End these claims; false if the holder has changed since, or if the state is not certain."""
        messages = [
            ReleasingPartition(row.place, row.holder, 0, row.generation, row.generation, row.last_offset)
            for row in rows
            # Otherwise a release would turn a best guess into a position.
            if row.holder is not None and row.certain and self._claim(row.place).positioned
        ]
        accepted = self._say(messages)
        return {row.place: accepted.get(row.place) is ClaimVerdict.ACCEPTED for row in rows}

    def set_positions(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """All existing claims end, and the next ones begin at these offsets."""
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
        """Write these, one per partition, and read on until all have come back."""
        self._lost.clear()
        verdicts: dict[GroupPartition, ClaimVerdict] = {}
        awaited = {message.place: message for message in messages}
        for message in messages:
            self._log.append(log_partition(message.place, len(self.worlds)), message)

        def answered() -> bool:
            if self._lost:
                raise BrokerUnavailable(
                    f"{len(self._lost)} of {len(messages)} messages may not have reached the coordination topic",
                    hint="check the claims, and try again",
                )
            return verdicts.keys() == awaited.keys()

        self._until(answered, lambda reading: _note(reading, awaited, verdicts))
        return verdicts

    def _until(self, done: Callable[[], bool], note: Callable[[Reading], None] = lambda _: None) -> None:
        """Read until `done`; BrokerUnavailable if nothing arrives any more."""
        deadline = clock_s() + _TIMEOUT_S
        while not done():
            if clock_s() > deadline:
                raise BrokerUnavailable(f"the coordination topic {self._log.topic!r} could not be read to its end")
            for reading in self._readings(_TURN_S):
                note(reading)
                deadline = clock_s() + _TIMEOUT_S

    def _readings(self, timeout_s: float) -> Iterator[Reading]:
        for partition, offset, at_ms, value in self._log.poll(timeout_s):
            yield from self.worlds[partition].read(offset, at_ms, value)

    def _offsets(self, places: Sequence[TopicPartition], spec: Any) -> dict[tuple[str, int], int]:
        deadline = clock_s() + _CALL_S
        while True:
            try:
                asked = self._admin.list_offsets(dict.fromkeys(places, spec), request_timeout=_CALL_S) if places else {}
                return {(each.topic, each.partition): answer(found, _TIMEOUT_S).offset for each, found in asked.items()}
            except KafkaException as error:
                if not passes(error.args[0]) or clock_s() > deadline:
                    raise self._failed(error) from error
                time.sleep(_TURN_S)  # a partition of a newly created topic may not have a leader yet
                refresh(self._admin, None, _CALL_S)

    def _claim(self, place: GroupPartition) -> Claim:
        return self.worlds[log_partition(place, len(self.worlds))].claim(place)

    def _failed(self, error: KafkaException) -> BrokerError:
        return failed(self._settings.coordination_topic, self._settings.kafka, error)


def _partitions(offsets: Mapping[tuple[str, int], int]) -> list[TopicPartition]:
    return [TopicPartition(topic, each, offset) for (topic, each), offset in offsets.items()]


def setting_position(place: GroupPartition, offset: int) -> SettingPosition:
    """The message that makes the next claim begin at `offset`."""
    return SettingPosition(
        place, Client.begin(_CLIENT_ID, uuid4().hex), 1, None, None, offset - 1 if offset > 0 else None
    )


def _note(
    reading: Reading, awaited: Mapping[GroupPartition, Message], verdicts: dict[GroupPartition, ClaimVerdict]
) -> None:
    message = reading.message
    if message is None or isinstance(message, Unreadable):
        return
    if awaited.get(message.place) == message:
        verdicts[message.place] = reading.verdict

"""One partition as known to the inbox: its position, the ids seen, and whether a record is new.

What is kept here is a copy of the row in the database, valid as long as the row has the same version; versions grow by
one with each change. A record is a repeat if its offset is below the position (it was read again), or if its origin was
seen before (the relay sent it again, so that it is in the log twice). A record without an origin is judged by its
offset alone.

This module has the common part of both inboxes, blocking and asyncio, between their statements: which rows to lock, how
to interpret them, what to write. An `InboxTransaction` is one batch. Its rows are locked and given to `take`; then come
`judge`, the application's effects, `write`, and finally `end`, whatever the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from harvester.errors import InboxError, InboxFenced
from harvester.idempotence.seen import SeenIds
from harvester.origin import VERSION, Origin, decode, find, version

Place = tuple[str, int]  # topic, partition


class Message(Protocol):
    """What the inbox needs from a consumed message; confluent_kafka.Message is one."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> Any: ...
    def value(self) -> Any: ...
    def headers(self) -> Any: ...
    def error(self) -> Any: ...


class Novelty(StrEnum):
    """Whether a record is new, or why not."""

    NEW = "new"
    READ_AGAIN = "its offset was consumed before"
    SENT_AGAIN = "its id was seen before"


class Judged(NamedTuple):
    """The judgement of a record; `origin` is None if it has none."""

    novelty: Novelty
    origin: Origin | None


class InboxPartition:
    """The copy of a row. `stale`: the row must be read again, and has at least `version`."""

    def __init__(self, place: Place, generation: int, header: str) -> None:
        self.place = place
        self.generation = generation
        self.version = 0
        self.stale = True
        self.next_offset: int | None = None
        self.seen = SeenIds()
        self._header = header
        self._failed: set[int] = set()

    def load(self, next_offset: int | None, version: int, seen: bytes) -> None:
        """Copy the row; raises CorruptSeenIds."""
        self.seen = SeenIds.from_bytes(seen)
        self.next_offset, self.version, self.stale = next_offset, version, False

    def check(self, offsets: Iterable[int]) -> None:
        """Refuse to continue after a record whose effect failed: it would be lost unnoticed."""
        position = self.next_offset or 0
        failed = min((each for each in self._failed if each >= position), default=None)
        new = next((each for each in offsets if each >= position), None)  # records read again do not make up for it
        if failed is not None and new is not None and failed < new:
            topic, partition = self.place
            raise InboxError(
                f"the effect of {topic}[{partition}]@{failed} was not committed, but now {new} was given",
                hint="seek back to it and try again; to skip it, record it without doing anything",
            )

    def judge(self, offset: int, headers: Any) -> Judged:
        """Accept a record; the caller has locked the row. Offsets ascend, except when records are read again.

        Raises InboxError if the record's header has a newer version: without its id it is unknown whether it is new.
        """
        value = find(headers, self._header)
        origin = decode(value)
        if self.next_offset is not None and offset < self.next_offset:
            return Judged(Novelty.READ_AGAIN, origin)
        if origin is None and version(value) not in (None, VERSION):
            topic, partition = self.place
            raise InboxError(
                f"the header {self._header!r} of {topic}[{partition}]@{offset} has version {version(value)},"
                f" but this consumer reads {VERSION}",
                hint="upgrade the consumers before the relay",
            )
        self.next_offset = offset + 1
        if origin is None:
            return Judged(Novelty.NEW, None)
        new = self.seen.add(origin.incarnation, origin.id)
        if origin.low_water is not None:  # applied after the record itself; never above it
            self.seen.low_water(origin.incarnation, origin.low_water)
        return Judged(Novelty.NEW if new else Novelty.SENT_AGAIN, origin)

    def done(self, *, written: bool) -> None:
        """The transaction was committed; `written`: including the row."""
        self.version += written
        if self._failed:
            self._failed = {each for each in self._failed if each >= (self.next_offset or 0)}

    def undone(self, offsets: Iterable[int]) -> None:
        """The transaction of these offsets failed, or its outcome is unknown."""
        self.stale = True
        self._failed.update(offsets)


def by_place(messages: Sequence[Message]) -> dict[Place, list[Message]]:
    """The messages of each partition, in order; raises InboxError for an error message or one without a place."""
    found: dict[Place, list[Message]] = {}
    for message in messages:
        error, topic, partition = message.error(), message.topic(), message.partition()
        if error is not None:
            raise InboxError(f"the consumer reported an error, not a record: {error}", hint="check error() first")
        if topic is None or partition is None or message.offset() is None:
            raise InboxError("a message without topic, partition and offset was not consumed")
        found.setdefault((topic, partition), []).append(message)
    return found


def offset_of(message: Message) -> int:
    """The offset of a message checked by `by_place`."""
    offset = message.offset()
    assert offset is not None
    return offset


Parameters = dict[str, Any]
Row = tuple[Any, ...]
C = TypeVar("C")
_log = logging.getLogger("harvester.idempotence")


@dataclass(frozen=True, slots=True)
class Position:
    """Where to read on. `offset` is None if this group has not consumed the partition yet."""

    topic: str
    partition: int
    offset: int | None
    generation: int


class OpenPartitions:
    """The partitions that a group's consumer has open."""

    def __init__(self, group: str, header: str, max_intervals: int, idle_timeout_s: float) -> None:
        self.name = group
        self.max_intervals = max_intervals
        self.idle_ms = round(idle_timeout_s * 1000)
        self._header = header
        self._open: dict[Place, InboxPartition] = {}

    def opening(self, place: Place, generation: int | None) -> Parameters:
        """The parameters of the statement that opens a row."""
        return {**self.row(place), "generation": generation, "seen": SeenIds().to_bytes()}

    def opened(self, place: Place, row: Row) -> Position:
        """Store the statement's result: generation, version, next offset, seen."""
        generation, version, next_offset, seen = row
        partition = InboxPartition(place, generation, self._header)
        partition.load(next_offset, version, seen)
        self._open[place] = partition
        return Position(*place, next_offset, generation)

    def close(self, place: Place) -> None:
        self._open.pop(place, None)

    def partition(self, place: Place) -> InboxPartition:
        """The open partition; raises InboxError if it is not open."""
        partition = self._open.get(place)
        if partition is None:
            raise InboxError(f"{place[0]}[{place[1]}] is not open", hint="open it when it is assigned")
        return partition

    def refused(self, messages: Iterable[Message]) -> None:
        """None of these messages was accepted, whatever they are: nothing may continue after them."""
        for message in messages:
            topic, number, offset = message.topic(), message.partition(), message.offset()
            if message.error() is None and topic is not None and number is not None and offset is not None:
                partition = self._open.get((topic, number))
                if partition is not None:
                    partition.undone([offset])

    def row(self, place: Place) -> Parameters:
        return {"group": self.name, "topic": place[0], "partition": place[1]}

    def rows(self, partitions: Iterable[InboxPartition]) -> Parameters:
        places = [partition.place for partition in partitions]
        return {
            "group": self.name,
            "topics": [topic for topic, _ in places],
            "partitions": [number for _, number in places],
        }

    def forgetting(self, rows: Iterable[Row], incarnation: Any) -> list[Parameters]:
        """Parameters to remove an incarnation from (topic, partition, seen); none for rows that do not have it."""
        changes = []
        for topic, partition, data in rows:
            seen = SeenIds.from_bytes(data)
            if seen.forget(incarnation):
                changes.append({**self.row((topic, partition)), "seen": seen.to_bytes()})
        return changes


class InboxTransaction:
    """One batch of messages; raises InboxError for invalid ones."""

    def __init__(self, group: OpenPartitions, messages: Sequence[Message]) -> None:
        self._group = group
        self._messages = messages
        try:
            places = by_place(messages)
            self._partitions = {place: group.partition(place) for place in places}
        except InboxError:
            group.refused(messages)
            raise
        self._offsets = {place: [offset_of(each) for each in found] for place, found in places.items()}
        self._before: dict[Place, int | None] = {}

    def locking(self) -> Parameters:
        """The parameters of the statement that locks the rows."""
        partitions = self._partitions.values()
        versions = [None if partition.stale else partition.version for partition in partitions]
        return {**self._group.rows(partitions), "versions": versions, "idle": str(self._group.idle_ms)}

    def take(self, rows: Iterable[Row]) -> bool:
        """Compare the locked rows; False if a copy was old: roll back and lock again, which returns the new row.

        Raises InboxFenced, and InboxError if a row is gone or went back, or a failed effect would be skipped.
        """
        found = {(row[0], row[1]): row[2:6] for row in rows}
        fresh = True
        for (topic, number), partition in self._partitions.items():
            row = found.get((topic, number))
            if row is None:
                raise InboxError(f"the row of {topic}[{number}] is gone", hint="open the partition again")
            generation, version, next_offset, seen = row
            if generation > partition.generation:
                raise InboxFenced(topic, number, ours=partition.generation, theirs=generation)
            for what, before, now in (
                ("generation", partition.generation, generation),
                ("version", partition.version, version),
            ):
                if now < before:  # continuing would skip what the row no longer knows
                    raise InboxError(
                        f"the row of {topic}[{number}] went back from {what} {before} to {now}:"
                        " the database was restored, or a failover lost commits",
                        hint="open the partition again and read on from its position",
                    )
            if partition.stale:
                partition.load(next_offset, version, seen)
            elif partition.version != version:
                partition.stale = True
                fresh = False
        if fresh:
            for place, partition in self._partitions.items():
                partition.check(self._offsets[place])
                self._before[place] = partition.next_offset
        return fresh

    def resolve(self, resolver: Callable[[Message], Message]) -> None:
        """Replace each message by the resolver's result."""
        self._messages = [resolver(message) for message in self._messages]

    def judge(self) -> list[tuple[Message, Judged]]:
        """Each message with its judgement, in the given order."""
        judged = []
        for message in self._messages:
            topic, number = message.topic(), message.partition()
            assert topic is not None
            assert number is not None
            partition = self._partitions[topic, number]
            judged.append((message, partition.judge(offset_of(message), message.headers())))
        return judged

    def write(self) -> Parameters | None:
        """The parameters of the statement that writes the rows; None if nothing was new."""
        moved = [self._partitions[place] for place in self._moved()]
        if not moved:
            return None
        most = self._group.max_intervals
        for partition in moved:
            if len(partition.seen) <= most:
                continue
            shed = partition.seen.shed(most - most // 10)  # one by one, each transaction would warn from now on
            if shed:
                topic, number = partition.place
                _log.warning("%s[%d]: %d intervals of seen ids forgotten, the lowest", topic, number, shed)
        return {
            **self._group.rows(moved),
            "offsets": [partition.next_offset for partition in moved],
            "seen": [partition.seen.to_bytes() for partition in moved],
        }

    def end(self, *, committed: bool) -> None:
        """The outcome. Unless it is a commit, the rows are read before they are trusted again."""
        moved = set(self._moved())
        for place, partition in self._partitions.items():
            if committed:
                partition.done(written=place in moved)
            else:
                partition.undone(self._offsets[place])

    def _moved(self) -> list[Place]:
        return [place for place, before in self._before.items() if self._partitions[place].next_offset != before]


class Batch(Generic[C]):
    """A running transaction. `cursor` belongs to it; what it does is committed together with the offsets, or not at
    all.
    """

    def __init__(self, cursor: C, judged: Sequence[tuple[Message, Judged]]) -> None:
        self.cursor = cursor
        self.judged = judged

    @property
    def new(self) -> list[Message]:
        """The messages whose effect is still to be done, in the given order."""
        return [message for message, (novelty, _) in self.judged if novelty is Novelty.NEW]


class Effect(Generic[C]):
    """A batch of one record; `origin` is None if it has none."""

    message: Message
    novelty: Novelty
    origin: Origin | None

    def __init__(self, batch: Batch[C]) -> None:
        self.cursor = batch.cursor
        ((self.message, (self.novelty, self.origin)),) = batch.judged

    @property
    def is_new(self) -> bool:
        """Whether the effect is still to be done."""
        return self.novelty is Novelty.NEW

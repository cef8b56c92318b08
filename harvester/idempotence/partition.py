"""One partition as the inbox knows it: where it stands, what it has seen, and whether a record is new.

What is kept here is a copy of the row in the database, good as long as the row has the same version; versions grow
by one with each change. A record is a repeat when its offset lies below the position (it was read again), or when its
origin was seen before (the relay sent it again, so that it stands in the log twice). A record without an origin passes
by its offset alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from harvester.errors import InboxError
from harvester.idempotence.seen import SeenIds
from harvester.origin import VERSION, Origin, decode, find, version

Place = tuple[str, int]  # topic, partition


class Message(Protocol):
    """What the inbox needs of a consumed message; confluent_kafka.Message is one."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def headers(self) -> Any: ...
    def error(self) -> Any: ...


class Novelty(StrEnum):
    """Whether a record is new, or why not."""

    NEW = "new"
    READ_AGAIN = "its offset was consumed before"
    SENT_AGAIN = "its id was seen before"


class Judged(NamedTuple):
    """What a record is; `origin` is None where it carries none."""

    novelty: Novelty
    origin: Origin | None


class Partition:
    """The copy of a row. `stale`: it has to be read anew, and has `version` at least."""

    def __init__(self, place: Place, generation: int, header: str) -> None:
        self.place = place
        self.generation = generation
        self.version = 0
        self.stale = True
        self.next_offset: int | None = None
        self.seen = SeenIds()
        self._header = header
        self._failed: int | None = None

    def load(self, next_offset: int | None, version: int, seen: bytes) -> None:
        """Take over what the row says; raises CorruptSeenIds."""
        self.seen = SeenIds.from_bytes(seen)
        self.next_offset, self.version, self.stale = next_offset, version, False

    def check(self, offset: int) -> None:
        """Refuse to go on behind a record whose effect has failed: it would be lost, and nobody told."""
        failed = self._failed
        if failed is not None and failed < offset and (self.next_offset or 0) <= failed:
            topic, partition = self.place
            raise InboxError(
                f"the effect of {topic}[{partition}]@{failed} was not committed, and now {offset} was given",
                hint="seek back to it and try again; to leave it out, record it without doing anything",
            )

    def judge(self, offset: int, headers: Any) -> Judged:
        """Take a record; whoever calls this has the row locked. Offsets ascend but for what is read again.

        Raises InboxError when its header is of a newer form: without its id nobody can tell whether it is new.
        """
        value = find(headers, self._header)
        origin = decode(value)
        if self.next_offset is not None and offset < self.next_offset:
            return Judged(Novelty.READ_AGAIN, origin)
        if origin is None and version(value) not in (None, VERSION):
            topic, partition = self.place
            raise InboxError(
                f"the header {self._header!r} of {topic}[{partition}]@{offset} has version {version(value)},"
                f" this consumer reads {VERSION}",
                hint="upgrade the consumers before the relay",
            )
        self.next_offset = offset + 1
        if origin is None:
            return Judged(Novelty.NEW, None)
        new = self.seen.add(origin.incarnation, origin.id)
        if origin.low_water is not None:  # after the record itself, and never above it
            self.seen.low_water(origin.incarnation, origin.low_water)
        return Judged(Novelty.NEW if new else Novelty.SENT_AGAIN, origin)

    def done(self, *, written: bool) -> None:
        """The transaction is committed; whether the row was written in it."""
        self.version += written
        if self._failed is not None and (self.next_offset or 0) > self._failed:
            self._failed = None

    def undone(self, offset: int) -> None:
        """The transaction that began with this offset failed, or its end is not known."""
        self.stale = True
        self._failed = offset if self._failed is None else min(self._failed, offset)


def by_place(messages: Sequence[Message]) -> dict[Place, list[Message]]:
    """The messages of each partition, in their order; raises InboxError for one that is an error or has no place."""
    found: dict[Place, list[Message]] = {}
    for message in messages:
        error, topic, partition = message.error(), message.topic(), message.partition()
        if error is not None:
            raise InboxError(f"the consumer reports an error, not a record: {error}", hint="look at error() first")
        if topic is None or partition is None or message.offset() is None:
            raise InboxError("a message without topic, partition and offset was not consumed")
        found.setdefault((topic, partition), []).append(message)
    return found


def offset_of(message: Message) -> int:
    """The offset of a message that `by_place` has let pass."""
    offset = message.offset()
    assert offset is not None
    return offset

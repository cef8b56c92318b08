"""The messages of clients on the coordination topic, and their text form. Pure.

A message is one line, readable with a console consumer:

    Heartbeat v1 group=billing topic=orders partition=3 client=b-1 instance=5f0c number=7 generation=41 confirmed=52
    last_offset=1041

(one line, wrapped here). The first word is the kind, the second the version of that kind, followed by its fields in
this order, each once. Names are percent-encoded (RFC 3986: everything but letters, digits and `_.-~`, as UTF-8), so no
name can contain a blank, a `=` or a `/`; numbers are decimal; `-` stands for a missing number.

All kinds carry the fields of the original protocol and four more. `instance` distinguishes two lives of one client id
(P29). `number` counts the messages of an instance, so that it recognises each of them when it reads the log.
`generation` is the offset of the claim under which the message is sent; in ClaimingPartition, the newest that its
sender knows for certain. `confirmed` is the offset of the newest message under that claim that its sender has read back
as accepted, initially the claim's own: from it a late reader learns what was true there (`world`).

A client that holds many places sends most of its heartbeats *combined*, one record for all places in the same partition
of the topic. Each counts as if it were a separate message at the record's offset:

    Heartbeats v1 group=billing client=b-1 instance=5f0c~ interval_ms=5000 orders/3=7:41:52:1041 orders/4=9:42:53:-

with a place's number, generation, confirmed and last_offset after its name. A client that can read this indicates it by
the `~` at the end of its instance.

Text that is not a message of a known version is `Unreadable`, a value with the reason: it changes nothing, and the
reader warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote

VERSION = 1
MAX_BYTES = 65_536  # per record
MOST_TOGETHER = 150  # heartbeats per record: they fit even with the longest names that Kafka allows
_MAX_NUMBER = 2**63
_NONE = "-"
_READS_TOGETHER = "~"


class GroupPartition(NamedTuple):
    """A partition of a topic, for a group: the unit of claims. A tuple, since it is hashed constantly."""

    group: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] of {self.group}"


class Client(NamedTuple):
    """One life of a client: its id, unique in its group, and the instance."""

    id: str
    instance: str

    @classmethod
    def begin(cls, client_id: str, instance: str) -> Client:
        """A life of the current version."""
        return cls(client_id, instance + _READS_TOGETHER)

    @property
    def reads_together(self) -> bool:
        """Whether its version reads `Heartbeats`."""
        return self.instance.endswith(_READS_TOGETHER)


@dataclass(frozen=True, slots=True)
class _Said:
    place: GroupPartition
    client: Client
    number: int
    generation: int | None
    confirmed: int | None

    carries: ClassVar[str | None] = None  # name of the position's field

    @property
    def parts(self) -> tuple[Message, ...]:
        """The messages in the record."""
        return (self,)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class ClaimingPartition(_Said):
    """A request to hold a partition. The earliest wins; the record's own offset is the generation.

    Carries, like a heartbeat, its sender's HeartbeatInterval and mode.
    """

    interval_ms: int | None = None
    at_most_once: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat(_Said):
    """The holder is alive, and has processed everything up to `last_offset`; None: nothing yet."""

    last_offset: int | None
    interval_ms: int | None = None
    at_most_once: bool = False
    carries: ClassVar[str | None] = "last_offset"


@dataclass(frozen=True, slots=True)
class ReleasingPartition(_Said):
    """The holder gives the partition up, with everything up to `last_offset` processed."""

    last_offset: int | None
    carries: ClassVar[str | None] = "last_offset"


@dataclass(frozen=True, slots=True)
class ClaimingMessages(_Said):
    """The holder is about to take the records up to `proposed_last_offset`, at most once."""

    proposed_last_offset: int
    carries: ClassVar[str | None] = "proposed_last_offset"


@dataclass(frozen=True, slots=True)
class ReturningMessages(_Said):
    """At most once: the holder returns the claimed records after `last_offset`, and never takes them.

    None: all from offset 0 on.
    """

    last_offset: int | None
    carries: ClassVar[str | None] = "last_offset"


@dataclass(frozen=True, slots=True)
class SettingPosition(_Said):
    """An administrator ends any claim, and makes the next one begin after `last_offset`."""

    last_offset: int | None
    carries: ClassVar[str | None] = "last_offset"


Message = Heartbeat | ClaimingPartition | ReleasingPartition | ClaimingMessages | ReturningMessages | SettingPosition


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """The heartbeats of a client for several places of a group, none of them at most once. At least one."""

    parts: tuple[Heartbeat, ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is not a message to this version; for the process's log."""

    reason: str


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Heartbeat, ClaimingPartition, ReleasingPartition, ClaimingMessages, ReturningMessages, SettingPosition)
}
_INTERVAL, _MODE = "interval_ms", "mode"  # the last fields of a message that has them
_AT_MOST_ONCE = "at-most-once"
_NUMBERS = ("number", "generation", "confirmed", "last_offset")
_FIELDS_TOGETHER = ("group", "client", "instance", "interval_ms")
_FIELDS = ("group", "topic", "partition", "client", "instance", "number", "generation", "confirmed")


def encode(message: Message | Heartbeats) -> bytes:
    """The record's value. Raises UnicodeEncodeError for a name with a lone surrogate."""
    if isinstance(message, Heartbeats):
        return _encode_together(message.parts)
    place, client = message.place, message.client
    names = _name(place.group), _name(place.topic), place.partition, _name(client.id), _name(client.instance)
    values = *names, message.number, _number(message.generation), _number(message.confirmed)
    words = [type(message).__name__, f"v{VERSION}"]
    words += [f"{field}={value}" for field, value in zip(_FIELDS, values, strict=True)]
    if message.carries is not None:
        words.append(f"{message.carries}={_number(getattr(message, message.carries))}")
    if isinstance(message, ClaimingPartition | Heartbeat):
        words += [] if message.interval_ms is None else [f"{_INTERVAL}={message.interval_ms}"]
        words += [f"{_MODE}={_AT_MOST_ONCE}"] if message.at_most_once else []
    return " ".join(words).encode("ascii")


def _encode_together(beats: tuple[Heartbeat, ...]) -> bytes:
    first = beats[0]
    who = _name(first.place.group), _name(first.client.id), _name(first.client.instance), _number(first.interval_ms)
    words = [Heartbeats.__name__, f"v{VERSION}"]
    words += [f"{field}={value}" for field, value in zip(_FIELDS_TOGETHER, who, strict=True)]
    for beat in beats:
        numbers = beat.number, _number(beat.generation), _number(beat.confirmed), _number(beat.last_offset)
        words.append(f"{_name(beat.place.topic)}/{beat.place.partition}={':'.join(map(str, numbers))}")
    return " ".join(words).encode("ascii")


def may_concern(group: str, topics: Iterable[str]) -> Callable[[bytes | None], bool]:
    """A quick test, in a twentieth of the time to parse a record: False if it says nothing of a group's places in these
    topics.
    """
    of_group = f" group={_name(group)} ".encode("ascii")
    of_topics = [form.encode("ascii") for name in map(_name, topics) for form in (f" topic={name} ", f" {name}/")]
    return lambda value: value is not None and of_group in value and any(each in value for each in of_topics)


def decode(value: bytes | None) -> Message | Heartbeats | Unreadable:
    """The message, or why it is not one. Raises nothing."""
    if not value or len(value) > MAX_BYTES:
        return Unreadable(f"a record of {len(value or b'')} bytes is not a message")
    try:
        return _parse(value.decode("ascii"))
    except ValueError as error:  # UnicodeDecodeError is one
        return Unreadable(str(error))


def _parse(text: str) -> Message | Heartbeats | Unreadable:
    kind, *words = text.split(" ")
    together = kind == Heartbeats.__name__
    if not words or not (together or kind in _KINDS):
        return Unreadable(f"{text[:40]!r} is not a known kind of message")
    if words[0] != f"v{VERSION}":
        return Unreadable(f"a {kind} of version {words[0][:20]!r}: this program reads v{VERSION}, a newer one wrote it")
    if together:
        return _parse_together(words[1:])
    made = _KINDS[kind]
    expected = _FIELDS if made.carries is None else (*_FIELDS, made.carries)
    found = [word.partition("=") for word in words[1:]]
    said: dict[str, Any] = {}
    if made in (ClaimingPartition, Heartbeat):
        if found and (found[-1][0], found[-1][2]) == (_MODE, _AT_MOST_ONCE):
            said["at_most_once"] = bool(found.pop())
        if found and found[-1][0] == _INTERVAL:
            said[_INTERVAL] = _whole(found.pop()[2])
    if tuple(field for field, _, _ in found) != expected:
        return Unreadable(f"a {kind} has fields other than {', '.join(expected)}")
    group, topic, partition, client, instance, number, *numbers = (text for _, _, text in found)
    place = GroupPartition(_unname(group), _unname(topic), _whole(partition))
    sender = Client(_unname(client), _unname(instance))
    rest = [_optional(text) for text in numbers]
    if made is ClaimingMessages and rest[-1] is None:
        return Unreadable("a ClaimingMessages has no offset")
    build: Callable[..., Message] = made
    return build(place, sender, _whole(number), *rest, **said)


def _parse_together(words: list[str]) -> Heartbeats | Unreadable:
    found = [word.partition("=") for word in words]
    who, places = found[: len(_FIELDS_TOGETHER)], found[len(_FIELDS_TOGETHER) :]
    if tuple(field for field, _, _ in who) != _FIELDS_TOGETHER or not places:
        return Unreadable(f"Heartbeats have fields other than {', '.join(_FIELDS_TOGETHER)} and places")
    group, client, instance, interval = (text for _, _, text in who)
    of, sender, interval_ms = _unname(group), Client(_unname(client), _unname(instance)), _optional(interval)
    beats = []
    for place, _, text in places:
        topic, _, partition = place.partition("/")
        numbers = text.split(":")
        if len(numbers) != len(_NUMBERS):
            return Unreadable(f"a place of Heartbeats has numbers other than {', '.join(_NUMBERS)}")
        number, generation, confirmed, last_offset = numbers
        beats.append(
            Heartbeat(
                GroupPartition(of, _unname(topic), _whole(partition)), sender, _whole(number),
                _optional(generation), _optional(confirmed), _optional(last_offset), interval_ms,
            )
        )  # fmt: skip
    return Heartbeats(tuple(beats))


def position(message: Message) -> int | None:
    """The last offset reported as processed; None if the message reports none."""
    return None if isinstance(message, ClaimingPartition | ClaimingMessages) else message.last_offset


def _name(name: str) -> str:
    return quote(name, safe="")


def _unname(text: str) -> str:
    return unquote(text, errors="strict")


def _number(number: int | None) -> str:
    return _NONE if number is None or number < 0 else str(number)


def _optional(text: str) -> int | None:
    return None if text == _NONE else _whole(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 19:
        raise ValueError(f"{text[:40]!r} is not a number")
    number = int(text)
    if number >= _MAX_NUMBER:
        raise ValueError(f"{text} does not fit into 64 bits")
    return number

"""Why consumers cannot coordinate, or cannot go on: a branch of the tree in `harvester.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from harvester.errors import ExitCode, HarvesterError


class CoordinationError(HarvesterError):
    """Consumers cannot coordinate through Kafka."""


class CoordinationTopicError(CoordinationError):
    """The coordination topic has settings under which claims would not be safe; nothing was written to it."""

    exit_code = ExitCode.CONFIGURATION


class UnknownTopic(CoordinationError):
    """A topic to consume does not exist; `close` are existing ones with a similar name."""

    exit_code = ExitCode.INPUT

    def __init__(self, topic: str, close: Sequence[str], *, option: str = "--topic") -> None:
        self.topic = topic
        meant = f"did you mean {', '.join(map(repr, close))}? " if close else ""
        super().__init__(f"there is no topic {topic!r}", hint=f"{meant}correct {option}, or create the topic first")


class DuplicateClient(CoordinationError):
    """Another live process of the group has this client id; `client_id` is the id, `other` that one's instance."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, client_id: str, other: str) -> None:
        self.group, self.client_id, self.other = group, client_id, other
        super().__init__(
            f"another live process consumes for group {group!r} as client {client_id!r} (instance {other})",
            hint="give each process a client id of its own, or none: then a random one is used",
        )


class OtherInterval(CoordinationError):
    """A client of the group that may be alive counts by another HeartbeatInterval; both in seconds."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, ours_s: float, client_id: str, theirs_s: float) -> None:
        self.group, self.ours_s, self.client_id, self.theirs_s = group, ours_s, client_id, theirs_s
        super().__init__(
            f"the heartbeat interval is {ours_s:g} s here, and {theirs_s:g} s for client {client_id!r} of {group!r}",
            hint="give all consumers of a group the same; to change it, stop all of them first",
        )


class OtherMode(CoordinationError):
    """A client of the group that may be alive consumes at most once, and this one at least once; or the reverse."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, client_id: str, *, at_most_once: bool) -> None:
        self.group, self.client_id, self.at_most_once = group, client_id, at_most_once
        ours, theirs = ("at most once", "at least once") if at_most_once else ("at least once", "at most once")
        super().__init__(
            f"this consumer of {group!r} consumes {ours}, and client {client_id!r} {theirs}",
            hint="give all consumers of a group the same mode; to change it, stop all of them first",
        )


class OffsetOutOfRange(CoordinationError):
    """The record that comes next is not to be had; `first` and `end` are what the partition holds."""

    def __init__(self, topic: str, partition: int, *, offset: int, first: int, end: int) -> None:
        self.topic, self.partition = topic, partition
        self.offset, self.first, self.end = offset, first, end
        gone = "retention has removed it" if offset < first else "the topic was made anew, or has lost records"
        super().__init__(
            f"{topic}[{partition}] goes on at offset {offset}, and holds {first} to {end}: {gone}",
            hint="`harvester claims set-position` says where to go on; the setting out_of_range does where records"
            " were removed, for good",
        )

"""Why consumers cannot coordinate, or cannot continue: a branch of the tree in `harvester.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from harvester.errors import ExitCode, HarvesterError


class CoordinationError(HarvesterError):
    """Consumers cannot coordinate through Kafka."""


class CoordinationTopicError(CoordinationError):
    """The coordination topic has settings with which claims would not be safe; nothing was written to it."""

    exit_code = ExitCode.CONFIGURATION


class UnknownTopic(CoordinationError):
    """A topic to consume does not exist; `close` are existing ones with similar names."""

    exit_code = ExitCode.INPUT

    def __init__(self, topic: str, close: Sequence[str], *, option: str = "--topic") -> None:
        self.topic = topic
        meant = f"did you mean {', '.join(map(repr, close))}? " if close else ""
        super().__init__(f"there is no topic {topic!r}", hint=f"{meant}correct {option}, or create the topic first")


class DuplicateClient(CoordinationError):
    """Another live process of the group has this client id; `client_id` is the id, `other` that process's instance."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, client_id: str, other: str) -> None:
        self.group, self.client_id, self.other = group, client_id, other
        super().__init__(
            f"another live process consumes for group {group!r} as client {client_id!r} (instance {other})",
            hint="give each process its own client id, or none to use a random one",
        )


class OtherInterval(CoordinationError):
    """A client of the group that may be alive uses another HeartbeatInterval; both in seconds."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, ours_s: float, client_id: str, theirs_s: float) -> None:
        self.group, self.ours_s, self.client_id, self.theirs_s = group, ours_s, client_id, theirs_s
        super().__init__(
            f"the heartbeat interval is {ours_s:g} s here, and {theirs_s:g} s for client {client_id!r} of {group!r}",
            hint="use the same for all consumers of a group; to change it, stop all of them first",
        )


class OtherMode(CoordinationError):
    """A client of the group that may be alive consumes at most once, but this one at least once; or the reverse."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, group: str, client_id: str, *, at_most_once: bool) -> None:
        self.group, self.client_id, self.at_most_once = group, client_id, at_most_once
        ours, theirs = ("at most once", "at least once") if at_most_once else ("at least once", "at most once")
        super().__init__(
            f"this consumer of {group!r} consumes {ours}, but client {client_id!r} {theirs}",
            hint="use the same mode for all consumers of a group; to change it, stop all of them first",
        )


class OffsetOutOfRange(CoordinationError):
    """The next record no longer exists; `first` and `end` are the bounds of the partition."""

    def __init__(self, topic: str, partition: int, *, offset: int, first: int, end: int) -> None:
        self.topic, self.partition = topic, partition
        self.offset, self.first, self.end = offset, first, end
        gone = "retention has removed it" if offset < first else "the topic was recreated, or has lost records"
        super().__init__(
            f"{topic}[{partition}] continues at offset {offset}, but holds {first} to {end}: {gone}",
            hint="`harvester claims set-position` sets where to continue; the setting out_of_range does so permanently"
            " for removed records",
        )

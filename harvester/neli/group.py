"""What the relay needs of a group, as an interface: Kafka's (`member`), or a fake for users' own tests (`fake`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


class GroupListener(Protocol):
    """Who is told what the group says. All but `revoking` are quick; all are called on the group's own thread."""

    def acquired(self) -> None: ...  # this process leads, as far as the group can tell
    def fenced(self, reason: str) -> None: ...  # trust is over, at once
    def revoking(self, within_s: float) -> None: ...  # returns when leadership is given up, or time is up
    def trust(self, until_s: float) -> None: ...  # leadership is proven up to this moment of CLOCK_BOOTTIME
    def fail(self, error: BaseException) -> None: ...  # the group cannot be used: the harvester ends
    def trouble(self, text: str | None, level: int = logging.WARNING) -> None: ...  # what it waits for, or None
    def marker_alive(self) -> bool: ...  # whether the mark loop is live (P14)
    def client_said(self, level: int, text: str) -> None: ...  # a line of the client library for the log


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this member is and which outbox it serves."""

    name: str
    outbox: str
    outbox_name: str


@dataclass(frozen=True, slots=True)
class Missing:
    """What a member waits for that does not lead. `within_s`: the longest that it lasts, where that is known.

    `is_member`: the group counts it in, so that it could take over as soon as this is over.
    """

    text: str
    within_s: float | None = None
    is_member: bool = False


class Group(Protocol):
    """A place in an election."""

    def start(self, identity: Identity, listener: GroupListener) -> None:
        """Join, without waiting for it."""

    def lead(self, leader_id: UUID, term: int) -> None:
        """The relay leads under this term: heartbeats carry it from now on."""

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Give leadership up; with `rejoin_after_s`, leave the group for that long so that another may try."""

    @property
    def highest_term(self) -> int:
        """The highest term seen in the leader topic."""

    def missing(self) -> Missing | None:
        """What this waits for; None if it leads, or somebody else does and this could take over.

        Returns at once, on any thread.
        """

    def cluster(self) -> str | None:
        """The id of the Kafka cluster that elects, None when it has none. Raises BrokerUnavailable."""

    def stop(self) -> None:
        """Leave the group, and wait until that is done."""

"""The interface of a group for the relay: Kafka's (`member`), or a fake for users' own tests (`fake`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


class GroupListener(Protocol):
    """Receives the group's notifications, all on the group's own thread. All methods but `revoking` must be quick."""

    def acquired(self) -> None: ...  # this process leads, as far as the group knows
    def fenced(self, reason: str) -> None: ...  # trust has ended, effective immediately
    def revoking(self, within_s: float) -> None: ...  # returns when leadership has been given up or time is up
    def trust(self, until_s: float) -> None: ...  # leadership is proven up to this moment of CLOCK_BOOTTIME
    def fail(self, error: BaseException) -> None: ...  # the group is unusable: the harvester ends
    def trouble(self, text: str | None, level: int = logging.WARNING) -> None: ...  # what it is waiting for, or None
    def marker_alive(self) -> bool: ...  # whether the mark loop is live (P14)
    def client_said(self, level: int, text: str) -> None: ...  # a line of the client library for the log


@dataclass(frozen=True, slots=True)
class Identity:
    """This member, and the outbox it serves."""

    name: str
    outbox: str
    outbox_name: str


@dataclass(frozen=True, slots=True)
class Missing:
    """What a member that does not lead is waiting for. `within_s`: the longest it can last, if known.

    `is_member`: the group counts this member in, so it could take over as soon as this is over.
    """

    text: str
    within_s: float | None = None
    is_member: bool = False


class Group(Protocol):
    """A place in an election."""

    def start(self, identity: Identity, listener: GroupListener) -> None:
        """Join, without waiting for the outcome."""

    def lead(self, leader_id: UUID, term: int) -> None:
        """The relay leads under this term, which heartbeats carry from now on."""

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Give up leadership; with `rejoin_after_s`, also leave the group for that long so that another may try."""

    @property
    def highest_term(self) -> int:
        """The highest term seen in the leader topic."""

    def missing(self) -> Missing | None:
        """What this member is waiting for; None if it leads, or if another member does and this one could take over.

        Returns at once, on any thread.
        """

    def cluster(self) -> str | None:
        """The id of the Kafka cluster that elects, None if it has none. Raises BrokerUnavailable."""

    def stop(self) -> None:
        """Leave the group, and wait until that has happened."""

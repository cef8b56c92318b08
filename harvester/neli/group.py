"""What the relay needs of a group, as an interface: Kafka's (`member`), or a fake for users' own tests (`fake`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class GroupCallbacks:
    """What a group tells the supervisor. All but `revoking` are quick and run on the group's own thread.

    - acquired(): this process leads, as far as the group can tell
    - fenced(reason): trust is over, at once
    - revoking(within_s): the group takes leadership away and waits; returns when it is given up, or time is up
    - trust(until_s): proven up to this moment of CLOCK_BOOTTIME
    - failed(error): the group cannot be used; ends the harvester
    - trouble(text): what it waits for; None when that is over
    - marker_alive(): whether the mark loop is live (P14)
    - client_said(level, text): a line of the client library for the log
    """

    acquired: Callable[[], None]
    fenced: Callable[[str], None]
    revoking: Callable[[float], None]
    trust: Callable[[float], None]
    failed: Callable[[BaseException], None]
    trouble: Callable[[str | None], None]
    marker_alive: Callable[[], bool]
    client_said: Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this member is and which outbox it serves."""

    name: str
    outbox: str
    outbox_name: str


class Group(Protocol):
    """A place in an election."""

    def start(self, identity: Identity, callbacks: GroupCallbacks) -> None:
        """Join, without waiting for it."""

    def lead(self, leader_id: UUID, term: int) -> None:
        """The relay leads under this term: heartbeats carry it from now on."""

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Give leadership up; with `rejoin_after_s`, leave the group for that long so that another may try."""

    @property
    def highest_term(self) -> int:
        """The highest term seen in the leader topic."""

    def cluster(self) -> str | None:
        """The id of the Kafka cluster that elects, None when it has none. Raises BrokerUnavailable."""

    def stop(self) -> None:
        """Leave the group, and wait until that is done."""

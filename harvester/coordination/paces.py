"""Whether others of the group count by another HeartbeatInterval, or consume in the other mode. Pure.

Whether a claim is stale depends on the interval, and each reader takes its own: two clients with different ones would
not agree who holds a place. And a record is not processed at most once if some of those who share the partitions repeat
what was not committed. So claims and heartbeats say by which interval their sender counts, and in which mode it is.
Who begins, and finds that a client which may still live differs, ends before it has claimed anything. Of those that
begin in the same moment with different modes the one at least once ends; with different intervals they warn.

A client may live for 2 of *its* intervals after its last heartbeat, unless it has released the place. Log time tells if
it goes on; where it stands still, since nobody writes, the newcomer listens for as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harvester.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    Heartbeat,
    Message,
    Place,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
)
from harvester.coordination.rationalizer import Verdict

_COUNTS = frozenset({Verdict.WON, Verdict.ACCEPTED, Verdict.UNDECIDED})


@dataclass(frozen=True, slots=True)
class Other:
    """A client that differs, and how it consumes."""

    client: Client
    interval_ms: int
    at_most_once: bool


class Paces:
    """See the module's text."""

    def __init__(self, interval_ms: int, *, at_most_once: bool = False) -> None:
        self._interval_ms, self._at_most_once = interval_ms, at_most_once
        self._others: dict[Place, tuple[Other, int]] = {}  # and when it was heard of
        self._known: set[Client] = set()

    def heard(self, message: Message, verdict: Verdict, now_ms: int) -> Other | None:
        """A message of the group, in the order of the log. Its sender, if that one differs."""
        if verdict not in _COUNTS:
            return None
        other = self._other(message)
        if other is not None:
            self._others[message.place] = (other, now_ms)
        elif not isinstance(message, ClaimingMessages | ReturningMessages):  # which do not tell of the interval
            self._others.pop(message.place, None)
        return other

    def _other(self, message: Message) -> Other | None:
        match message:
            case ClaimingPartition(interval_ms=interval_ms) | Heartbeat(interval_ms=interval_ms):
                other = Other(message.client, interval_ms or self._interval_ms, message.at_most_once)
            case ClaimingMessages() | ReturningMessages():
                other = Other(message.client, self._interval_ms, at_most_once=True)
            case ReleasingPartition() | SettingPosition():
                return None
        same = (other.interval_ms, other.at_most_once) == (self._interval_ms, self._at_most_once)
        return None if same else other

    def is_new(self, client: Client) -> bool:
        """Whether this is asked for the first time."""
        new = client not in self._known
        self._known.add(client)
        return new

    def silence_ms(self, now_ms: Callable[[Place], int]) -> int:
        """How long it has to be silent here until none of them can be alive, given the log's time at each place."""
        alive = (
            2 * other.interval_ms
            for place, (other, heard_ms) in self._others.items()
            if now_ms(place) - heard_ms <= 2 * other.interval_ms
        )
        return max(alive, default=0)

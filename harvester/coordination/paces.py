"""Whether others of the group count by another HeartbeatInterval. Pure.

Whether a claim is stale depends on the interval, and each reader takes its own: two clients with different ones would
not agree who holds a place. So claims and heartbeats say by which interval their sender counts. Who begins, and finds
that a client which may still live counts by another one, ends before it has claimed anything. Who has begun and hears
of such a newcomer warns: the newcomer has read the log, and is about to end.

A client may live for 2 of *its* intervals after its last heartbeat, unless it has released the place. Log time tells if
it goes on; where it stands still, since nobody writes, the newcomer listens for as long.
"""

from __future__ import annotations

from collections.abc import Callable

from harvester.coordination.messages import (
    ClaimingMessages,
    Client,
    Message,
    Place,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
)
from harvester.coordination.rationalizer import Verdict

_COUNTS = frozenset({Verdict.WON, Verdict.ACCEPTED, Verdict.UNDECIDED})


class Paces:
    """See the module's text."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._others: dict[Place, tuple[Client, int, int]] = {}  # who counts otherwise, by what, when heard of
        self._known: set[Client] = set()

    def heard(self, message: Message, verdict: Verdict, now_ms: int) -> int | None:
        """A message of the group, in the order of the log. The interval in ms of a sender that counts otherwise."""
        if verdict not in _COUNTS or isinstance(message, ClaimingMessages | ReturningMessages):
            return None
        theirs_ms = None if isinstance(message, ReleasingPartition | SettingPosition) else message.interval_ms
        if theirs_ms is None or theirs_ms == self._interval_ms:
            self._others.pop(message.place, None)
            return None
        self._others[message.place] = (message.client, theirs_ms, now_ms)
        return theirs_ms

    def is_new(self, client: Client) -> bool:
        """Whether this is asked for the first time."""
        new = client not in self._known
        self._known.add(client)
        return new

    def silence_ms(self, now_ms: Callable[[Place], int]) -> int:
        """How long it has to be silent here until none of them can be alive, given the log's time at each place."""
        alive = (
            2 * theirs_ms
            for place, (_, theirs_ms, heard_ms) in self._others.items()
            if now_ms(place) - heard_ms <= 2 * theirs_ms
        )
        return max(alive, default=0)

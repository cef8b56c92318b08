"""A group without Kafka, for the tests of applications that embed a harvester.

The test decides who leads: `elect()`, `revoke()`, `fence()`. Everything else works as with the real group: events come
in the same order on the same thread, and a revoke waits for the drain and for the handler of LeaderRevoked.

    group = FakeGroup()
    with Harvester(config, group=group) as harvester:
        group.elect()
"""

from __future__ import annotations

import threading
from uuid import UUID

from harvester.clock import clock_s
from harvester.neli.group import GroupListener, Identity, Missing

_FOR_EVER_S = 1e6


class FakeGroup:
    """A `Group` controlled by the test. Its methods may be called from any thread."""

    def __init__(self, *, elected: bool = False, revoke_within_s: float = 10.0) -> None:
        self._elected = elected
        self._within_s = revoke_within_s
        self._listener: GroupListener | None = None
        self._started = threading.Event()
        self._led = threading.Event()
        self._leads = False
        self._highest_term = 0

    def start(self, identity: Identity, listener: GroupListener) -> None:
        """Called by the harvester when it joins."""
        self._listener = listener
        self._started.set()
        if self._elected:
            self._elect(listener)

    def elect(self, timeout_s: float = 10.0) -> bool:
        """Make this harvester the leader; returns whether it leads (has taken its term) within `timeout_s`."""
        self._elect(self._joined(timeout_s))
        return self._led.wait(timeout_s)

    def _elect(self, listener: GroupListener) -> None:
        self._led.clear()
        self._leads = True
        listener.trust(clock_s() + _FOR_EVER_S)
        listener.acquired()

    def revoke(self, timeout_s: float = 10.0) -> None:
        """Take leadership away in an orderly way; returns when it has been given up."""
        listener = self._joined(timeout_s)
        if self._leads:
            self._leads = False
            listener.revoking(self._within_s)

    def fence(self, reason: str = "fenced by the test", timeout_s: float = 10.0) -> None:
        """Take leadership away immediately."""
        listener = self._joined(timeout_s)
        if self._leads:
            self._leads = False
            listener.fenced(reason)

    def lead(self, leader_id: UUID, term: int) -> None:
        """Called by the harvester after it has taken its term."""
        self._highest_term = max(self._highest_term, term)
        self._led.set()

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Called by the harvester when it gives up leadership itself."""
        self.fence(reason)

    @property
    def highest_term(self) -> int:
        return self._highest_term

    def missing(self) -> Missing | None:
        """Called by the harvester for its readiness."""
        return None if self._started.is_set() else Missing("has not joined the group yet")

    def cluster(self) -> str | None:
        """Called by the harvester before it takes its term."""
        return None

    def stop(self) -> None:
        """Called by the harvester when it leaves."""
        self.revoke()

    def _joined(self, timeout_s: float) -> GroupListener:
        if not self._started.wait(timeout_s) or self._listener is None:
            raise TimeoutError("the harvester has not joined the group")
        return self._listener

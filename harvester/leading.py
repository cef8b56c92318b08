"""What the group says about leading, done to the relay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from harvester.announcer import Announcer
from harvester.events import LeaderRevoked
from harvester.journal import Journal
from harvester.neli.group import GroupCallbacks
from harvester.relay.supervisor import Supervisor

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Leading:
    """`fenced`: trust was over, and the group has neither elected this one again since, nor taken leadership away.

    `drain_s` says how long what is on the wire is waited for.
    """

    def __init__(self, announcer: Announcer, journal: Journal, drain_s: Callable[[], float], log: Log) -> None:
        self._announcer, self._journal, self._drain_s, self._log = announcer, journal, drain_s, log
        self.fenced = False

    def callbacks(self, supervisor: Supervisor, failed: Callable[[BaseException], None]) -> GroupCallbacks:
        """What the group is given to call."""

        def acquired() -> None:
            self.fenced = False
            supervisor.acquire()

        def fenced(reason: str) -> None:
            self.fenced = True
            supervisor.fence(reason)

        def revoking(within_s: float) -> None:
            self.fenced = False
            deadline = time.monotonic() + within_s
            if supervisor.is_alive() and supervisor.drain(min(self._drain_s(), within_s)):
                self._log.info("leadership is revoked")
                self._announcer.announce(LeaderRevoked()).wait(max(0.0, deadline - time.monotonic()))

        return GroupCallbacks(
            acquired=acquired,
            fenced=fenced,
            revoking=revoking,
            trust=supervisor.trust.extend,
            failed=failed,
            trouble=lambda text: self._journal.trouble("group", text),
            marker_alive=supervisor.is_working,
            client_said=self._log.log,
        )

"""The supervisor, as the rest of the process knows it: what other threads tell its core, ask of it, and wait for.

Stopping is done by whoever asks for it (`Supervisor.drain`, then `end`), so that a drain can be part of a rebalance
callback as well as of a signal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from harvester.relay.commands import Command
from harvester.relay.core import Core
from harvester.relay.frames import Login
from harvester.relay.heeding import heed
from harvester.relay.marking import MarkLoop
from harvester.relay.onekey import KeyUnderWay, look_up
from harvester.relay.performing import Outlets
from harvester.relay.reports import Report
from harvester.relay.spec import ShardSpec


class Supervisor(threading.Thread):
    """See the module's text. The thread is the core's (`harvester.relay.core`)."""

    def __init__(self, core: Core, outlets: Outlets) -> None:
        """Not started yet; `outlets` are those of the core."""
        super().__init__(target=core.run, name="harvester-relay", daemon=True)
        self._core, self._performer, self._out = core, core.performer, outlets
        self._log = outlets.log(None)
        self.relay, self.trust, self.fleet = core.relay, core.trust, core.fleet
        self.shards_ready = core.shards_ready  # every shard has been ready at once

    def attach(self, marker: MarkLoop) -> None:
        """The mark loop, which could not be made before there was somebody to report to."""
        self._performer.marker = marker

    def post(self, action: Callable[[float], None]) -> None:
        """Run this on the supervisor's thread soon; it is given the monotonic time."""
        self._core.post(action)

    # -- the group and the mark loop

    def is_working(self) -> bool:
        """Liveness for the election (P14): this loop and the mark loop turn."""
        return self._core.is_working()

    def acquire(self) -> None:
        """The group made us leader."""
        self.post(self._performer.acquire)

    def fence(self, reason: str) -> None:
        """The group no longer vouches for us. Trust ends here, before the thread gets to it."""
        self.trust.revoke()
        self.post(lambda now: self._performer.fence(reason, now))

    def renounce(self) -> None:
        """Never lead again: the harvester stops."""
        self._performer.renounced = True

    def report(self, report: Report) -> None:
        """The mark loop has something to say."""
        self.post(lambda now: heed(self._performer, report, now, self._out))

    @property
    def lent_to(self) -> str | None:
        """Who has the term that this process would take (P32)."""
        marker = self._performer.marker
        return marker.lent_to if marker is not None else None

    @property
    def leadership(self) -> tuple[UUID | None, int | None]:
        """(leader id, term); (None, None) while not leading. The id shows only with its term."""
        relay = self.relay
        term = relay.tenure.term
        return (relay.tenure.leader_id, term) if term is not None else (None, None)

    # -- the end

    def drain(self, within_s: float) -> bool:
        """Finish what is on the wire. At the bound the shards are killed (P13). Returns whether we had led."""
        done, led = threading.Event(), []
        self.trust.close()
        if self._core.broken:
            return False

        def begin(now: float) -> None:
            led.append(self.relay.tenure.term is not None)
            self._performer.drain(done, now)

        def cut(_now: float) -> None:
            late = [index for index in self.fleet.alive if self.relay.ledger.unsettled_of(index)]
            if late:
                self._log.warning("what was on the wire did not settle within %.1f s: it may be repeated", within_s)
            for index in late:
                self.fleet.kill(index, asked=True)

        self.post(begin)
        if not done.wait(within_s):
            self.post(cut)
            done.wait(5.0)
        return bool(led and led[0])

    def kill_shards(self) -> None:
        """End all shards at once, for good: what is on the wire may be repeated by the next leader."""

        def kill(_now: float) -> None:
            self.trust.revoke()
            self.fleet.closed = True
            for index in self.fleet.alive:
                self.fleet.kill(index, asked=True)

        self.post(kill)

    def end(self, within_s: float) -> None:
        """End the shards (killing those that take longer) and this thread. Nothing may be leading any more."""
        self.post(lambda now: self._core.end(within_s, now))

    # -- the operator

    def scale(self, shards: int, within_s: float) -> bool:
        """Change the number of shards (P17); False when it was refused, as it is while another change is under way."""
        done, changed = threading.Event(), [False]
        if self._core.broken:
            return False
        self.post(lambda now: self._performer.scale(shards, now + within_s, done, changed, now))
        done.wait(within_s + 5.0)
        return changed[0]

    def pause(self, within_s: float, then: Callable[[], None]) -> bool:
        """Mark nothing until `resume`. True as soon as that holds, whatever is still on the wire by then.

        `then` is called when it holds, on the supervisor's thread, however late that is.
        """
        return self._do(self.relay.pause, within_s, then)

    def resume(self, within_s: float, then: Callable[[], None]) -> bool:
        """The end of `pause`; True when it has begun. `then` as there."""
        return self._do(self.relay.resume, within_s, then)

    def remark(self, reason: str, within_s: float) -> bool:
        """Drop what is queued and mark again, if this one leads; True when it has begun."""
        return self._do(lambda now: self.relay.remark(reason, now), within_s)

    def look_up(self, key: bytes, within_s: float) -> KeyUnderWay | None:
        """What the relay knows of this key; None when it does not answer in time."""
        found: list[KeyUnderWay] = []
        self._do(lambda _now: (), within_s, lambda: found.append(look_up(self.relay, key, time.monotonic())))
        return found[0] if found else None

    def log_in(self, spec: ShardSpec, login: Login) -> None:
        """Shards log in with this from now on, new ones and those that there are."""
        self.post(lambda _now: self.fleet.log_in(spec, login))

    def _do(
        self,
        decide: Callable[[float], Sequence[Command]],
        within_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        done = threading.Event()

        def act(now: float) -> None:
            self._performer.perform(decide(now))
            then()
            done.set()

        self.post(act)
        return done.wait(within_s)

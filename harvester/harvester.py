"""The harvester as an object: what the command line runs and what applications embed.

    with Harvester(load_config(), on_event=print) as harvester:
        harvester.wait()

Starting is quick and does not need any server to be up: what is missing is waited for, and `status().problem` says
what that is. A wrong schema, a group that serves another outbox, or a crash loop end the harvester; `wait` raises what
did. It runs beside the host's threads, installs no signal handlers, and imports nothing of the host's main module.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from types import TracebackType
from uuid import UUID

from harvester.announcer import Announcer
from harvester.config import Config, load_config
from harvester.errors import HarvesterError
from harvester.events import EventHandler
from harvester.lifecycle import Endpoints, Life
from harvester.neli.group import Group
from harvester.relay.core.state_machine import LeadershipPhase
from harvester.status import KeyStatus, State, Status
from harvester.status_recorder import StatusRecorder
from harvester.telemetry.logging import LEVELS, logger_for
from harvester.telemetry.metrics import Totals

_ANSWER_WITHIN_S = 5.0


class Harvester:
    """One harvester. Create it, `start` it, `stop` it; it cannot be started twice."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        on_event: EventHandler | None = None,
        logger: logging.Logger | None = None,
        group: Group | None = None,
        until_empty: bool = False,
    ) -> None:
        """`config` defaults to what `load_config()` finds; `logger` to the standard logger `harvester`.

        `group` replaces Kafka's election (`harvester.neli.fake.FakeGroup`, for tests). With `until_empty` the
        harvester stops by itself when it leads and finds the outbox empty.
        """
        self.config = config if config is not None else load_config()
        self._base_logger = logger if logger is not None else logging.getLogger("harvester")
        logger_of = partial(logger_for, self._base_logger, self.config.name)
        self._log = logger_of()
        self._announcer = Announcer(on_event, self._log)
        self._recorder = StatusRecorder(self.config, self._announcer, self._log)
        endpoints = Endpoints(self.config, self._recorder, self._log, shown=self, controlled=self)
        self._life = Life(
            self.config, self._announcer, self._recorder, endpoints, logger_of, group=group, until_empty=until_empty
        )
        self._progress = 0.0

    # -- life

    def start(self) -> None:
        """Start in the background; returns at once."""
        self._life.start()

    def stop(self, *, force: bool = False) -> None:
        """Finish what is on the wire, leave the group, end the shards; returns when all is done.

        With `force` nothing is awaited: what is on the wire may be repeated by the next leader.
        """
        self._life.stop(force=force)

    def scale(self, shards: int, within_s: float = 10.0) -> bool:
        """Change the number of shards while running; no record is repeated or reordered by it.

        Marking stops, queues are dropped, and the switch is made when nothing is unsettled any more. False when
        that did not come true within `within_s`, or when a shard that would end has a record whose delivery timed
        out, which only that shard may send again: nothing has changed then.
        """
        parts = self._life.running()
        if not 1 <= shards <= 256:
            raise HarvesterError(f"{shards} shards are not possible", hint="1 to 256 are")
        parts.prepare(self._life.login, shards)
        return parts.supervisor.scale(shards, within_s)

    def pause(self) -> bool:
        """Mark nothing more until `resume`, or until this object ends; False when it was paused already.

        What was queued is given back to the outbox; what is on the wire is finished and purged. Leadership is kept;
        a paused standby that takes over publishes nothing until resumed. Other harvesters of the group are not paused.
        """
        changed: list[bool] = []
        parts = self._life.running()
        _check(parts.supervisor.pause(_ANSWER_WITHIN_S, lambda: changed.append(self._recorder.paused(True))))
        return changed[0]

    def resume(self) -> bool:
        """The end of `pause`; False when it was not paused."""
        changed: list[bool] = []
        parts = self._life.running()
        _check(parts.supervisor.resume(_ANSWER_WITHIN_S, lambda: changed.append(self._recorder.paused(False))))
        return changed[0]

    def remark(self, reason: str = "asked for") -> None:
        """Drop what is queued and mark it again from the head; what is on the wire is awaited, so nothing repeats.

        Raises HarvesterError where there is nothing to mark anew: it does not lead, or is paused.
        """
        parts = self._life.running()
        if self.state not in (State.LEADING, State.REMARKING):
            raise HarvesterError(f"it is {self.state.value}: only a leader marks", hint="resume it, or ask the leader")
        _check(parts.supervisor.remark(reason, _ANSWER_WITHIN_S))

    def set_log_level(self, level: str) -> None:
        """Log from this level on: trace, debug, info, warning or error. What shards say is logged here as well."""
        if level.lower() not in LEVELS:
            raise HarvesterError(f"{level!r} is no level", hint=f"one of {', '.join(LEVELS)}")
        self._base_logger.setLevel(LEVELS[level.lower()])
        self._log.info("logs from level %s on", level.lower())

    def key(self, key: str) -> KeyStatus:
        """Everything about one key: what is under way, waits for a retry, stands in the outbox, is in quarantine.

        Takes a few seconds at most; the outbox has no index on keys. Raises HarvesterError when it does not run.
        """
        from harvester.key_status import key_status

        return key_status(self._life.running().supervisor, self._life.login, key)

    def renew_logins(self, config: Config) -> None:
        """Log in with the passwords of `config` from now on; connections that are open stay.

        Nothing else of `config` is looked at: it must not differ in anything else.
        """
        from harvester.wiring import renew_logins

        self._life.login = config
        parts = self._life.running()
        renew_logins(parts, config)

    def stop_soon(self) -> None:
        """Begin to `stop`, in the background; returns at once."""
        self._life.stop_soon()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True when it has. Raises what ended it, if that was an error."""
        ended = self._life.stopped.wait(timeout_s)
        if ended and self._life.failure is not None:
            raise self._life.failure
        return ended

    def __enter__(self) -> Harvester:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- questions

    @property
    def state(self) -> State:
        """Where it stands."""
        parts = self._life.parts
        if parts is None:
            return State.CREATED
        if self._life.stopped.is_set():
            return State.FAILED if self._life.failure is not None else State.STOPPED
        if self._life.stopping.is_set():
            return State.DRAINING
        if not parts.joined.is_set():
            return State.STARTING
        machine = parts.supervisor.machine
        match machine.phase:
            case LeadershipPhase.LEADING:
                return State.LEADING
            case LeadershipPhase.REMARKING | LeadershipPhase.SCALING:
                return State.PAUSED if machine.paused else State.REMARKING
            case LeadershipPhase.DRAINING:
                return State.DRAINING
            case LeadershipPhase.TAKING if parts.supervisor.lent_to is not None:
                return State.SUSPENDED
            case _:
                return State.FENCED if self._life.is_fenced else State.STANDBY

    @property
    def is_leader(self) -> bool:
        """Whether it leads and is trusted to, now."""
        return self.leader_id is not None

    @property
    def leader_id(self) -> UUID | None:
        """The current leader id; None when it does not lead. Never reused."""
        parts = self._life.parts
        if parts is None or not parts.supervisor.trust.trusted:
            return None
        return parts.supervisor.leadership[0]

    @property
    def term(self) -> int | None:
        """The current term; None when it does not lead."""
        parts = self._life.parts
        return parts.supervisor.leadership[1] if parts is not None and self.leader_id is not None else None

    @property
    def in_flight(self) -> int:
        """Records that may be with producers now."""
        return self._life.parts.supervisor.machine.ledger.in_flight if self._life.parts is not None else 0

    def status(self) -> Status:
        """A snapshot of everything; never waits for the relay."""
        parts = self._life.parts
        pool = parts.supervisor.pool if parts is not None else None
        ledger = parts.supervisor.machine.ledger if parts is not None else None
        return self._recorder.status(
            state=self.state,
            leader_id=self.leader_id,
            term=self.term,
            slots=pool.in_use if pool is not None else [],
            in_flight=ledger.in_flight if ledger is not None else 0,
            queued=ledger.queued if ledger is not None else 0,
            backlog=parts.backlog.latest() if parts is not None and not self._life.stopping.is_set() else None,
        )

    def totals(self) -> Totals:
        """What has happened since the start, for counters; never waits for the relay."""
        parts = self._life.parts
        return self._recorder.totals(list(parts.supervisor.pool.slots) if parts is not None else [])

    def is_working(self) -> bool:
        """Whether its threads turn: false when one is stuck, and when it has not started or has failed."""
        parts = self._life.parts
        if parts is None or self._life.failure is not None:
            return False
        return not parts.joined.is_set() or self._life.stopping.is_set() or parts.supervisor.is_working()

    def progress(self) -> float:
        """Something that changes when the mark loop has turned: the proof of life that a watchdog wants.

        Where that loop does not have to turn, because servers are waited for or the harvester stops, it changes with
        the time. It stands still while `is_working` is false.
        """
        parts = self._life.parts
        if parts is not None and self.is_working():
            waits = not parts.joined.is_set() or self._life.stopping.is_set()
            self._progress = time.monotonic() if waits else parts.marker.turned_at
        return self._progress


def _check(answered: bool) -> None:
    if not answered:
        raise HarvesterError(
            "the relay does not answer yet",
            hint="it is busy, and does what was asked for as soon as it goes on, or about to end; see its log",
        )

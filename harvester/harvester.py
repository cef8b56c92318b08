"""The harvester as an object, run by the command line and embedded by applications.

    with Harvester(load_config(), on_event=print) as harvester:
        harvester.wait()

Starting is quick and does not need any server to be up: the harvester waits for missing servers, and `status().problem`
names them. A wrong schema, a group that serves another outbox, or a crash loop ends the harvester, and `wait` raises
the error. It runs alongside the host's threads, installs no signal handlers, and imports nothing of the host's main
module.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import psycopg

from harvester.announcer import Announcer
from harvester.config import Config, load_config
from harvester.errors import HarvesterError
from harvester.events import EventHandler
from harvester.lifecycle import Endpoints, Life
from harvester.neli.group import Group, Missing
from harvester.outbox.connection import connect, one_line
from harvester.outbox.overview import KeyRows, read_key
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from harvester.relay.forkserver import Forkserver
from harvester.status import READY_STATES, KeyStatus, State, Status
from harvester.status_recorder import StatusRecorder
from harvester.telemetry.logging import LEVELS, logger_for
from harvester.telemetry.metrics import Totals

_ANSWER_WITHIN_S = 5.0
_FIRST_LOOK_S = 2.0
_TURN_S = 0.2
_LEADING = (LeadershipPhase.LEADING, LeadershipPhase.REMARKING, LeadershipPhase.SCALING)
_KEY_WITHIN_S = 3.0
_TOO_LONG = f"no answer within {_KEY_WITHIN_S:g} s: the outbox is large, or locked"


class Harvester:
    """A harvester. Create it, `start` it, `stop` it; it cannot be started twice."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        on_event: EventHandler | None = None,
        logger: logging.Logger | None = None,
        group: Group | None = None,
        until_empty: bool = False,
        forkserver: Forkserver | None = None,
    ) -> None:
        """`config` defaults to what `load_config()` finds; `logger` to the standard logger `harvester`.

        `group` replaces Kafka's election (`harvester.neli.fake.FakeGroup`, for tests). With `until_empty` the
        harvester stops by itself once it leads and finds the outbox empty. `forkserver`
        (`harvester.relay.forkserver.Forkserver`) may have been started ahead, to import while the host does, too.
        """
        self.config = config if config is not None else load_config()
        self._base_logger = logger if logger is not None else logging.getLogger("harvester")
        logger_of = partial(logger_for, self._base_logger, self.config.name)
        self._log = logger_of()
        self._announcer = Announcer(on_event, self._log)
        self._recorder = StatusRecorder(self.config, self._announcer, self._log)
        endpoints = Endpoints(self.config, self._recorder, self._log, shown=self, controlled=self)
        self._life = Life(
            self.config, self._announcer, self._recorder, endpoints, logger_of,
            group=group, until_empty=until_empty, forkserver=forkserver,
        )  # fmt: skip
        self._progress = 0.0

    # -- life

    def start(self) -> None:
        """Start in the background and return at once."""
        self._life.start()

    def stop(self, *, force: bool = False) -> None:
        """Finish what is on the wire, leave the group and end the shards; returns when all of that is done.

        With `force` it waits for nothing: the next leader may repeat what is on the wire.
        """
        self._life.stop(force=force)

    def scale(self, shards: int, within_s: float = 10.0) -> bool:
        """Change the number of shards while running, without repeating or reordering records.

        Marking stops, queues are dropped, and the switch happens once nothing is unsettled. Returns False, with nothing
        changed, if that takes longer than `within_s`, or if a shard that would end has a record whose delivery timed
        out, since only that shard may send it again.
        """
        parts = self._life.running()
        if not 1 <= shards <= 256:
            raise HarvesterError(f"{shards} shards are not possible", hint="1 to 256 are")
        parts.prepare(self._life.login, shards)
        return parts.supervisor.scale(shards, within_s)

    def pause(self) -> bool:
        """Stop marking until `resume`, or until this object ends; returns False if it was already paused.

        Queued records go back to the outbox; what is on the wire is finished and purged. Leadership is kept; a paused
        standby that takes over publishes nothing until resumed. Other harvesters of the group are not paused.
        """
        changed: list[bool] = []
        parts = self._life.running()
        _check(parts.supervisor.pause(_ANSWER_WITHIN_S, lambda: changed.append(self._recorder.paused(True))))
        return changed[0]

    def resume(self) -> bool:
        """End a `pause`; returns False if it was not paused."""
        changed: list[bool] = []
        parts = self._life.running()
        _check(parts.supervisor.resume(_ANSWER_WITHIN_S, lambda: changed.append(self._recorder.paused(False))))
        return changed[0]

    def remark(self, reason: str = "asked for") -> None:
        """Drop what is queued and mark it again from the head; waits for what is on the wire, so nothing is repeated.

        Raises HarvesterError if it does not lead or is paused.
        """
        parts = self._life.running()
        if self.state not in (State.LEADING, State.REMARKING):
            raise HarvesterError(f"it is {self.state.value}: only a leader marks", hint="resume it, or ask the leader")
        _check(parts.supervisor.remark(reason, _ANSWER_WITHIN_S))

    def set_log_level(self, level: str) -> None:
        """Set the log level (trace, debug, info, warning or error), also for messages of shards."""
        if level.lower() not in LEVELS:
            raise HarvesterError(f"{level!r} is not a log level", hint=f"one of {', '.join(LEVELS)}")
        self._base_logger.setLevel(LEVELS[level.lower()])
        self._log.info("the log level is %s now", level.lower())

    def key(self, key: str) -> KeyStatus:
        """Everything about one key: records under way, waiting for a retry, in the outbox and in quarantine.

        Takes a few seconds at most, since the outbox has no index on keys. Raises HarvesterError if it is not running.
        """
        supervisor = self._life.running().supervisor
        try:
            data = key.encode()
        except UnicodeEncodeError as error:
            raise HarvesterError(
                f"{key!r} is not valid text", hint="keys that are not UTF-8 cannot be looked up"
            ) from error
        # First the database: what is settled in the meantime must not seem to be under way without a row.
        rows, trouble = _rows_of(self._life.login, data)
        known = supervisor.ask(partial(_known_of, data), _KEY_WITHIN_S)
        if known is None:
            raise HarvesterError("the relay does not answer", hint="it is busy or about to end; see its log")
        return KeyStatus(at=datetime.now(UTC), key=key, **known, **asdict(rows), trouble=trouble)

    def renew_logins(self, config: Config) -> None:
        """Use the passwords of `config` for new connections; open connections are kept.

        The rest of `config` is ignored and must be the same.
        """
        from harvester.wiring import renew_logins

        self._life.login = config
        parts = self._life.running()
        renew_logins(parts, config)

    def stop_soon(self) -> None:
        """Begin to `stop` in the background and return at once."""
        self._life.stop_soon()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; returns whether it has. Raises the error that ended it, if any."""
        ended = self._life.stopped.wait(timeout_s)
        if ended and self._life.failure is not None:
            raise self._life.failure
        return ended

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """Like `wait`, in an event loop; the harvester continues to run if this is cancelled."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:  # in short turns, since the waiting thread outlives a cancellation
            left_s = _TURN_S if deadline is None else min(_TURN_S, deadline - time.monotonic())
            ended = await asyncio.to_thread(self.wait, max(0.0, left_s))
            if ended or left_s < _TURN_S:
                return ended

    def __enter__(self) -> Harvester:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    async def __aenter__(self) -> Harvester:
        self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- questions

    @property
    def state(self) -> State:
        """The current state."""
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
        """Whether it leads, and is trusted to, at this moment."""
        return self.leader_id is not None

    @property
    def leader_id(self) -> UUID | None:
        """The current leader id, never reused; None while it does not lead."""
        parts = self._life.parts
        if parts is None or not parts.supervisor.trust.trusted:
            return None
        return parts.supervisor.leadership[0]

    @property
    def term(self) -> int | None:
        """The current term; None while it does not lead."""
        parts = self._life.parts
        return parts.supervisor.leadership[1] if parts is not None and self.leader_id is not None else None

    @property
    def in_flight(self) -> int:
        """The number of records that producers may hold now."""
        return self._life.parts.supervisor.machine.ledger.in_flight if self._life.parts is not None else 0

    def status(self) -> Status:
        """A snapshot of everything; never waits for the relay."""
        parts = self._life.parts
        pool = parts.supervisor.pool if parts is not None else None
        ledger = parts.supervisor.machine.ledger if parts is not None else None
        state = self.state
        return self._recorder.status(
            state=state,
            waits=self._waits(state),
            leader_id=self.leader_id,
            term=self.term,
            slots=pool.in_use if pool is not None else [],
            in_flight=ledger.in_flight if ledger is not None else 0,
            queued=ledger.queued if ledger is not None else 0,
            backlog=parts.backlog.latest() if parts is not None and not self._life.stopping.is_set() else None,
        )

    def _waits(self, state: State) -> Missing | None:
        """What a standby is waiting for before it can lead or take over: meanwhile nobody may be leading."""
        parts = self._life.parts
        if parts is None or state is not State.STANDBY:
            return None
        if parts.supervisor.machine.phase is LeadershipPhase.TAKING:
            return Missing("elected, taking the term in the database")
        return parts.group.missing()

    def totals(self) -> Totals:
        """Totals since the start, for counters; never waits for the relay."""
        parts = self._life.parts
        return self._recorder.totals(list(parts.supervisor.pool.slots) if parts is not None else [])

    def unready(self) -> str | None:
        """Why it neither leads nor could take over now; None if it is ready.

        A harvester is ready while the database answers and Kafka's group counts it as a member, leader or standby.
        Waits for the database only, for at most 2 s, and only if nobody has asked for 15 s.
        """
        parts, state = self._life.parts, self.state
        if parts is None or state not in READY_STATES:
            return self._recorder.problem() or "neither leads nor could take over"
        missing = parts.group.missing()
        if missing is not None and not missing.is_member:
            return self._recorder.problem() or missing.text
        silence = parts.backlog.silence(_FIRST_LOOK_S)
        return None if silence is None else f"database: {silence}"

    def is_working(self) -> bool:
        """Whether its threads make progress; False if one is stuck, or if it has not started or has failed."""
        parts = self._life.parts
        if parts is None or self._life.failure is not None:
            return False
        return not parts.joined.is_set() or self._life.stopping.is_set() or parts.supervisor.is_working()

    def progress(self) -> float:
        """A value that changes as the mark loop progresses: the proof of life for a watchdog.

        While the loop has nothing to do, because the harvester waits for servers or is stopping, the value changes with
        time. It does not change while `is_working` is False.
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
            hint="it is busy, and will do what was requested as soon as it can, or is about to end; see its log",
        )


def _known_of(key: bytes, machine: StateMachine, now: float) -> dict[str, Any]:
    """What the relay knows about this key at `now`, as in `KeyStatus`. On the supervisor's thread."""
    queue = machine.planner.deferred.by_key.get(key)
    return {
        "leads": machine.phase in _LEADING,
        "shard": machine.planner.dispatcher.shard_of(key),
        "under_way": machine.ledger.count_of(key),
        "waiting": len(queue) + queue.fetching if queue is not None else 0,
        "retry_in_s": max(0.0, queue.not_before - now) if queue is not None and queue.parked else None,
        "held": queue is not None and queue.held,
    }


def _rows_of(config: Config, key: bytes) -> tuple[KeyRows, str | None]:
    """What the database has of the key, or why it does not answer. `config` has the credentials."""
    name = f"harvester {config.name}/key"
    try:
        with connect(config.dsn, application_name=name, connect_timeout_s=int(_KEY_WITHIN_S)) as connection:
            connection.execute(f"SET statement_timeout = '{_KEY_WITHIN_S * 1000:.0f}ms'")
            return read_key(connection, config.table, key), None
    except (HarvesterError, psycopg.Error) as error:
        timed_out = isinstance(error.__cause__ or error, psycopg.errors.QueryCanceled)
        return KeyRows(), _TOO_LONG if timed_out else one_line(error)

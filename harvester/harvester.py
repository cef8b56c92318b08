"""The harvester as an object: what the command line runs and what applications embed.

    with Harvester(load_config(), on_event=print) as harvester:
        harvester.wait()

Starting is quick and does not need any server to be up: what is missing is waited for, and `status().problem` says
what that is. A wrong schema, a group that serves another outbox, or a crash loop end the harvester; `wait` raises what
did. It runs beside the host's threads, installs no signal handlers, and imports nothing of the host's main module.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from harvester.announcer import Announcer
from harvester.assembly import Parts, assemble
from harvester.config import Config, load_config
from harvester.errors import BrokerError, BrokerUnavailable, DatabaseUnavailable, ExitCode, HarvesterError, OutboxError
from harvester.events import EventHandler, LeaderRevoked
from harvester.journal import Journal
from harvester.neli.group import Group, GroupCallbacks, Identity
from harvester.outbox.connect import one_line
from harvester.outbox.marker import MarkSession
from harvester.relay.machine import Phase
from harvester.status import KeyStatus, State, Status
from harvester.telemetry.extras import require_tracing
from harvester.telemetry.logging import LEVELS, logger_for
from harvester.telemetry.totals import Totals

if TYPE_CHECKING:
    from harvester.control.server import ControlServer
    from harvester.http import WebServer

_STOP_MARGIN_S = 5.0
_SHARDS_WITHIN_S = 15.0
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
        self._log = logger_for(self._base_logger, self.config.name)
        self._announcer = Announcer(on_event, self._log)
        self._journal = Journal(self.config, self._announcer, self._log)
        self._given_group = group
        self._until_empty = until_empty
        self._parts: Parts | None = None
        self._web: WebServer | None = None
        self._control: ControlServer | None = None
        self._starter: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._fenced = False
        self._forced = False
        self._progress = 0.0
        self._login = self.config  # what connections are made with
        self._lock = threading.Lock()
        self._stop_lock = threading.Lock()

    # -- life

    def start(self) -> None:
        """Start in the background; returns at once."""
        with self._lock:
            if self._parts is not None:
                raise HarvesterError("this harvester was started before", hint="create a new Harvester")
            if self._stopping.is_set():
                self._stopped.set()
                return
            if self.config.tracing.enabled:
                require_tracing()
            self._web = self._make_web_server()
            self._announcer.start()
            self._parts = assemble(
                self.config,
                group=self._given_group,
                announcer=self._announcer,
                journal=self._journal,
                emptied=self._emptied,
                failed=self._fail,
                log=self._logger_of,
            )
            atexit.register(self._at_exit)
            self._journal.started()
            if self._web is not None:
                self._web.start()
            self._parts.supervisor.start()
            self._control = self._open_control()
            self._starter = threading.Thread(target=self._join_group, name="harvester-start", daemon=True)
            self._starter.start()

    def stop(self, *, force: bool = False) -> None:
        """Finish what is on the wire, leave the group, end the shards; returns when all is done.

        With `force` nothing is awaited: what is on the wire may be repeated by the next leader.
        """
        with self._lock:
            self._stopping.set()
            parts = self._parts
        if parts is None:
            self._stopped.set()
            return
        parts.supervisor.renounce()
        if force:
            self._forced = True
            parts.supervisor.kill_shards()
        with self._stop_lock:
            if self._stopped.is_set():
                return
            if parts.supervisor.is_alive() and parts.supervisor.drain(self._drain_s()):
                handled = self._announcer.announce(LeaderRevoked())
                if threading.current_thread() is not self._announcer and not self._forced:
                    handled.wait(parts.revoke_within_s)
            parts.group_stop()
            parts.supervisor.end(0.5 if self._forced else self.config.delivery_timeout.total_seconds() + 0.5)
            parts.supervisor.join(self.config.delivery_timeout.total_seconds() + _STOP_MARGIN_S)
            parts.end_marker(_STOP_MARGIN_S)
            if self._starter is not None and self._starter is not threading.current_thread():
                self._starter.join(_STOP_MARGIN_S)
            parts.backlog.stop()
            if parts.keeper is not None:
                parts.keeper.stop()
            if self._web is not None:
                self._web.stop()
            if self._control is not None:
                self._control.stop()
            self._announcer.stop(1.0)
            atexit.unregister(self._at_exit)
            self._log.info("stopped")
            self._stopped.set()

    def scale(self, shards: int, within_s: float = 10.0) -> bool:
        """Change the number of shards while running; no record is repeated or reordered by it.

        Marking stops, queues are dropped, and the switch is made when nothing is unsettled any more. False when
        that did not come true within `within_s` (a record waits for its retry, say): nothing has changed then.
        """
        parts = self._running()
        if not 1 <= shards <= 256:
            raise HarvesterError(f"{shards} shards are not possible", hint="1 to 256 are")
        parts.prepare(self._login, shards)
        return parts.supervisor.scale(shards, within_s)

    def pause(self) -> bool:
        """Mark nothing more until `resume`, or until this object ends; False when it was paused already.

        What was queued is given back to the outbox; what is on the wire is finished and purged. Leadership is kept,
        and where this one stands by, it will lead without marking. Other harvesters of the group are not paused.
        """
        changed: list[bool] = []
        parts = self._running()
        _check(parts.supervisor.pause(_ANSWER_WITHIN_S, lambda: changed.append(self._journal.paused(True))))
        return changed[0]

    def resume(self) -> bool:
        """The end of `pause`; False when it was not paused."""
        changed: list[bool] = []
        parts = self._running()
        _check(parts.supervisor.resume(_ANSWER_WITHIN_S, lambda: changed.append(self._journal.paused(False))))
        return changed[0]

    def remark(self, reason: str = "asked for") -> None:
        """Drop what is queued and mark it again from the head; what is on the wire is awaited, so nothing repeats.

        Raises HarvesterError where there is nothing to mark anew: it does not lead, or is paused.
        """
        parts = self._running()
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
        from harvester.onekey import key_status

        return key_status(self._running().supervisor, self._login, key)

    def renew_logins(self, config: Config) -> None:
        """Log in with the passwords of `config` from now on; connections that are open stay.

        Nothing else of `config` is looked at: it must not differ in anything else.
        """
        from harvester.renewal import renew_logins

        self._login = config
        parts = self._running()
        renew_logins(parts, config)

    def _running(self) -> Parts:
        parts = self._parts
        if parts is None or self._stopping.is_set():
            raise HarvesterError("the harvester is not running", hint="start it first")
        return parts

    def stop_soon(self) -> None:
        """Begin to `stop`, in the background; returns at once."""
        self._stopping.set()
        threading.Thread(target=self.stop, name="harvester-stop", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True when it has. Raises what ended it, if that was an error."""
        ended = self._stopped.wait(timeout_s)
        if ended and self._failure is not None:
            raise self._failure
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
        parts = self._parts
        if parts is None:
            return State.CREATED
        if self._stopped.is_set():
            return State.FAILED if self._failure is not None else State.STOPPED
        if self._stopping.is_set():
            return State.DRAINING
        if not parts.joined.is_set():
            return State.STARTING
        relay = parts.supervisor.relay
        match relay.phase:
            case Phase.LEADING:
                return State.LEADING
            case Phase.REMARKING | Phase.SCALING:
                return State.PAUSED if relay.paused else State.REMARKING
            case Phase.DRAINING:
                return State.DRAINING
            case Phase.TAKING if parts.supervisor.lent_to is not None:
                return State.SUSPENDED
            case _:
                return State.FENCED if self._fenced else State.STANDBY

    @property
    def is_leader(self) -> bool:
        """Whether it leads and is trusted to, now."""
        return self.leader_id is not None

    @property
    def leader_id(self) -> UUID | None:
        """The current leader id; None when it does not lead. Never reused."""
        parts = self._parts
        if parts is None or not parts.supervisor.trust.trusted:
            return None
        return parts.supervisor.leadership[0]

    @property
    def term(self) -> int | None:
        """The current term; None when it does not lead."""
        parts = self._parts
        return parts.supervisor.leadership[1] if parts is not None and self.leader_id is not None else None

    @property
    def in_flight(self) -> int:
        """Records that may be with producers now."""
        return self._parts.supervisor.relay.ledger.in_flight if self._parts is not None else 0

    def status(self) -> Status:
        """A snapshot of everything; never waits for the relay."""
        parts = self._parts
        fleet = parts.supervisor.fleet if parts is not None else None
        ledger = parts.supervisor.relay.ledger if parts is not None else None
        return self._journal.status(
            state=self.state,
            leader_id=self.leader_id,
            term=self.term,
            slots=fleet.in_use if fleet is not None else [],
            in_flight=ledger.in_flight if ledger is not None else 0,
            queued=ledger.queued if ledger is not None else 0,
            backlog=parts.backlog.latest() if parts is not None and not self._stopping.is_set() else None,
        )

    def totals(self) -> Totals:
        """What has happened since the start, for counters; never waits for the relay."""
        parts = self._parts
        return self._journal.totals(list(parts.supervisor.fleet.slots) if parts is not None else [])

    def is_working(self) -> bool:
        """Whether its threads turn: false when one is stuck, and when it has not started or has failed."""
        parts = self._parts
        if parts is None or self._failure is not None:
            return False
        return not parts.joined.is_set() or self._stopping.is_set() or parts.supervisor.is_working()

    def progress(self) -> float:
        """Something that changes when the mark loop has turned: the proof of life that a watchdog wants.

        Where that loop does not have to turn, because servers are waited for or the harvester stops, it changes with
        the time. It stands still while `is_working` is false.
        """
        parts = self._parts
        if parts is not None and self.is_working():
            waits = not parts.joined.is_set() or self._stopping.is_set()
            self._progress = time.monotonic() if waits else parts.marker.turned_at
        return self._progress

    # -- inside

    def _make_web_server(self) -> WebServer | None:
        listen = self.config.http.listen
        if listen == "off":
            return None
        from harvester.http import web_server

        return web_server(listen, self, lambda text: self._journal.trouble("http", text), self._log.info)

    def _open_control(self) -> ControlServer | None:
        """The relay goes on without a control socket where none can be had."""
        from harvester.control import control_server

        try:
            server = control_server(self.config, self, self._log)
        except HarvesterError as error:
            self._log.warning("%s", f"control: {error.message} ({error.hint})")
            self._journal.note(f"control: {error.message}")
            return None
        if server is not None:
            server.start()
            self._log.debug("listens on the control socket %s", server.path)
        return server

    def _join_group(self) -> None:
        """Check the tables, learn the outbox's identity, then join: in the background, for as long as it takes."""
        parts = self._parts
        assert parts is not None
        config = self.config
        session = MarkSession(config.dsn, config.table, f"harvester {config.name}", 10.0)
        while not self._stopping.is_set():
            try:
                session.log_in(self._login.dsn)
                session.open()
                session.refuse_pooler()
                identity = session.identity()
                if config.archive != "off":
                    session.check_archive()
                parts.prepare(self._login)
            except (DatabaseUnavailable, BrokerUnavailable, psycopg.OperationalError) as error:
                what = "group" if isinstance(error, BrokerUnavailable) else "database"
                hint = f" ({error.hint})" if isinstance(error, HarvesterError) and error.hint else ""
                self._journal.trouble(what, f"{one_line(error)}{hint}")
                self._stopping.wait(config.limits.io_error_backoff.total_seconds())
                continue
            except (OutboxError, BrokerError, psycopg.Error) as error:
                self._fail(error)
                return
            finally:
                session.close()
            self._journal.trouble("database", None)
            self._journal.trouble("group", None)
            self._await_shards(parts)
            with self._lock:  # either this is done before a stop begins, or not at all
                if not self._stopping.is_set():
                    parts.marker.start()
                    if parts.keeper is not None:
                        parts.keeper.start()
                    parts.join(Identity(config.name, identity, str(config.table)), self._callbacks(parts))
            return

    def _await_shards(self, parts: Parts) -> None:
        """A harvester whose shards cannot send yet should not be elected; nor should one bad shard keep it out."""
        deadline = time.monotonic() + _SHARDS_WITHIN_S
        while not self._stopping.is_set() and time.monotonic() < deadline:
            if parts.supervisor.shards_ready.wait(0.05):
                return

    def _callbacks(self, parts: Parts) -> GroupCallbacks:
        supervisor = parts.supervisor

        def acquired() -> None:
            self._fenced = False
            supervisor.acquire()

        def fenced(reason: str) -> None:
            self._fenced = True
            supervisor.fence(reason)

        def revoking(within_s: float) -> None:
            self._fenced = False
            deadline = time.monotonic() + within_s
            if supervisor.is_alive() and supervisor.drain(min(self._drain_s(), within_s)):
                self._log.info("leadership is revoked")
                self._announcer.announce(LeaderRevoked()).wait(max(0.0, deadline - time.monotonic()))

        return GroupCallbacks(
            acquired=acquired,
            fenced=fenced,
            revoking=revoking,
            trust=supervisor.trust.extend,
            failed=self._fail,
            trouble=lambda text: self._journal.trouble("group", text),
            marker_alive=supervisor.is_working,
            client_said=self._log.log,
        )

    def _drain_s(self) -> float:
        """How long what is on the wire is waited for: not at all when the end is forced or an error is its cause."""
        cut_short = self._forced or self._failure is not None
        return 0.0 if cut_short else self.config.limits.drain_interval.total_seconds()

    def _emptied(self) -> None:
        if self._until_empty and not self._stopping.is_set():
            self._log.info("the outbox is empty")
            self.stop_soon()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not self._stopped.is_set():
            self._failure = error
            if not isinstance(error, HarvesterError):
                self._failure = HarvesterError(f"internal error: {error!r}", hint="please report this")
                self._failure.exit_code = ExitCode.SOFTWARE
                self._failure.__cause__ = error
            self._log.error("%s", error, exc_info=None if isinstance(error, HarvesterError) else error)
            self.stop_soon()

    def _logger_of(self, shard: int | None) -> logging.LoggerAdapter[logging.Logger]:
        return logger_for(self._base_logger, self.config.name, shard)

    def _at_exit(self) -> None:
        """The host exits without having stopped us: leave no process behind."""
        parts = self._parts
        if parts is not None and not self._stopped.is_set():
            self.stop()


def _check(answered: bool) -> None:
    if not answered:
        raise HarvesterError(
            "the relay does not answer yet",
            hint="it is busy, and does what was asked for as soon as it goes on, or about to end; see its log",
        )

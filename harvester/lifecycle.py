"""The life of a harvester: starts its parts, joins the group, leads, and ends.

`Life` determines that order. Before it joins the group, it checks the tables, learns which outbox it serves and waits
for shards that can send (`await_identity`, `await_shards`). Then it passes the group's decisions about leading on to
the relay (`GroupListener`), and handles what may end it (`Host`). `Endpoints` are where a running harvester can be
reached: its HTTP pages and the control socket.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg

from harvester.announcer import Announcer
from harvester.config import Config, check_clients
from harvester.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    ExitCode,
    HarvesterError,
    LeadershipError,
    OutboxError,
)
from harvester.events import LeaderRevoked
from harvester.neli.group import Group, Identity
from harvester.outbox.connection import one_line
from harvester.outbox.leader_session import Owner, TermSession
from harvester.relay.forkserver import Forkserver
from harvester.relay.supervisor import Supervisor
from harvester.status_recorder import StatusRecorder
from harvester.telemetry import require_tracing
from harvester.wiring import Parts, assemble

if TYPE_CHECKING:
    from harvester.control.server import Controlled, ControlServer
    from harvester.http.pages import StatusSource
    from harvester.http.server import WebServer

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

_STOP_MARGIN_S = 5.0


class Life:
    """Runs at most once; any thread may begin its end.

    - parts: what runs; None until started
    - stopping, stopped: its end has begun, is complete
    - failure: the error that ended it, if any
    - is_fenced: trust has expired, and the group has since neither elected this member again nor revoked leadership
    - login: the credentials for connections; may be replaced
    """

    def __init__(
        self,
        config: Config,
        announcer: Announcer,
        recorder: StatusRecorder,
        endpoints: Endpoints,
        logger_of: Callable[[int | None], Log],
        *,
        group: Group | None,
        until_empty: bool,
        forkserver: Forkserver | None,
    ) -> None:
        self._config, self._announcer, self._recorder, self._endpoints = config, announcer, recorder, endpoints
        self._logger_of, self._log = logger_of, logger_of(None)
        self._group, self._until_empty, self._forkserver = group, until_empty, forkserver
        self.parts: Parts | None = None
        self.is_fenced = False
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.stopped = threading.Event()
        self.login = config
        self._starter: threading.Thread | None = None
        self._stopper: threading.Thread | None = None
        self._stop_asked = threading.Event()
        self._forced = False
        self._lock = threading.Lock()
        self._stop_lock = threading.Lock()

    def running(self) -> Parts:
        """The parts; raises HarvesterError if they are not running."""
        parts = self.parts
        if parts is None or self.stopping.is_set():
            raise HarvesterError("the harvester is not running", hint="start it first")
        return parts

    def start(self) -> None:
        """Start in the background; returns at once. Raises ConfigurationError, also for options of Kafka's client."""
        with self._lock:
            if self.parts is not None:
                raise HarvesterError("this harvester has already been started", hint="create a new Harvester")
            if self.stopping.is_set():
                self.stopped.set()
                return
            problems = check_clients(self._config)
            if problems:
                raise ConfigurationError(problems)
            if self._config.tracing.enabled:
                require_tracing()
            self._endpoints.prepare()
            self._announcer.start()
            self.parts = assemble(
                self._config,
                group=self._group,
                forkserver=self._forkserver,
                announcer=self._announcer,
                recorder=self._recorder,
                host=self,
                log_of=self._logger_of,
            )
            atexit.register(self._at_exit)
            self._stopper = self._new_stopper()
            self._recorder.started()
            self._endpoints.open_web()
            self.parts.supervisor.start()
            self._endpoints.open_control()
            self._starter = threading.Thread(target=self._join, args=(self.parts,), name="harvester-start", daemon=True)
            self._starter.start()

    def stop(self, *, force: bool) -> None:
        """Finish what is on the wire, leave the group, end the shards; returns when all of that is done.

        With `force` it waits for nothing.
        """
        with self._lock:
            self.stopping.set()
            parts = self.parts
        if parts is None:
            self.stopped.set()
            return
        parts.supervisor.renounce()
        if force:
            self._forced = True
            parts.supervisor.kill_shards()
        with self._stop_lock:
            if self.stopped.is_set():
                return
            if parts.supervisor.is_alive() and parts.supervisor.drain(self._drain_s()):
                handled = self._announcer.announce(LeaderRevoked())
                if threading.current_thread() is not self._announcer and not self._forced:
                    handled.wait(parts.revoke_within_s)
            parts.group_stop()
            parts.supervisor.end(0.5 if self._forced else self._config.delivery_timeout.total_seconds() + 0.5)
            parts.supervisor.join(self._config.delivery_timeout.total_seconds() + _STOP_MARGIN_S)
            parts.end_marker(_STOP_MARGIN_S)
            if self._starter is not None and self._starter is not threading.current_thread():
                self._starter.join(_STOP_MARGIN_S)
            parts.backlog.stop()
            if parts.keeper is not None:
                parts.keeper.stop()
            self._endpoints.close()
            self._announcer.stop(1.0)
            atexit.unregister(self._at_exit)
            self._log.info("stopped")
            self.stopped.set()
        self._stop_asked.set()  # ends the thread that waits for it
        if self._stopper is not None and self._stopper is not threading.current_thread():
            self._stopper.join(_STOP_MARGIN_S)

    def stop_soon(self) -> None:
        """Begin to `stop` in the background; returns at once."""
        self.stopping.set()
        self._stop_asked.set()
        if self._stopper is None or not self._stopper.is_alive():
            self._new_stopper()

    def _new_stopper(self) -> threading.Thread:
        """A thread that will call `stop`. It waits for that from the start: Python 3.12 starts no thread once the
        host's main thread has ended.
        """

        def stop() -> None:
            self._stop_asked.wait()
            self.stop(force=False)

        thread = threading.Thread(target=stop, name="harvester-stop", daemon=True)
        thread.start()
        return thread

    def _join(self, parts: Parts) -> None:
        """The thread that joins the group once everything that this requires exists."""
        try:
            identity = await_identity(parts, self._config, lambda: self.login, self._recorder, self.stopping)
        except (OutboxError, LeadershipError, BrokerError, psycopg.Error) as error:
            self.fail(error)
            return
        if identity is None:
            return
        await_shards(parts, self.stopping)
        with self._lock:  # either this happens before a stop begins, or not at all
            if not self.stopping.is_set():
                parts.marker.start()
                if parts.keeper is not None:
                    parts.keeper.start()
                parts.join(identity, self)

    def _drain_s(self) -> float:
        """How long to wait for what is on the wire: not at all if the end is forced or caused by an error."""
        cut_short = self._forced or self.failure is not None
        return 0.0 if cut_short else self._config.limits.drain_interval.total_seconds()

    def emptied(self) -> None:
        """Nothing is left to publish: end, if that was requested."""
        if self._until_empty and not self.stopping.is_set():
            self._log.info("the outbox is empty")
            self.stop_soon()

    def fail(self, error: BaseException) -> None:
        """The harvester cannot continue after this error: log it, and begin to stop."""
        if self.failure is None and not self.stopped.is_set():
            self.failure = error
            if not isinstance(error, HarvesterError):
                self.failure = HarvesterError(f"internal error: {error!r}", hint="please report this")
                self.failure.exit_code = ExitCode.SOFTWARE
                self.failure.__cause__ = error
            self._log.error("%s", error, exc_info=None if isinstance(error, HarvesterError) else error)
            self.stop_soon()

    # -- decisions of the group (`GroupListener`)

    @property
    def _supervisor(self) -> Supervisor:
        assert self.parts is not None, "the group is joined after the parts exist"
        return self.parts.supervisor

    def acquired(self) -> None:
        """Lead."""
        self.is_fenced = False
        self._supervisor.acquire()

    def fenced(self, reason: str) -> None:
        """Stop at once."""
        self.is_fenced = True
        self._supervisor.fence(reason)

    def revoking(self, within_s: float) -> None:
        """Finish what is on the wire, and notify the host."""
        self.is_fenced = False
        deadline = time.monotonic() + within_s
        supervisor = self._supervisor
        if supervisor.is_alive() and supervisor.drain(min(self._drain_s(), within_s)):
            self._log.info("leadership is revoked")
            self._announcer.announce(LeaderRevoked()).wait(max(0.0, deadline - time.monotonic()))

    def trust(self, until_s: float) -> None:
        """Shards may produce until then, while this harvester leads."""
        self._supervisor.trust.extend(until_s)

    def trouble(self, text: str | None, level: int = logging.WARNING) -> None:
        """What the group is waiting for."""
        self._recorder.trouble("group", text, level)

    def marker_alive(self) -> bool:
        """Whether supervisor and mark loop turn."""
        return self._supervisor.is_working()

    def client_said(self, level: int, text: str) -> None:
        """A log line of the Kafka client."""
        self._recorder.client_said(self._log, level, text)

    def _at_exit(self) -> None:
        """The host exits without having stopped the harvester: leave no process behind."""
        if self.parts is not None and not self.stopped.is_set():
            self.stop(force=False)


_SHARDS_WITHIN_S = 15.0


def await_identity(
    parts: Parts, config: Config, login: Callable[[], Config], recorder: StatusRecorder, stopping: threading.Event
) -> Identity | None:
    """Check the tables and learn the outbox's identity, for as long as it takes; None if `stopping` is set first.

    `login` returns the current credentials. Raises OutboxError, LeadershipError, BrokerError or psycopg.Error for
    problems that waiting does not solve.
    """
    session = TermSession(config.dsn, config.table, f"harvester {config.name}", 10.0)
    while not stopping.is_set():
        try:
            session.log_in(login().dsn)
            session.open()
            session.refuse_pooler()
            outbox = session.identity()
            row = session.read_term()
            session.check_owner(row, Owner(config.leader_group_id))
            if config.archive != "off":
                session.check_archive()
            parts.prepare(login(), recorded=row.progress_topic)
        except (DatabaseUnavailable, BrokerUnavailable, psycopg.OperationalError) as error:
            what = "group" if isinstance(error, BrokerUnavailable) else "database"
            hint = f" ({error.hint})" if isinstance(error, HarvesterError) and error.hint else ""
            recorder.trouble(what, f"{one_line(error)}{hint}")
            stopping.wait(config.limits.io_error_backoff.total_seconds())
            continue
        finally:
            session.close()
        recorder.trouble("database", None)
        recorder.trouble("group", None)
        return Identity(config.name, outbox, str(config.table))
    return None


def await_shards(parts: Parts, stopping: threading.Event) -> None:
    """A harvester whose shards cannot send yet should not be elected; but a single bad shard should not keep it out."""
    deadline = time.monotonic() + _SHARDS_WITHIN_S
    while not stopping.is_set() and time.monotonic() < deadline:
        if parts.supervisor.shards_ready.wait(0.05):
            return


class Endpoints:
    """Each is open if configured. Opened once, in the order of the methods."""

    def __init__(
        self, config: Config, recorder: StatusRecorder, log: Log, *, shown: StatusSource, controlled: Controlled
    ) -> None:
        self._config, self._recorder, self._log = config, recorder, log
        self._shown, self._controlled = shown, controlled
        self._web: WebServer | None = None
        self._control: ControlServer | None = None

    def prepare(self) -> None:
        """Raises ConfigurationError if the HTTP library is required but not installed."""
        listen = self._config.http.listen
        if listen == "off":
            return
        from harvester.http import web_server

        self._web = web_server(listen, self._shown, lambda text: self._recorder.trouble("http", text), self._log.info)

    def open_web(self) -> None:
        """Serve the configured HTTP pages."""
        if self._web is not None:
            self._web.start()

    def open_control(self) -> None:
        """Listen on the control socket; without one, the relay continues."""
        from harvester.control.server import ControlServer

        try:
            server = ControlServer.of(self._config, self._controlled, self._log)
        except HarvesterError as error:
            self._log.warning("%s", f"control: {error.message} ({error.hint})")
            self._recorder.note(f"control: {error.message}")
            return
        if server is not None:
            server.start()
            self._log.debug("listening on the control socket %s", server.path)
        self._control = server

    def close(self) -> None:
        """Close them all."""
        if self._web is not None:
            self._web.stop()
        if self._control is not None:
            self._control.stop()

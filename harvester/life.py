"""The life of a harvester: its parts are started, it joins the group, and it ends, asked or by a failure."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

import psycopg

from harvester.announcer import Announcer
from harvester.assembly import Parts, assemble
from harvester.config import Config
from harvester.doors import Doors
from harvester.errors import BrokerError, ExitCode, HarvesterError, LeadershipError, OutboxError
from harvester.events import LeaderRevoked
from harvester.joining import await_identity, await_shards
from harvester.journal import Journal
from harvester.leading import Leading
from harvester.neli.group import Group
from harvester.telemetry.extras import require_tracing

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

_STOP_MARGIN_S = 5.0


class Life:
    """One at most; any thread may begin its end.

    - parts: what runs; None until it is started
    - stopping, stopped: its end has begun, and is done
    - failure: what ended it, if that was an error
    - login: what connections are made with; may be replaced
    """

    def __init__(
        self,
        config: Config,
        announcer: Announcer,
        journal: Journal,
        doors: Doors,
        logger_of: Callable[[int | None], Log],
        *,
        group: Group | None,
        until_empty: bool,
    ) -> None:
        self._config, self._announcer, self._journal, self._doors = config, announcer, journal, doors
        self._logger_of, self._log = logger_of, logger_of(None)
        self._group, self._until_empty = group, until_empty
        self.parts: Parts | None = None
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.stopped = threading.Event()
        self.login = config
        self._leading = Leading(announcer, journal, self._drain_s, self._log)
        self._starter: threading.Thread | None = None
        self._forced = False
        self._lock = threading.Lock()
        self._stop_lock = threading.Lock()

    @property
    def fenced(self) -> bool:
        """Whether it led, and may not any more, until the group says otherwise."""
        return self._leading.fenced

    def running(self) -> Parts:
        """The parts; raises HarvesterError when they do not run."""
        parts = self.parts
        if parts is None or self.stopping.is_set():
            raise HarvesterError("the harvester is not running", hint="start it first")
        return parts

    def start(self) -> None:
        """Start in the background; returns at once."""
        with self._lock:
            if self.parts is not None:
                raise HarvesterError("this harvester was started before", hint="create a new Harvester")
            if self.stopping.is_set():
                self.stopped.set()
                return
            if self._config.tracing.enabled:
                require_tracing()
            self._doors.prepare()
            self._announcer.start()
            self.parts = assemble(
                self._config,
                group=self._group,
                announcer=self._announcer,
                journal=self._journal,
                emptied=self._emptied,
                failed=self._fail,
                log=self._logger_of,
            )
            atexit.register(self._at_exit)
            self._journal.started()
            self._doors.open_web()
            self.parts.supervisor.start()
            self._doors.open_control()
            self._starter = threading.Thread(target=self._join, args=(self.parts,), name="harvester-start", daemon=True)
            self._starter.start()

    def stop(self, *, force: bool) -> None:
        """Finish what is on the wire, leave the group, end the shards; returns when all is done.

        With `force` nothing is awaited.
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
            self._doors.close()
            self._announcer.stop(1.0)
            atexit.unregister(self._at_exit)
            self._log.info("stopped")
            self.stopped.set()

    def stop_soon(self) -> None:
        """Begin to `stop`, in the background; returns at once."""
        self.stopping.set()
        threading.Thread(target=self.stop, kwargs={"force": False}, name="harvester-stop", daemon=True).start()

    def _join(self, parts: Parts) -> None:
        """The thread that joins the group, when all that it takes is there."""
        try:
            identity = await_identity(parts, self._config, lambda: self.login, self._journal, self.stopping)
        except (OutboxError, LeadershipError, BrokerError, psycopg.Error) as error:
            self._fail(error)
            return
        if identity is None:
            return
        await_shards(parts, self.stopping)
        with self._lock:  # either this is done before a stop begins, or not at all
            if not self.stopping.is_set():
                parts.marker.start()
                if parts.keeper is not None:
                    parts.keeper.start()
                parts.join(identity, self._leading.callbacks(parts.supervisor, self._fail))

    def _drain_s(self) -> float:
        """How long what is on the wire is waited for: not at all when the end is forced or an error is its cause."""
        cut_short = self._forced or self.failure is not None
        return 0.0 if cut_short else self._config.limits.drain_interval.total_seconds()

    def _emptied(self) -> None:
        if self._until_empty and not self.stopping.is_set():
            self._log.info("the outbox is empty")
            self.stop_soon()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None and not self.stopped.is_set():
            self.failure = error
            if not isinstance(error, HarvesterError):
                self.failure = HarvesterError(f"internal error: {error!r}", hint="please report this")
                self.failure.exit_code = ExitCode.SOFTWARE
                self.failure.__cause__ = error
            self._log.error("%s", error, exc_info=None if isinstance(error, HarvesterError) else error)
            self.stop_soon()

    def _at_exit(self) -> None:
        """The host exits without having stopped us: leave no process behind."""
        if self.parts is not None and not self.stopped.is_set():
            self.stop(force=False)

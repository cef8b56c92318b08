"""How much stands in the outbox: asked now and then over a session of its own, so that nobody waits for it."""

from __future__ import annotations

import threading
import time

import psycopg

from harvester.errors import OutboxError
from harvester.outbox.connect import connect
from harvester.outbox.overview import read_backlog
from harvester.outbox.tables import OutboxTable
from harvester.status import Backlog

_EVERY_S = 1.0
_REST = 20  # times as long as the last look took
_FORGOTTEN_AFTER_S = 15.0
_STOP_WITHIN_S = 6.0  # a statement under way ends by its own timeout


class BacklogWatch:
    """Looks once a second while somebody is interested; rests, without a session, when nobody has asked for a while.

    Looks that take long come less often: they cost a twentieth of the time at the most.
    """

    def __init__(self, dsn: str, table: OutboxTable, application_name: str) -> None:
        self._dsn, self._table, self._application = dsn, table, application_name
        self._asked_at = 0.0
        self._latest: Backlog | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def latest(self) -> Backlog | None:
        """The last look; None while there is none. Asking keeps the watch awake."""
        self._asked_at = time.monotonic()
        with self._lock:
            if not self._ended.is_set() and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="harvester-backlog", daemon=True)
                self._thread.start()
        return self._latest

    def log_in(self, dsn: str) -> None:
        """Connect with this from now on."""
        self._dsn = dsn

    def stop(self) -> None:
        """End the watch, and wait for it."""
        self._ended.set()
        with self._lock:
            if self._thread is not None:
                self._thread.join(_STOP_WITHIN_S)

    def _run(self) -> None:
        connection: psycopg.Connection | None = None
        while not self._ended.is_set() and time.monotonic() - self._asked_at < _FORGOTTEN_AFTER_S:
            began = time.monotonic()
            try:
                if connection is None or connection.closed:
                    connection = connect(self._dsn, application_name=self._application, silence_s=_STOP_WITHIN_S)
                    connection.execute("SET statement_timeout = '5s'")
                    began = time.monotonic()
                self._latest = read_backlog(connection, self._table)
            except (psycopg.Error, OutboxError):
                self._latest = None  # the relay's own sessions report what is wrong
                if connection is not None:
                    connection.close()
            # It reads past all dead rows at the head, and under a forgotten transaction these are never cleaned away.
            self._ended.wait(max(_EVERY_S, _REST * (time.monotonic() - began)))
        if connection is not None:
            connection.close()
        self._latest = None

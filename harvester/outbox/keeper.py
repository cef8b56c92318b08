"""The archive's keeper: a thread that makes the partitions of the next days and drops those past retention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import psycopg

from harvester.errors import OutboxError
from harvester.outbox.archive import check_archive, keep_archive
from harvester.outbox.connect import connect, one_line
from harvester.outbox.tables import OutboxTable

_EVERY_S = 3600.0
_AGAIN_S = 60.0  # after the database could not be reached


class ArchiveKeeper(threading.Thread):
    """Looks after the archive at once and then every hour; several harvesters may do so at the same time.

    `problem` gets what it could not do, in words, and None when nothing is wrong.
    """

    def __init__(
        self,
        dsn: str,
        table: OutboxTable,
        retention: timedelta,
        application_name: str,
        problem: Callable[[str | None], None],
    ) -> None:
        super().__init__(name="harvester-archive", daemon=True)
        self._dsn, self._table, self._retention = dsn, table, retention
        self._application, self._problem = application_name, problem
        self._ended = threading.Event()

    def log_in(self, dsn: str) -> None:
        """Connect with this from now on."""
        self._dsn = dsn

    def stop(self) -> None:
        """End the thread; it is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """The thread."""
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                self._problem(self._keep())
                wait_s = _EVERY_S
            except (psycopg.Error, OutboxError) as error:
                self._problem(one_line(error))
                wait_s = _AGAIN_S

    def _keep(self) -> str | None:
        connection = connect(self._dsn, application_name=self._application)
        try:
            check_archive(connection, self._table)
            return keep_archive(connection, self._table, self._retention).problem
        finally:
            connection.close()

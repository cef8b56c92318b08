"""The stasher over Django's connections: the one for psycopg, within `transaction.atomic`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import psycopg
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from harvester.errors import NoTransaction, OutboxError
from harvester.outbox.stasher import Stasher
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord


class DjangoStasher:
    """Writes records into one outbox of one of the configured databases; threads may share it.

    Inside `atomic` only: elsewhere Django commits each statement, and nothing would tie a record to its change. Errors
    of the server come as Django's own (`django.db.Error`). `connection.queries` does not list these statements.
    """

    def __init__(self, table: str | OutboxTable | None = None, using: str = DEFAULT_DB_ALIAS) -> None:
        self.using = using
        self._stasher = Stasher(outbox_table() if table is None else table)
        self.table = self._stasher.table

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises NoTransaction, RecordRejected, SchemaError or Django's errors."""
        wrapper = self._wrapper()
        with wrapper.wrap_database_errors:
            return self._stasher.stash(psycopg_connection(wrapper), record)

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order. All are checked first."""
        wrapper = self._wrapper()
        with wrapper.wrap_database_errors:
            return self._stasher.stash_many(psycopg_connection(wrapper), records)

    def _wrapper(self) -> BaseDatabaseWrapper:
        wrapper = connections[self.using]
        if not wrapper.in_atomic_block:
            raise NoTransaction(
                f"a record for {self.table} was to be written outside of transaction.atomic",
                hint="write it within the atomic block that makes the change",
            )
        wrapper.validate_no_broken_transaction()
        return wrapper


def stash(record: OutboxRecord, using: str = DEFAULT_DB_ALIAS) -> int:
    """Write one record into the outbox of the settings; see `DjangoStasher.stash`."""
    return _stasher(outbox_table(), using).stash(record)


def stash_many(records: Iterable[OutboxRecord], using: str = DEFAULT_DB_ALIAS) -> list[int]:
    """Write records into the outbox of the settings; see `DjangoStasher.stash_many`."""
    return _stasher(outbox_table(), using).stash_many(records)


def outbox_table() -> OutboxTable:
    """The outbox that HARVESTER_OUTBOX_TABLE names; raises SchemaError."""
    return OutboxTable.parse(getattr(settings, "HARVESTER_OUTBOX_TABLE", "outbox"))


def psycopg_connection(wrapper: BaseDatabaseWrapper) -> psycopg.Connection[object]:
    """What Django talks over; raises OutboxError for another database than PostgreSQL."""
    wrapper.ensure_connection()
    connection = wrapper.connection
    if not isinstance(connection, psycopg.Connection):
        raise OutboxError(
            f"the database {wrapper.alias!r} is not used through psycopg 3 ({wrapper.vendor})",
            hint="the outbox is a table of PostgreSQL; a database router can keep its migration from others",
        )
    return connection


@cache
def _stasher(table: OutboxTable, using: str) -> DjangoStasher:
    return DjangoStasher(table, using)

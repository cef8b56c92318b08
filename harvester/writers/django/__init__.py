"""A Django app: the outbox as a model, its tables by migration, and `stash()` inside `atomic`.

    INSTALLED_APPS = [..., "harvester.writers.django"]
    HARVESTER_OUTBOX_TABLE = "outbox"  # the default

    with transaction.atomic():
        Account.objects.filter(pk=42).update(balance=F("balance") - 5)
        stash(OutboxRecord("billing.paid", key="42", value="{…}"))

The stashers are those for psycopg, on Django's connections. Nothing here loads models, so the package may be imported
before Django's apps are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import psycopg
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from harvester.errors import NoTransaction, OutboxError
from harvester.outbox.lease_steps import Numbered, not_apart
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease, Stashed
from harvester.outbox.stasher import LeasedStasher, Stasher, require_alive
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord


class DjangoStasher:
    """Writes records into one outbox of one of the configured databases; threads may share it.

    Only inside `atomic`: otherwise Django commits each statement, and nothing would tie a record to its change. The
    server's errors are raised as Django's (`django.db.Error`). `connection.queries` does not list these statements.
    """

    def __init__(
        self,
        table: str | OutboxTable | None = None,
        using: str = DEFAULT_DB_ALIAS,
        *,
        lease_time: timedelta = DEFAULT_LEASE_TIME,
    ) -> None:
        self.using = using
        self._stasher = Stasher(outbox_table() if table is None else table, lease_time=lease_time)
        self.table = self._stasher.table

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises NoTransaction, RecordRejected, SchemaError or Django's errors."""
        with self._connection() as connection:
            return self._stasher.stash(connection, record)

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which ascend in that order. All are checked first."""
        with self._connection() as connection:
            return self._stasher.stash_many(connection, records)

    def lease(self, name: str) -> Lease:
        """Take a lease of one name, like `lease_many`."""
        return self.lease_many([name])[0]

    def lease_many(self, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names; only outside `atomic`. See `harvester.Stasher.lease_many`."""
        wrapper = connections[self.using]
        if wrapper.in_atomic_block:
            raise not_apart()
        with wrapper.wrap_database_errors:
            return self._stasher.lease_many(psycopg_connection(wrapper), names)

    def leased(self, lease: Lease) -> DjangoLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return DjangoLeasedStasher(self, self._stasher.leased(lease))

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[object]]:
        wrapper = connections[self.using]
        if not wrapper.in_atomic_block:
            raise NoTransaction(
                f"a record for {self.table} must be written within transaction.atomic",
                hint="write it within the atomic block that makes the change",
            )
        wrapper.validate_no_broken_transaction()
        with wrapper.wrap_database_errors:
            yield psycopg_connection(wrapper)


class DjangoLeasedStasher(Numbered):
    """Made by `DjangoStasher.leased`; see `harvester.LeasedStasher`. For one thread at a time, only inside `atomic`."""

    def __init__(self, stasher: DjangoStasher, leased: LeasedStasher) -> None:
        self._stasher, self._leased, self._course = stasher, leased, leased._course

    def stash(self, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record if its number is next; saves `position` with it, None keeps the previous one."""
        with self._stasher._connection() as connection:
            return self._leased.stash(connection, record, position=position)

    def stash_many(self, records: Iterable[OutboxRecord], *, position: str | None = None) -> list[Stashed]:
        """Write records in order, all or none, skipping those already written; `position` is that of the last one."""
        with self._stasher._connection() as connection:
            return self._leased.stash_many(connection, records, position=position)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """`atomic`, which takes the numbers back unless it commits."""
        with self._taken_back() as outcome:
            with transaction.atomic(self._stasher.using):
                yield
                rolls_back = transaction.get_rollback(self._stasher.using)
                if not rolls_back:
                    require_alive(psycopg_connection(connections[self._stasher.using]))
            outcome.committed = not rolls_back


def stash(record: OutboxRecord, using: str = DEFAULT_DB_ALIAS) -> int:
    """Write one record into the configured outbox; see `DjangoStasher.stash`."""
    return _stasher(outbox_table(), using).stash(record)


def stash_many(records: Iterable[OutboxRecord], using: str = DEFAULT_DB_ALIAS) -> list[int]:
    """Write records into the configured outbox; see `DjangoStasher.stash_many`."""
    return _stasher(outbox_table(), using).stash_many(records)


def outbox_table() -> OutboxTable:
    """The outbox named by HARVESTER_OUTBOX_TABLE; raises SchemaError."""
    return OutboxTable.parse(getattr(settings, "HARVESTER_OUTBOX_TABLE", "outbox"))


def psycopg_connection(wrapper: BaseDatabaseWrapper) -> psycopg.Connection[object]:
    """Django's connection; raises OutboxError for databases other than PostgreSQL."""
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

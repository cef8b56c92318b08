"""What stashers are given to write over: a connection of psycopg, or a cursor, which stands for its connection."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from harvester.errors import LeaseError

Target = psycopg.Connection[Any] | psycopg.Cursor[Any]
AsyncTarget = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]


def connection_of(target: Target) -> psycopg.Connection[Any]:
    """The blocking connection; raises TypeError for anything else."""
    if isinstance(target, psycopg.Connection):
        return target
    if isinstance(target, psycopg.Cursor):
        return target.connection
    raise TypeError(f"a psycopg Connection or Cursor is needed, not {type(target).__name__} (see AsyncStasher)")


def async_connection_of(target: AsyncTarget) -> psycopg.AsyncConnection[Any]:
    """The asyncio connection; raises TypeError for anything else."""
    if isinstance(target, psycopg.AsyncConnection):
        return target
    if isinstance(target, psycopg.AsyncCursor):
        return target.connection
    raise TypeError(f"a psycopg AsyncConnection or AsyncCursor is needed, not {type(target).__name__} (see Stasher)")


def begin(connection: psycopg.Connection[Any]) -> None:
    """See to it that `connection.transaction()` becomes a savepoint, unless the connection autocommits.

    On one that is idle psycopg would make it the outermost transaction and commit at its end, although the caller's own
    transaction, which the first statement begins, is still to be committed or rolled back by him.
    """
    if _begins_with_a_statement(connection):
        psycopg.Cursor(connection).execute("SELECT")


async def async_begin(connection: psycopg.AsyncConnection[Any]) -> None:
    """See `begin`."""
    if _begins_with_a_statement(connection):
        await psycopg.AsyncCursor(connection).execute("SELECT")


def _begins_with_a_statement(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return not connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE


def require_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Nothing is under way there: a lease commits by itself.

    Were it rolled back after it was returned, the next one of the name would be given the same generation.
    """
    idle = connection.info.transaction_status == TransactionStatus.IDLE
    if not idle or connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise not_apart()


def not_apart() -> LeaseError:
    """What to raise where a lease is asked for within a transaction."""
    return LeaseError(
        "a lease is taken in a transaction of its own, and this connection is within one, or within a pipeline",
        hint="take the lease before the transaction begins, or over another connection",
    )


def require_alive(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """The transaction can be committed; raises psycopg's error for one that an error has ended.

    PostgreSQL answers its COMMIT with a rollback and without an error.
    """
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise psycopg.errors.InFailedSqlTransaction(
            "an error has ended this transaction, whatever became of the exception: nothing of it is committed"
        )

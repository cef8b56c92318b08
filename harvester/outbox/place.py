"""Where a session is: on which server, at which term, and as which backend (P7, P9)."""

from __future__ import annotations

from typing import Any

import psycopg

from harvester.errors import SchemaError
from harvester.outbox.connect import server_identity
from harvester.outbox.tables import OutboxTable

Connection = psycopg.Connection[Any]


def read_server(connection: Connection) -> str | None:
    """System identifier and timeline as one text; None where this user may not ask."""
    identity = server_identity(connection)
    return f"{identity[0]}/{identity[1]}" if identity is not None else None


def read_place(connection: Connection, table: OutboxTable) -> tuple[str | None, int]:
    """(server, term in the term row); raises SchemaError when there is no term row."""
    row = connection.execute(f"SELECT term FROM {table.term}").fetchone()
    if row is None:
        raise SchemaError(f"{table.term} has no row", hint="run `harvester init`")
    return read_server(connection), int(row[0])


def read_holder(connection: Connection, table: OutboxTable) -> tuple[int, str | None]:
    """(term, holder) of the term row; raises SchemaError when there is none."""
    row = connection.execute(f"SELECT term, holder::text FROM {table.term}").fetchone()
    if row is None:
        raise SchemaError(f"{table.term} has no row", hint="run `harvester init`")
    return int(row[0]), row[1]


def why_another(server: str | None, term: int, meant_server: str | None, meant_term: int) -> str | None:
    """Why a database with this server and term row is not the one that the term was taken on (P9); None: it is."""
    if meant_server is not None and server is not None and server != meant_server:
        return f"it is server {server}, the term was taken on {meant_server}"
    if term < meant_term:
        return f"its term is {term}, ours is {meant_term}: it has gone back in time"
    return None


def read_session(connection: Connection) -> tuple[int, str]:
    """(pid, backend_start) of this session, as others find it in pg_stat_activity."""
    row = connection.execute(
        "SELECT pid, backend_start::text FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()"
    ).fetchone()
    if row is None:
        raise SchemaError("pg_stat_activity does not show this session")
    return int(row[0]), str(row[1])

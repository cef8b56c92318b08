"""A database for each test, cloned from one that has the outbox in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from harvester.outbox import schema
from harvester.outbox.tables import OutboxTable

from .servers import Servers, template_name

TABLE = OutboxTable.parse("outbox")
Admin = psycopg.Connection[Any]


def ensure_template(servers: Servers) -> str:
    """Its name. The first worker makes it; the others wait for that."""
    name = template_name()
    with psycopg.connect(servers.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(hashtext(%s))", [name])  # until the session ends
        if admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            scratch = sql.Identifier(f"{name}_new")
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(scratch))
            admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(scratch))
            with psycopg.connect(make_conninfo(servers.dsn, dbname=f"{name}_new")) as connection:
                schema.init(connection, TABLE)
            # The first session writes down what it reads of the catalogs; clones have it from here.
            psycopg.connect(make_conninfo(servers.dsn, dbname=f"{name}_new")).close()
            admin.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(scratch, sql.Identifier(name)))
    return name


@contextmanager
def fresh_database(
    servers: Servers, template: str, admin: Admin | None = None, *, encoding: str | None = None
) -> Iterator[str]:
    """The DSN of a clone of `template`, dropped at the end whoever is still connected.

    `admin` is a session that is kept from test to test; without one, each of the two commands has its own. `encoding`:
    another than the template's, which has to be template0.
    """
    name = f"test_{uuid.uuid4().hex[:12]}"

    def execute(command: sql.Composed) -> None:
        if admin is not None:
            admin.execute(command)
            return
        with psycopg.connect(servers.dsn, autocommit=True) as own:
            own.execute(command)

    other = sql.SQL(" ENCODING {} LOCALE 'C'").format(encoding) if encoding is not None else sql.SQL("")
    # Through the WAL, as by default, a copy takes the server twice as long, and so does its end.
    execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy{}").format(
            sql.Identifier(name), sql.Identifier(template), other
        )
    )
    try:
        yield make_conninfo(servers.dsn, dbname=name)
    finally:
        execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def make_its_own(dsn: str) -> None:
    """Give a cloned outbox identities of its own: two clones are two outboxes."""
    with psycopg.connect(dsn) as connection:
        connection.execute(
            sql.SQL("UPDATE {} SET outbox_id = gen_random_uuid(), incarnation = gen_random_uuid()").format(
                sql.SQL(TABLE.term)
            )
        )

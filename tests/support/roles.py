"""An outbox as a careful user keeps it: owned by one role, read by another, written by a third."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from harvester.outbox import schema
from harvester.outbox.sql.grants import GrantTarget, script
from harvester.outbox.tables import OutboxTable

from .outboxes import poor_role

TABLE = OutboxTable.parse("billing.outbox")


@dataclass(frozen=True)
class Roles:
    """DSNs of the administrator, the owner of the tables, the relay's role and a writer's."""

    admin: str
    owner: str
    relay: str
    writer: str


def lead_astray(admin: psycopg.Connection[Any], poor: psycopg.Connection[Any]) -> None:
    """Have this role's session find a now() of its own before the server's, which would be long ago."""
    admin.execute(f"CREATE SCHEMA astray AUTHORIZATION {poor.info.user}".encode())
    poor.execute("CREATE FUNCTION astray.now() RETURNS timestamptz LANGUAGE sql AS $$SELECT timestamptz '2000-01-01'$$")
    poor.execute("SET search_path = astray, public, pg_catalog")


def led_astray(admin: psycopg.Connection[Any]) -> int:
    """How many rows of the outbox are of that time."""
    row = admin.execute("SELECT count(*) FROM outbox WHERE create_time < '2001-01-01'").fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def separate_roles(dsn: str) -> Iterator[Roles]:
    """A schema `billing` with an outbox in it, grants as `harvester grants` prints them, and a table of others."""
    with poor_role(dsn) as owner, poor_role(dsn) as relay, poor_role(dsn) as writer:
        owner_name, relay_name, writer_name = (
            psycopg.conninfo.conninfo_to_dict(d)["user"] for d in (owner, relay, writer)
        )
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            admin.execute(f"CREATE SCHEMA billing AUTHORIZATION {owner_name}")
        with psycopg.connect(owner, autocommit=True) as connection:
            schema.init(connection, TABLE, notify=True)
            connection.execute("CREATE TABLE billing.customers (name TEXT)")
            place = GrantTarget.of(TABLE, schema.read_facts(connection, TABLE))
            connection.execute(script(place, relays=[str(relay_name)], writers=[str(writer_name)]).encode())
        yield Roles(dsn, owner, relay, writer)

"""Outbox tables and rows as users have them, and roles with few rights."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row, tuple_row


def seed_ddl(table: str = "outbox", *, leader_id: str = "UUID", value: str = "VARCHAR(10000)") -> str:
    """The table of goharvest's user guide."""
    return f"""CREATE TABLE IF NOT EXISTS {table} (
        id                  BIGSERIAL PRIMARY KEY,
        create_time         TIMESTAMP WITH TIME ZONE NOT NULL,
        kafka_topic         VARCHAR(249) NOT NULL,
        kafka_key           VARCHAR(100) NOT NULL,
        kafka_value         {value},
        kafka_header_keys   TEXT[] NOT NULL,
        kafka_header_values TEXT[] NOT NULL,
        leader_id           {leader_id})"""


def seed_insert(table: str = "outbox") -> str:
    """The statement of the original user guide; its five parameters may all be bound as text."""
    return f"""INSERT INTO {table} (
        create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
        VALUES (NOW(), %s, %s, %s, %s, %s)"""


@contextmanager
def poor_role(dsn: str, *grants: str) -> Iterator[str]:
    """The DSN of a role that may do nothing but `grants`, SQL in which {role} stands for its name."""
    name, password = f"role_{uuid.uuid4().hex}", uuid.uuid4().hex
    role = sql.Identifier(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, password))
        try:
            for grant in grants:
                connection.execute(grant.format(role=name))
            yield make_conninfo(dsn, user=name, password=password)
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


def insert(connection: psycopg.Connection[Any], table: str = "outbox", rows: int = 1) -> None:
    """Rows by the statement of the guide; a % of the name is doubled by the caller."""
    for _ in range(rows):
        connection.execute(seed_insert(table), ("t", "k", "v", "{}", "{}"))


def term_row(connection: psycopg.Connection[Any], table: str = '"outbox_term"') -> dict[str, Any]:
    """The term row by column."""
    row = connection.cursor(row_factory=dict_row).execute(f"SELECT * FROM {table}").fetchone()
    assert row is not None
    return row


def tables(connection: psycopg.Connection[Any]) -> set[str]:
    """Names of everything in the schema public."""
    rows = psycopg.Cursor(connection, row_factory=tuple_row).execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    )
    return {row[0] for row in rows}

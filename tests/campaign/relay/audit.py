"""Triggers that write down, inside the very transactions, what happens to the outbox and to the term row.

They run in the harvester's and the writers' own statements, so a transaction that is rolled back, or that a crash of
the server undoes, leaves nothing, and what a mark saw of the term is what its lock on the term row guaranteed. The
tables stand in the schema `audit`, beside the function with which the campaign's own writers number their rows.
"""

from __future__ import annotations

from typing import Any

import psycopg

from .history import Committed, Marked, Quarantined, Removed

Connection = psycopg.Connection[Any]

_HEAD = """
    split_part(left(kafka_value, 48), ':', 1)::bigint, split_part(left(kafka_value, 48), ':', 2)::bigint,
    split_part(left(kafka_value, 48), ':', 3)"""

_INSTALL = f"""
CREATE SCHEMA audit;
CREATE TABLE audit.inserted (key text, seq bigint, stamp bigint, kind text, id bigint);
CREATE TABLE audit.removed (key text, seq bigint, stamp bigint, kind text, id bigint, at timestamptz);
CREATE TABLE audit.marked (by text, leader_id uuid, at timestamptz, rows int, term bigint, holder text);

CREATE TABLE audit.truncated (key text, seq bigint, at timestamptz);

CREATE FUNCTION audit.on_insert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.inserted SELECT kafka_key, {_HEAD}, id FROM fresh;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_insert AFTER INSERT ON outbox REFERENCING NEW TABLE AS fresh
    FOR EACH STATEMENT EXECUTE FUNCTION audit.on_insert();

-- When the server received the statement: a purge must have been acknowledged before.
CREATE FUNCTION audit.on_delete() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.removed SELECT kafka_key, {_HEAD}, id, statement_timestamp() FROM gone;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_delete AFTER DELETE ON outbox REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION audit.on_delete();

-- The lock that a TRUNCATE takes before its triggers run keeps everybody else away.
CREATE FUNCTION audit.on_truncate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.truncated
    SELECT kafka_key, split_part(left(kafka_value, 48), ':', 1)::bigint, clock_timestamp() FROM outbox;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_truncate BEFORE TRUNCATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION audit.on_truncate();

CREATE FUNCTION audit.on_mark() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.marked
    SELECT regexp_replace(current_setting('application_name'), '^harvester (\\S+).*', '\\1'), leader_id,
           clock_timestamp(), count(*), t.term, t.holder_name
    FROM taken, outbox_term t WHERE leader_id IS NOT NULL GROUP BY leader_id, t.term, t.holder_name;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_mark AFTER UPDATE ON outbox REFERENCING NEW TABLE AS taken
    FOR EACH STATEMENT EXECUTE FUNCTION audit.on_mark();

-- One row, numbered under the lock of its key, in the pump's form and in the pump's counts.
CREATE FUNCTION audit.write(key text, topic text, kind text, created timestamptz DEFAULT clock_timestamp(),
    header_keys text[] DEFAULT '{{}}', header_values text[] DEFAULT '{{}}', partition int DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$ DECLARE seq bigint; BEGIN
    INSERT INTO outbox_pump AS p (key, topic, count) VALUES (write.key, write.topic, 1)
    ON CONFLICT ON CONSTRAINT outbox_pump_pkey DO UPDATE SET count = p.count + 1 RETURNING p.count INTO seq;
    INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
        kafka_partition)
    VALUES (write.created, write.topic, write.key, rpad(seq || ':' ||
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint || ':' || write.kind || ':', 60, '.'),
        write.header_keys, write.header_values, write.partition);
END $$;
"""


def install(connection: Connection) -> None:
    """On the default outbox, which must be empty; needs an autocommit connection."""
    with connection.transaction():
        connection.execute(_INSTALL)


def read_committed(connection: Connection) -> list[Committed]:
    """Rows whose transactions were committed, rows that others than the pump wrote excluded."""
    rows = connection.execute("SELECT key, seq, stamp, kind FROM audit.inserted").fetchall()
    return [Committed(key, seq, stamp / 1e6, stamp, late=kind == "l") for key, seq, stamp, kind in rows]


def read_removed(connection: Connection) -> list[Removed]:
    """Rows that left the outbox."""
    rows = connection.execute("SELECT key, seq, extract(epoch FROM at)::float8 FROM audit.removed").fetchall()
    return [Removed(*row) for row in rows]


def read_truncated(connection: Connection) -> list[tuple[str, int]]:
    """Rows that stood in the outbox when it was truncated; rows that others than the writers wrote have no number."""
    query = "SELECT key, seq FROM audit.truncated WHERE key IS NOT NULL AND seq IS NOT NULL"
    return [tuple(row) for row in connection.execute(query).fetchall()]


def read_marked(connection: Connection) -> list[Marked]:
    """Marks that wrote: none where marks are kept in memory."""
    query = "SELECT by, leader_id::text, extract(epoch FROM at)::float8, rows, term, holder FROM audit.marked"
    return [Marked(*row) for row in connection.execute(query).fetchall()]


def read_quarantined(connection: Connection) -> list[Quarantined]:
    """What stands in quarantine."""
    query = """SELECT kafka_key, split_part(left(kafka_value, 48), ':', 1)::bigint,
                      extract(epoch FROM quarantined_at)::float8, error FROM outbox_quarantine"""
    return [Quarantined(*row) for row in connection.execute(query).fetchall()]


def read_waiting(connection: Connection) -> list[tuple[str, int]]:
    """What stands in the outbox."""
    query = "SELECT kafka_key, split_part(left(kafka_value, 48), ':', 1)::bigint FROM outbox"
    return [tuple(row) for row in connection.execute(query).fetchall()]


def side_counts(connection: Connection) -> dict[str, int]:
    """The pump's own counts: the audit must agree with them."""
    return dict(connection.execute("SELECT key, count FROM outbox_pump WHERE count > 0").fetchall())

"""The statements that make the schema, as text: what `init` executes is what `init --print` shows.

Every statement is idempotent by itself, so a script of them may run twice, or half of it may have run before.
Names are quoted by `OutboxTable`; the only other text that enters a statement are the types chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from harvester.outbox.tables import OutboxTable

KafkaType = Literal["text", "bytea"]
Migration = Callable[[OutboxTable], list[str]]


def index_quarantine(table: OutboxTable) -> list[str]:
    """Version 2: `harvester dead` looks records up by key and by time. A hash, because keys may be of any length."""
    plain = OutboxTable(None, table.name)
    return [
        f"CREATE INDEX IF NOT EXISTS {plain.beside('quarantine_key')} ON {table.quarantine} USING hash (kafka_key)",
        f"CREATE INDEX IF NOT EXISTS {plain.beside('quarantine_at')} ON {table.quarantine} (quarantined_at)",
    ]


# Entry n brings version n + 1 to n + 2. Each runs inside the transaction of `init`, and its statements are idempotent.
MIGRATIONS: tuple[Migration, ...] = (index_quarantine,)

# One lock for every outbox of a database: two `init` at once are rare, and short.
ADVISORY_LOCK = 0x68_61_72_76_65_73_74  # "harvest"


def schema_version() -> int:
    """The version that this code writes and understands."""
    return 1 + len(MIGRATIONS)


def lock_statement() -> str:
    """Makes concurrent runs wait for each other until the end of the transaction."""
    return f"SELECT pg_catalog.pg_advisory_xact_lock({ADVISORY_LOCK})"


def create_outbox(table: OutboxTable, value_type: KafkaType) -> str:
    """A new outbox: the table of the original guide with defaults, without length limits, with a partition."""
    return f"""CREATE TABLE IF NOT EXISTS {table.sql} (
    id                  BIGSERIAL PRIMARY KEY,
    create_time         TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    kafka_topic         VARCHAR(249) NOT NULL,
    kafka_key           TEXT,
    kafka_value         {value_type.upper()},
    kafka_header_keys   TEXT[] NOT NULL DEFAULT '{{}}',
    kafka_header_values TEXT[] NOT NULL DEFAULT '{{}}',
    kafka_partition     INTEGER,
    leader_id           UUID
)"""


def create_term(table: OutboxTable) -> str:
    """The table whose one row says who leads, under which term, and which id space is meant."""
    return f"""CREATE TABLE IF NOT EXISTS {table.term} (
    singleton         BOOLEAN PRIMARY KEY DEFAULT true CHECK (singleton),
    schema_version    INTEGER NOT NULL,
    outbox_id         UUID NOT NULL DEFAULT gen_random_uuid(),
    incarnation       UUID NOT NULL DEFAULT gen_random_uuid(),
    delivery          TEXT NOT NULL DEFAULT 'at-least-once',
    term              BIGINT NOT NULL DEFAULT 0,
    holder            UUID,
    holder_name       TEXT,
    sessions          JSONB NOT NULL DEFAULT '[]',
    system_identifier BIGINT,
    timeline          INTEGER,
    outbox_oid        OID,
    last_value        BIGINT,
    acquired_at       TIMESTAMP WITH TIME ZONE
)"""


def insert_term(table: OutboxTable) -> str:
    """The one row, if it is not there. It begins with version 1, so that all migrations run on a new schema too."""
    return f"""INSERT INTO {table.term} (schema_version, outbox_oid)
VALUES (1, {_literal(table.sql)}::pg_catalog.regclass)
ON CONFLICT DO NOTHING"""


def create_quarantine(table: OutboxTable, key_type: KafkaType, value_type: KafkaType) -> str:
    """The table for records that Kafka will never take; key and value are as in the outbox, without limits."""
    return f"""CREATE TABLE IF NOT EXISTS {table.quarantine} (
    id                  BIGINT NOT NULL,
    incarnation         UUID NOT NULL,
    create_time         TIMESTAMP WITH TIME ZONE,
    kafka_topic         TEXT,
    kafka_key           {key_type.upper()},
    kafka_value         {value_type.upper()},
    kafka_header_keys   TEXT[],
    kafka_header_values TEXT[],
    kafka_partition     INTEGER,
    error               TEXT NOT NULL,
    attempts            INTEGER NOT NULL,
    first_failed_at     TIMESTAMP WITH TIME ZONE,
    quarantined_at      TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    PRIMARY KEY (incarnation, id)
)"""


def retype_quarantine(table: OutboxTable, column: str, kind: KafkaType) -> str:
    """Follow an outbox whose key or value changed between text and bytea; the bytes stay the same."""
    convert = "convert_to" if kind == "bytea" else "convert_from"
    return (
        f"ALTER TABLE {table.quarantine} ALTER COLUMN {column} TYPE {kind.upper()} "
        f"USING pg_catalog.{convert}({column}, 'UTF8')"
    )


def create_notify(table: OutboxTable, channel: str) -> list[str]:
    """Wake the leader at each committed INSERT; one notification per transaction, whatever its size."""
    function = _notify_function(table)
    return [
        f"""CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS $function$
BEGIN
    PERFORM pg_catalog.pg_notify(TG_ARGV[0], '');
    RETURN NULL;
END
$function$""",
        drop_notify(table, channel),
        f"""CREATE TRIGGER {channel} AFTER INSERT ON {table.sql}
FOR EACH STATEMENT EXECUTE FUNCTION {_notify_function(table, channel)}""",
    ]


def drop_notify(table: OutboxTable, channel: str) -> str:
    """Remove the trigger; its function stays, since other names of the table may use it."""
    return f"DROP TRIGGER IF EXISTS {channel} ON {table.sql}"


def set_version(table: OutboxTable) -> str:
    """Note that all migrations have run."""
    version = schema_version()
    return f"UPDATE {table.term} SET schema_version = {version} WHERE schema_version < {version}"


def refresh_statement(table: OutboxTable, sequence: str, oid: int) -> str:
    """Renew the incarnation when ids may start again; returns one row (renewed).

    They may when the outbox is another table than before, or its sequence stands below a value seen before. While
    a sequence has not been called since it was (re)started, its last_value is the one it will give next.
    """
    return f"""WITH known AS MATERIALIZED (
    SELECT outbox_oid, last_value FROM {table.term} FOR UPDATE
), seen AS MATERIALIZED (
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS value FROM {sequence}
), verdict AS MATERIALIZED (
    SELECT seen.value, coalesce(known.outbox_oid <> {oid}, false)
        OR coalesce(seen.value < known.last_value, false) AS renewed
    FROM known, seen
)
UPDATE {table.term} SET
    incarnation = CASE WHEN verdict.renewed THEN gen_random_uuid() ELSE incarnation END,
    outbox_oid = {oid},
    last_value = verdict.value
FROM verdict
RETURNING verdict.renewed"""


def script(
    table: OutboxTable,
    *,
    key_type: KafkaType,
    value_type: KafkaType,
    new: bool,
    notify: bool,
    archive: Sequence[str] = (),
) -> str:
    """The whole schema as a script for psql: one transaction, may run again. `archive`: the statements that make it."""
    statements = ["BEGIN", lock_statement()]
    if new:
        statements.append(create_outbox(table, value_type))
    statements += [
        create_term(table),
        create_quarantine(table, key_type, value_type),
        insert_term(table),
    ]
    for migration in MIGRATIONS:
        statements += migration(table)
    if MIGRATIONS:
        statements.append(set_version(table))
    if notify:
        statements += create_notify(table, table.channel)
    statements += archive
    statements.append("COMMIT")
    return "".join(f"{statement};\n\n" for statement in statements).rstrip("\n") + "\n"


def _notify_function(table: OutboxTable, argument: str | None = None) -> str:
    name = OutboxTable(schema=table.schema, name=f"{table.name}_notify").sql
    return f"{name}('{argument}')" if argument is not None else f"{name}()"


def _literal(text: str) -> str:
    # E'' reads the same whatever standard_conforming_strings says.
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"

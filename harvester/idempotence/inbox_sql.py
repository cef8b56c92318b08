"""The inbox's table and statements. A table is named as it is, `name` or `schema.name`; case counts."""

from __future__ import annotations

from psycopg import sql

ADVISORY_LOCK = 0x69_6E_62_6F_78  # "inbox"


class Statements:
    """For one table; parameters are psycopg's named ones."""

    def __init__(self, table: str) -> None:
        plain = sql.Identifier(*table.split("."))
        name = sql.Identifier(*table.replace("%", "%%").split("."))  # beside parameters a per cent sign means something
        self.lock_creation = sql.SQL("SELECT pg_catalog.pg_advisory_xact_lock({})").format(sql.Literal(ADVISORY_LOCK))
        # Rows change all the time and no index holds what changes: room on the page keeps updates within it.
        self.create = sql.SQL("""CREATE TABLE IF NOT EXISTS {} (
    consumer_group TEXT NOT NULL,
    topic          TEXT NOT NULL,
    partition      INTEGER NOT NULL,
    next_offset    BIGINT,
    version        BIGINT NOT NULL DEFAULT 0,
    generation     BIGINT NOT NULL,
    seen           BYTEA NOT NULL,
    updated_at     TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic, partition)
) WITH (fillfactor = 50)""").format(plain)
        # Opening counts as a change: whoever has a copy of the row notices.
        self.open = sql.SQL("""INSERT INTO {} AS i (consumer_group, topic, partition, generation, seen)
VALUES (%(group)s, %(topic)s, %(partition)s, coalesce(%(generation)s::bigint, 1), %(seen)s)
ON CONFLICT (consumer_group, topic, partition) DO UPDATE
SET generation = coalesce(%(generation)s::bigint, i.generation + 1), version = i.version + 1, updated_at = now()
WHERE %(generation)s::bigint IS NULL OR i.generation <= %(generation)s::bigint
RETURNING i.generation, i.version, i.next_offset, i.seen""").format(name)
        self.generation = sql.SQL("""SELECT generation FROM {}
WHERE consumer_group = %(group)s AND topic = %(topic)s AND partition = %(partition)s""").format(name)
        # In the order of the key, so that two batches never wait for each other. The setting ends with the transaction.
        # What was seen is long, and only sent to who does not know the row.
        self.lock = sql.SQL("""SELECT i.topic, i.partition, i.generation, i.version, i.next_offset,
    CASE WHEN w.version IS NULL THEN i.seen END, set_config('idle_in_transaction_session_timeout', %(idle)s, true)
FROM {} AS i JOIN unnest(%(topics)s::text[], %(partitions)s::int[], %(versions)s::bigint[])
    AS w (topic, partition, version) ON i.topic = w.topic AND i.partition = w.partition
WHERE i.consumer_group = %(group)s
ORDER BY i.topic, i.partition FOR UPDATE OF i""").format(name)
        self.write = sql.SQL("""UPDATE {} AS i
SET next_offset = w.next_offset, seen = w.seen, version = i.version + 1, updated_at = now()
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[], %(seen)s::bytea[])
    AS w (topic, partition, next_offset, seen)
WHERE i.consumer_group = %(group)s AND i.topic = w.topic AND i.partition = w.partition""").format(name)
        self.stored = sql.SQL("""SELECT topic, partition, seen FROM {}
WHERE consumer_group = %(group)s ORDER BY topic, partition FOR UPDATE""").format(name)
        self.replace_seen = sql.SQL("""UPDATE {} SET seen = %(seen)s, version = version + 1, updated_at = now()
WHERE consumer_group = %(group)s AND topic = %(topic)s AND partition = %(partition)s""").format(name)

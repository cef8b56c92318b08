"""The SQL of the relay: mark, purge, reset, quarantine, term. Text only; nothing here talks to a server.

Rule P6: under READ COMMITTED a condition on a snapshot fences nothing: a mark that waited on a row lock stole rows
after the term had risen. So mark, reset and quarantine begin with a MATERIALIZED CTE that selects the term row FOR
SHARE (term and holder must match); a take-over that has raised the term makes it empty, one that wants to raise it
waits for the statement. Lock order is the term row, then ids ascending. A purge is not fenced: the acknowledgement
was real, whoever received it (P2).

Everything that varies is a literal made by this module from ints, UUIDs and escaped keys: COPY takes no parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from uuid import UUID

from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable


def _fence(table: OutboxTable, term: int, holder: UUID) -> str:
    return (
        f"WITH t AS MATERIALIZED (SELECT 1 FROM {table.term} WHERE term = {term:d} AND holder = '{holder}' FOR SHARE)"
    )


def _columns(shape: OutboxShape) -> str:
    partition = "o.kafka_partition::int" if shape.has_partition else "NULL::int"
    return (
        "o.id::bigint, o.kafka_key, o.kafka_topic, o.kafka_value, o.kafka_header_keys, o.kafka_header_values,"
        f" o.create_time, {partition}"
    )


def key_bytes_sql(shape: OutboxShape, alias: str = "o") -> str:
    """The key's bytes as the shards see them, as an SQL expression of type bytea."""
    column = f"{alias}.kafka_key"
    return column if shape.key_type == "bytea" else f"convert_to({column}, 'UTF8')"


def key_literal(shape: OutboxShape, key: bytes) -> str:
    """A key as an SQL literal that cannot inject anything (standard_conforming_strings is on)."""
    if shape.key_type == "bytea":
        return f"'\\x{key.hex()}'"
    return "'" + key.decode().replace("'", "''") + "'"


def exclusions(
    shape: OutboxShape, closed_keys: Collection[bytes], closed_slices: str | None, kept: Collection[int] = ()
) -> str:
    """Conditions that leave out closed keys (P18), the slices of closed shards (an SQL condition), and these ids."""
    parts: list[str] = []
    if closed_keys:
        keys = ", ".join(sorted(key_literal(shape, key) for key in closed_keys))
        cast = "bytea" if shape.key_type == "bytea" else "text"
        parts.append(f" AND (o.kafka_key IS NULL OR o.kafka_key <> ALL (ARRAY[{keys}]::{cast}[]))")
    if closed_slices:
        parts.append(f" AND NOT ({closed_slices})")
    if kept:
        parts.append(f" AND o.id <> ALL ({_id_array(kept)})")
    return "".join(parts)


def mark_in_table(
    table: OutboxTable, shape: OutboxShape, *, term: int, holder: UUID, leader_id: UUID, limit: int, excluded: str
) -> str:
    """Take the first rows that this leader id has not taken; they carry it from then on (seed 000, MP/R)."""
    return (
        f"COPY ({_fence(table, term, holder)}, m AS MATERIALIZED ("
        f"SELECT o.id FROM {table.sql} o WHERE EXISTS (SELECT 1 FROM t)"
        f" AND o.leader_id IS DISTINCT FROM '{leader_id}'{excluded}"
        f" ORDER BY o.id LIMIT {limit:d} FOR UPDATE OF o)"
        f" UPDATE {table.sql} o SET leader_id = '{leader_id}' WHERE o.id = ANY (ARRAY(SELECT id FROM m))"
        f" RETURNING {_columns(shape)}) TO STDOUT (FORMAT BINARY)"
    )


def reset(table: OutboxTable, *, term: int, holder: UUID, leader_id: UUID, ids: Iterable[int]) -> str:
    """Give rows back: they carry no leader id any more, if they still carry this one."""
    return (
        f"{_fence(table, term, holder)}, r AS MATERIALIZED ("
        f"SELECT o.id FROM {table.sql} o WHERE EXISTS (SELECT 1 FROM t) AND o.id = ANY ({_id_array(ids)})"
        f" AND o.leader_id = '{leader_id}' ORDER BY o.id FOR UPDATE OF o)"
        f" UPDATE {table.sql} o SET leader_id = NULL WHERE o.id = ANY (ARRAY(SELECT id FROM r))"
    )


def purge(table: OutboxTable) -> str:
    """Delete what Kafka acknowledged; one parameter in libpq's notation, the ids (ascending) as bigint[]."""
    return f"DELETE FROM {table.sql} WHERE id = ANY ($1::bigint[])"


def quarantine(table: OutboxTable, shape: OutboxShape) -> str:
    """Move one row to quarantine; parameters id, term, holder, error, attempts, first_failed_at.

    Returns one row: `moved`, and `fenced`, whether the term was another's. Neither: the row was gone.
    """
    partition = "kafka_partition" if shape.has_partition else "NULL::int AS kafka_partition"
    columns = "create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
    return (
        f"WITH t AS MATERIALIZED (SELECT incarnation FROM {table.term}"
        " WHERE term = %(term)s AND holder = %(holder)s FOR SHARE),"
        f" d AS (DELETE FROM {table.sql} WHERE id = %(id)s AND EXISTS (SELECT 1 FROM t)"
        f" RETURNING id, {columns}, {partition}),"
        f" q AS (INSERT INTO {table.quarantine} (id, incarnation, {columns}, kafka_partition, error, attempts,"
        f" first_failed_at) SELECT d.id, t.incarnation, {', '.join('d.' + c for c in columns.split(', '))},"
        " d.kafka_partition, %(error)s, %(attempts)s, %(first_failed_at)s FROM d, t"
        " ON CONFLICT (incarnation, id) DO UPDATE SET error = excluded.error, attempts = excluded.attempts"
        " RETURNING 1)"
        " SELECT EXISTS (SELECT 1 FROM q) AS moved, NOT EXISTS (SELECT 1 FROM t) AS fenced"
    )


def read_term(table: OutboxTable) -> str:
    """Term, holder and the outbox's identity."""
    return f"SELECT term, holder, outbox_id, incarnation, delivery, schema_version FROM {table.term}"


def take_term(table: OutboxTable) -> str:
    """Compare and set (P8); parameters expected term, highest term seen, holder, holder_name. Returns the term."""
    return (
        f"UPDATE {table.term} SET term = greatest(term, %(seen)s) + 1, holder = %(holder)s,"
        " holder_name = %(name)s, acquired_at = clock_timestamp() WHERE term = %(expected)s RETURNING term"
    )


def _id_array(ids: Iterable[int]) -> str:
    return "'{" + ",".join(f"{i:d}" for i in ids) + "}'::bigint[]"

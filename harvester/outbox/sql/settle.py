"""The SQL of settling: purge what Kafka acknowledged, leaving a trace in the archive, and quarantine what it refuses.

A purge is not fenced by the term: the acknowledgement was real, whoever received it (P2). A quarantine begins with the
term row FOR SHARE (P6), so that a deposed leader moves nothing. Both are fenced by the id space (P35): if ids have
started again, or another table has the outbox's name, an id may mean another row. And both take a row only with the
xmin with which it was read, since an id can be given out again without any trace in the space (P50). Each is one
statement, hence one transaction: the archive, the quarantine and its notice contain exactly what has left the outbox,
and nothing leaves it without them. Text only.
"""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from harvester.errors import SchemaError
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.sql.queries import IdSpace, in_space
from harvester.outbox.tables import OutboxTable, as_bytes, doubled
from harvester.record import LATEST_US

Archive = Literal["off", "ids", "rows"]

# What a notice keeps of an error; broker messages are shorter, but serialisers' tracebacks are not.
NOTICE_ERROR_CHARACTERS = 1_000
_SHORT_ERROR_CHARACTERS = 100

_ROW = ("create_time", "kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")
_UTC = """'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'"""


def _meant(ids: str, xmins: str | None) -> str:
    """The condition for the rows with these ascending ids; with `xmins`, only if they have the respective xmin.

    The position of a row's id in the array is found by binary search. A join with both arrays triples the purge's cost
    to the server, and depends on the table's statistics.
    """
    condition = f"o.id = ANY ({ids}::bigint[])"
    if xmins is not None:
        place = f"pg_catalog.width_bucket(o.id::bigint, {ids}::bigint[])"
        condition += f" AND o.xmin = ({xmins}::xid[])[{place}]"
    return condition


def purge(
    table: OutboxTable,
    archive: Archive = "off",
    shape: OutboxShape | None = None,
    space: IdSpace | None = None,
    *,
    by_version: bool = False,
    incarnation: UUID | None = None,
) -> str:
    """Delete what Kafka acknowledged; a parameter in libpq's notation, the ids (ascending) as bigint[].

    `by_version`: only rows with the xmins of a second parameter, as xid[] (P50). The command tag carries the number of
    rows, with an archive (INSERT 0 n) or without (DELETE n). `shape` is required for an archive. `incarnation`: the one
    of their records, for the archive; None: the current one.
    """
    delete = f"DELETE FROM {table.sql} o WHERE {_meant('$1', '$2' if by_version else None)}{in_space(table, space)}"
    if archive == "off":
        return delete
    assert shape is not None, "the archive's content depends on the columns"
    trace = _into_archive(table.archive, table.term, incarnation)
    return f"WITH d AS ({delete} RETURNING {_kept(archive, shape)}) {trace}"


def purge_unlocked(
    table: OutboxTable,
    archive: Archive = "off",
    shape: OutboxShape | None = None,
    space: IdSpace | None = None,
    *,
    by_version: bool = False,
) -> str:
    """Delete the rows of %(ids)s that nobody has locked; returns the ids of the others. For psycopg.

    `by_version`: see `purge`, with %(xmins)s as texts.
    """
    meant = _meant("%(ids)s", "%(xmins)s::text[]" if by_version else None)
    outbox, returned, trace = doubled(table.sql), "o.id", ""
    if archive != "off":
        assert shape is not None, "the archive's content depends on the columns"
        returned, trace = (
            _kept(archive, shape),
            f", a AS ({_into_archive(doubled(table.archive), doubled(table.term))})",
        )
    return (
        f"WITH free AS MATERIALIZED (SELECT o.id FROM {outbox} o WHERE {meant}"
        f"{doubled(in_space(table, space))} ORDER BY o.id FOR UPDATE OF o SKIP LOCKED)"
        f", d AS (DELETE FROM {outbox} o WHERE o.id = ANY (ARRAY(SELECT id FROM free))"
        f" RETURNING {returned}){trace} SELECT o.id FROM {outbox} o WHERE {meant}"
        " AND o.id NOT IN (SELECT id FROM d) ORDER BY o.id"
    )


def versions(table: OutboxTable) -> str:
    """The current rows with %(ids)s: id, xmin, and create_time in microseconds since the UNIX epoch. For psycopg."""
    return (
        "SELECT o.id::bigint, o.xmin::text::bigint,"
        f" coalesce(least(greatest(extract(epoch FROM o.create_time) * 1000000, 0), {LATEST_US}), 0)::bigint"
        f" FROM {doubled(table.sql)} o WHERE o.id = ANY (%(ids)s::bigint[])"
    )


def quarantine(table: OutboxTable, shape: OutboxShape, notice_topic: str = "", space: IdSpace | None = None) -> str:
    """Move one row to quarantine; parameters id, xmin (as text; NULL: any), term, holder, error, attempts,
    first_failed_at, origin. For psycopg.

    Returns one row: `moved`; `fenced`: whether the term belonged to another; `taken`: whether another record is in
    quarantine under this id and incarnation, so that the row stays. None of them: the row was gone. With a topic, a
    notice is inserted into the outbox like any record, under the record's key; a record of that very topic gets none,
    otherwise a refused notice would cause another one. Raises SchemaError for a topic longer than its column.
    """
    row = ", ".join(_ROW)
    # As Kafka would have got them; their plain names would mean the outbox's columns.
    fields = (
        f"o.id, o.create_time, o.kafka_topic, {columns.key(shape, 'o')} AS kafka_key,"
        f" {columns.value(shape, 'o')} AS kafka_value, {columns.header_keys(shape, 'o')} AS kafka_header_keys,"
        f" {columns.header_values(shape, 'o')} AS kafka_header_values"
    )
    partition = "kafka_partition" if shape.has_partition else "NULL::int AS kafka_partition"
    notice = f", n AS ({_notice(table, shape, notice_topic)})" if notice_topic else ""
    is_it = "o.id = %(id)s AND (%(xmin)s::text IS NULL OR o.xmin = %(xmin)s::text::xid)"
    return (
        f"WITH t AS MATERIALIZED (SELECT incarnation FROM {doubled(table.term)}"
        f" WHERE term = %(term)s AND holder = %(holder)s{doubled(in_space(table, space))} FOR SHARE),"
        f" x AS MATERIALIZED (SELECT 1 FROM {doubled(table.quarantine)} x, t"
        " WHERE x.incarnation = t.incarnation AND x.id = %(id)s),"
        f" d AS (DELETE FROM {doubled(table.sql)} o WHERE {is_it} AND EXISTS (SELECT 1 FROM t)"
        f" AND NOT EXISTS (SELECT 1 FROM x) RETURNING {fields}, {partition}),"
        f" q AS (INSERT INTO {doubled(table.quarantine)} (id, incarnation, {row}, kafka_partition, error, attempts,"
        f" first_failed_at, origin) SELECT d.id, t.incarnation, {', '.join(f'd.{c}' for c in _ROW)},"
        " d.kafka_partition, %(error)s, %(attempts)s, %(first_failed_at)s, %(origin)s::bytea FROM d, t"
        f" RETURNING 1){notice}"
        " SELECT EXISTS (SELECT 1 FROM q) AS moved, NOT EXISTS (SELECT 1 FROM t) AS fenced,"
        f" EXISTS (SELECT 1 FROM x, {doubled(table.sql)} o WHERE {is_it}) AS taken"
    )


def _kept(archive: Archive, shape: OutboxShape) -> str:
    """The archive's columns, in order. Key and value are kept as the bytes that Kafka got."""
    key, value = (
        as_bytes(columns.key(shape, "o"), shape.key_type),
        as_bytes(columns.value(shape, "o"), shape.value_type),
    )
    kept = ["o.id::bigint AS id", "o.create_time", "o.kafka_topic", f"{key} AS key"]
    if archive == "rows":
        kept += [
            f"{value} AS value",
            f"{columns.header_keys(shape, 'o')} AS kafka_header_keys",
            f"{columns.header_values(shape, 'o')} AS kafka_header_values",
        ]
    else:
        kept += ["NULL::bytea AS value", "NULL::text[] AS kafka_header_keys", "NULL::text[] AS kafka_header_values"]
    has_partition = archive == "rows" and shape.has_partition
    kept.append("o.kafka_partition" if has_partition else "NULL::int AS kafka_partition")
    return ", ".join(kept)


def _into_archive(archive: str, term: str, incarnation: UUID | None = None) -> str:
    # A scalar subquery: if the term row were missing, a join would drop the trace, and the count with it.
    of = f"(SELECT incarnation FROM {term})" if incarnation is None else f"'{incarnation}'::uuid"
    return (
        f"INSERT INTO {archive} (id, incarnation, purged_at, create_time, kafka_topic, kafka_key, kafka_value,"
        " kafka_header_keys, kafka_header_values, kafka_partition)"
        f" SELECT d.id, {of}, now(), d.create_time, d.kafka_topic, d.key, d.value,"
        " d.kafka_header_keys, d.kafka_header_values, d.kafka_partition FROM d"
    )


def _notice(table: OutboxTable, shape: OutboxShape, topic: str) -> str:
    """The row of a notice, from d (the record) and t (the term row)."""
    longest = shape.topic_max
    if longest is not None and len(topic) > longest:
        raise SchemaError(
            f"the notice topic {topic!r} does not fit into kafka_topic, which holds {longest} characters",
            hint="widen the column, or set a shorter poison.notice_topic",
        )
    if shape.value_stored not in (None, "json", "jsonb"):
        raise SchemaError(
            f"a notice does not fit into kafka_value, which is {shape.value_stored}: it is a JSON document",
            hint="change the column's type, or remove poison.notice_topic",
        )
    document = _document(shape, NOTICE_ERROR_CHARACTERS, key=True)
    value, condition = "x.document", ""
    if shape.value_max is not None:
        # Prefer a notice without its key, or none, to a poison record that cannot leave.
        value = f"CASE WHEN char_length(x.document) <= {shape.value_max} THEN x.document ELSE x.short END"
        condition = f" WHERE char_length({value}) <= {shape.value_max}"
    value = as_bytes(value, "text") if shape.value_type == "bytea" else value
    fields = columns.stored(shape, "x.kafka_key", value, "'{}'::text[]", "'{}'::text[]")
    return (
        f"INSERT INTO {doubled(table.sql)} (create_time, kafka_topic, {columns.written(shape)})"
        f" SELECT now(), '{topic}', {fields}"
        f" FROM (SELECT d.kafka_key, {document} AS document,"
        f" {_document(shape, _SHORT_ERROR_CHARACTERS, key=False)} AS short FROM d, t"
        f" WHERE d.kafka_topic <> '{topic}') x{condition}"
    )


def _document(shape: OutboxShape, error_characters: int, *, key: bool) -> str:
    if not key:
        pair = "'key', NULL, 'key_base64', NULL"
    elif shape.key_type == "bytea":
        # encode() inserts line breaks into base64.
        pair = "'key', NULL, 'key_base64', translate(encode(d.kafka_key, 'base64'), E'\\n', '')"
    else:
        pair = "'key', d.kafka_key, 'key_base64', NULL"

    def time(value: str) -> str:
        return f"to_char({value} AT TIME ZONE 'UTC', {_UTC})"

    return (
        "json_build_object('id', d.id, 'incarnation', t.incarnation, 'topic', left(d.kafka_topic, 249),"
        f" {pair}, 'error', left(%(error)s::text, {error_characters}), 'attempts', %(attempts)s::int,"
        f" 'create_time', {time('d.create_time')}, 'first_failed_at', {time('%(first_failed_at)s::timestamptz')},"
        f" 'quarantined_at', {time('now()')}, 'origin', encode(%(origin)s::bytea, 'hex'))::text"
    )

"""What PostgreSQL's catalog says about the outbox and its companion tables, read in one round trip.

Facts only: `shape` decides whether they are good enough. Reading them needs no privilege on the tables, and a missing
table is a fact, not an error, so nothing here can break the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harvester.outbox.tables import OutboxTable

# $schema is compared only if a schema was named; otherwise the search path decides, as it does for writers.
CATALOG_SQL = """
WITH named AS (
    SELECT to_regclass(%(outbox)s)::oid AS outbox,
           to_regclass(%(term)s)::oid AS term,
           to_regclass(%(quarantine)s)::oid AS quarantine
), relation AS (
    SELECT c.oid, json_build_object(
        'oid', c.oid::bigint,
        'schema', n.nspname,
        'kind', c.relkind,
        'persistence', c.relpersistence,
        'is_partition', c.relispartition,
        'has_children', EXISTS (SELECT FROM pg_catalog.pg_inherits WHERE inhparent = c.oid),
        'row_security', row_security_active(c.oid),
        'lacks', ARRAY(
            SELECT privilege FROM unnest(CASE c.oid
                WHEN named.outbox THEN ARRAY['SELECT', 'UPDATE (leader_id)', 'DELETE']
                WHEN named.term THEN ARRAY['SELECT', 'UPDATE']
                ELSE ARRAY['SELECT', 'INSERT'] END) AS privilege
            WHERE NOT coalesce(CASE split_part(privilege, ' ', 2)
                WHEN '' THEN has_table_privilege(c.oid, privilege)
                ELSE (SELECT has_column_privilege(c.oid, g.attnum, split_part(privilege, ' ', 1))
                      FROM pg_catalog.pg_attribute g
                      WHERE g.attrelid = c.oid AND NOT g.attisdropped
                          AND format('(%%s)', g.attname) = split_part(privilege, ' ', 2)) END, true)),
        'columns', (
            SELECT coalesce(json_agg(json_build_object(
                'name', a.attname,
                'type', format_type(a.atttypid, NULL),
                'max_length', CASE WHEN a.atttypid = 'varchar'::regtype AND a.atttypmod > 4
                                   THEN a.atttypmod - 4 END,
                'nullable', NOT a.attnotnull,
                'identity', a.attidentity <> '',
                'default', pg_get_expr(d.adbin, d.adrelid)) ORDER BY a.attnum), '[]')
            FROM pg_catalog.pg_attribute a
            LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)) AS facts
    FROM named
    JOIN pg_catalog.pg_class c ON c.oid IN (named.outbox, named.term, named.quarantine)
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
), id AS (
    SELECT attrelid, attnum FROM pg_catalog.pg_attribute
    WHERE attrelid = (SELECT outbox FROM named) AND attname = 'id' AND NOT attisdropped
)
SELECT
    current_setting('server_version_num')::int AS server_version,
    quote_ident(current_user) AS "user",
    %(schema)s::text IS NULL OR EXISTS (
        SELECT FROM pg_catalog.pg_namespace WHERE nspname = %(schema)s::text) AS schema_exists,
    (SELECT facts FROM relation WHERE oid = named.outbox) AS outbox,
    (SELECT facts FROM relation WHERE oid = named.term) AS term,
    (SELECT facts FROM relation WHERE oid = named.quarantine) AS quarantine,
    -- The sequence behind id: identity columns own theirs (i), a default depends on the one it calls (n).
    (SELECT json_build_object(
        'name', format('%%I.%%I', sn.nspname, s.relname),
        'cache', q.seqcache, 'increment', q.seqincrement, 'cycle', q.seqcycle,
        'readable', has_sequence_privilege(s.oid, 'SELECT'))
     FROM id
     JOIN pg_catalog.pg_depend dep ON
        (dep.classid = 'pg_class'::regclass AND dep.deptype = 'i'
            AND dep.refclassid = 'pg_class'::regclass AND dep.refobjid = id.attrelid
            AND dep.refobjsubid = id.attnum)
        OR (dep.classid = 'pg_attrdef'::regclass AND dep.refclassid = 'pg_class'::regclass AND dep.deptype = 'n'
            AND dep.objid = (SELECT oid FROM pg_catalog.pg_attrdef
                             WHERE adrelid = id.attrelid AND adnum = id.attnum))
     JOIN pg_catalog.pg_class s ON s.relkind = 'S'
        AND s.oid = CASE WHEN dep.deptype = 'i' THEN dep.objid ELSE dep.refobjid END
     JOIN pg_catalog.pg_namespace sn ON sn.oid = s.relnamespace
     JOIN pg_catalog.pg_sequence q ON q.seqrelid = s.oid
     LIMIT 1) AS sequence,
    current_database() AS database,
    (SELECT json_agg(datname ORDER BY datname) FROM pg_catalog.pg_database
     WHERE named.outbox IS NULL AND datallowconn AND NOT datistemplate
        AND datname NOT IN (current_database(), 'postgres')
        AND has_database_privilege(oid, 'CONNECT')) AS other_databases,
    EXISTS (
        SELECT FROM id
        JOIN pg_catalog.pg_index i ON i.indrelid = id.attrelid
        JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
        JOIN pg_catalog.pg_am am ON am.oid = ic.relam
        WHERE i.indisunique AND i.indisvalid AND i.indisready AND i.indpred IS NULL
            AND i.indnkeyatts = 1 AND i.indkey[0] = id.attnum AND am.amname = 'btree') AS ordered_by_id,
    EXISTS (
        SELECT FROM pg_catalog.pg_trigger t
        WHERE t.tgrelid = named.outbox AND t.tgname = %(channel)s AND NOT t.tgisinternal
            AND t.tgenabled IN ('O', 'A')) AS notifies,
    getdatabaseencoding()::text AS encoding
FROM named
"""


@dataclass(frozen=True, slots=True)
class Column:
    """`type` as returned by format_type without modifier; `max_length` is n of varchar(n), in characters."""

    name: str
    type: str
    max_length: int | None
    nullable: bool
    identity: bool
    default: str | None


@dataclass(frozen=True, slots=True)
class Relation:
    """One of the three tables. `kind`, `persistence`: letters of pg_class; `lacks`: privileges that we do not have."""

    oid: int
    schema: str
    kind: str
    persistence: str
    is_partition: bool
    has_children: bool
    row_security: bool
    lacks: tuple[str, ...]
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class Sequence:
    """The sequence that provides `id`; `name` is qualified and quoted for SQL text."""

    name: str
    cache: int
    increment: int
    cycle: bool
    readable: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """The catalog at one moment; a missing relation is None."""

    server_version: int  # as in server_version_num: 160003 is 16.3
    user: str  # quoted for SQL text
    schema_exists: bool
    outbox: Relation | None
    term: Relation | None
    quarantine: Relation | None
    sequence: Sequence | None
    ordered_by_id: bool  # id has a unique btree index of its own
    notifies: bool  # the enabled trigger for this table's channel is there
    database: str = ""
    other_databases: tuple[str, ...] = ()  # of this server; read only if there is no outbox
    encoding: str = "UTF8"  # of the database; PostgreSQL's name


def catalog_parameters(table: OutboxTable) -> dict[str, str | None]:
    return {
        "outbox": table.sql,
        "term": table.term,
        "quarantine": table.quarantine,
        "schema": table.schema,
        "channel": table.channel,
    }


def parse_catalog(row: tuple[Any, ...]) -> Facts:
    """Turns the one row of CATALOG_SQL into facts."""
    server_version, user, schema_exists, *documents = row[:7]
    database, others, ordered_by_id, notifies, encoding = row[7:]
    # Some drivers leave JSON as text.
    outbox, term, quarantine, sequence, others = (
        json.loads(d) if isinstance(d, str) else d for d in (*documents, others)
    )
    return Facts(
        server_version=server_version,
        user=user,
        schema_exists=schema_exists,
        outbox=_relation(outbox),
        term=_relation(term),
        quarantine=_relation(quarantine),
        sequence=Sequence(**sequence) if sequence is not None else None,
        ordered_by_id=ordered_by_id,
        notifies=notifies,
        database=database,
        other_databases=tuple(others or ()),
        encoding=encoding,
    )


def _relation(fields: dict[str, Any] | None) -> Relation | None:
    if fields is None:
        return None
    columns = {column["name"]: Column(**column) for column in fields["columns"]}
    return Relation(**{**fields, "lacks": tuple(fields["lacks"]), "columns": columns})

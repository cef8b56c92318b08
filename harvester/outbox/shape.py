"""The shape of an outbox: which of the accepted forms a table has, and why others are refused.

Accepted are the table of goharvest's user guide and, beyond that, common types for key and value, a nullable key,
headers in one column, and a column kafka_partition. All decisions are based on facts from the catalog: no I/O.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from harvester.errors import SchemaError
from harvester.outbox.catalog import Column, Facts, Relation
from harvester.outbox.tables import OutboxTable

MINIMUM_SERVER_VERSION = 130000  # gen_random_uuid() is built in from 13 on
INIT_HINT = "run `harvester init`"

_TEXT = ("text", "character varying")
# Published in PostgreSQL's text form.
StoredType = Literal["jsonb", "json", "uuid", "bigint", "integer"]
HeaderKind = Literal["pairs", "jsonb", "json"]
_KEY_OR_VALUE = (*_TEXT, "bytea", *get_args(StoredType))
_TEXT_ARRAYS = ("text[]", "character varying[]")
_HEADERS = "kafka_headers"
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "id": ("bigint", "integer"),
    "create_time": ("timestamp with time zone",),
    "kafka_topic": _TEXT,
    "kafka_key": _KEY_OR_VALUE,
    "kafka_value": _KEY_OR_VALUE,
    "kafka_header_keys": _TEXT_ARRAYS,
    "kafka_header_values": _TEXT_ARRAYS,
    _HEADERS: ("jsonb", "json", *_TEXT_ARRAYS),
    "leader_id": ("uuid", *_TEXT),
    "kafka_partition": ("integer",),
}
_OPTIONAL = ("kafka_partition",)
# UTF-8, encodings in which PostgreSQL can convert every byte, and none at all, whose bytes are published unchanged
# (P33).
_READABLE_ENCODINGS = frozenset({
    "UTF8", "SQL_ASCII", "LATIN1", "LATIN2", "LATIN4", "LATIN5", "LATIN6", "LATIN7", "LATIN8", "LATIN9", "LATIN10",
    "ISO_8859_5", "KOI8R", "KOI8U", "WIN866", "WIN1256",
})  # fmt: skip
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
_UUID_CHARACTERS = 36
_SHOWN_DATABASES = 5
_PLAIN_CALL = re.compile(r"nextval\('(?:[^']|'')*'::regclass\)")

TERM_COLUMNS = (
    "singleton", "schema_version", "outbox_id", "incarnation", "delivery", "term", "holder", "holder_name",
    "sessions", "system_identifier", "timeline", "outbox_oid", "last_value", "acquired_at",
    "progress_topic", "holder_kind", "lease_until", "wanted_by", "wanted_until",
    "leader_group", "kafka_cluster", "closed_floor", "open_ids", "floor_space", "sequence_file",
)  # fmt: skip
QUARANTINE_COLUMNS = (
    "id", "incarnation", "create_time", "kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys",
    "kafka_header_values", "kafka_partition", "error", "attempts", "first_failed_at", "quarantined_at", "origin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """What a writer of rows needs to know. Lengths are in characters; None is unlimited.

    - key_type, value_type: as Kafka gets them; key_stored, value_stored: the column's type if it differs
    - headers: in two arrays, or in one column: an array of pairs, or an object of that type
    """

    key_type: Literal["text", "bytea"]
    key_nullable: bool
    value_type: Literal["text", "bytea"]
    value_nullable: bool
    has_partition: bool
    topic_max: int | None
    key_max: int | None
    value_max: int | None
    key_stored: StoredType | None = field(default=None, kw_only=True)
    value_stored: StoredType | None = field(default=None, kw_only=True)
    headers: Literal["arrays"] | HeaderKind = field(default="arrays", kw_only=True)


@dataclass(frozen=True, slots=True)
class OutboxShape(ColumnShape):
    """What the relay needs to know. `sequence` is qualified and quoted for SQL text; `schema` is a bare name."""

    oid: int
    schema: str
    id_type: Literal["bigint", "integer"]
    leader_id_type: Literal["uuid", "text"]
    has_notify: bool
    sequence: str | None


def outbox_shape(table: OutboxTable, facts: Facts) -> OutboxShape:
    """Check the outbox itself; raises SchemaError with all problems."""
    outbox = _require_outbox(table, facts)
    if outbox.kind == "p":
        raise SchemaError(
            f"the outbox table {table} is a partitioned table: rows are read in the order of one index on id, which"
            " partitions do not share, and dropping a partition would lose its records",
            hint="name an ordinary table as outbox_table (`harvester init` creates it), and copy each new row of the"
            " partitioned one into it: `harvester adopt TABLE --topic '{kafka_topic}' --key '{kafka_key}'"
            " --value '{kafka_value}'`",
        )
    problems = [*_misplaced(outbox), *_column_problems(outbox), *_id_problems(outbox, facts)]
    _refuse(table, problems)
    return OutboxShape(
        **asdict(_columns(outbox)),
        oid=outbox.oid,
        schema=outbox.schema,
        id_type="bigint" if outbox.columns["id"].type == "bigint" else "integer",
        leader_id_type="uuid" if outbox.columns["leader_id"].type == "uuid" else "text",
        has_notify=facts.notifies,
        sequence=facts.sequence.name if facts.sequence else None,
    )


def column_shape(table: OutboxTable, facts: Facts) -> ColumnShape:
    """Check only what a writer depends on; raises SchemaError."""
    outbox = _require_outbox(table, facts)
    _refuse(table, _column_problems(outbox))
    return _columns(outbox)


def check_place(table: OutboxTable, facts: Facts) -> None:
    """Check the server and the schema; raises SchemaError."""
    if facts.server_version < MINIMUM_SERVER_VERSION:
        major = facts.server_version // 10000
        raise SchemaError(
            f"the server runs PostgreSQL {major}, which is too old",
            hint=f"PostgreSQL {MINIMUM_SERVER_VERSION // 10000} or newer is needed",
        )
    if facts.encoding not in _READABLE_ENCODINGS:
        raise SchemaError(
            f"the database has the encoding {facts.encoding}, in which some text cannot be converted to UTF-8:"
            " one such record would block all others",
            hint="keep the outbox in a database with the encoding UTF8",
        )
    if not facts.schema_exists:
        raise SchemaError(
            f"there is no schema {table.schema!r} in this database",
            hint="create it, or correct outbox_table and data_source",
        )


def _require_outbox(table: OutboxTable, facts: Facts) -> Relation:
    check_place(table, facts)
    if facts.outbox is None:
        where = f"the database {facts.database!r}" if facts.database else "this database"
        hint = INIT_HINT
        if facts.other_databases:
            shown = ", ".join(repr(name) for name in facts.other_databases[:_SHOWN_DATABASES])
            more = " and others" if len(facts.other_databases) > _SHOWN_DATABASES else ""
            hint += f"; or correct dbname in data_source: this server also has the databases {shown}{more}"
        raise SchemaError(f"there is no outbox table {table} in {where}", hint=hint)
    return facts.outbox


def check_companions(table: OutboxTable, facts: Facts, shape: OutboxShape, *, read_only: bool = False) -> None:
    """Check the term and quarantine tables and our privileges on all three; raises SchemaError.

    `read_only`: SELECT is sufficient.
    """
    problems: list[str] = []
    for name, relation, wanted in (
        (table.term, facts.term, TERM_COLUMNS),
        (table.quarantine, facts.quarantine, QUARANTINE_COLUMNS),
    ):
        if relation is None:
            problems.append(f"the table {name} is missing")
        elif relation.schema != shape.schema:
            problems.append(f"the table {name} is in schema {relation.schema!r}, not in the outbox's")
        else:
            absent = [column for column in wanted if column not in relation.columns]
            if absent:
                problems.append(f"the table {name} lacks {', '.join(absent)}")
    if not problems and facts.quarantine is not None:
        problems.extend(
            f"the table {table.quarantine} has {column} as {theirs}, the outbox as {ours}"
            for column, theirs, ours in quarantine_mismatches(facts.quarantine, shape)
        )
    if problems:
        raise SchemaError(f"{table} is not ready: {'; '.join(problems)}", hint=INIT_HINT)
    grants = _missing_grants(table, facts, read_only=read_only)
    if grants:
        purpose = f"reading {table} requires" if read_only else f"the relay of {table} requires"
        raise SchemaError(
            f"this database user lacks privileges that {purpose}",
            hint=f"let the owner run: {'; '.join(grants)}",
        )


def quarantine_mismatches(quarantine: Relation, shape: OutboxShape) -> list[tuple[str, str, str]]:
    """Columns (name, type there, type in the outbox) that are text in one table and bytea in the other."""
    pairs = (("kafka_key", shape.key_type), ("kafka_value", shape.value_type))
    return [
        (name, _kind(quarantine.columns[name]), ours)
        for name, ours in pairs
        if name in quarantine.columns and _kind(quarantine.columns[name]) != ours
    ]


def _misplaced(outbox: Relation) -> list[str]:
    problems = []
    if outbox.kind in _KINDS:
        problems.append(f"it is {_KINDS[outbox.kind]}: it must be an ordinary table")
    elif outbox.kind != "r":
        problems.append("it is not a table")
    if outbox.is_partition or outbox.has_children:
        problems.append("it uses inheritance or partitioning, which is not supported")
    if outbox.persistence != "p":
        problems.append("it is unlogged or temporary, so a crash of the server would lose records")
    if outbox.row_security:
        problems.append("row security hides rows from this user (grant BYPASSRLS, or disable it)")
    return problems


def _column_problems(outbox: Relation) -> list[str]:
    problems = []
    spare = ("kafka_header_keys", "kafka_header_values") if _in_one_column(outbox) else (_HEADERS,)
    for name, accepted in _ACCEPTED.items():
        if name in spare:
            continue
        column = outbox.columns.get(name)
        if column is None:
            if name not in _OPTIONAL:
                problems.append(f"column {name} is missing ({accepted[0]})")
        elif column.type not in accepted:
            problems.append(f"column {name} is {column.type} (accepted: {', '.join(accepted)})")
    leader = outbox.columns.get("leader_id")
    if leader is not None:
        if not leader.nullable:
            problems.append("column leader_id is NOT NULL, but a new record has no leader")
        if leader.max_length is not None and leader.max_length < _UUID_CHARACTERS:
            problems.append(f"column leader_id holds {leader.max_length} characters, but a UUID has 36")
    return problems


def _id_problems(outbox: Relation, facts: Facts) -> list[str]:
    column, sequence = outbox.columns.get("id"), facts.sequence
    if column is None:
        return []
    problems = []
    if not facts.ordered_by_id:
        problems.append("column id has no unique index of its own (make it the primary key)")
    if sequence is None or not (column.identity or _PLAIN_CALL.fullmatch(column.default or "")):
        problems.append("column id does not come from a sequence by its default (BIGSERIAL or IDENTITY)")
        return problems
    if sequence.cache != 1:
        # A cached id can be used long after other sessions have committed larger ones (protocol P10).
        problems.append(f"its sequence has CACHE {sequence.cache} (ALTER SEQUENCE {sequence.name} CACHE 1)")
    if sequence.cycle:
        problems.append(f"its sequence has CYCLE (ALTER SEQUENCE {sequence.name} NO CYCLE)")
    if sequence.increment < 1:
        problems.append("its sequence counts down")
    return problems


def _columns(outbox: Relation) -> ColumnShape:
    key, value = outbox.columns["kafka_key"], outbox.columns["kafka_value"]
    return ColumnShape(
        key_type=_kind(key),
        key_nullable=key.nullable,
        value_type=_kind(value),
        value_nullable=value.nullable,
        has_partition="kafka_partition" in outbox.columns,
        topic_max=outbox.columns["kafka_topic"].max_length,
        key_max=key.max_length,
        value_max=value.max_length,
        key_stored=_stored(key),
        value_stored=_stored(value),
        headers=_headers(outbox),
    )


def _in_one_column(outbox: Relation) -> bool:
    """Whether kafka_headers is used. Next to the two arrays it is an unrelated column."""
    return _HEADERS in outbox.columns and not {"kafka_header_keys", "kafka_header_values"} & outbox.columns.keys()


def _headers(outbox: Relation) -> Literal["arrays"] | HeaderKind:
    return (header_kind(outbox.columns[_HEADERS].type) or "pairs") if _in_one_column(outbox) else "arrays"


def header_kind(column_type: str) -> HeaderKind | None:
    """The form of headers in a column of this type; None if it cannot hold headers."""
    if column_type in _TEXT_ARRAYS:
        return "pairs"
    return next((kind for kind in get_args(HeaderKind) if kind == column_type), None)


def _stored(column: Column) -> StoredType | None:
    return next((kind for kind in get_args(StoredType) if kind == column.type), None)


def _kind(column: Column) -> Literal["text", "bytea"]:
    return "bytea" if column.type == "bytea" else "text"


def _refuse(table: OutboxTable, problems: list[str]) -> None:
    if problems:
        raise SchemaError(
            f"the outbox table {table} does not fit: {'; '.join(problems)}",
            hint="change the table (`harvester init --print` shows the expected one), or name another outbox_table",
        )


def _missing_grants(table: OutboxTable, facts: Facts, *, read_only: bool) -> list[str]:
    named = ((table.sql, facts.outbox), (table.term, facts.term), (table.quarantine, facts.quarantine))
    if read_only:
        return [
            f"GRANT SELECT ON {name} TO {facts.user}"
            for name, relation in named
            if relation is not None and "SELECT" in relation.lacks
        ]
    grants = [
        f"GRANT {', '.join(relation.lacks)} ON {name} TO {facts.user}"
        for name, relation in named
        if relation is not None and relation.lacks
    ]
    if facts.sequence is not None and not facts.sequence.readable:
        grants.append(f"GRANT SELECT ON SEQUENCE {facts.sequence.name} TO {facts.user}")
    return grants

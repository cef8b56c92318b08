"""The functions for writers in any language, as text (pure; docs/writing.md).

    SELECT outbox_stash(topic => 'orders', key => 'customer-42', value => '{"total": 99}');
    SELECT * FROM outbox_take_lease('orders-reader');
    SELECT outbox_stash_leased(lease, generation, sequence + 1, 'orders', 'customer-42', '{"total": 99}', at => '17');

They run as their owner, who owns the tables, so a role that may call them needs no privilege on any table. Each
executes static statements, the stashers' own. A fixed search path and full names keep callers from substituting
objects. PostgreSQL grants EXECUTE to everybody by default; that is revoked.

Parameters have the types of the columns. A function with other types would exist next to the new one and make calls
ambiguous, so `create_functions` drops it.

An SQL function has only one kind of answer, so what a leased stasher raises is an SQL error here, with its own SQLSTATE
(`LEASE_STATES`); it fails the caller's transaction like any error. A repeat returns NULL.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from harvester.outbox.leases import DEFAULT_LEASE_TIME, MAX_NAME_CHARACTERS
from harvester.outbox.shape import ColumnShape
from harvester.outbox.sql import leases as lease_queries
from harvester.outbox.sql.insert import Insertion, Style, inlined
from harvester.outbox.tables import OutboxTable, dollar_quoted
from harvester.outbox.validation import MAX_TOPIC_CHARACTERS, TOPIC_CHARACTERS

LEASE_STATES = {"expired": "OL001", "fenced": "OL002", "unknown": "OL003", "gap": "OL004"}
_KINDS = ("text", "bytea")


def signatures(table: OutboxTable, key_type: str, value_type: str) -> list[str]:
    """The functions with their parameter types, as named in statements; `table` has its schema."""
    record = f"text, {key_type}, {value_type}, text[], text[], integer"
    return [
        f"{table.beside('stash')}({record})",
        f"{table.beside('take_lease')}(text, interval)",
        f"{table.beside('stash_leased')}(bigint, bigint, bigint, {record}, text)",
    ]


def all_signatures(table: OutboxTable) -> list[str]:
    """The signatures with all types that the columns may have had, each once."""
    found = [name for key, value in product(_KINDS, _KINDS) for name in signatures(table, key, value)]
    return list(dict.fromkeys(found))


def bodies(table: OutboxTable, shape: ColumnShape) -> dict[str, str]:
    """The source of each function by its signature."""
    names = signatures(table, shape.key_type, shape.value_type)
    return dict(zip(names, (_stash(table, shape), _take_lease(table), _stash_leased(table, shape)), strict=True))


def create_functions(table: OutboxTable, shape: ColumnShape) -> list[str]:
    """Statements that create the functions, or replace them and keep their grants; `table` has its schema."""
    sources = bodies(table, shape)
    record = f"""topic text, key {shape.key_type}, value {shape.value_type},
    header_keys text[] DEFAULT '{{}}', header_values text[] DEFAULT '{{}}', partition integer DEFAULT NULL"""
    lease_time = f"interval '{DEFAULT_LEASE_TIME.total_seconds():.0f} seconds'"
    heads = [
        f"{table.beside('stash')}(\n    {record}\n) RETURNS bigint",
        f"{table.beside('take_lease')}(\n    name text, lease_time interval DEFAULT {lease_time}\n)"
        " RETURNS TABLE (lease bigint, generation bigint, sequence bigint, at text, expires_at timestamptz)",
        f"{table.beside('stash_leased')}(\n    lease bigint, generation bigint, sequence bigint,\n    {record},"
        " at text DEFAULT NULL\n) RETURNS bigint",
    ]
    statements = drop_functions(name for name in all_signatures(table) if name not in sources)
    for head, (name, source) in zip(heads, sources.items(), strict=True):
        statements += [
            f"CREATE OR REPLACE FUNCTION {head} LANGUAGE plpgsql SECURITY DEFINER"
            f" SET search_path = pg_catalog, pg_temp AS {dollar_quoted(source)}",
            f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC",
        ]
    return statements


def drop_functions(names: Iterable[str]) -> list[str]:
    return [f"DROP FUNCTION IF EXISTS {name}" for name in names]


def _problem(shape: ColumnShape) -> str:
    """What `validation` refuses, as far as columns of these types can hold it: a message, or NULL."""
    partition = "partition < 0" if shape.has_partition else "partition IS NOT NULL"
    why = "is below 0" if shape.has_partition else "is given, but the outbox has no column kafka_partition"
    return f"""CASE
        WHEN topic IS NULL OR topic COLLATE "C" !~ '^{TOPIC_CHARACTERS}$' OR topic IN ('.', '..')
            THEN format('topic %L is not a valid topic name', topic)
        WHEN length(topic) > {MAX_TOPIC_CHARACTERS}
            THEN format('topic has %s characters, Kafka takes {MAX_TOPIC_CHARACTERS}', length(topic))
        WHEN header_keys IS NULL OR header_values IS NULL
                OR array_ndims(header_keys) > 1 OR array_ndims(header_values) > 1
                OR cardinality(header_keys) <> cardinality(header_values)
            THEN 'header_keys and header_values are not two lists of the same length'
        WHEN array_position(header_keys, NULL) IS NOT NULL OR array_position(header_values, NULL) IS NOT NULL
            THEN 'a header is NULL'
        WHEN {partition} THEN 'partition {why}'
    END"""


_REFUSE = """IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'record refused: ' || problem;
    END IF;"""
_SUPPRESSED = """IF stashed IS NULL THEN
        RAISE EXCEPTION 'the row was not inserted: a trigger or rule of the table suppressed it';
    END IF;"""


def _stash(table: OutboxTable, shape: ColumnShape) -> str:
    # Parameters are numbered like those of the statement; the last one is omitted if there is no column for it.
    insert = Insertion.build(table, shape, "utf-8", Style.DOLLAR).one_sql
    return f"""
DECLARE
    stashed bigint;
    problem text := {_problem(shape)};
BEGIN
    {_REFUSE}
    {insert} INTO stashed;
    {_SUPPRESSED}
    RETURN stashed;
END
"""


def _take_lease(table: OutboxTable) -> str:
    """A lease must be committed, and durable, before it is used: see `lease_queries.WAIT_FOR_COMMIT`."""
    given = {"names": "ARRAY[$1]", "seconds": "extract(epoch FROM $2)", "rows": "100"}
    return f"""
#variable_conflict use_column
DECLARE
    leased text;
BEGIN
    IF $1 IS NULL OR length($1) NOT BETWEEN 1 AND {MAX_NAME_CHARACTERS} THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'the name of a lease has 1 to {MAX_NAME_CHARACTERS} characters';
    ELSIF $2 IS NULL OR $2 <= interval '0' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'a lease lasts longer than no time';
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_transaction_state',
            MESSAGE = 'a lease is taken in a transaction of its own, READ COMMITTED';
    END IF;
    PERFORM {lease_queries.WAIT_FOR_COMMIT.removeprefix("SELECT ")};
    {inlined(lease_queries.take(table), given)}
        INTO leased, lease, generation, sequence, at, expires_at;
    RETURN NEXT;
    {inlined(lease_queries.sweep(table), given)};
END
"""


def _stash_leased(table: OutboxTable, shape: ColumnShape) -> str:
    """Only the deciding step: the hopeful one needs the row's ctid, which a caller would have to keep."""
    given = {"lease": "$1", "generation": "$2", "first": "$3", "last": "$3"}
    given |= {name: f"${number}" for number, name in enumerate((*lease_queries.ONE, "position"), 4)}
    record = "format('lease %s, generation %s, record %s', $1, $2, $3)"

    def refuse(state: str, message: str, hint: str) -> str:
        return (
            f"RAISE EXCEPTION USING ERRCODE = '{LEASE_STATES[state]}', MESSAGE = {record} || {message}, HINT = '{hint}'"
        )

    anew = "take the lease of the name again and go on behind the position and sequence that it carries"
    return f"""
#variable_conflict use_column
DECLARE
    stashed bigint; step_place tid; step_previous bigint; step_generation bigint; step_expired boolean;
    problem text := {_problem(shape)};
BEGIN
    IF $3 IS NULL OR $3 < 1 THEN problem := 'its sequence is below 1'; END IF;
    {_REFUSE}
    {inlined(lease_queries.stash_one(table, shape, hopeful=False), given)}
        INTO step_place, stashed, step_previous, step_generation, step_expired;
    IF step_generation IS NULL THEN
        {refuse("expired", "': there is no such lease'", anew)};
    ELSIF step_expired THEN
        {refuse("expired", "': the lease has expired'", anew)};
    ELSIF $2 < step_generation THEN
        {
        refuse(
            "fenced",
            "format(': another writer took the lease, with generation %s', step_generation)",
            "stop: another writer goes on",
        )
    };
    ELSIF $2 > step_generation + 1 THEN
        {
        refuse(
            "unknown",
            "format(': the database has generation %s', step_generation)",
            "is this an older copy of the database?",
        )
    };
    ELSIF $3 > step_previous + 1 THEN
        {refuse("gap", "format(': %s is next', step_previous + 1)", "stash the records between again, in order")};
    ELSIF $3 <= step_previous THEN
        RETURN NULL;
    END IF;
    {_SUPPRESSED}
    RETURN stashed;
END
"""

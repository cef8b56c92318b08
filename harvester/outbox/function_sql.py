"""The function `outbox_stash` as text: a record from any language by one SELECT (pure; docs/writing.md).

    SELECT outbox_stash(topic => 'orders', key => 'customer-42', value => '{"total": 99}');

It runs as its owner, the one of the tables, and executes one static INSERT, the stashers' own; so a role that may call
it needs no privilege on any table. That it cannot be led astray takes a fixed search path and full names. Nobody may
call it to whom it was not granted: PostgreSQL would let everybody.

Its parameters have the types of the columns. One with other types would stand beside it, and a call be ambiguous: so
those are dropped where it is made.
"""

from __future__ import annotations

from itertools import product

from harvester.outbox.insertion import Insertion
from harvester.outbox.placeholders import Style
from harvester.outbox.shape import ColumnShape
from harvester.outbox.tables import OutboxTable, dollar_quoted
from harvester.outbox.validation import MAX_TOPIC_CHARACTERS, TOPIC_CHARACTERS

_KINDS = ("text", "bytea")


def signature(table: OutboxTable, key_type: str, value_type: str) -> str:
    """The function with the types of its parameters, as statements name it; `table` has its schema."""
    return f"{table.beside('stash')}(text, {key_type}, {value_type}, text[], text[], integer)"


def create_function(table: OutboxTable, shape: ColumnShape) -> list[str]:
    """Statements that make it, or replace it with all that was granted on it; `table` has its schema."""
    name = signature(table, shape.key_type, shape.value_type)
    return [
        *(f"DROP FUNCTION IF EXISTS {other}" for other in signatures(table) if other != name),
        f"""CREATE OR REPLACE FUNCTION {table.beside("stash")}(
    topic text, key {shape.key_type}, value {shape.value_type},
    header_keys text[] DEFAULT '{{}}', header_values text[] DEFAULT '{{}}', partition integer DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS {
            dollar_quoted(body(table, shape))
        }""",
        f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC",
    ]


def drop_function(table: OutboxTable) -> list[str]:
    """Statements that remove it, whatever its types."""
    return [f"DROP FUNCTION IF EXISTS {name}" for name in signatures(table)]


def body(table: OutboxTable, shape: ColumnShape) -> str:
    """What it does: refuses what `validation` refuses, as far as columns of these types can hold it, and inserts."""
    # Parameters are numbered as those of the statement; the last one is left out where there is no column for it.
    insert = Insertion.build(table, shape, "utf-8", Style.DOLLAR).one_sql
    partition = "partition < 0" if shape.has_partition else "partition IS NOT NULL"
    why = "is below 0" if shape.has_partition else "is given, but the outbox has no column kafka_partition"
    return f"""
DECLARE
    stashed bigint;
    problem text := CASE
        WHEN topic IS NULL OR topic COLLATE "C" !~ '^{TOPIC_CHARACTERS}$' OR topic IN ('.', '..')
            THEN format('topic %L is no topic name', topic)
        WHEN length(topic) > {MAX_TOPIC_CHARACTERS}
            THEN format('topic has %s characters, Kafka takes {MAX_TOPIC_CHARACTERS}', length(topic))
        WHEN header_keys IS NULL OR header_values IS NULL
                OR array_ndims(header_keys) > 1 OR array_ndims(header_values) > 1
                OR cardinality(header_keys) <> cardinality(header_values)
            THEN 'header_keys and header_values are not two lists of the same length'
        WHEN array_position(header_keys, NULL) IS NOT NULL OR array_position(header_values, NULL) IS NOT NULL
            THEN 'a header is NULL'
        WHEN {partition} THEN 'partition {why}'
    END;
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'record refused: ' || problem;
    END IF;
    {insert} INTO stashed;
    IF stashed IS NULL THEN
        RAISE EXCEPTION 'the row was not inserted: a trigger or rule of the table suppressed it';
    END IF;
    RETURN stashed;
END
"""


def signatures(table: OutboxTable) -> list[str]:
    """The function with all types that it may have had."""
    return [signature(table, key, value) for key, value in product(_KINDS, _KINDS)]

"""The judgement over the catalog's facts, on forged ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harvester.errors import SchemaError
from harvester.outbox.catalog import Column, Facts, Relation, Sequence
from harvester.outbox.shape import (
    QUARANTINE_COLUMNS,
    TERM_COLUMNS,
    check_companions,
    check_place,
    column_shape,
    outbox_shape,
    quarantine_mismatches,
)
from harvester.outbox.tables import OutboxTable

TABLE = OutboxTable.parse("outbox")


def column(name: str, type_: str, **changes: Any) -> Column:
    return dataclasses.replace(Column(name, type_, None, nullable=True, identity=False, default=None), **changes)


def relation(*columns: Column, **changes: Any) -> Relation:
    base = Relation(
        oid=7,
        schema="public",
        kind="r",
        persistence="p",
        is_partition=False,
        has_children=False,
        row_security=False,
        lacks=(),
        columns={c.name: c for c in columns},
    )
    return dataclasses.replace(base, **changes)


SEED_COLUMNS = (
    column("id", "bigint", nullable=False, default="nextval('outbox_id_seq'::regclass)"),
    column("create_time", "timestamp with time zone", nullable=False),
    column("kafka_topic", "character varying", nullable=False, max_length=249),
    column("kafka_key", "character varying", nullable=False, max_length=100),
    column("kafka_value", "character varying", max_length=10_000),
    column("kafka_header_keys", "text[]", nullable=False),
    column("kafka_header_values", "text[]", nullable=False),
    column("leader_id", "uuid"),
)
SEED = relation(*SEED_COLUMNS)
FACTS = Facts(
    server_version=160_003,
    user="relay",
    schema_exists=True,
    outbox=SEED,
    term=relation(*(column(name, "text") for name in TERM_COLUMNS)),
    quarantine=relation(*(column(name, "text") for name in QUARANTINE_COLUMNS)),
    sequence=Sequence("public.outbox_id_seq", cache=1, increment=1, cycle=False, readable=True),
    ordered_by_id=True,
    notifies=False,
)


def with_column(changed: Column) -> Facts:
    return dataclasses.replace(FACTS, outbox=dataclasses.replace(SEED, columns={**SEED.columns, changed.name: changed}))


def with_outbox(**changes: Any) -> Facts:
    return dataclasses.replace(FACTS, outbox=dataclasses.replace(SEED, **changes))


def with_sequence(**changes: Any) -> Facts:
    assert FACTS.sequence is not None
    return dataclasses.replace(FACTS, sequence=dataclasses.replace(FACTS.sequence, **changes))


def test_the_table_of_the_original_guide_fits() -> None:
    shape = outbox_shape(TABLE, FACTS)
    assert (shape.id_type, shape.key_type, shape.value_type, shape.leader_id_type) == ("bigint", "text", "text", "uuid")
    assert (shape.key_nullable, shape.has_partition, shape.has_notify) == (False, False, False)
    assert shape.sequence == "public.outbox_id_seq"
    assert (shape.topic_max, shape.key_max, shape.value_max) == (249, 100, 10_000)
    check_companions(TABLE, FACTS, shape)


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        (column("leader_id", "character varying", max_length=36), "leader_id_type", "text"),
        (column("leader_id", "text"), "leader_id_type", "text"),
        (column("kafka_value", "bytea"), "value_type", "bytea"),
        (column("kafka_key", "text"), "key_nullable", True),
        (column("kafka_key", "bytea"), "key_type", "bytea"),
        (column("kafka_partition", "integer"), "has_partition", True),
        (column("id", "integer", default="nextval('o''dd'::regclass)"), "id_type", "integer"),
        (column("id", "bigint", identity=True), "id_type", "bigint"),
        (column("something_else", "jsonb"), "has_partition", False),
    ],
)
def test_accepted_variations(changed: Column, field: str, value: object) -> None:
    assert getattr(outbox_shape(TABLE, with_column(changed)), field) == value


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (with_column(column("kafka_topic", "integer")), "column kafka_topic is integer (accepted: text, char"),
        (with_column(column("kafka_value", "xml")), "column kafka_value is xml"),
        (with_column(column("kafka_key", "character")), "column kafka_key is character "),
        (with_column(column("create_time", "timestamp without time zone")), "column create_time is timestamp without"),
        (with_column(column("kafka_header_keys", "text")), "column kafka_header_keys is text"),
        (with_column(column("kafka_partition", "bigint")), "column kafka_partition is bigint"),
        (with_column(column("leader_id", "uuid", nullable=False)), "column leader_id is NOT NULL"),
        (with_column(column("leader_id", "character varying", max_length=35)), "leader_id holds 35 characters"),
        (with_column(column("id", "uuid")), "column id is uuid"),
        (with_column(column("id", "bigint", default=None)), "id does not come from a sequence"),
        (with_column(column("id", "bigint", default="my_id()")), "id does not come from a sequence"),
        (
            with_column(column("id", "bigint", default="(nextval('a'::regclass) * nextval('b'::regclass))")),
            "id does not come from a sequence",
        ),
        (
            with_column(column("id", "bigint", default="nextval('a'::regclass) + nextval('b'::regclass)")),
            "id does not come from a sequence",
        ),
        (dataclasses.replace(FACTS, sequence=None), "id does not come from a sequence"),
        (dataclasses.replace(FACTS, ordered_by_id=False), "id has no unique index"),
        (with_sequence(cache=20), "CACHE 20 (ALTER SEQUENCE public.outbox_id_seq CACHE 1)"),
        (with_sequence(cycle=True), "CYCLE (ALTER SEQUENCE public.outbox_id_seq NO CYCLE)"),
        (with_sequence(increment=-1), "counts down"),
        (with_outbox(kind="v"), "it is a view"),
        (with_outbox(kind="f"), "it is a foreign table"),
        (with_outbox(kind="p"), "is a partitioned table: rows are read in the order of one index"),
        (with_outbox(kind="S"), "it is not a table"),
        (with_outbox(is_partition=True), "inheritance or partitioning"),
        (with_outbox(has_children=True), "inheritance or partitioning"),
        (with_outbox(persistence="u"), "unlogged or temporary"),
        (with_outbox(row_security=True), "row security hides rows"),
        (dataclasses.replace(FACTS, outbox=None), "there is no outbox table"),
        (dataclasses.replace(FACTS, server_version=120_022), "PostgreSQL 12, which is too old"),
    ],
)
def test_misfits_are_refused_with_a_hint(facts: Facts, said: str) -> None:
    with pytest.raises(SchemaError) as refused:
        outbox_shape(TABLE, facts)
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("name", [c.name for c in SEED_COLUMNS])
def test_every_column_of_the_guide_is_needed(name: str) -> None:
    facts = with_outbox(columns={k: c for k, c in SEED.columns.items() if k != name})
    for judge in (outbox_shape, column_shape):
        with pytest.raises(SchemaError, match=f"column {name} is missing"):
            judge(TABLE, facts)


def test_all_problems_are_told_at_once() -> None:
    facts = dataclasses.replace(with_outbox(kind="v", persistence="u"), ordered_by_id=False)
    with pytest.raises(SchemaError, match=r"a view.*unlogged.*unique index"):
        outbox_shape(TABLE, facts)


def test_writers_are_not_stopped_by_what_concerns_the_relay_only() -> None:
    facts = dataclasses.replace(with_sequence(cache=20), ordered_by_id=False)
    assert column_shape(TABLE, facts).value_max == 10_000


def test_a_missing_schema_is_named() -> None:
    facts = dataclasses.replace(FACTS, schema_exists=False, outbox=None)
    with pytest.raises(SchemaError, match="no schema 'billing'"):
        check_place(OutboxTable("billing", "outbox"), facts)


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"term": None}, 'the table "outbox_term" is missing', "harvester init"),
        ({"quarantine": None}, 'the table "outbox_quarantine" is missing', "harvester init"),
        ({"term": relation(column("term", "bigint"))}, "lacks singleton, schema_version", "harvester init"),
        ({"term": dataclasses.replace(FACTS.term or SEED, schema="other")}, "in schema 'other'", "harvester init"),
        (
            {"outbox": dataclasses.replace(SEED, lacks=("UPDATE", "DELETE"))},
            "this database user lacks privileges",
            'GRANT UPDATE, DELETE ON "outbox" TO relay',
        ),
        (
            {"sequence": dataclasses.replace(FACTS.sequence or Sequence("", 1, 1, False, True), readable=False)},
            "this database user lacks privileges",
            "GRANT SELECT ON SEQUENCE public.outbox_id_seq TO relay",
        ),
    ],
)
def test_what_stands_beside_is_checked(changes: dict[str, Any], said: str, hint: str) -> None:
    facts = dataclasses.replace(FACTS, **changes)
    with pytest.raises(SchemaError) as refused:
        check_companions(TABLE, facts, outbox_shape(TABLE, facts))
    assert said in refused.value.message
    assert hint in (refused.value.hint or "")


def test_a_quarantine_of_other_types_is_noticed() -> None:
    facts = with_column(column("kafka_value", "bytea"))
    shape = outbox_shape(TABLE, facts)
    assert facts.quarantine is not None
    assert quarantine_mismatches(facts.quarantine, shape) == [("kafka_value", "text", "bytea")]
    with pytest.raises(SchemaError, match="has kafka_value as text, the outbox as bytea"):
        check_companions(TABLE, facts, shape)

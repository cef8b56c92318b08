"""Columns of schemas, and how they grow: decided without Spark's Java process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from harvester.pipeline.lake.columns import from_json_schema, grown, projected, respelled, storable

scalars = st.sampled_from([
    BooleanType(), IntegerType(), LongType(), FloatType(), DoubleType(), StringType(), TimestampType(),
    DecimalType(5, 2), DecimalType(9, 2), DecimalType(9, 4),
])  # fmt: skip


def structs(inner: st.SearchStrategy[DataType], least: int = 1) -> st.SearchStrategy[StructType]:
    named = st.dictionaries(st.sampled_from("abcdef"), inner, min_size=least)
    return named.map(lambda fields: StructType([StructField(name, kind) for name, kind in fields.items()]))


def nested(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[DataType]:
    return structs(inner) | inner.map(ArrayType) | inner.map(lambda kind: MapType(StringType(), kind))


kinds = st.recursive(scalars, nested, max_leaves=6)
payloads = structs(kinds)


def leaves(kind: DataType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each scalar within a type: its path, and its type."""
    if isinstance(kind, StructType):
        for field in kind:
            yield from leaves(field.dataType, (*path, field.name))
    elif isinstance(kind, ArrayType):
        yield from leaves(kind.elementType, (*path, "element"))
    elif isinstance(kind, MapType):
        yield from leaves(kind.valueType, (*path, "value"))
    else:
        yield path, kind.simpleString()


WIDER = {
    ("int", "bigint"), ("int", "double"), ("float", "double"), ("decimal(5,2)", "decimal(9,2)"),
    ("decimal(5,2)", "decimal(9,4)"),
}  # fmt: skip


@given(payloads, payloads)
def test_grown_columns_hold_the_old_values_and_the_new_ones(have: StructType, written: StructType) -> None:
    found, growth = grown(have, written)
    assert found.names[: len(have.names)] == have.names
    columns, before = dict(leaves(found)), dict(leaves(have))
    widened = {one.path: one.kind.simpleString() for one in growth.widened}
    for path, kind in before.items():
        assert columns[path] == widened.get(path, kind)
        assert columns[path] == kind or (kind, columns[path]) in WIDER - {("int", "double")}
    if not growth.problems:
        for path, kind in leaves(written):
            assert columns[path] == kind or (kind, columns[path]) in WIDER
        added = {(*one.path, *path) for one in growth.added for path, _ in leaves(one.kind)}
        assert added == columns.keys() - before.keys()
        again, none = grown(found, written)
        assert again == found
        assert (none.added, none.widened, none.problems) == ([], [], [])


@given(payloads, payloads)
def test_columns_that_may_not_widen_keep_their_types(have: StructType, written: StructType) -> None:
    found, growth = grown(have, written, may_widen=False)
    assert growth.widened == []
    assert dict(leaves(found)).items() >= dict(leaves(have)).items()
    _, free = grown(have, written)
    assert len(growth.problems) == len(free.problems) + len(free.widened)


def test_problems_name_the_column_whatever_its_case() -> None:
    have = StructType([StructField("Total", IntegerType()), StructField("by", ArrayType(StringType()))])
    written = StructType([StructField("total", StringType()), StructField("by", ArrayType(LongType()))])
    found, growth = grown(have, written)
    assert growth.problems == ["Total is string, not int", "by.element is bigint, not string"]
    assert (found, growth.added) == (have, [])


@given(st.recursive(scalars | st.just(NullType()), nested, max_leaves=6))
def test_what_no_table_can_hold_is_left_out(kind: DataType) -> None:
    whole = StructType([StructField("it", kind), StructField("other", StructType([]))])
    assert dict(leaves(storable(whole))) == {path: one for path, one in leaves(whole) if one != "void"}


SCHEMAS: dict[str, Any] = {
    "boolean": BooleanType(),
    "integer": LongType(),
    "number": DoubleType(),
    "string": StringType(),
}


@st.composite
def documents(draw: st.DrawFn, depth: int = 0) -> tuple[Any, DataType]:
    """A JSON Schema, in one of the usual ways to write it, and the type of its values."""
    form = draw(st.sampled_from([*SCHEMAS, "choice", *(["array", "object", "map"] if depth < 2 else [])]))
    schema: Any = {"type": form}
    kind: DataType = SCHEMAS.get(form, StringType())
    if form == "array":
        schema["items"], inner = draw(documents(depth + 1))
        kind = ArrayType(inner)
    elif form == "map":
        schema["additionalProperties"], inner = draw(documents(depth + 1))
        schema["type"], kind = "object", MapType(StringType(), inner)
    elif form == "object":
        given_ = draw(st.dictionaries(st.sampled_from("abc"), documents(depth + 1), min_size=1))
        schema["properties"] = {name: one for name, (one, _) in given_.items()}
        kind = StructType([StructField(name, one) for name, (_, one) in given_.items()])
    elif form == "choice":
        choice = [{"type": "integer"}, {"type": "string"}]
        schema, kind = (
            draw(st.sampled_from([{"oneOf": choice}, {"enum": [1, "a"]}, {}, {"type": ["integer", "string"]}])),
            StringType(),
        )
        return schema, kind
    wrapped = draw(st.sampled_from(["plain", "list", "anyOf", "allOf"]))
    if wrapped == "list":
        schema["type"] = draw(st.permutations([schema["type"], "null"]))
    elif wrapped != "plain":
        schema = {wrapped: [schema, *([{"type": "null"}] if wrapped == "anyOf" else [])]}
    return schema, kind


@given(documents())
def test_the_types_of_a_json_schema_are_found_however_it_is_written(document: tuple[Any, DataType]) -> None:
    schema, kind = document
    text = json.dumps(
        {"$ref": "#/definitions/it", "definitions": {"it": {"type": "object", "properties": {"x": schema}}}}
    )
    assert from_json_schema(text) == StructType([StructField("x", kind)])


@pytest.mark.parametrize("reference", ["#", "#/$defs/node", "other.json#/node", "#/$defs/missing"])
def test_references_that_cannot_be_columns_are_text(reference: str) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": reference}}}
    found = from_json_schema(json.dumps({**node, "$defs": {"node": {"$ref": "#"}}}))
    assert found == StructType([StructField("next", StringType())])


@pytest.mark.parametrize(
    "document", ["true", '"text"', '{"type": "array"}', '{"type": "object"}', '{"$ref": "#"}', "["]
)
def test_documents_without_columns_are_refused(document: str) -> None:
    with pytest.raises(ValueError):
        from_json_schema(document)


def test_values_are_projected_by_name() -> None:
    have = StructType([StructField("a`b", IntegerType()), StructField("list", ArrayType(IntegerType()))])
    wanted = StructType([StructField("list", ArrayType(LongType())), StructField("n", LongType())])
    assert projected("v", have, wanted) == (
        "CASE WHEN v IS NOT NULL THEN named_struct('list', transform(v.`list`, _0 -> CAST(_0 AS bigint)), 'n',"
        " CAST(NULL AS bigint)) END"
    )
    assert projected("v", have, have) == "v"


def renamed(kind: DataType, name: Callable[[str], str]) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(name(one.name), renamed(one.dataType, name)) for one in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(renamed(kind.elementType, name))
    return MapType(kind.keyType, renamed(kind.valueType, name)) if isinstance(kind, MapType) else kind


@given(payloads, payloads)
def test_columns_take_the_spelling_of_a_schema_and_keep_everything_else(have: StructType, other: StructType) -> None:
    assert respelled(have, renamed(have, str.upper)) == renamed(have, str.upper)
    found = respelled(have, renamed(other, str.upper))
    assert renamed(found, str.lower) == have
    assert isinstance(found, StructType)
    assert set(found.names) == {name.upper() if name in other.names else name for name in have.names}


def test_a_schema_that_spells_a_column_in_two_ways_means_that_of_the_column() -> None:
    two = StructType([StructField(name, LongType()) for name in ("total", "Total")])
    for field in two:
        assert respelled(StructType([field]), two) == StructType([field])
    with pytest.raises(ValueError, match="TOTAL may be any of total, Total"):
        respelled(StructType([StructField("TOTAL", LongType())]), two)

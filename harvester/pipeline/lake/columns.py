"""The columns of registry-framed values: derived from schemas, grown by later ones, filled from values. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from harvester.pipeline.schemas import Addition, kind_of, quote, text

FRAME = 5
"""The bytes before a value: a zero byte and the schema's id, as the serialisers of the registry write them."""
SCHEMA_ID = (
    f"CASE WHEN length(value) >= {FRAME} AND substring(value, 1, 1) = X'00'"
    f" THEN CAST(conv(hex(substring(value, 2, {FRAME - 1})), 16, 10) AS BIGINT) END"
)
"""The id of the schema with which a value was written; NULL if the value is not framed."""
CONTENT = f"substring(value, {FRAME + 1})"
_DEEPEST = 8
_VARINT = "(?:[89A-F].){0,4}[0-7]."  # in hexadecimal digits: all bytes but the last have the highest bit
PLACE = "|".join(f"{2 * depth:02X}(?:{_VARINT}){{{depth}}}" for depth in range(_DEEPEST + 1))
"""Of Protobuf, the place of the message type in the schema's file, which precedes the message: a number of indexes,
each of a type within the one before, as zigzag varints. A pattern for its hexadecimal digits, to which nothing deeper
than anybody nests types conforms."""
PLACE_BYTES = 1 + 5 * _DEEPEST
MESSAGE_TYPE = (
    f"unhex(nullif(regexp_extract(hex(substring(value, {FRAME + 1}, {PLACE_BYTES})), '^(?:{PLACE})', 0), ''))"
)
"""The place of a value's message type; NULL if it has none."""
FIRST_TYPE = b"\0"

_END = b"\xb5\x01the end"


def from_avro(content: str, schema: str) -> tuple[str, str]:
    """Expressions for the decoded content, as a struct with `value`, and for whether this struct, if given its name, is
    sound. Raises ValueError if the schema is not JSON.

    Spark gives a struct of NULLs for what it cannot decode, and does not notice superfluous bytes. So the content is
    decoded together with bytes that have to follow it.
    """
    end = {"type": "fixed", "name": "harvester_end", "size": len(_END)}
    fields = [{"name": "value", "type": json.loads(schema)}, {"name": "end", "type": end}]
    framed = json.dumps({"type": "record", "name": "harvester_value", "fields": fields})
    tail = f"X'{_END.hex()}'"
    decoded = f"from_avro(concat({content}, {tail}), {text(framed)}, map('mode', 'PERMISSIVE'))"
    return decoded, f".end <=> {tail}"


_SCALARS: Mapping[Any, DataType] = {"boolean": BooleanType(), "integer": LongType(), "number": DoubleType()}


def from_json_schema(document: str) -> StructType:
    """The columns of a JSON Schema: its properties. Raises ValueError if it describes no object that has any.

    A string, and whatever has no type of its own in Spark (such as a choice of types), becomes STRING, which for
    anything but a string is its JSON text. References are followed within the document.
    """
    schema = json.loads(document)
    found = _of(schema, schema, ("#",))
    if not isinstance(found, StructType):
        raise ValueError("it describes no object with properties")  # noqa: TRY004 - of the text, not of an argument
    return found


def _of(schema: Any, root: Any, within: tuple[str, ...]) -> DataType:
    while True:
        if not isinstance(schema, dict):
            return StringType()
        reference = schema.get("$ref")
        one = _only_one(schema)
        if isinstance(reference, str):
            if reference in within:  # a tree, say: Spark has no recursive types
                return StringType()
            schema, within = _resolved(reference, root), (*within, reference)
        elif one is not None:
            schema = one
        else:
            break
    kinds = schema.get("type", "object" if "properties" in schema else None)
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    kind = named[0] if len(named) == 1 else None
    if kind == "object":
        if isinstance(properties := schema.get("properties"), dict) and properties:
            return StructType([StructField(name, _of(one, root, within)) for name, one in properties.items()])
        if isinstance(values := schema.get("additionalProperties"), dict):
            return MapType(StringType(), _of(values, root, within))
    elif kind == "array" and isinstance(items := schema.get("items"), dict):
        return ArrayType(_of(items, root, within))
    return _SCALARS.get(kind if isinstance(kind, str) else None, StringType())


def _only_one(schema: Mapping[str, Any]) -> Any:
    """The one of a choice that is not NULL; None if there are several, or none."""
    for word in ("allOf", "anyOf", "oneOf"):
        if isinstance(listed := schema.get(word), list) and "properties" not in schema:
            others = [one for one in listed if one != {"type": "null"}]
            return others[0] if len(others) == 1 else None
    return None


def _resolved(reference: str, root: Any) -> Any:
    """The schema to which a reference such as `#/definitions/NAME` leads; None if it is not in this document."""
    if not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def storable(kind: StructType) -> StructType:
    """The columns without what no table can hold: what is always NULL, and structs without fields."""
    found = rebuilt(kind, lambda leaf: None if isinstance(leaf, NullType) else leaf)
    return found if isinstance(found, StructType) else StructType()


def rebuilt(kind: DataType, leaf: Callable[[DataType], DataType | None]) -> DataType | None:
    """The type with each simple type within it replaced by `leaf`; without those, and what holds nothing else, if None.

    Keys of maps stay.
    """
    if isinstance(kind, StructType):
        inner = ((one.name, rebuilt(one.dataType, leaf)) for one in kind)
        fields = [StructField(name, some) for name, some in inner if some is not None]
        return StructType(fields) if fields else None
    if isinstance(kind, ArrayType):
        element = rebuilt(kind.elementType, leaf)
        return None if element is None else ArrayType(element)
    if isinstance(kind, MapType):
        value = rebuilt(kind.valueType, leaf)
        return None if value is None else MapType(kind.keyType, value)
    return leaf(kind)


@dataclass(slots=True)
class Growth:
    """The changes that a schema requires of a table: new columns and wider types; and what cannot be had."""

    may_widen: bool
    added: list[Addition] = field(default_factory=list)
    widened: list[Addition] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def grown(have: StructType, written: StructType, *, may_widen: bool = True) -> tuple[StructType, Growth]:
    """The columns that hold what they held, and values of another schema, apart from those with problems.

    Names are compared as Spark does, without regard to case.
    """
    growth = Growth(may_widen)
    found = _grown(have, written, (), growth)
    assert isinstance(found, StructType)
    return found, growth


def _grown(have: DataType, written: DataType, path: tuple[str, ...], growth: Growth) -> DataType:
    if isinstance(have, StructType) and isinstance(written, StructType):
        fields = {one.name.lower(): one for one in have}
        for one in written:
            held = fields.get(one.name.lower())
            if held is None:
                growth.added.append(Addition((*path, one.name), one.dataType))
                fields[one.name.lower()] = StructField(one.name, one.dataType)
            else:
                kind = _grown(held.dataType, one.dataType, (*path, held.name), growth)
                fields[one.name.lower()] = StructField(held.name, kind)
        return StructType(list(fields.values()))
    if isinstance(have, ArrayType) and isinstance(written, ArrayType):
        return ArrayType(_grown(have.elementType, written.elementType, (*path, "element"), growth))
    if isinstance(have, MapType) and isinstance(written, MapType) and have.keyType == written.keyType:
        return MapType(have.keyType, _grown(have.valueType, written.valueType, (*path, "value"), growth))
    if _holds(have, written):
        return have
    if growth.may_widen and _holds(written, have) and _may_become(have, written):
        growth.widened.append(Addition(path, written))
        return written
    growth.problems.append(f"{'.'.join(path)} is {written.simpleString()}, not {have.simpleString()}")
    return have


_NUMBERS = ("tinyint", "smallint", "int", "bigint")


def _holds(wide: DataType, narrow: DataType) -> bool:
    """Whether a column holds each value of a scalar type unaltered."""
    one, other = wide.simpleString(), narrow.simpleString()
    if isinstance(wide, DecimalType) and isinstance(narrow, DecimalType):
        return wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale
    if one in _NUMBERS and other in _NUMBERS:
        return _NUMBERS.index(one) >= _NUMBERS.index(other)
    return one == other or (one == "double" and other in ("float", "tinyint", "smallint", "int"))


def _may_become(have: DataType, wider: DataType) -> bool:
    """Whether tables of both formats can make this wider type of a column."""
    if isinstance(have, DecimalType) and isinstance(wider, DecimalType):
        return have.scale == wider.scale
    return wider.simpleString() != "double" or have.simpleString() == "float"


def projected(value: str, have: DataType, wanted: DataType, depth: int = 0) -> str:
    """An expression for the value as another type: fields by their names, others NULL; numbers as wider ones."""
    if have.simpleString() == wanted.simpleString():
        return value
    one = f"_{depth}"
    if isinstance(have, StructType) and isinstance(wanted, StructType):
        there = {field.name.lower(): field for field in have}
        parts = []
        for wish in wanted:
            found, held = there.get(wish.name.lower()), f"CAST(NULL AS {kind_of(wish.dataType)})"
            if found is not None:
                held = projected(f"{value}.{quote(found.name)}", found.dataType, wish.dataType, depth)
            parts.append(f"{text(wish.name)}, {held}")
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(parts)}) END"
    if isinstance(have, ArrayType) and isinstance(wanted, ArrayType):
        return f"transform({value}, {one} -> {projected(one, have.elementType, wanted.elementType, depth + 1)})"
    if isinstance(have, MapType) and isinstance(wanted, MapType):
        inner = projected(one, have.valueType, wanted.valueType, depth + 1)
        return f"transform_values({value}, (_k{depth}, {one}) -> {inner})"
    return f"CAST({value} AS {kind_of(wanted)})"


def respelled(kind: DataType, like: DataType) -> DataType:
    """The type with its fields named as those of another one, which may spell them in another case.

    Each field may be NULL. Raises ValueError if it may be any of several of the other type.
    """
    like = like if type(like) is type(kind) else kind
    if isinstance(kind, StructType) and isinstance(like, StructType):
        there, fields = dict[str, list[StructField]](), []
        for other in like:
            there.setdefault(other.name.lower(), []).append(other)
        for one in kind:
            similar = there.get(one.name.lower(), [one])
            same = [other for other in similar if other.name == one.name] or similar
            if len(same) > 1:
                raise ValueError(f"{one.name} may be any of {', '.join(other.name for other in same)}")
            fields.append(StructField(same[0].name, respelled(one.dataType, same[0].dataType)))
        return StructType(fields)
    if isinstance(kind, ArrayType) and isinstance(like, ArrayType):
        return ArrayType(respelled(kind.elementType, like.elementType))
    if isinstance(kind, MapType) and isinstance(like, MapType):
        return MapType(kind.keyType, respelled(kind.valueType, like.valueType))
    return kind

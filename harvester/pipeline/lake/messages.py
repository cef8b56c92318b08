"""Protobuf messages as columns, and as the JSON text from which these are read. Pure.

Spark's own connector for Protobuf reads one type of message per call, and a topic may have many. So Python's library
reads them, in Spark's Python processes.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import import_module
from math import isfinite
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from harvester.pipeline.lake.columns import FIRST_TYPE, FRAME, PLACE, PLACE_BYTES


def file_set(file: str, imports: Mapping[str, str]) -> str:
    """A schema's file with all that it imports, each after what it imports itself; all in base64.

    `imports`: files by the names under which others import them; any other comes with a library. Raises ValueError.
    """
    found: dict[str, FileDescriptorProto] = {}

    def add(one: FileDescriptorProto) -> None:
        for name in one.dependency:
            if name not in found:
                add(_named(_file(imports[name]), name) if name in imports else _of_library(name))
        found[one.name] = one

    add(_named(_file(file), "harvester/value.proto"))
    return b64encode(FileDescriptorSet(file=found.values()).SerializeToString()).decode()


def _file(text: str) -> FileDescriptorProto:
    try:
        return FileDescriptorProto.FromString(b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        raise ValueError("the registry gives it as text only, although it was asked for format=serialized") from error


def _named(file: FileDescriptorProto, name: str) -> FileDescriptorProto:
    file.name = name
    return file


def _of_library(name: str) -> FileDescriptorProto:
    module = name.removesuffix(".proto").replace("/", ".") + "_pb2"
    # Serialisers register no reference to Confluent's own files either, which its client has.
    places = ("", "confluent_kafka.schema_registry.") if name.startswith("confluent/") else ("",)
    for place in places:
        try:
            return FileDescriptorProto.FromString(import_module(place + module).DESCRIPTOR.serialized_pb)
        except ImportError:
            continue
    raise ValueError(f"it imports {name}, to which the registry has no reference")


@lru_cache(maxsize=256)
def _type_at(files: str, place: bytes) -> Any:
    """The descriptor of a message type. Raises ValueError if there is none."""
    listed = FileDescriptorSet.FromString(b64decode(files)).file
    pool = DescriptorPool()
    try:
        for file in listed:
            pool.Add(file)
    except TypeError as error:
        raise ValueError(f"it is inconsistent: {error}") from error
    types, names = listed[-1].message_type, list(filter(None, [listed[-1].package]))
    for index in _indexes(place):
        if not 0 <= index < len(types):
            raise ValueError(f"it has no message type at {place.hex()}")
        names.append(types[index].name)
        types = types[index].nested_type
    return pool.FindMessageTypeByName(".".join(names))


def _indexes(place: bytes) -> Iterator[int]:
    """Of a message type, and of the types around it."""
    zigzag, bits = 0, 0
    for byte in place[1:] or FIRST_TYPE:
        zigzag, bits = zigzag | (byte & 0x7F) << bits, bits + 7
        if byte < 0x80:
            yield zigzag >> 1 if zigzag % 2 == 0 else -1
            zigzag, bits = 0, 0


_OF = FieldDescriptor
_SCALARS: Mapping[int, DataType] = {
    **dict.fromkeys((_OF.TYPE_INT32, _OF.TYPE_SINT32, _OF.TYPE_SFIXED32), IntegerType()),
    **dict.fromkeys((_OF.TYPE_INT64, _OF.TYPE_SINT64, _OF.TYPE_SFIXED64), LongType()),
    **dict.fromkeys((_OF.TYPE_UINT32, _OF.TYPE_FIXED32), LongType()),
    **dict.fromkeys((_OF.TYPE_UINT64, _OF.TYPE_FIXED64), DecimalType(20, 0)),
    **dict.fromkeys((_OF.TYPE_STRING, _OF.TYPE_ENUM), StringType()),
    _OF.TYPE_FLOAT: FloatType(),
    _OF.TYPE_DOUBLE: DoubleType(),
    _OF.TYPE_BOOL: BooleanType(),
    _OF.TYPE_BYTES: BinaryType(),
}
_GOOGLE = "google.protobuf."
_ANY_JSON = tuple(f"{_GOOGLE}{name}" for name in ("Struct", "Value", "ListValue"))
_WRAPPERS = tuple(
    f"{_GOOGLE}{name}Value"
    for name in ("Bool", "Int32", "Int64", "UInt32", "UInt64", "Float", "Double", "String", "Bytes")
)
_SPECIAL: Mapping[str, DataType] = {
    **dict.fromkeys(_ANY_JSON, StringType()),
    f"{_GOOGLE}Timestamp": TimestampType(),
    f"{_GOOGLE}Duration": DecimalType(21, 9),
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def columns_of(files: str, place: bytes = FIRST_TYPE) -> StructType:
    """The columns of a message type of a `file_set`. Raises ValueError.

    A field is named as in the schema. Enums are names, a Duration is seconds; STRING with JSON text stands for messages
    that have no fields of their own, and for a message within one of its own type, since Spark has no recursive types.
    """
    of_message = _struct(_type_at(files, place), ())
    if not isinstance(of_message, StructType):
        raise ValueError(f"it is {of_message.simpleString()}, not a message with fields")  # noqa: TRY004 - of the text
    return of_message


def _struct(kind: Any, within: tuple[str, ...]) -> DataType:
    if kind.full_name in _SPECIAL:
        return _SPECIAL[kind.full_name]
    if kind.full_name in _WRAPPERS:
        return _SCALARS[kind.fields_by_name["value"].type]
    if kind.full_name in within:
        return StringType()
    inside = (*within, kind.full_name)
    return StructType([StructField(field.name, _column(field, inside)) for field in kind.fields])


def _column(field: Any, within: tuple[str, ...]) -> DataType:
    if _is_map(field):
        return MapType(StringType(), _one(field.message_type.fields_by_name["value"], within))
    return ArrayType(_one(field, within)) if _is_repeated(field) else _one(field, within)


def _one(field: Any, within: tuple[str, ...]) -> DataType:
    return _SCALARS[field.type] if field.message_type is None else _struct(field.message_type, within)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_repeated(field: Any) -> bool:
    is_repeated: bool | None = getattr(field, "is_repeated", None)  # since Protobuf 6.31, which replaces `label`
    return field.label == _OF.LABEL_REPEATED if is_repeated is None else is_repeated


_PLACE = re.compile(PLACE)


def reader(known: Mapping[int, tuple[str, frozenset[bytes]]]) -> Callable[[bytes | None], str | None]:
    """A function from framed values to JSON text for `columns_of`; None for what is not of its schema.

    `known`: by schema id, its `file_set` and the places of the types that may come. The function never raises: that
    would end the job, at each start again.
    """

    def read(value: bytes | None) -> str | None:
        if value is None or len(value) <= FRAME:
            return None
        files, places = known.get(int.from_bytes(value[1:FRAME], "big"), ("", frozenset()))
        of_type = _PLACE.match(value[FRAME : FRAME + PLACE_BYTES].hex().upper())
        place = bytes.fromhex(of_type[0]) if of_type is not None else b""
        if place not in places:
            return None
        try:
            message = GetMessageClass(_type_at(files, place)).FromString(bytes(value[FRAME + len(place) :]))
            return json.dumps(_plain(message, ()), ensure_ascii=False)
        except Exception:  # noqa: BLE001 - whatever the libraries raise for what they or JSON cannot express
            return None

    return read


def _plain(message: Any, within: tuple[str, ...]) -> Any:
    kind = message.DESCRIPTOR
    if kind.full_name == f"{_GOOGLE}Timestamp":
        return _timestamp(message)
    if kind.full_name == f"{_GOOGLE}Duration":
        nanos = message.seconds * 10**9 + message.nanos
        return f"{'-' if nanos < 0 else ''}{abs(nanos) // 10**9}.{abs(nanos) % 10**9:09d}"
    if kind.full_name in _WRAPPERS:
        return _scalar(kind.fields_by_name["value"], message.value)
    if kind.full_name in _ANY_JSON or kind.full_name in within:
        return MessageToJson(message, indent=None, preserving_proto_field_name=True, ensure_ascii=False)
    inside, found = (*within, kind.full_name), dict[str, Any]()
    for field in kind.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            of_value = field.message_type.fields_by_name["value"]
            found[field.name] = {_name(key): _scalar(of_value, one, inside) for key, one in value.items()}
        elif _is_repeated(field):
            found[field.name] = [_scalar(field, one, inside) for one in value]
        elif not field.has_presence or message.HasField(field.name):
            found[field.name] = _scalar(field, value, inside)
    return found


def _scalar(field: Any, value: Any, within: tuple[str, ...] = ()) -> Any:
    if field.message_type is not None:
        return _plain(value, within)
    if field.type == _OF.TYPE_ENUM:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    if field.type == _OF.TYPE_BYTES:
        return b64encode(value).decode()
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124 - NaN alone
    return value


def _name(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _timestamp(message: Any) -> str:
    try:
        at = _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)
    except OverflowError:
        return f"{message.seconds} seconds"  # which is no time, so the value does not fit
    return f"{at:%Y-%m-%dT%H:%M:%S.%f}Z" if at.year > 999 else f"{at.year:04d}-{at:%m-%dT%H:%M:%S.%f}Z"

"""The columns of every table, whether an existing table fits, and the statements that write tables.

The statements that write Delta tables, as text. Each has the same effect whether it runs once or again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def struct(*fields: tuple[str, DataType]) -> StructType:
    """Columns in this order."""
    return StructType([StructField(name, kind) for name, kind in fields])


KAFKA = struct(
    ("key", BinaryType()),
    ("value", BinaryType()),
    ("topic", StringType()),
    ("partition", IntegerType()),
    ("offset", LongType()),
    ("timestamp", TimestampType()),
    ("timestampType", IntegerType()),
    ("headers", HEADERS),
)
"""What Spark's Kafka source gives, with its option includeHeaders."""

PLACE = (
    ("topic", StringType()),
    ("partition", IntegerType()),
    ("offset", LongType()),
    ("timestamp", TimestampType()),
)
_ORIGIN = (
    ("incarnation", StringType()),
    ("id", LongType()),
    ("term", LongType()),
    ("lane", LongType()),
    ("producer", LongType()),
    ("sequence", LongType()),
    ("low_water", LongType()),
    ("created_us", LongType()),
    ("created_at", TimestampType()),
)
_CONTENT = (("key", BinaryType()), ("value", BinaryType()), ("headers", HEADERS))

BRONZE = struct(
    ("day", DateType()), *PLACE, ("timestamp_type", IntegerType()), *_CONTENT, *_ORIGIN, ("problem", StringType())
)
SILVER = struct(("day", DateType()), *_ORIGIN, *PLACE, *_CONTENT, ("tombstone", BooleanType()))
CURRENT = struct(
    ("topic", StringType()),
    ("key", BinaryType()),
    ("value", BinaryType()),
    ("headers", HEADERS),
    ("deleted", BooleanType()),
    ("since", TimestampType()),
    ("incarnation", StringType()),
    ("id", LongType()),
    ("created_at", TimestampType()),
    ("timestamp", TimestampType()),
)
INCARNATIONS = struct(("incarnation", StringType()), ("since", TimestampType()))
REJECTS = struct(("day", DateType()), *PLACE, *_CONTENT, ("reason", StringType()), ("detail", StringType()))


@dataclass(frozen=True, slots=True)
class Table:
    """A Delta table of a lake: its directory, columns and what it is partitioned by.

    `bounded`: of which columns each file's smallest and largest value is kept, to leave out files by; empty means of
    all. Each of them costs every record that is written.
    """

    name: str
    schema: StructType
    partitioned_by: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()


_BOUNDED = ("id", "created_at", "timestamp", "topic")
TABLES = (
    Table("bronze", BRONZE, ("day",), (*_BOUNDED, "partition", "offset")),
    Table("silver", SILVER, ("day",), _BOUNDED),
    Table("current", CURRENT, ("topic",), ("incarnation", "id", "created_at", "timestamp")),
    Table("incarnations", INCARNATIONS),
    Table("rejects", REJECTS, ("day",)),
)


@dataclass(frozen=True, slots=True)
class Addition:
    """A column that a table lacks; `path` leads into structs."""

    path: tuple[str, ...]
    kind: DataType


def differences(found: StructType, expected: StructType) -> tuple[list[Addition], list[str]]:
    """Columns that `found` lacks and that can be added, and what is wrong, in words.

    Columns that only `found` has are somebody's own; they are left alone and get NULL, unless they refuse it.
    """
    additions: list[Addition] = []
    problems: list[str] = []
    _compare(found, expected, (), additions, problems)
    return additions, problems


def _compare(
    found: StructType, expected: StructType, path: tuple[str, ...], additions: list[Addition], problems: list[str]
) -> None:
    have = {field.name.lower(): field for field in found}
    for field in expected:
        here = (*path, field.name)
        other = have.pop(field.name.lower(), None)
        if other is None:
            additions.append(Addition(here, field.dataType))
        elif isinstance(other.dataType, StructType) and isinstance(field.dataType, StructType):
            _compare(other.dataType, field.dataType, here, additions, problems)
        elif other.dataType.simpleString() != field.dataType.simpleString():
            name = ".".join(here)
            problems.append(f"{name} is {other.dataType.simpleString()}, not {field.dataType.simpleString()}")
    problems += [f"{'.'.join((*path, field.name))} takes no NULL" for field in have.values() if not field.nullable]


_AGE = ("since", "incarnation", "id")


def create(path: str, table: Table, properties: Mapping[str, str]) -> str:
    """The table, unless it is there."""
    columns = ", ".join(f"{quote(field.name)} {field.dataType.simpleString()}" for field in table.schema)
    partitioned = f" PARTITIONED BY ({', '.join(table.partitioned_by)})" if table.partitioned_by else ""
    return f"CREATE TABLE IF NOT EXISTS {at(path)} ({columns}) USING DELTA{partitioned} {_properties(properties)}"


def add_columns(path: str, additions: Iterable[Addition]) -> str:
    """Columns at the end of the table, or of one of its structs; NULL in what is there."""
    listed = ", ".join(f"{'.'.join(map(quote, one.path))} {one.kind.simpleString()}" for one in additions)
    return f"ALTER TABLE {at(path)} ADD COLUMNS ({listed})"


def take_latest(path: str, topics: Iterable[str]) -> str:
    """States of {source} that are younger than the table's, or whose key it does not have."""
    listed = ", ".join(_text(topic) for topic in topics)
    younger = " > ".join(f"struct({', '.join(f'{side}.{name}' for name in _AGE)})" for side in "st")
    changes = ", ".join(f"t.{quote(name)} = s.{quote(name)}" for name in CURRENT.names)
    return (
        f"MERGE INTO {_into(path)} t USING {{source}} s"
        f" ON t.topic IN ({listed}) AND t.topic = s.topic AND t.key = s.key"
        f" WHEN MATCHED AND {younger} THEN UPDATE SET {changes} {_insert(CURRENT.names)}"
    )


def compact(path: str) -> str:
    """Small files into large ones. What was written before stays readable until the user's VACUUM."""
    return f"OPTIMIZE {at(path)}"


def at(path: str) -> str:
    """The table in a directory, for Spark SQL."""
    return f"delta.{quote(path)}"


def quote(name: str) -> str:
    """A name in SQL, whatever it holds."""
    return "`" + name.replace("`", "``") + "`"


def _into(path: str) -> str:
    # The statement's {source} is filled in later; other braces are to stay.
    return at(path).replace("{", "{{").replace("}", "}}")


def _insert(columns: Iterable[str]) -> str:
    names = list(columns)
    return (
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(map(quote, names))})"
        f" VALUES ({', '.join(f's.{quote(name)}' for name in names)})"
    )


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _properties(properties: Mapping[str, str]) -> str:
    listed = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in properties.items())
    return f"TBLPROPERTIES ({listed})"

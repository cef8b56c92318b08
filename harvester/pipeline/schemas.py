"""The columns of every table, whether an existing table fits, and the statements that write tables, as text.

Each statement has the same effect whether it runs once or again.
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
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TYPES: Mapping[str, DataType] = {
    "bigint": LongType(), "binary": BinaryType(), "boolean": BooleanType(), "date": DateType(), "double": DoubleType(),
    "headers": HEADERS, "int": IntegerType(), "string": StringType(), "timestamp": TimestampType(),
}  # fmt: skip


def struct(*columns: str | StructField) -> StructType:
    """Columns in this order, each a field or a list such as `id bigint, key binary`. `headers` are those of Kafka.

    Spark's own parser of such lists needs a running Java process.
    """
    fields: list[StructField] = []
    for part in columns:
        if isinstance(part, str):
            named = (column.split() for column in part.split(","))
            fields += [StructField(name, _TYPES[kind]) for name, kind in named]
        else:
            fields.append(part)
    return StructType(fields)


PLACE = "topic string, partition int, offset bigint, timestamp timestamp"
_CONTENT = "key binary, value binary, headers headers"
_ORIGIN = (
    "incarnation string, id bigint, term bigint, lane bigint, producer bigint, sequence bigint, low_water bigint,"
    " created_us bigint, created_at timestamp"
)

KAFKA = struct(
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int,"
    " headers headers"
)
"""What Spark's Kafka source gives, with its option includeHeaders."""

BRONZE = struct("day date", PLACE, "timestamp_type int", _CONTENT, _ORIGIN, "problem string")
SILVER = struct("day date", _ORIGIN, PLACE, _CONTENT, "tombstone boolean")
CURRENT = struct(
    "topic string", _CONTENT, "deleted boolean, since timestamp, incarnation string, id bigint",
    "created_at timestamp, timestamp timestamp",
)  # fmt: skip
INCARNATIONS = struct("incarnation string, since timestamp")
REJECTS = struct("day date", PLACE, _CONTENT, "reason string, detail string")


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
BRONZE_TABLE = Table("bronze", BRONZE, ("day",), (*_BOUNDED, "partition", "offset"))
SILVER_TABLE = Table("silver", SILVER, ("day",), _BOUNDED)
TABLES = (
    BRONZE_TABLE,
    SILVER_TABLE,
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
    listed = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in properties.items())
    return f"CREATE TABLE IF NOT EXISTS {at(path)} ({columns}) USING DELTA{partitioned} TBLPROPERTIES ({listed})"


def add_columns(path: str, additions: Iterable[Addition]) -> str:
    """Columns at the end of the table, or of one of its structs; NULL in what is there."""
    listed = ", ".join(f"{'.'.join(map(quote, one.path))} {one.kind.simpleString()}" for one in additions)
    return f"ALTER TABLE {at(path)} ADD COLUMNS ({listed})"


def take_latest(path: str, topics: Iterable[str]) -> str:
    """States of {source} that are younger than the table's, or whose key it does not have."""
    listed = ", ".join(_text(topic) for topic in topics)
    younger = " > ".join(f"struct({', '.join(f'{side}.{name}' for name in _AGE)})" for side in "st")
    changes = ", ".join(f"t.{quote(name)} = s.{quote(name)}" for name in CURRENT.names)
    columns = ", ".join(map(quote, CURRENT.names))
    values = ", ".join(f"s.{quote(name)}" for name in CURRENT.names)
    # The statement's {source} is filled in later; other braces are to stay.
    table = at(path).replace("{", "{{").replace("}", "}}")
    return (
        f"MERGE INTO {table} t USING {{source}} s"
        f" ON t.topic IN ({listed}) AND t.topic = s.topic AND t.key = s.key"
        f" WHEN MATCHED AND {younger} THEN UPDATE SET {changes}"
        f" WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({values})"
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


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

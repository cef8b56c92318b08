"""The statements that write Delta tables, as text. Each has the same effect whether it runs once or again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harvester.pipeline.schemas import CURRENT, Addition, Table

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

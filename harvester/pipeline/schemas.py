"""The columns of tables and views, the check whether an existing table fits, and the SQL that writes and reads them.

Every statement is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    MapType,
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
    """A schema from fields and lists such as `id bigint, key binary`, in this order. `headers` is the type of Kafka's.

    Spark's own parser for such lists needs a running Java process.
    """
    fields: list[StructField] = []
    for part in columns:
        if isinstance(part, str):
            named = (column.split() for column in part.split(","))
            fields += [StructField(name, _TYPES[kind]) for name, kind in named]
        else:
            fields.append(part)
    return StructType(fields)


BITS = 6
"""Ids are summarised in stretches of 64, a bit each."""


def block(number: str) -> str:
    """The stretch of 64 that a number is in."""
    return f"shiftright({number}, {BITS})"


def bit(number: str) -> str:
    """The bit that stands for a number within its stretch."""
    return f"shiftleft(1L, CAST({number} & {2**BITS - 1}L AS INT))"


PLACE = "topic string, partition int, offset bigint, timestamp timestamp"
_CONTENT = "key binary, value binary, headers headers"
_ORIGIN = (
    "incarnation string, id bigint, term bigint, lane bigint, producer bigint, sequence bigint, low_water bigint,"
    " created_us bigint"
)

KAFKA = struct(
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int,"
    " headers headers"
)
"""The rows of Spark's Kafka source with the option includeHeaders."""

BRONZE = struct("day date", PLACE, _CONTENT, _ORIGIN, "created_at timestamp, problem string")
"""Every record of the topics with Kafka's columns and its decoded header. A view; `day` is of Kafka's timestamp."""
SILVER = struct("day date", _ORIGIN, PLACE, _CONTENT, "batch string")
"""The stored form, in `silver` and `repeats`: `day` is of creation, `headers` are without the harvester's."""
DELIVERIES = struct("day date", _ORIGIN, "created_at timestamp", PLACE, _CONTENT, "tombstone boolean, batch string")
"""SILVER with derived columns and all headers. A view."""
CURRENT = struct(
    "topic string", _CONTENT, "deleted boolean, since timestamp, incarnation string, id bigint",
    "created_at timestamp, timestamp timestamp",
)  # fmt: skip
HISTORY = struct(
    "topic string", _CONTENT, "deleted boolean, valid_from timestamp, valid_to timestamp, incarnation string,"
    " id bigint, created_at timestamp, timestamp timestamp",
)  # fmt: skip
"""Every state of each key (a slowly changing dimension of type 2). A view."""
INCARNATIONS = struct("incarnation string, since timestamp")
REJECTS = struct("day date", PLACE, _CONTENT, "reason string, detail string, batch string")
LOSSES = struct("topic string, partition int, first_offset bigint, end_offset bigint, accepted_at timestamp")
"""Offsets from `first_offset` up to, but not including, `end_offset` that were never read; NULL: unknown end."""

ERASURES = struct(
    "incarnation string, term bigint, lane bigint, producer bigint, sequence bigint, erased_at timestamp,"
    " topic string, timestamp timestamp"
)
"""The numbers of erased records, which an audit would otherwise report as missing. Topic and Kafka's time are set for
records that the archive keeps, NULL for others.
"""

CUTS = struct("incarnation string, id bigint, at timestamp, silver_version bigint, batch string")
"""The lake has every record of the incarnation with a lower id, in batches up to `batch`. `at`: about when these were
all that the source had, NULL outside the years 1 to 9999.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a lake: its directory, columns and partitioning.

    `bounded`: the columns for which each file's smallest and largest value is kept, so that queries can skip files;
    empty means all. Each such column makes writing a record slower.
    """

    name: str
    schema: StructType
    partitioned_by: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()


_BOUNDED = ("id", "created_us", "timestamp", "topic", "partition", "offset", "batch")
SILVER_TABLE = Table("silver", SILVER, ("day",), _BOUNDED)
REPEATS_TABLE = Table("repeats", SILVER, ("day",), _BOUNDED)
CURRENT_TABLE = Table("current", CURRENT, ("topic",), ("incarnation", "id", "created_at", "timestamp"))
INCARNATIONS_TABLE = Table("incarnations", INCARNATIONS)
REJECTS_TABLE = Table("rejects", REJECTS, ("day",))
LOSSES_TABLE = Table("losses", LOSSES)
ERASURES_TABLE = Table("erasures", ERASURES)
CUTS_TABLE = Table("cuts", CUTS)
TABLES = (
    SILVER_TABLE, REPEATS_TABLE, CURRENT_TABLE, INCARNATIONS_TABLE, REJECTS_TABLE, LOSSES_TABLE, ERASURES_TABLE,
    CUTS_TABLE,
)  # fmt: skip
BAD_PAYLOAD = "bad payload"
"""The reason in `rejects` of a record that is also in silver."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A column that a table lacks; `path` includes the structs that contain it."""

    path: tuple[str, ...]
    kind: DataType


def differences(found: StructType, expected: StructType) -> tuple[list[Addition], list[str]]:
    """The columns that can be added to `found`, and a description of every other difference.

    Columns that only `found` has belong to the user; they are kept and filled with NULL, which they must accept.
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
    problems += [f"{'.'.join((*path, field.name))} accepts no NULL" for field in have.values() if not field.nullable]


def create(at: str, kind: str, table: Table, properties: Mapping[str, str]) -> str:
    """Creates the table in this format, unless it exists."""
    columns = ", ".join(f"{quote(field.name)} {kind_of(field.dataType)}" for field in table.schema)
    partitioned = f" PARTITIONED BY ({', '.join(table.partitioned_by)})" if table.partitioned_by else ""
    listed = ", ".join(f"{text(name)} = {text(value)}" for name, value in properties.items())
    return f"CREATE TABLE IF NOT EXISTS {at} ({columns}) USING {kind}{partitioned} TBLPROPERTIES ({listed})"


def add_columns(at: str, additions: Iterable[Addition]) -> str:
    """Adds columns at the end of a table or of its structs; NULL in existing rows."""
    listed = ", ".join(f"{'.'.join(map(quote, one.path))} {kind_of(one.kind)}" for one in additions)
    return f"ALTER TABLE {at} ADD COLUMNS ({listed})"


def widen(at: str, wider: Addition) -> str:
    """Gives a column a wider type, which keeps its values."""
    return f"ALTER TABLE {at} ALTER COLUMN {'.'.join(map(quote, wider.path))} TYPE {kind_of(wider.kind)}"


def kind_of(kind: DataType) -> str:
    """A type in SQL, with the names in it quoted, which `simpleString` does not do."""
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{quote(field.name)}: {kind_of(field.dataType)}' for field in kind)}>"
    if isinstance(kind, ArrayType):
        return f"array<{kind_of(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{kind_of(kind.keyType)}, {kind_of(kind.valueType)}>"
    return kind.simpleString()


_AGE = "since, incarnation, id"


def merge_states(at: str, states: str) -> str:
    """Merges the rows of a query for CURRENT that have a new key, or are newer than the table's row of their key."""
    younger = " > ".join(f"struct({', '.join(f'{side}.{name}' for name in _AGE.split(', '))})" for side in "st")
    changes = ", ".join(f"t.{quote(name)} = s.{quote(name)}" for name in CURRENT.names)
    columns = ", ".join(map(quote, CURRENT.names))
    values = ", ".join(f"s.{quote(name)}" for name in CURRENT.names)
    return (
        f"MERGE INTO {at} t USING ({states}) s ON t.topic = s.topic AND t.key = s.key"
        f" WHEN MATCHED AND {younger} THEN UPDATE SET {changes}"
        f" WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({values})"
    )


def merge_losses(at: str, losses: str) -> str:
    """Merges a view with the columns of LOSSES except the last; losses with the same start count as one, the later."""
    return (
        f"MERGE INTO {at} t USING {losses} s ON t.topic = s.topic AND t.partition = s.partition AND"
        " t.first_offset = s.first_offset WHEN MATCHED THEN UPDATE SET t.end_offset = s.end_offset, t.accepted_at ="
        f" current_timestamp() WHEN NOT MATCHED THEN INSERT ({', '.join(LOSSES.names)}) VALUES (s.topic, s.partition,"
        " s.first_offset, s.end_offset, current_timestamp())"
    )


def keep_latest(repeats: str, silver: str, since: str) -> str:
    """Deletes rows of `repeats` whose record a later batch has written again, to `repeats` or to silver.

    Considers only batches from `since` on.
    """
    place = "topic, partition, offset, timestamp"
    rows = " UNION ALL ".join(
        f"SELECT {place}, batch FROM {table} WHERE batch >= {text(since)}" for table in (repeats, silver)
    )
    same = " AND ".join(f"t.{name} = s.{name}" for name in place.split(", "))
    return (
        f"MERGE INTO {repeats} t USING (SELECT {place}, max(batch) AS batch FROM ({rows}) GROUP BY {place}) s"
        f" ON {same} AND t.batch >= {text(since)} AND t.batch < s.batch WHEN MATCHED THEN DELETE"
    )


# -- views. Their columns have the names of stored columns; `at` maps the name of a table to its name in SQL.

At = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Cut:
    """A row of CUTS. `before`: the incarnations that were first seen before its own."""

    incarnation: str
    id: int
    batch: str
    before: tuple[str, ...] = ()


_DAY_US = 86_400_000_000
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The first and last microsecond of the years 1 to 9999, the range of a timestamp."""
_OWN = (
    ("term", 16),
    ("lane", 8),
    ("producer", 8),
    ("coalesce(low_water, shiftleft(1L, 63))", 16),
    *((name, 16) for name in ("id", "sequence", "created_us")),
)
_CREATED_AT = f"CASE WHEN created_us BETWEEN {FIRST_US} AND {LAST_US} THEN timestamp_micros(created_us) END"
# Not to_date, which would return the day in the session's time zone.
_DAY = (
    f"date_from_unix_date(CAST((unix_micros(timestamp) - pmod(unix_micros(timestamp), {_DAY_US}L)) DIV {_DAY_US}L"
    " AS INT))"
)


def deliveries(source: str, header: str) -> str:
    """A query for DELIVERIES from a table with the columns of SILVER. `header`: the name of the harvester's header.

    The header is reconstructed byte for byte from the decoded columns, unless `headers` contains it, as it does if it
    was not the last header, and in tables of earlier versions.
    """
    digits = ", ".join(f"lpad(hex({column}), {size}, '0')" for column, size in _OWN)
    own = f"unhex(concat('b501', replace(incarnation, '-', ''), {digits}))"
    name = text(header)
    last = f"try_element_at(filter(headers, one -> one.key = {name}), -1).value"
    none = f"CAST(array() AS {HEADERS.simpleString()})"
    whole = f"concat(coalesce(headers, {none}), array(struct({name} AS key, {own} AS value)))"
    made = {
        "created_at": _CREATED_AT,
        "tombstone": "value IS NULL",
        "headers": f"CASE WHEN {last} <=> {own} THEN headers ELSE {whole} END",
    }
    return f"SELECT {_listed(DELIVERIES, made)} FROM {source}"


def bronze(at: At, header: str, before: str | None = None) -> str:
    """A query for BRONZE: every record once, whichever table holds it. `before`: only batches before this one."""

    def stored(table: str) -> str:
        rows = at(table)
        return rows if before is None else f"(SELECT * FROM {rows} WHERE coalesce(batch < {text(before)}, true))"

    of_silver = {"day": _DAY, "problem": "CAST(NULL AS STRING)"}
    parts = [
        f"SELECT {_listed(BRONZE, of_silver)} FROM ({deliveries(stored(table), header)})"
        for table in ("silver", "repeats")
    ]
    none = {field.name: f"CAST(NULL AS {field.dataType.simpleString()})" for field in struct(_ORIGIN)}
    of_rejects = {**none, "created_at": "CAST(NULL AS TIMESTAMP)", "problem": "reason"}
    rejects = f"{stored('rejects')} WHERE reason <> {text(BAD_PAYLOAD)}"
    return " UNION ALL ".join([*parts, f"SELECT {_listed(BRONZE, of_rejects)} FROM {rejects}"])


def as_of(at: At, cut: Cut) -> At:
    """The tables, with silver as of a cut.

    Incarnations have no common order of ids. Those that were first seen before the cut's own were over by then.
    """
    before = f" OR incarnation IN ({', '.join(map(text, cut.before))})" if cut.before else ""
    own = f"incarnation = {text(cut.incarnation)} AND id < {cut.id}"

    def of_cut(table: str) -> str:
        if table != "silver":
            return at(table)
        return f"(SELECT * FROM {at(table)} WHERE batch <= {text(cut.batch)} AND ({own}{before}))"

    return of_cut


def current(at: At, header: str, after: str | None = None) -> str:
    """A query for CURRENT: the table's states and those of silver's batches after `after`, the last folded one.

    None: all batches of silver. An earlier batch than the last folded one gives the same states.
    """
    states = f"SELECT {_listed(CURRENT, {})} FROM {at('current')}"
    return _youngest(f"{states} UNION ALL {_states(at, header, after)}")


def folded(at: At, header: str, after: str | None) -> str:
    """A query for CURRENT: only the states in silver's batches after `after`."""
    return _youngest(_states(at, header, after))


def _states(at: At, header: str, after: str | None = None) -> str:
    behind = "" if after is None else f" AND batch > {text(after)}"
    return (
        f"SELECT {_listed(CURRENT, {'deleted': 'tombstone'})} FROM ({deliveries(at('silver'), header)})"
        f" JOIN {at('incarnations')} USING (incarnation) WHERE key IS NOT NULL{behind}"
    )


def history(at: At, header: str) -> str:
    """A query for HISTORY. The states of a key follow each other without gaps, in the order of their creation.

    A row whose creation time is before its predecessor's is valid from the predecessor's time on. A row without a
    creation time is valid from Kafka's time on.
    """
    key = "PARTITION BY topic, key ORDER BY " + _AGE
    begun = f"max(coalesce(created_at, timestamp)) OVER ({key} ROWS UNBOUNDED PRECEDING)"
    dated = f"SELECT *, {begun} AS valid_from FROM ({_states(at, header)})"
    return f"SELECT {_listed(HISTORY, {'valid_to': f'lead(valid_from) OVER ({key})'})} FROM ({dated})"


def _youngest(states: str) -> str:
    """For each topic and key, the state with the highest (since, incarnation, id)."""
    others = [field.name for field in CURRENT if field.name not in ("topic", "key")]
    row = f"struct({', '.join(map(quote, others))})"
    chosen = f"SELECT topic, key, max_by({row}, struct({_AGE})) AS state FROM ({states}) GROUP BY topic, key"
    return f"SELECT {_listed(CURRENT, {name: f'state.{quote(name)}' for name in others})} FROM ({chosen})"


def _listed(schema: StructType, made: Mapping[str, str]) -> str:
    return ", ".join(f"{made[name]} AS {quote(name)}" if name in made else quote(name) for name in schema.names)


def quote(name: str) -> str:
    """Quotes any name for SQL."""
    return "`" + name.replace("`", "``") + "`"


def text(value: str) -> str:
    """Quotes any string for SQL."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

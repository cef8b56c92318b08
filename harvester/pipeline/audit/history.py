"""What the database knows of the records: outbox, quarantine and archive, in one snapshot, through JDBC.

A row leaves the outbox and enters the archive, or the quarantine, in one statement. All three are read by one statement
as well: whatever was committed stands in exactly one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from harvester.errors import SchemaError
from harvester.outbox import archive
from harvester.outbox.connection import Connection, connect, database_errors
from harvester.outbox.schema import find_shape
from harvester.outbox.shape import INIT_HINT, OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.audit.schemas import HISTORY, RecordSource
from harvester.pipeline.jdbc import JdbcSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FETCH_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """What has to be known before the tables are read. `at`: the database's clock."""

    shape: OutboxShape
    incarnation: UUID
    term: int
    has_archive: bool
    at: datetime


def history_facts(dsn: str, table: OutboxTable) -> HistoryFacts:
    """Look at the outbox; raises DatabaseUnavailable, SchemaError."""
    with connect(dsn, application_name="harvester audit") as connection:
        shape = find_shape(connection, table)
        if shape is None:
            raise SchemaError(f"there is no outbox table {table} in this database", hint=INIT_HINT)
        has_archive = archive.exists(connection, table)
        _check_readable(connection, [table.sql, table.quarantine, *([table.archive] if has_archive else [])])
        with database_errors(f"read {table.term}"):
            row = connection.execute(f"SELECT incarnation, term, now() FROM {table.term}").fetchone()
    if row is None:
        raise SchemaError(f"the table {table.term} is empty", hint=INIT_HINT)
    return HistoryFacts(shape, row[0], row[1], has_archive, row[2].astimezone(UTC))


def _check_readable(connection: Connection, names: list[str]) -> None:
    with database_errors("look at the outbox's tables"):
        # has_table_privilege would raise for a table that is not there.
        rows = connection.execute(
            "SELECT name, to_regclass(name) IS NULL, quote_ident(current_user) FROM unnest(%s::text[]) AS name"
            " WHERE NOT coalesce(has_table_privilege(to_regclass(name), 'SELECT'), false)",
            (names,),
        ).fetchall()
    for name, missing, user in rows:
        if missing:
            raise SchemaError(f"the table {name} is missing", hint=INIT_HINT)
        raise SchemaError(
            f"this database user may not read {name}", hint=f"let the owner run: GRANT SELECT ON {name} TO {user}"
        )


def query(table: OutboxTable, facts: HistoryFacts, since: datetime | None) -> str:
    """One SELECT with the columns of HISTORY. `since`: what was purged before is left out."""
    key = "kafka_key" if facts.shape.key_type == "bytea" else "convert_to(kafka_key, 'UTF8')"
    partition = "kafka_partition" if facts.shape.has_partition else "NULL::integer"
    # An archive that was written while nothing stood in the term table does not know whose its rows are.
    current = f"'{facts.incarnation}'"
    since_sql = "" if since is None else f" WHERE purged_at >= '{since.astimezone(UTC).isoformat()}'"
    parts = [
        _select(RecordSource.OUTBOX, table.sql, incarnation=current, partition=partition, key=key),
        _select(RecordSource.QUARANTINE, table.quarantine, key=key, at="quarantined_at", origin="origin"),
        _select(
            RecordSource.ARCHIVE, table.archive, incarnation=f"coalesce(incarnation::text, {current})", at="purged_at"
        ) + since_sql,
    ]  # fmt: skip
    return " UNION ALL ".join(parts if facts.has_archive else parts[:2])


def read_history(spark: SparkSession, jdbc: JdbcSource, statement: str) -> DataFrame:
    """`query` → HISTORY, lazily. It comes through one session, and is spread by the names of the records."""
    options = {**jdbc.options, "dbtable": f"({statement}) AS history", "fetchsize": str(_FETCH_ROWS)}
    rows = spark.read.format("jdbc").options(**options).load()
    named = rows.select(*(rows[field.name].cast(field.dataType).alias(field.name) for field in HISTORY))
    return named.repartition("incarnation", "id")


def _select(
    source: RecordSource,
    table: str,
    *,
    incarnation: str = "incarnation::text",
    partition: str = "kafka_partition",
    key: str = "kafka_key",
    at: str = "NULL::timestamptz",
    origin: str = "NULL::bytea",
) -> str:
    # No calendar of Java has an infinite time.
    created = "CASE WHEN isfinite(create_time) THEN create_time END"
    return (
        f"SELECT '{source}' AS source, {incarnation} AS incarnation, id::bigint AS id, kafka_topic AS topic,"
        f" {partition} AS partition, {key} AS key, {created} AS created_at, {at} AS at, {origin} AS origin FROM {table}"
    )

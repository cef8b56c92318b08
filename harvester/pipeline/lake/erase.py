"""Erases a key: from every table of a lake, and from the quarantine and the archive of the outbox.

Rows that a table has deleted are still in its older files, and columns' smallest and largest values in its log. So the
files are written anew without the rows, those of earlier versions are removed, and the log begins with this version:
nothing of the key can be read from the directory any more, and no earlier version of its tables. That goes for tables
of other jobs in the directory as well.

What was erased had numbers in its lanes, which an audit would miss: they are kept, without the key and the id. Where
the archive keeps its rows, so are topic and time, by which an audit explains that they are not in the lake.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StructType

from harvester.claim_check.reference import HEADER
from harvester.errors import SchemaError
from harvester.outbox import archive
from harvester.outbox.connection import connect, database_errors, execute, fetch_row
from harvester.outbox.schema import find_shape
from harvester.outbox.shape import INIT_HINT
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable, as_bytes
from harvester.pipeline import schemas, tables
from harvester.pipeline.audit.report import key_text
from harvester.pipeline.audit.schemas import AUDITS_TABLE, FINDINGS_TABLE
from harvester.pipeline.errors import PipelineError
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import recovery
from harvester.pipeline.lake.silver import payload_table
from harvester.pipeline.metrics.windows import KEYS, METRICS
from harvester.pipeline.replay.job import DIRECTORY
from harvester.pipeline.store import END_JOBS, ErasedTable, TableStore

_KEYED = ("silver", "repeats", "rejects", "current")
_NOT_REACHED = (
    "Kafka's topics: the records stay until retention or compaction removes them",
    "the store of large values: `objects` are to be erased there, and those of records that the lake has not read",
    "the checkpoint of `pipeline metrics`: keys of open windows, until these close and Spark drops old states",
    "tables made elsewhere: metrics and an audit's findings in other directories, copies, backups",
)


@dataclass(frozen=True, slots=True)
class ErasedRows:
    """Rows of the database. `waiting`: those that the outbox still has, and that are going to be published."""

    archive: int
    quarantine: int
    waiting: int
    not_vacuumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was removed where. Of the key it has the SHA-256 alone; `topics`: () for all.

    `replays`: ids of those that were asked for the key, and are forgotten. `objects`: what the erased records named in
    the store of large values; nobody has erased that yet.
    """

    erased_at: datetime
    key_sha256: str
    topics: tuple[str, ...]
    lake: str
    tables: dict[str, ErasedTable]
    database: ErasedRows | None
    replays: tuple[str, ...]
    objects: tuple[str, ...]
    not_reached: tuple[str, ...] = field(default=_NOT_REACHED)


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a table has the key: rows that are deleted, or that are changed so that they have it no more."""

    where: str
    change: str | None = None

    def removal(self, at: str) -> str:
        """The statement that removes it from a table."""
        if self.change is None:
            return f"DELETE FROM {at} WHERE {self.where}"
        return f"UPDATE {at} SET {self.change} WHERE {self.where}"


def traces_of_other_jobs(key: bytes, of_topics: str) -> dict[str, Trace]:
    """By the tables of `metrics` and `audit`. `of_topics`: a further condition, of tables with the column `topic`."""
    raw, told = f"X'{key.hex()}'", f'"key": {json.dumps(key_text(key))}'
    return {
        KEYS.name: Trace(f"key = {raw}{of_topics}"),
        METRICS.name: Trace(f"hottest_key = {raw}{of_topics}", "hottest_key = NULL"),
        FINDINGS_TABLE.name: Trace(f"key = {raw}{of_topics}"),
        # A report does not say of which topic its hottest keys are.
        AUDITS_TABLE.name: Trace(
            f"contains(report, {schemas.text(told)})",
            f"report = replace(report, {schemas.text(told)}, '\"key\": null')",
        ),
    }


def erase(
    spark: SparkSession,
    root: str,
    key: bytes,
    topics: Collection[str] = (),
    checkpoint: str | None = None,
    database: tuple[str, OutboxTable] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Erases the records of a key, of these topics or of all. `database`: connection string and outbox; None: left out.

    Repeatable, after a failure as well. Raises InputMissing, TableMismatch, CheckpointMismatch, DatabaseUnavailable,
    SchemaError before anything is erased; PipelineError where the key is back at the end.
    """
    store = open_store(spark, root).in_new_session()
    header, owner = store.header(), store.properties("silver").get(tables.OWNER)
    recovery.require_idle(spark, checkpoint or store.beside("checkpoint"), owner)
    store.prepare(schemas.TABLES, owner, header)
    of_topics = f" AND topic IN ({', '.join(map(schemas.text, topics))})" if topics else ""
    named = f"key = X'{key.hex()}'"
    chosen = named + of_topics
    traces = dict.fromkeys(_KEYED, Trace(chosen))
    with_columns = {payload_table(topic, StructType()).name for topic in topics}
    for name in store.values():
        if not topics or name in with_columns:
            traces[name] = Trace(named)
    others = traces_of_other_jobs(key, of_topics).items()
    traces |= {name: trace for name, trace in others if store.exists(name)}
    # Told before the first row is gone: what is cut off afterwards could not find them again.
    for url in (objects := _objects(store, chosen)):
        say(f"to be erased from the store: {url}")
    erased = None if database is None else erase_rows(*database, key, topics)
    _keep_numbers(store, chosen, archived=database is None)
    for replay in (replays := _forget_replays(store, key)):
        say(f"the replay {replay} is forgotten")
    found = {}
    for name, trace in traces.items():
        found[name] = store.erase(name, trace.where, trace.removal(store.at(name)))
        say(f"{name}: {found[name].rows:,} rows")
    for name, trace in traces.items():
        if not store.table(name).where(trace.where).isEmpty():
            raise PipelineError(f"the key is in {name} again", hint=END_JOBS)
    digest = hashlib.sha256(key).hexdigest()
    return Certificate(datetime.now(UTC), digest, tuple(topics), root, found, erased, replays, objects)


def _objects(store: TableStore, chosen: str) -> tuple[str, ...]:
    """URLs of the objects that the chosen records name (docs/large-values.md)."""
    named = f"try_element_at(filter(headers, one -> one.key = {schemas.text(HEADER)}), -1).value"
    url = F.expr(f"try_validate_utf8(CAST({named} AS STRING)) AS url")
    parts = [store.table(name).where(chosen).select(url) for name in _KEYED]
    rows = reduce(DataFrame.unionByName, parts).where("url IS NOT NULL").distinct()
    return tuple(sorted(row["url"] for row in rows.collect()))


def _keep_numbers(store: TableStore, chosen: str, *, archived: bool) -> None:
    """`archived`: the archive may list the records on. Silver has each of its ids once."""
    for name in ("silver", "repeats"):
        rows = store.table(name).where(chosen).withColumn("erased_at", F.current_timestamp())
        if not (archived and name == "silver"):
            rows = rows.withColumns(
                {"topic": F.expr("CAST(NULL AS STRING)"), "timestamp": F.expr("CAST(NULL AS TIMESTAMP)")}
            )
        numbers = rows.select(*schemas.ERASURES.names)
        if not numbers.isEmpty():
            store.append(numbers, schemas.ERASURES_TABLE.name)


def _forget_replays(store: TableStore, key: bytes) -> tuple[str, ...]:
    """Removes the notes of replays that were asked for the key; the version of silver that they read goes as well."""
    spark, where, asked = store.spark, store.beside(DIRECTORY), json.dumps(base64.b64encode(key).decode())
    names = [
        name
        for name in tables.listing(spark, where)
        if asked in (tables.read_text(spark, f"{where}/{name}") or "")
    ]  # fmt: skip
    tables.remove(spark, [f"{where}/{name}" for name in names])
    return tuple(sorted({name.partition(".")[0] for name in names}))


def erase_rows(dsn: str, table: OutboxTable, key: bytes, topics: Collection[str]) -> ErasedRows:
    """Deletes a key from archive and quarantine. Raises DatabaseUnavailable, SchemaError."""
    warned: list[str] = []
    with connect(dsn, application_name="harvester erase") as connection:
        shape = find_shape(connection, table)
        if shape is None:
            raise SchemaError(f"there is no outbox table {table} in this database", hint=INIT_HINT)
        chosen = "{} = $1 AND (cardinality($2::text[]) = 0 OR kafka_topic = ANY($2))"
        quarantined = f"{table.quarantine} WHERE {chosen.format(as_bytes('kafka_key', shape.key_type))}"
        waiting = f"{columns.published(table, shape)} o WHERE {chosen.format(as_bytes('kafka_key', shape.key_type))}"
        archived = f"{table.archive} WHERE {chosen.format('kafka_key')}" if archive.exists(connection, table) else None
        values = (key, list(topics))
        with database_errors("erase the key"), connection.transaction():
            gone = 0 if archived is None else execute(connection, f"DELETE FROM {archived}", *values).rowcount
            dead = execute(connection, f"DELETE FROM {quarantined}", *values).rowcount
            left = fetch_row(connection, f"SELECT count(*) FROM {waiting}", *values)[0]
        # Whoever may not, gets a warning.
        connection.add_notice_handler(lambda told: warned.append(str(told.message_primary)))
        with database_errors("vacuum"):
            for name in (table.quarantine, *([table.archive] if archived else [])):
                connection.execute(f"VACUUM {name}")
    return ErasedRows(gone, dead, left, tuple(warned))

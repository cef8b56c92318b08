"""Erases a key: from every table of a lake, and from the quarantine and the archive of the outbox.

Deleted rows remain in older files, and the bounds of columns in the table's log. So the files are rewritten without the
rows, those of earlier versions are removed, and the log begins with this version: neither the key nor an earlier
version can be read any more. This includes the tables of other jobs at the same location.

Erased records had numbers in their lanes, which an audit would report as missing: they are kept, without key and id.
If the archive keeps its rows, topic and time are also kept, so that an audit can explain why the lake lacks them.
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
from harvester.pipeline.replay import DIRECTORY
from harvester.pipeline.store import END_JOBS, ErasedTable, TableStore
from harvester.pipeline.windows import KEYS, METRICS

_KEYED = ("silver", "repeats", "rejects", "current")
_NOT_REACHED = (
    "Kafka's topics: the records stay until retention or compaction removes them",
    "the store of large values: erase `objects` there, and those of records that the lake has not read",
    "tables elsewhere: metrics and an audit's findings in other directories, copies, backups",
)


@dataclass(frozen=True, slots=True)
class ErasedRows:
    """Rows deleted from the database. `waiting`: rows still in the outbox, which will be published."""

    archive: int
    quarantine: int
    waiting: int
    not_vacuumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was removed where. Contains only the key's SHA-256; `topics`: () for all.

    `replays`: the ids of removed replays, which had requested the key. `objects`: the objects in the store of large
    values to which the erased records refer; they still exist.
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
    """The rows of a table with the key; they are deleted, or changed so that they no longer contain it."""

    where: str
    change: str | None = None

    def removal(self, at: str) -> str:
        """The statement that removes the key from a table."""
        if self.change is None:
            return f"DELETE FROM {at} WHERE {self.where}"
        return f"UPDATE {at} SET {self.change} WHERE {self.where}"


def traces_of_other_jobs(key: bytes, of_topics: str) -> dict[str, Trace]:
    """Traces in the tables of `metrics` and `audit`. `of_topics`: a further condition on the column `topic`."""
    raw, told = f"X'{key.hex()}'", f'"key": {json.dumps(key_text(key))}'
    return {
        KEYS.name: Trace(f"key = {raw}{of_topics}"),
        METRICS.name: Trace(f"hottest_key = {raw}{of_topics}", "hottest_key = NULL"),
        FINDINGS_TABLE.name: Trace(f"key = {raw}{of_topics}"),
        # A report does not name the topics of its hottest keys.
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
    """Erases the records of a key, in these topics or in all. `database`: connection string and outbox; None: skip it.

    Repeatable, even after a failure. Raises InputMissing, TableMismatch, CheckpointMismatch, DatabaseUnavailable,
    SchemaError before anything is erased; PipelineError if the key is back at the end.
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
    store.require_erasable(traces)
    # Reported before the first row is deleted: after an interruption they could not be found again.
    for url in (objects := _objects(store, chosen)):
        say(f"to be erased from the store: {url}")
    erased = None if database is None else erase_rows(*database, key, topics)
    _keep_numbers(store, chosen, archived=database is None)
    for replay in (replays := _forget_replays(store, key)):
        say(f"removed the replay {replay}")
    found = {}
    for name, trace in traces.items():
        found[name] = store.erase(name, trace.where, trace.removal(store.at(name)))
        say(f"{name}: {found[name].rows:,} rows")
    for name, trace in traces.items():
        if not store.table(name).where(trace.where).isEmpty():
            raise PipelineError(f"the key has returned to {name}", hint=END_JOBS)
    digest = hashlib.sha256(key).hexdigest()
    return Certificate(datetime.now(UTC), digest, tuple(topics), root, found, erased, replays, objects)


def _objects(store: TableStore, chosen: str) -> tuple[str, ...]:
    """The URLs of the objects to which the chosen records refer (docs/large-values.md).

    A record with a value of its own may have the headers of another record, whose object must stay.
    """
    named = f"try_element_at(filter(headers, one -> one.key = {schemas.text(HEADER)}), -1).value"
    url = F.expr(f"try_validate_utf8(CAST({named} AS STRING)) AS url")
    parts = [store.table(name).where(chosen).where(f"value = {named}").select(url) for name in _KEYED]
    rows = reduce(DataFrame.unionByName, parts).where("url IS NOT NULL").distinct()
    return tuple(sorted(row["url"] for row in rows.collect()))


def _keep_numbers(store: TableStore, chosen: str, *, archived: bool) -> None:
    """Keeps the numbers of the chosen records. `archived`: the archive may still list them; silver has each id once."""
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
    """Removes the progress of replays that requested the key; the version of silver that they read disappears, too."""
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
    with connect(dsn, application_name="harvester erase", silence_s=archive.SILENCE_S) as connection:
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
        # Without the privilege, VACUUM only warns.
        connection.add_notice_handler(lambda told: warned.append(str(told.message_primary)))
        with database_errors("vacuum"):
            for name in (table.quarantine, *([table.archive] if archived else [])):
                connection.execute(f"VACUUM {name}")
    return ErasedRows(gone, dead, left, tuple(warned))

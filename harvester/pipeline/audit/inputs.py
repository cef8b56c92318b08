"""The inputs of an audit: records from topics in their current state or from a lake, and their history in the database.

The brokers report where topics begin and end, and whether they drop records. Offsets only delimit what is read: any
number of records may lie between two of them.

A row moves from the outbox to the archive, or to the quarantine, in one statement. All three are also summarised by one
statement, through JDBC, so every committed row is in exactly one of them. It returns a row for 64 ids (`blocks`). Where
there are many, a few sessions read a range of ids each: what holds for a row does not depend on other ids. Archived
rows that are needed themselves are read later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from uuid import UUID

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StructType

from harvester.errors import BrokerUnavailable, SchemaError
from harvester.outbox import archive
from harvester.outbox.connection import Connection, connect, database_errors
from harvester.outbox.schema import find_shape
from harvester.outbox.shape import INIT_HINT, OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable, as_bytes
from harvester.pipeline import schemas, source, streaming, tables
from harvester.pipeline.audit import checks
from harvester.pipeline.audit.checks import AcceptedLoss
from harvester.pipeline.audit.schemas import GIVEN_UP, HISTORY, HISTORY_BLOCKS, RECORDS, RecordSource
from harvester.pipeline.formats import open_store
from harvester.pipeline.jdbc import JdbcSource
from harvester.pipeline.lake.batch import batch_name, done_again, ids_file
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.schemas import BITS
from harvester.pipeline.source import Place
from harvester.pipeline.store import TableStore

_OPEN_S = 60.0  # the default timeout of transactions whose producer is silent
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """The bounds of topics. `start` and `end`: the range to read. `earliest`: the current beginning of the log."""

    earliest: Mapping[Place, int]
    start: Mapping[Place, int]
    end: Mapping[Place, int]
    compacted: tuple[str, ...] = ()

    @property
    def truncated(self) -> tuple[Place, ...]:
        """Partitions whose beginning has been removed, and which are read from their first remaining record on."""
        return tuple(place for place, first in self.earliest.items() if first > 0 and first >= self.start[place])

    def options(self) -> dict[str, str]:
        """Options for Spark's batch source."""
        topics = ",".join(sorted({topic for topic, _ in self.end}))
        start, end = streaming.by_topic(self.start), streaming.by_topic(self.end)
        return {"subscribe": topics, "startingOffsets": start, "endingOffsets": end}


def topic_bounds(
    spark: SparkSession,
    kafka: Mapping[str, str],
    topics: Iterable[str],
    since: datetime | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> TopicBounds:
    """Queries the brokers. The bounds include everything now in the topics, even after open transactions.

    Waits for open transactions to end, because a `read_committed` reader sees nothing after them. Raises
    BrokerUnavailable.
    """
    with source.admin(spark, kafka, "ends of topics") as client:
        return _bounds(client, list(dict.fromkeys(topics)), since, progress)


def _bounds(
    asked: source.TopicAdmin, topics: list[str], since: datetime | None, progress: Callable[[str], None]
) -> TopicBounds:
    places = asked.places(topics)
    end, earliest = asked.latest(places), asked.earliest(places)
    start = dict(earliest) if since is None else asked.since(places, since, end)
    deadline, told = time.monotonic() + _OPEN_S, False
    while True:
        readable = asked.latest(places, committed=True)
        held = [place for place in places if readable[place] < end[place]]
        if not held:
            return TopicBounds(earliest, start, end, asked.compacted(topics))
        name = f"{held[0][0]}[{held[0][1]}]"
        if not told:
            progress(f"waiting for the open transaction that hides the end of {name}")
            told = True
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"an open transaction hides the end of {name} (waited {_OPEN_S:g} s)",
                hint="wait until its producer or its timeout ends it",
            )
        time.sleep(_LOOK_S)


@dataclass(frozen=True, slots=True)
class PartitionInput:
    """The records of a partition: their count, those without an origin (`foreign`), the first offset and the times."""

    records: int
    foreign: int
    first_offset: int
    first_at: datetime
    last_at: datetime


def read_so_far(records: DataFrame) -> dict[Place, PartitionInput]:
    """RECORDS → what was read of each partition, including records outside the range; in one action."""
    assert {"topic", "partition", "offset", "timestamp", "problem"} <= set(RECORDS.names)
    rows = records.groupBy("topic", "partition").agg(
        F.count(F.lit(1)).alias("records"),
        F.count("problem").alias("foreign"),
        F.min("offset").alias("first_offset"),
        F.min_by("timestamp", "offset").alias("first_at"),
        F.max("timestamp").alias("last_at"),
    )
    return {(row.pop("topic"), row.pop("partition")): PartitionInput(**row) for row in tables.collected(rows)}


def whole_since(
    bounds: TopicBounds | None,
    read: Mapping[Place, PartitionInput],
    since: datetime | None,
    late: Collection[Place] = (),
) -> tuple[datetime | None, tuple[Place, ...]]:
    """The time since which every partition is complete (None: always), and the partitions where that is unknown.

    `since`: where reading began. A partition whose beginning was removed is complete from its first record on; one that
    was emptied may have lost anything. In a lake (`bounds` None) a partition that does not begin at offset 0 may have
    had a beginning that was never read, as may one without a record that it found begun (`late`).
    """
    if bounds is None:
        cut = [place for place, one in read.items() if one.first_offset > 0 and since is None]
        cut += [place for place in late if place not in read and since is None]
    else:
        cut = list(bounds.truncated)
    begins = [read[place].first_at for place in cut if place in read]
    # Not by offsets: a transaction's marker may remain.
    emptied = tuple(place for place in cut if place not in read)
    return max([*begins, *([] if since is None else [since])], default=None), emptied


_TASK_RECORDS = 500_000


@dataclass(frozen=True, slots=True)
class Input:
    """The records to audit: `bronze` as schemas.BRONZE, lazily. `bounds`: from the brokers; None for a lake.

    `is_whole`: it contains no batch of a lake that may be half written. `ends`: the end of a lake's last batch, as far
    as known; `late`: partitions that it may not have read from offset 0.
    """

    name: str
    topics: tuple[str, ...]
    bronze: DataFrame
    bounds: TopicBounds | None
    is_whole: bool = True
    ends: Mapping[Place, int] | None = None
    late: Collection[Place] = ()


def require(spark: SparkSession, kafka: Mapping[str, str], topics: tuple[str, ...], lake: str | None) -> None:
    """Checks early that there is something to read. Raises InputMissing, BrokerUnavailable, TableMismatch."""
    if lake is None:
        source.require_topics(spark, kafka, topics)
    else:
        open_store(spark, lake).header()


def from_topics(
    spark: SparkSession,
    kafka: Mapping[str, str],
    topics: tuple[str, ...],
    header: str,
    since: datetime | None,
    progress: Callable[[str], None],
) -> Input:
    """Everything committed from `since` on, up to the current ends. Raises BrokerUnavailable."""
    bounds = topic_bounds(spark, kafka, topics, since, progress=progress)
    # The maximum number of records, which only determines the size of tasks.
    most = sum(end - bounds.start[place] for place, end in bounds.end.items())
    options = {
        **source.options(kafka),
        **bounds.options(),
        "minPartitions": str(min(10_000, len(bounds.end) + most // _TASK_RECORDS)),
    }
    rows = spark.read.format("kafka").options(**options).load()
    return Input(f"Kafka at {kafka.get('bootstrap.servers')}", topics, bronze_columns(rows, header), bounds)


def from_lake(spark: SparkSession, root: str, since: datetime | None, checkpoint: str | None = None) -> Input:
    """The view `bronze` of the complete batches of `pipeline lake`. Raises InputMissing, TableMismatch."""
    store = open_store(spark, root)
    where = checkpoint or store.beside("checkpoint")
    before = half_written(spark, where)
    # One version, however often it is read: an erasure meanwhile would look like a loss.
    versions = {table: store.as_of(table, store.version(table)) for table in ("silver", "repeats", "rejects")}
    rows = spark.sql(schemas.bronze(versions.__getitem__, store.header(), before))
    if since is not None:
        rows = rows.where(F.col("timestamp") >= F.lit(since))
    last = streaming.planned(spark, where, int(before) - 1) if before is not None else None
    begins = streaming.first_begins(spark, where)
    late = [place for place, end in (last or {}).items() if end > 0 and begins.get(place) != 0]
    return Input(f"lake {root}", topics_of(spark, where), rows, None, before is not None, last, late)


_BRIEF = {"default.api.timeout.ms": "5000", "request.timeout.ms": "5000"}


def behind(
    spark: SparkSession, kafka: Mapping[str, str], given: Input, read: Collection[Place], until: datetime | None
) -> set[str]:
    """The topics of which a lake may not have all records before `until` yet, such as one that was just added.

    Asks the brokers; if they do not answer, returns the topics without any record. Topics are always read to the end.
    """
    if given.bounds is not None or until is None:
        return set()
    if kafka and given.ends is not None and read:
        with suppress(BrokerUnavailable), source.admin(spark, {**_BRIEF, **kafka}, "ends of topics") as asked:
            there = asked.names()
            places = asked.places([topic for topic in given.topics if topic in there])
            wanted = asked.since(places, until, asked.latest(places, committed=True))
            short = {place[0] for place, end in wanted.items() if given.ends.get(place, 0) < end}
            return short | (set(given.topics) - there)
    return set(given.topics) - {topic for topic, _ in read}


def half_written(spark: SparkSession, where: str) -> str | None:
    """The first batch of which a table may lack rows that another table has; None if there is no checkpoint."""
    names = [*tables.listing(spark, f"{where}/commits")]
    names += [name.removesuffix(".json") for name in tables.listing(spark, f"{where}/ids")]
    done = [int(name) for name in names if name.isdigit()]
    if not done:
        return batch_name(0) if tables.read_text(spark, f"{where}/{streaming.FILE}") else None
    # An abandoned batch is complete once the next one has read its records again.
    again = done_again(tables.read_text(spark, ids_file(where, max(done))))
    return batch_name(max(done) + 1 if again is None else again)


@dataclass(frozen=True, slots=True)
class LakeNotes:
    """What a lake is known to lack: accepted `losses`, and `erasures` of records that the archive still lists.

    `anew`: topics that were recreated during its lifetime. It may have records of two logs, whose offsets have no
    common order.
    """

    losses: tuple[AcceptedLoss, ...] = ()
    erasures: tuple[AcceptedLoss, ...] = ()
    anew: tuple[str, ...] = ()


def lake_notes(spark: SparkSession, root: str | None, records: DataFrame, since: datetime | None) -> LakeNotes:
    """The notes of the lake in `root`; None: no lake. `records`: its RECORDS. `since`: where reading began."""
    if root is None:
        return LakeNotes()
    store, name = open_store(spark, root), schemas.LOSSES_TABLE.name
    erasures = _archived_erasures(store)
    noted = store.table(name) if store.exists(name) else None
    if noted is None or noted.isEmpty():
        return LakeNotes(erasures=erasures)
    # If a loss was noted before `since`, no record of the first log is read, and none that is missing was in it.
    read = late = F.lit(True)
    if since is not None:
        read, late = (F.col("accepted_at") >= F.lit(moment) for moment in (since, since - checks.SLACK))
    anew = noted.where(F.col("end_offset").isNull() & read).select("topic").distinct().collect()
    return LakeNotes(_losses(noted.where(late), records), erasures, tuple(sorted(row["topic"] for row in anew)))


def _losses(noted: DataFrame, records: DataFrame) -> tuple[AcceptedLoss, ...]:
    """A loss that was accepted has only records sent before that, even if nothing behind it is known."""
    end = F.coalesce("end_offset", F.lit(_NO_END))
    seen = records.select("topic", "partition", "offset", "timestamp")
    rows = seen.join(F.broadcast(noted), ["topic", "partition"], "right").groupBy(
        "topic", "partition", "first_offset", "end_offset", "accepted_at"
    )
    # A recreated log also has low offsets, but had hardly got this close to the loss when the loss was noted.
    old = F.col("end_offset").isNotNull() | (F.col("timestamp") <= F.col("accepted_at"))
    nearest = F.when(old & (F.col("offset") < F.col("first_offset")), F.struct("offset", -F.unix_micros("timestamp")))
    times = rows.agg(
        F.max_by("timestamp", nearest).alias("after"),
        F.least(F.min(F.when(F.col("offset") >= end, F.col("timestamp"))), "accepted_at").alias("before"),
    )
    room = times.withColumn("room", F.col("end_offset") - F.col("first_offset"))
    return tuple(AcceptedLoss(**row) for row in tables.collected(room.select("topic", "room", "after", "before")))


_NO_END = 2**63 - 1


def given_up(spark: SparkSession, root: str | None, origins: DataFrame, records: DataFrame) -> DataFrame:
    """`checks.given_up`, and the numbers of the records that were erased from a lake, if it is one."""
    found, name = checks.given_up(origins, records), schemas.ERASURES_TABLE.name
    if root is None or not (store := open_store(spark, root)).exists(name):
        return found
    return found.unionByName(store.table(name).select(*GIVEN_UP.names)).distinct()


def _archived_erasures(store: TableStore) -> tuple[AcceptedLoss, ...]:
    """The erasures of records that the archive still lists, one for each topic, regardless of the number of keys."""
    name = schemas.ERASURES_TABLE.name
    rows = store.table(name) if store.exists(name) else None
    if rows is None or "timestamp" not in rows.columns:
        return ()
    # A repeated erasure may have noted them twice.
    numbers = rows.where("topic IS NOT NULL").select(*GIVEN_UP.names, "topic", "timestamp").distinct()
    found = numbers.groupBy("topic").agg(
        F.count(F.lit(1)).alias("room"), F.min("timestamp").alias("after"), F.max("timestamp").alias("before")
    )
    return tuple(AcceptedLoss(**row) for row in tables.collected(found))


def trimmed(bronze: DataFrame, since: datetime | None, until: datetime | None, notices: str) -> DataFrame:
    """schemas.BRONZE → RECORDS. `notices`: the topic of notices; "": none."""
    inside = F.lit(True)
    if since is not None:
        inside = inside & (F.col("timestamp") >= F.lit(since))
    if until is not None:
        inside = inside & (F.col("timestamp") < F.lit(until))
    return bronze.withColumns({"inside": inside, "notice": _notice(notices)}).select(*RECORDS.names)


def _notice(topic: str) -> Column:
    """The header of the record to which a notice refers (docs/dead-letters.md); NULL for anything else."""
    if not topic:
        return F.lit(None).cast("binary")
    text = F.try_validate_utf8(F.col("value").cast("string"))
    return F.when(F.col("topic") == topic, F.unhex(F.get_json_object(text, "$.origin")))


def topics_of(spark: SparkSession, where: str) -> tuple[str, ...]:
    """The topics that the lake's checkpoint reads; () if it is elsewhere."""
    manifest = manifest_of(spark, where)
    return () if manifest is None else manifest.topics


def manifest_of(spark: SparkSession, where: str) -> streaming.Manifest | None:
    """The lake's, in its checkpoint; None if that is elsewhere."""
    text = tables.read_text(spark, f"{where}/{streaming.FILE}")
    return None if text is None else streaming.from_text(text, where)


_FETCH_ROWS = 10_000
SESSIONS = 4
"""With the database, at the same time: it may be the one that the application uses."""
_IDS_A_SESSION = 250_000


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """The facts needed before the tables are read. `at`: the database's clock; `ids`: the lowest and the highest."""

    shape: OutboxShape
    incarnation: UUID
    term: int
    has_archive: bool
    at: datetime
    ids: tuple[int, int]


def history_facts(dsn: str, table: OutboxTable) -> HistoryFacts:
    """Inspects the outbox. Raises DatabaseUnavailable, SchemaError."""
    with connect(dsn, application_name="harvester audit", silence_s=archive.SILENCE_S) as connection:
        shape = find_shape(connection, table)
        if shape is None:
            raise SchemaError(f"there is no outbox table {table} in this database", hint=INIT_HINT)
        has_archive = archive.exists(connection, table)
        _check_readable(connection, [table.sql, table.quarantine, *([table.archive] if has_archive else [])])
        with database_errors(f"read {table.term}"):
            row = connection.execute(f"SELECT incarnation, term, now() FROM {table.term}").fetchone()
        if row is None:
            raise SchemaError(f"the table {table.term} is empty", hint=INIT_HINT)
        places = [f"{columns.published(table, shape)} o", table.quarantine, *([table.archive] if has_archive else [])]
        ends = " UNION ALL ".join(
            f"SELECT min(id)::bigint AS low, max(id)::bigint AS high FROM {one}" for one in places
        )
        with database_errors(f"look for ids in {table}"):
            ids = connection.execute(f"SELECT coalesce(min(low), 0), coalesce(max(high), 0) FROM ({ends}) x").fetchone()
    assert ids is not None
    return HistoryFacts(shape, row[0], row[1], has_archive, row[2].astimezone(UTC), ids)


def _check_readable(connection: Connection, names: list[str]) -> None:
    with database_errors("look at the outbox's tables"):
        # has_table_privilege would raise for a missing table.
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
    """One SELECT with the columns of HISTORY. `since`: omits rows that were purged earlier."""
    key = as_bytes("kafka_key", facts.shape.key_type)
    partition = "kafka_partition" if facts.shape.has_partition else "NULL::integer"
    outbox = f"{columns.published(table, facts.shape)} o"
    parts = [
        _select(RecordSource.OUTBOX, outbox, incarnation=f"'{facts.incarnation}'", partition=partition, key=key),
        _select(RecordSource.QUARANTINE, table.quarantine, key=key, at="quarantined_at", origin="origin"),
    ]
    return " UNION ALL ".join([*parts, _archived(table.archive, facts, since)] if facts.has_archive else parts)


def _archived(rows: str, facts: HistoryFacts, since: datetime | None) -> str:
    # Archived rows have no incarnation if they were written while the term table was empty.
    own = f"coalesce(incarnation::text, '{facts.incarnation}')"
    purged = "" if since is None else f" WHERE purged_at >= '{since.astimezone(UTC).isoformat()}'"
    return _select(RecordSource.ARCHIVE, rows, incarnation=own, at="purged_at") + purged


def read_query(spark: SparkSession, jdbc: JdbcSource, statement: str, ids: tuple[int, int] = (0, 0)) -> DataFrame:
    """The rows of a query in PostgreSQL, lazily. With many `ids`, each of several sessions reads a range of them."""
    # Conditions that Spark passes on would be evaluated with PostgreSQL's collations, and times in Java's zone.
    own = {"dbtable": f"({statement}) AS history", "fetchsize": str(_FETCH_ROWS), "pushDownPredicate": "false"}
    options = {**jdbc.options, **own}
    low, high = ids
    sessions = min(SESSIONS, 1 + (high - low) // _IDS_A_SESSION)
    if sessions > 1:  # the first and the last range are open-ended
        bounds = {"lowerBound": str(low), "upperBound": str(high), "numPartitions": str(sessions)}
        options |= {"partitionColumn": "id", **bounds}
    return spark.read.format("jdbc").options(**options).load()


def read_history(spark: SparkSession, jdbc: JdbcSource, statement: str, ids: tuple[int, int]) -> DataFrame:
    """`query` → HISTORY, lazily. Each of several sessions reads a range of `ids`."""
    return _typed(read_query(spark, jdbc, statement, ids), HISTORY)


def read_blocks(spark: SparkSession, jdbc: JdbcSource, statement: str, ids: tuple[int, int]) -> DataFrame:
    """`query` → HISTORY_BLOCKS, lazily; summarised by the database, in several sessions if there are many `ids`."""
    low, high = ids
    step = max(_IDS_A_SESSION, -(-(high - low + 1) // SESSIONS))
    cuts = list(range(low + step, high + 1, step))  # the first and the last range are open-ended
    parts = []
    for first, end in zip([None, *cuts], [*cuts, None], strict=True):
        inside = [*([] if first is None else [f"id >= {first}"]), *([] if end is None else [f"id < {end}"])]
        # Texts are compared last, and byte by byte: with a locale it takes several times as long.
        summary = (
            f'SELECT source, incarnation, topic COLLATE "C" AS topic, id >> {BITS} AS block, count(*) AS rows,'
            f" bit_or(1::bigint << (id & {2**BITS - 1})::integer) AS ids, min(at) AS first_at, max(at) AS last_at,"
            " string_agg(encode(origin, 'hex'), ' ') AS origins"
            f" FROM ({statement}) AS known WHERE {' AND '.join(inside) or 'true'} GROUP BY 4, 3, 2, 1"
        )
        parts.append(read_query(spark, jdbc, summary))
    return _typed(reduce(DataFrame.unionByName, parts), HISTORY_BLOCKS)


MOST_BLOCKS = 20_000
"""If the archived rows of more blocks are needed, the whole archive is read."""


def read_archived(
    spark: SparkSession, jdbc: JdbcSource, table: OutboxTable, facts: HistoryFacts, since: datetime | None,
    blocks: Collection[int],
) -> DataFrame:  # fmt: skip
    """The archive's rows in these blocks, as HISTORY; of all blocks if there are many. `since`: as in `query`."""
    if len(blocks) > MOST_BLOCKS:
        return read_history(spark, jdbc, _archived(table.archive, facts, since), facts.ids)
    # A plain join would be planned as if a third of the archive were in each range: by reading all of it.
    rows = (
        f"unnest('{{{','.join(map(str, blocks))}}}'::bigint[]) AS wanted (block) CROSS JOIN LATERAL (SELECT * FROM"
        f" {table.archive} WHERE id >= block << {BITS} AND id <= (block << {BITS}) + {2**BITS - 1} OFFSET 0) AS kept"
    )
    return read_history(spark, jdbc, _archived(rows, facts, since), (0, 0))


def _typed(rows: DataFrame, schema: StructType) -> DataFrame:
    return rows.select(*(rows[field.name].cast(field.dataType).alias(field.name) for field in schema))


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
    # Java cannot represent an infinite time.
    created = "CASE WHEN isfinite(create_time) THEN create_time END"
    return (
        f"SELECT '{source}' AS source, {incarnation} AS incarnation, id::bigint AS id, kafka_topic AS topic,"
        f" {partition} AS partition, {key} AS key, {created} AS created_at, {at} AS at, {origin} AS origin FROM {table}"
    )

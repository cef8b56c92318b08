"""The job `lake`: writes harvested topics to tables, exactly once across kill and restart.

A batch is a range of offsets that Spark records before it begins, so a killed batch is repeated with the same records.
`batch` explains why each of its writes is idempotent.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from harvester import failpoints
from harvester.errors import BrokerUnavailable
from harvester.origin import HEADER
from harvester.pipeline import schemas, source, streaming, tables
from harvester.pipeline.errors import InputMissing, TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import recovery, typed
from harvester.pipeline.lake.batch import BatchCounts, LakeBatch, batch_name
from harvester.pipeline.lake.recovery import Recovery
from harvester.pipeline.lake.silver import JsonValues, TopicValues, payload_table
from harvester.pipeline.lake.typed import SchemaRegistry, TypedValues
from harvester.pipeline.lake.upkeep import Upkeep, fill_in
from harvester.pipeline.origin_columns import bronze_columns, fastest_reader
from harvester.pipeline.schemas import TABLES, Cut, Table
from harvester.pipeline.session import clear_errors
from harvester.pipeline.store import TableStore
from harvester.pipeline.streaming import Manifest


@dataclass(frozen=True, slots=True)
class LakeSettings:
    """The settings of a run. `kafka`: options of Kafka's Java client. `once`: stop at the current ends of the topics.

    `pattern`: a regular expression; the topics whose whole name matches are read, too, also those created later.
    `options`: of Spark's Kafka source, such as minPartitions. `fold_s`: how long states may stay in silver before they
    are folded into `current`; infinite: never fold. `payloads`: the columns of topics whose values are JSON. `typed`:
    of those whose values are framed, None for those of their schemas in the `registry`.
    """

    topics: tuple[str, ...]
    root: str
    kafka: Mapping[str, str]
    checkpoint: str | None = None
    header: str = HEADER
    once: bool = False
    trigger_s: float = 10.0
    most_records: int = 2_000_000
    compact_every: int = 50
    fold_s: float = 600.0
    payloads: Mapping[str, StructType] = field(default_factory=dict)
    recovery: Recovery = field(default_factory=Recovery)
    pattern: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    typed: Mapping[str, StructType | None] = field(default_factory=dict)
    registry: SchemaRegistry | None = None


_LOOK_S = 30.0
"""Seconds between two requests for the names of new topics."""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """What a finished batch did. `behind`: records after it in the partition that is furthest behind, if known."""

    batch: int
    records: int
    repeats: int
    rejects: int
    seconds: float
    per_s: float
    behind: int | None


def run(
    spark: SparkSession,
    settings: LakeSettings,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[BatchDone], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Runs until nothing is left (`once`) or `stop()`; returns the number of records read.

    Raises InputMissing, CheckpointMismatch, TableMismatch, BrokerUnavailable before it writes anything, and
    PipelineError for later failures of the stream. After a restart it continues where it stopped.
    """
    choose = partial(
        source.chosen_topics, spark, settings.kafka, pattern=settings.pattern, without=settings.recovery.retire
    )
    topics = _Topics(choose, settings.pattern is not None and not settings.once, choose(settings.topics))
    records = 0
    while True:
        settings = replace(settings, topics=topics.read)
        records += _read(spark, settings, lambda: stop() or topics.have_grown(), progress, say)
        if stop() or not topics.added:
            return records
        topics.read += topics.added
        # What the user permits is done, and not permitted again.
        settings = replace(settings, recovery=Recovery())


@dataclass(slots=True)
class _Topics:
    """The topics that a run reads, and with `looks` those that were added and match its pattern, by `choose`."""

    choose: Callable[[tuple[str, ...]], tuple[str, ...]]
    looks: bool
    read: tuple[str, ...]
    _at: float = field(default_factory=time.monotonic)
    _found: tuple[str, ...] = ()

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(topic for topic in self._found if topic not in self.read)

    def have_grown(self) -> bool:
        """Asks the brokers every `_LOOK_S` seconds."""
        if self.looks and not self.added and time.monotonic() - self._at >= _LOOK_S:
            # If the brokers do not answer, the stream says so; it also goes on while no topic matches.
            with suppress(BrokerUnavailable, InputMissing):
                self._found = self.choose(())
            self._at = time.monotonic()
        return bool(self.added)


def _read(
    spark: SparkSession,
    settings: LakeSettings,
    stop: Callable[[], bool],
    progress: Callable[[BatchDone], None],
    say: Callable[[str], None],
) -> int:
    """Reads the topics of the settings until nothing is left (`once`) or `stop()`; returns the number of records."""
    with clear_errors("the lake"):
        store = open_store(spark, settings.root)
        where = settings.checkpoint or store.beside("checkpoint")
        if not store.is_catalog and store.exists("bronze"):
            raise TableMismatch(f"{settings.root} is a lake of an earlier version", hint=tables.REBUILD)
        columns, tables_of = _columns(store, settings)
        store.require_types(tables_of.values())
        wanted = Manifest(uuid.uuid4().hex, "lake", settings.topics, settings.header, columns)
        manifest = recovery.claim(store, where, settings.kafka, wanted, settings.recovery, say)
        store.prepare([*TABLES, *tables_of.values()], manifest.owner, settings.header)
        # The stored schemas: columns requested in earlier runs remain, in the order of their addition.
        stored = {topic: store.load(table).select("data.*").schema for topic, table in tables_of.items()}
        alone = Lock()
        values = _values(store, settings, where, stored, alone)
        for topic, one in values.items():
            if manifest.payloads.get(topic) != columns[topic]:
                fill_in(store, settings.header, one, say)
        if manifest.payloads != columns:
            streaming.store(spark, where, replace(manifest, payloads=columns))
        recovery.note(store, where, manifest)
        hit = failpoints.load().hit
        by_day = ["silver", "repeats", "rejects", *(table.name for table in tables_of.values())]
        upkeep = Upkeep(store, settings.header, by_day, settings.compact_every, settings.fold_s, hit, alone)
        written: dict[int, BatchCounts] = {}

        def done(counts: BatchCounts) -> None:
            written[counts.batch] = counts
            upkeep.after(counts.batch)

        batch = LakeBatch(
            store, where, manifest.owner, settings.header, values, hit, done,
            lambda with_ends: recovery.require_same(spark, settings.kafka, manifest, with_ends=with_ends),
        )  # fmt: skip
        kafka = source.stream(spark, settings.kafka, settings.topics, settings.most_records, settings.options)
        # Built once for all batches: building it takes a thousand calls to Java.
        bronze = bronze_columns(kafka, settings.header, fastest_reader(spark))
        writer = bronze.writeStream.foreachBatch(batch.write).option("checkpointLocation", where).queryName("lake")
        query = streaming.start(writer, once=settings.once, trigger_s=settings.trigger_s)
        records = 0

        def take(said: Mapping[str, Any]) -> None:
            nonlocal records
            number = int(said["batchId"])
            ended = _ended(said, written.pop(number, BatchCounts(number, 0, 0)))
            records += ended.records
            progress(ended)

        finished = False
        try:
            streaming.follow(query, stop, take)
            finished = settings.once and not stop()
        except PySparkException:
            if settings.registry is not None and settings.registry.failure is not None:
                raise settings.registry.failure from None
            recovery.require_unread(spark, where, settings.kafka, manifest)
            raise
        finally:
            upkeep.close(finish=finished)
        return records


def _columns(store: TableStore, settings: LakeSettings) -> tuple[dict[str, str], dict[str, Table]]:
    """What the manifest records of the topics with values as columns, and the tables of these values."""
    columns = {topic: payload.simpleString() for topic, payload in settings.payloads.items()}
    payloads = dict(settings.payloads)
    if settings.registry is not None:
        typed.require_avro(store.spark)
        for topic, payload in settings.typed.items():
            columns[topic] = "typed" if payload is None else f"typed {payload.simpleString()}"
            payloads[topic] = payload or typed.first_columns(store, topic, settings.registry)
    return columns, {topic: payload_table(topic, payload) for topic, payload in payloads.items()}


def _values(
    store: TableStore, settings: LakeSettings, where: str, stored: Mapping[str, StructType], alone: Lock
) -> dict[str, TopicValues]:
    """How the values of each of these topics become the columns that are stored."""
    found: dict[str, TopicValues] = {topic: JsonValues(topic, stored[topic]) for topic in settings.payloads}
    if settings.registry is not None:
        written = typed.Schemas(store.spark, where, settings.registry)
        for topic, payload in settings.typed.items():
            found[topic] = TypedValues(topic, stored[topic], payload is None, store, written, alone)
    return found


def _ended(said: Mapping[str, Any], written: BatchCounts) -> BatchDone:
    sources = said.get("sources") or [{}]
    behind = (sources[0].get("metrics") or {}).get("maxOffsetsBehindLatest")
    return BatchDone(
        written.batch,
        int(said["numInputRows"]),
        written.repeats,
        written.rejects,
        said["durationMs"]["triggerExecution"] / 1000,
        float(said.get("processedRowsPerSecond") or 0.0),
        None if behind is None else int(float(behind)),
    )


LATEST = "latest"


def queries(store: TableStore, as_of: str | None = None) -> dict[str, str]:
    """The query of each view. `as_of`: LATEST, or the number of a cut's batch. Raises InputMissing, TableMismatch."""
    header, at = store.header(), store.at
    if as_of is None:
        return {
            "bronze": schemas.bronze(at, header),
            "deliveries": schemas.deliveries(at("silver"), header),
            "current": schemas.current(at, header, store.properties("current").get(tables.FOLDED)),
            "history": schemas.history(at, header),
        }
    of_cut = schemas.as_of(at, find_cut(store, as_of))
    return {
        "deliveries_as_of": schemas.deliveries(of_cut("silver"), header),
        "current_as_of": schemas.folded(of_cut, header, None),  # the table may have later states
        "history_as_of": schemas.history(of_cut, header),
    }


def find_cut(store: TableStore, as_of: str) -> Cut:
    """The latest cut, or the one of a batch. If it has several, that of the youngest incarnation.

    Raises InputMissing if there is none.
    """
    cuts = store.load(schemas.CUTS_TABLE)
    if as_of != LATEST:
        cuts = cuts.where(cuts["batch"] == batch_name(int(as_of)))
    highest = {row["incarnation"]: row for row in cuts.orderBy("id").collect()}
    since = store.load(schemas.INCARNATIONS_TABLE).collect()
    ages = sorted((row["since"], row["incarnation"]) for row in since)
    names = [name for _, name in ages]
    found = [highest[name] for name in names if name in highest]
    if not found:
        raise InputMissing(
            f"the lake in {store.root} has no cut" + ("" if as_of == LATEST else f" of batch {as_of}"),
            hint="its table `cuts` lists them; there is none before a batch has read all records below a low watermark",
        )
    last = found[-1]
    before = names[: names.index(last["incarnation"])]
    return Cut(last["incarnation"], last["id"], last["batch"], tuple(before))

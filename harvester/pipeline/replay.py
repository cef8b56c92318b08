"""The job `replay`: publishes records of a lake again, in the order of each key, at a limited rate.

A replay reads one version of silver, even if the lake grows in the meantime. It is divided into slices of a total order
(`plan`); each is written by its own Spark job and then recorded in a file next to the tables. So a killed replay
continues after its last complete slice, and repeats what it had written of the next one: at least once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import replay_plan as plan
from harvester.pipeline import schemas, source, streaming, tables
from harvester.pipeline.errors import InputMissing, PipelineError
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import batch_name
from harvester.pipeline.replay_plan import ReplayProgress, ReplayRate, ReplayRequest, ReplaySlice
from harvester.pipeline.session import clear_errors
from harvester.pipeline.source import Place
from harvester.pipeline.store import TableStore

DIRECTORY = "replays"
# The client splits a batch of several records that a broker refuses as too large, and Spark does not wait for the
# halves (KAFKA-19479): so no batch may come near a topic's limit.
_FORCED = {"acks": "all", "enable.idempotence": "true", "batch.size": "16384", "compression.type": "none"}
_LOOK_S = 0.2
# Slices are read from the table together, up to this many records: a single one may be far smaller than a file.
_READ_RECORDS = 200_000


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of a run. `kafka`: options of Kafka's Java client."""

    lake: str
    kafka: Mapping[str, str]
    pace: ReplayRate = field(default_factory=ReplayRate)


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """What a replay will write for a topic; `first` and `last` are Kafka's times."""

    topic: str
    target: str
    records: int
    tombstones: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True)
class ReplaySliceDone:
    """The report of a finished slice: records written so far, their total, and the rate since this run began."""

    records: int
    total: int
    per_s: float


def begin(spark: SparkSession, lake: str, request: ReplayRequest) -> ReplayProgress:
    """A new replay of the lake's current version, not stored yet. Raises InputMissing, TableMismatch."""
    with clear_errors("the replay"):
        store = open_store(spark, lake)
        store.header()
        return ReplayProgress(str(uuid.uuid4()), request, store.version("silver"))


def load(spark: SparkSession, lake: str, replay: str) -> ReplayProgress:
    """A replay that was begun earlier. Raises InputMissing if there is none with this id, CheckpointMismatch."""
    with clear_errors("the replay"):
        store = open_store(spark, lake)
        store.header()
        file = _file(store, replay)
        text = tables.read_text(spark, file)
    if text is None:
        hint = f"the ids of replays are the names of the files in {store.beside(DIRECTORY)}"
        raise InputMissing(f"no replay {replay} in {lake}", hint=hint)
    return plan.from_text(text, file)


def preview(spark: SparkSession, lake: str, progress: ReplayProgress) -> list[TopicSummary]:
    """What is left to write, by topic. Raises PipelineError for a topic to which records would return."""
    with clear_errors("the replay"):
        rows = tables.collected(plan.summary(_remaining(spark, lake, progress)).orderBy("topic"))
    targets = progress.request.destination.targets([row["topic"] for row in rows])
    return [TopicSummary(target=targets[row["topic"]], **row) for row in rows]


def run(
    spark: SparkSession,
    settings: ReplaySettings,
    progress: ReplayProgress,
    *,
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[ReplaySliceDone], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ReplayProgress:
    """Writes what is left, until the end or `stop()`; returns the progress.

    Raises InputMissing if a target topic does not exist, BrokerUnavailable, and PipelineError if a slice fails.
    """
    if progress.finished:
        return progress
    _refuse_speculation(spark)
    with clear_errors("the replay"):
        planned = _planned(spark, settings, progress)
    if not planned:
        return replace(progress, finished=True)
    total = progress.records + sum(one.records for one in planned)
    targets = progress.request.destination.targets({topic for one in planned for topic, _ in one.upto})
    source.require_topics(spark, settings.kafka, sorted(set(targets.values())))
    try:
        with clear_errors("the replay"):
            store = open_store(spark, settings.lake)
            _store(store, progress)
            # The header that the lake's view reconstructs, not the one configured now.
            without = store.header() if progress.request.as_new else None
            before, began, due = progress.records, clock(), clock()
            for one, rows in _with_rows(spark, settings, progress, planned):
                while not stop() and (wait_s := due - clock()) > 0:
                    sleep(min(wait_s, _LOOK_S))
                if stop():
                    return progress
                due = settings.pace.next_s(clock(), one.records)
                records = plan.outgoing(rows, targets, progress.id, without)
                records.write.format("kafka").options(**sink_options(settings.kafka)).save()
                done = {**progress.done, **one.upto}
                progress = replace(progress, records=progress.records + one.records, done=done)
                _store(store, progress)
                elapsed_s = clock() - began
                per_s = (progress.records - before) / elapsed_s if elapsed_s > 0 else 0.0
                report(ReplaySliceDone(progress.records, total, per_s))
            progress = replace(progress, finished=True)
            _store(store, progress)
            return progress
    except PipelineError as error:
        error.hint = f"--resume {progress.id} continues after the last complete slice"
        raise


def _planned(spark: SparkSession, settings: ReplaySettings, progress: ReplayProgress) -> list[ReplaySlice]:
    remaining = _remaining(spark, settings.lake, progress)
    return list(plan.slices(plan.cuts(remaining, settings.pace.size).toLocalIterator()))


def _with_rows(
    spark: SparkSession, settings: ReplaySettings, progress: ReplayProgress, planned: Iterable[ReplaySlice]
) -> Iterator[tuple[ReplaySlice, DataFrame]]:
    """Each slice with its rows, in order; reads the rows of several small slices together."""
    remaining = _remaining(spark, settings.lake, progress)
    done = dict(progress.done)
    for together in _readings(planned):
        upto = {place: offset for one in together for place, offset in one.upto.items()}
        rows = plan.placed(plan.between(remaining, done, upto))
        if len(together) > 1:
            rows = rows.persist()
        try:
            for one in together:
                yield one, plan.between(rows, done, one.upto)
                done.update(one.upto)
        finally:
            rows.unpersist()


def _readings(planned: Iterable[ReplaySlice]) -> Iterator[list[ReplaySlice]]:
    together: list[ReplaySlice] = []
    records = 0
    for one in planned:
        if together and records + one.records > _READ_RECORDS:
            yield together
            together, records = [], 0
        together.append(one)
        records += one.records
    if together:
        yield together


def sink_options(kafka: Mapping[str, str]) -> dict[str, str]:
    """Options for Spark's Kafka sink: the given ones, except any that could lose or reorder records."""
    return {f"kafka.{name}": value for name, value in {**kafka, **_FORCED}.items()}


def live_offsets(spark: SparkSession, lake: str, progress: ReplayProgress) -> dict[Place, int]:
    """For each partition, the first offset after all records in the replay's version of the lake.

    A consumer that has processed the replay continues there in the original topics. It misses no record, and receives
    none twice except later repeats by harvesters. It must read partitions without an offset from their beginning.
    Raises PipelineError for a replay with `until`, because later records would be missing.
    """
    selection = progress.request.selection
    if selection.until is not None:
        raise PipelineError("a replay with --until leaves a gap before the live records", hint="replay without --until")
    with clear_errors("the live offsets"):
        store = open_store(spark, lake)
        silver = spark.sql(f"SELECT * FROM {store.as_of('silver', progress.silver_version)}")
        logs = streaming.logs_from_text(store.properties("silver").get(tables.TOPICS))
        since = {topic: batch_name(log.since) for topic, log in logs.items()}
        found = plan.ends(silver, store.table("repeats"), since)
        if selection.topics:
            found = found.where(F.col("topic").isin(*selection.topics))
        return {(row["topic"], row["partition"]): row["last"] + 1 for row in tables.collected(found)}


def _remaining(spark: SparkSession, lake: str, progress: ReplayProgress) -> DataFrame:
    store = open_store(spark, lake)
    silver = spark.sql(schemas.deliveries(store.as_of("silver", progress.silver_version), store.header()))
    return plan.behind(plan.selected(silver, progress.request.selection), progress.done)


def _refuse_speculation(spark: SparkSession) -> None:
    # A speculative copy of a task would write its records again, among those of the original.
    if spark.sparkContext.getConf().get("spark.speculation", "false") == "true":
        raise PipelineError("a replay cannot preserve the order of keys with spark.speculation", hint="set it to false")


def _store(store: TableStore, progress: ReplayProgress) -> None:
    tables.write_text(store.spark, _file(store, progress.id), plan.to_text(progress))


def _file(store: TableStore, replay: str) -> str:
    return f"{store.beside(DIRECTORY)}/{replay}.json"

"""The job `metrics`: throughput, latency and skew of topics by window, each complete window once.

Spark keeps counts of open windows, and emits them when the watermark, the newest timestamp minus the permitted
lateness, has passed a window's end. This happens in an ordinary batch: its end offsets, its state and its output belong
together, and a killed batch is repeated with the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.origin import HEADER
from harvester.pipeline import source, streaming
from harvester.pipeline.formats import open_store
from harvester.pipeline.metrics import windows
from harvester.pipeline.metrics.windows import KEYS, METRICS, counts
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.session import clear_errors
from harvester.pipeline.store import TableStore

_EARLIEST = -2


def count(spark: SparkSession, kafka: Mapping[str, str], checkpoint: str, batch: int, window_s: int) -> dict[str, int]:
    """The late records of a batch by topic, only for topics with any, and without those that Kafka has removed since.

    Spark drops late records, and reports only the number of their groups. So this reads the batch again.
    """
    before, here = (streaming.planned(spark, checkpoint, number) for number in (batch - 1, batch))
    if before is None or here is None or not (ranges := streaming.ranges(before, here)):
        return {}
    partitions: dict[str, list[int]] = {}
    for one in ranges:
        partitions.setdefault(one.topic, []).append(one.partition)
    begin = {(one.topic, one.partition): _EARLIEST if one.first is None else one.first for one in ranges}
    options = {
        **source.options(kafka),
        "includeHeaders": "false",
        "assign": json.dumps(partitions),
        "startingOffsets": streaming.by_topic(begin),
        "endingOffsets": streaming.by_topic({place: here.ends[place] for place in begin}),
        "failOnDataLoss": "false",
    }
    rows = spark.read.format("kafka").options(**options).load()
    # A batch drops records by the watermark of the previous batch, and closes windows by its own.
    found = windows.late(rows, window_s, before.watermark_ms).collect()
    return {row["topic"]: row["records"] for row in found}


@dataclass(frozen=True, slots=True)
class MetricsBatch:
    """Writes batches. `owner` names the checkpoint. `written`: batch → its rows of `metrics`, for the report."""

    store: TableStore
    owner: str
    most_keys: int
    compact_every: int
    written: dict[int, int] = field(default_factory=dict)

    def write(self, closed: DataFrame, number: int) -> None:
        """Writes the COUNTS of closed windows. Repeatable with the same counts after any interruption.

        All counts of a window are in the same batch, because they have the same end.
        """
        closed = closed.persist()
        try:
            # Every row must be computed, even if none is needed: otherwise tasks would not store their state.
            found = closed.agg(F.count_distinct("window_start", "topic").alias("windows")).first()
            assert found is not None
            if found["windows"]:
                self.store.append(windows.windows(closed), METRICS.name, (self.owner, number))
                if self.most_keys:
                    self.store.append(windows.top_keys(closed, self.most_keys), KEYS.name, (self.owner, number))
            self.written[number] = found["windows"]
        finally:
            closed.unpersist()
        if self.compact_every and (number + 1) % self.compact_every == 0:
            for table in (METRICS, KEYS):
                self.store.compact(table.name)


ALL = 2**62
# State is on the executors' disks, and each batch saves only changes: open windows may have many keys.
_STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The settings of a run. `kafka`: options of Kafka's Java client. `once`: stop at the current ends of the topics.

    `most_records`: the maximum of a batch, by default everything. All partitions share one watermark, so if a backlog
    is divided, records are late when one partition's part is older than another's.
    """

    topics: tuple[str, ...]
    root: str
    kafka: Mapping[str, str]
    checkpoint: str | None = None
    header: str = HEADER
    once: bool = False
    trigger_s: float = 10.0
    window_s: int = 60
    late_s: float = 600.0
    most_keys: int = 10
    most_records: int = ALL
    compact_every: int = 50


@dataclass(frozen=True, slots=True)
class MetricsBatchDone:
    """The report of a finished batch. `windows`: written by it. `open_counts`: counts kept for open windows.

    `late`: records by topic that arrived after their window closed, and that no window counts.
    """

    batch: int
    records: int
    per_s: float
    windows: int
    open_counts: int
    late: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Total:
    records: int = 0
    windows: int = 0
    late: Mapping[str, int] = field(default_factory=dict)
    open_counts: int = 0

    def after(self, done: MetricsBatchDone) -> Total:
        """The total including one more batch."""
        late = {topic: self.late.get(topic, 0) + done.late.get(topic, 0) for topic in {*self.late, *done.late}}
        return Total(self.records + done.records, self.windows + done.windows, late, done.open_counts)


def run(
    spark: SparkSession,
    settings: MetricsSettings,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[MetricsBatchDone], None] = lambda _: None,
) -> Total:
    """Runs until nothing is left (`once`) or `stop()`. The next run writes the windows that are still open then.

    Raises InputMissing, CheckpointMismatch, TableMismatch, BrokerUnavailable before it writes anything, and
    PipelineError for later failures of the stream. After a restart it continues where it stopped.
    """
    source.require_topics(spark, settings.kafka, settings.topics)
    with clear_errors("the metrics"):
        spark = _with_state(spark)
        store = open_store(spark, settings.root)
        where = settings.checkpoint or store.beside("checkpoint-metrics")
        # The state of open windows depends on their length and on keys: a job with other settings cannot continue it.
        job = f"metrics of {settings.window_s} s windows{'' if settings.most_keys else ' without keys'}"
        names = (METRICS.name, KEYS.name)
        manifest = streaming.claim(store, where, job, settings.topics, settings.header, names)
        store.prepare([METRICS, KEYS], manifest.owner)
        batch = MetricsBatch(store, manifest.owner, settings.most_keys, settings.compact_every)
        kafka = source.stream(spark, settings.kafka, settings.topics, settings.most_records)
        bronze = bronze_columns(kafka, settings.header).withWatermark(
            "timestamp", f"{round(settings.late_s * 1000)} milliseconds"
        )
        counted = counts(bronze, settings.window_s, keys=bool(settings.most_keys))
        writer = counted.writeStream.outputMode("append").foreachBatch(batch.write)
        writer = writer.option("checkpointLocation", where).queryName("metrics")
        query = streaming.start(writer, once=settings.once, trigger_s=settings.trigger_s)

        total = Total()

        def late(number: int) -> dict[str, int]:
            return count(spark, settings.kafka, where, number, settings.window_s)

        def take(said: Mapping[str, Any]) -> None:
            nonlocal total
            done = _done(said, batch.written.pop(said["batchId"], 0), late)
            total = total.after(done)
            progress(done)

        streaming.follow(query, stop, take)
        return total


def _with_state(spark: SparkSession) -> SparkSession:
    given = spark.sparkContext.getConf()
    own = spark.newSession()
    for name, value in _STATE.items():
        if not given.contains(name):
            own.conf.set(name, value)
    return own


def _done(said: Mapping[str, Any], windows: int, late: Callable[[int], dict[str, int]]) -> MetricsBatchDone:
    batch, state = int(said["batchId"]), said["stateOperators"][0]
    return MetricsBatchDone(
        batch,
        int(said["numInputRows"]),
        float(said.get("processedRowsPerSecond") or 0.0),
        windows,
        int(state["numRowsTotal"]),
        late(batch) if state["numRowsDroppedByWatermark"] else {},
    )

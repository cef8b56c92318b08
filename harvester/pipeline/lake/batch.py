"""One batch of the lake: which tables it is written to, in which order, and what makes that safe to repeat.

Bronze comes first, and all other tables are made of what bronze then holds of the batch. So Kafka is read once, columns
that a table does not need are not read again, and no record waits in memory from one write to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import files, merging, offsets, schemas, tables
from harvester.pipeline.lake import payloads, silver
from harvester.pipeline.origin_columns import bronze_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class LakeBatch:
    """What every batch of a lake needs to know. `owner` names the checkpoint, which is in the directory `checkpoint`.

    `hit` is told before each write which one comes. `_known` are incarnations of the table, and when each was first
    seen in microseconds: what is there once never changes.
    """

    spark: SparkSession
    root: str
    checkpoint: str
    owner: str
    header: str
    payloads: Mapping[str, StructType]
    compact_every: int
    hit: Callable[[str], None] = lambda _: None
    _known: dict[str, int] = field(default_factory=dict)

    def write(self, kafka: DataFrame, number: int) -> None:
        """Write a batch to every table. May be cut off anywhere, and called again with the same records."""
        self._append(bronze_columns(kafka, self.header), "bronze", number)
        # Read in the job's session: in the stream's own, Spark plans without looking at how much there is.
        bronze = self._table("bronze").where(offsets.within(self._ranges(number)))
        found = silver.summed_up(silver.overview(bronze).collect())
        repeats = silver.later_deliveries(bronze).persist()
        try:
            rows = silver.deliveries(bronze)
            if repeats.count():
                rows = silver.without(rows, repeats)
            self._reject(bronze, rows, found, number)
            if found.ids is not None:
                self._merge(rows, found, merging.Bounds(found.days, *found.ids))
        finally:
            repeats.unpersist()
        if self.compact_every and (number + 1) % self.compact_every == 0:
            self.hit("lake.compaction")
            for name in self._names():
                self.spark.sql(merging.compact(self._path(name)))
        self.hit("lake.end")

    def _append(self, rows: DataFrame, name: str, number: int) -> None:
        # Delta leaves out a transaction whose application has committed this version, or a later one, before.
        self.hit(f"lake.{name}")
        options = {"txnAppId": f"{self.owner}-{name}", "txnVersion": str(number)}
        rows.write.format("delta").mode("append").options(**options).save(self._path(name))

    def _reject(self, bronze: DataFrame, rows: DataFrame, found: silver.Overview, number: int) -> None:
        bad = [payloads.bad_payloads(rows, topic, self.payloads[topic]) for topic in self._expanded(found)]
        rejected = silver.rejects(bronze)
        for frame in bad:
            rejected = rejected.unionByName(frame)
        if found.rejected or (bad and not rejected.isEmpty()):
            self._append(rejected, "rejects", number)

    def _merge(self, rows: DataFrame, found: silver.Overview, bounds: merging.Bounds) -> None:
        if found.incarnations - self._known.keys():
            self._know(rows)
        self._run("silver", merging.insert_new(self._path("silver"), schemas.SILVER.names, bounds), rows)
        known = self.spark.sql(merging.incarnations({name: self._known[name] for name in found.incarnations}))
        states = silver.latest_states(rows, known)
        self._run("current", merging.take_latest(self._path("current"), sorted(found.topics)), states)
        for topic in self._expanded(found):
            table = payloads.table(topic, self.payloads[topic])
            expanded = payloads.expanded(rows, topic, self.payloads[topic])
            self._run("json", merging.insert_new(self._path(table.name), table.schema.names, bounds), expanded)

    def _know(self, rows: DataFrame) -> None:
        self._run("incarnations", merging.insert_incarnations(self._path("incarnations")), silver.incarnations(rows))
        stored = self._table("incarnations").select("incarnation", F.unix_micros("since").alias("since_us"))
        self._known.update({row["incarnation"]: row["since_us"] for row in stored.collect()})

    def _run(self, what: str, statement: str, source: DataFrame) -> None:
        self.hit(f"lake.{what}")
        self.spark.sql(statement, source=source)

    def _ranges(self, number: int) -> list[offsets.Range]:
        before = files.read_text(self.spark, offsets.file_of(self.checkpoint, number - 1))
        now = files.read_text(self.spark, offsets.file_of(self.checkpoint, number))
        return offsets.ranges(before, now or "", self.checkpoint)

    def _expanded(self, found: silver.Overview) -> list[str]:
        return [topic for topic in self.payloads if topic in found.topics]

    def _names(self) -> list[str]:
        extra = [payloads.table(topic, payload).name for topic, payload in self.payloads.items()]
        return [*(table.name for table in schemas.TABLES), *extra]

    def _table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self._path(name))

    def _path(self, name: str) -> str:
        return tables.path_of(self.root, name)

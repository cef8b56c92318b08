"""One batch of the lake: which tables it is written to, in which order, and what makes that safe to repeat.

Bronze comes first, and all other tables are made of what bronze then holds of the batch. So Kafka is read once, columns
that a table does not need are not read again, and no record waits in memory from one write to the next.

What silver has already is left out of silver, and of the tables that expand it. So silver is written after those: were
it there before, a batch that is cut off and comes again would find nothing new for them. The state of keys takes any
record any number of times, and is written beside silver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas, streaming, tables
from harvester.pipeline.lake import silver
from harvester.pipeline.origin_columns import bronze_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from harvester.pipeline.origin_columns import ColumnReader

_IN_A_FILE = 100_000
_EXTENT = ("topic", "partition", "from_offset", "to_offset")


@dataclass(frozen=True, slots=True)
class LakeBatch:
    """What every batch of a lake needs to know. `owner` names the checkpoint, which is in the directory `checkpoint`.

    `hit` is told before each write which one comes. Of the incarnations in the tables `_known` has when each was first
    seen, in microseconds, which never changes, and `_highest` the highest id in silver, where there is any.
    """

    spark: SparkSession
    root: str
    checkpoint: str
    owner: str
    header: str
    payloads: Mapping[str, StructType]
    compact_every: int
    reader: ColumnReader
    hit: Callable[[str], None] = lambda _: None
    _known: dict[str, int] = field(default_factory=dict)
    _highest: dict[str, int] = field(default_factory=dict)

    def write(self, kafka: DataFrame, number: int) -> None:
        """Write a batch to every table. May be cut off anywhere, and called again with the same records."""
        before, now = (streaming.planned(self.spark, self.checkpoint, one) for one in (number - 1, number))
        assert now is not None  # Spark has written it before it called
        ranges = streaming.ranges(before, now)
        most = streaming.most_records(ranges)
        # One file for a few records, however many partitions they come from; nothing is moved for it.
        records = bronze_columns(kafka, self.header, self.reader).coalesce(-(-most // _IN_A_FILE) or 1)
        self._append(records, "bronze", number)
        bronze, found = self._bronze(ranges)
        with ExitStack() as stack:
            repeated = self._some(silver.later_deliveries(bronze, most), stack)
            self._know(bronze, found, number)
            stored = silver.stored_before(bronze, self._table("silver"), found, self._highest)
            rows = silver.deliveries(bronze)
            new = silver.without(silver.without(rows, repeated), self._some(stored, stack))
            self._reject(bronze, new, found, number)
            if found.ids:
                since_us = {name: self._known[name] for name in found.ids}
                self._derive(silver.latest_states(rows, since_us, most, repeated), new, found, number)
        if self.compact_every and (number + 1) % self.compact_every == 0:
            self.hit("lake.compaction")
            for name in self._names():
                self.spark.sql(schemas.compact(self._path(name)))
        self.hit("lake.end")

    def _some(self, places: DataFrame | None, stack: ExitStack) -> DataFrame | None:
        if places is None:
            return None
        kept = places.persist()
        stack.callback(kept.unpersist)
        return kept if kept.count() else None

    def _append(self, rows: DataFrame, name: str, number: int, hit: str | None = None) -> None:
        self.hit(f"lake.{hit or name}")
        tables.append(rows, self.root, name, (self.owner, number))

    def _reject(self, bronze: DataFrame, rows: DataFrame, found: silver.BatchOverview, number: int) -> None:
        bad = [silver.bad_payloads(rows, topic, self.payloads[topic]) for topic in self._expanded(found)]
        rejected = silver.rejects(bronze)
        for frame in bad:
            rejected = rejected.unionByName(frame)
        if found.rejected or (bad and not rejected.isEmpty()):
            self._append(rejected, "rejects", number)

    def _derive(self, states: DataFrame, new: DataFrame, found: silver.BatchOverview, number: int) -> None:
        for topic in self._expanded(found):
            table = silver.payload_table(topic, self.payloads[topic])
            self._append(silver.expanded(new, topic, self.payloads[topic]), table.name, number, hit="json")
        with ThreadPoolExecutor(1) as beside:
            taken = beside.submit(self._take_states, states, found)
            self._append(new, "silver", number)
            taken.result()
        for name, span in found.ids.items():
            self._highest[name] = max(span.highest, self._highest.get(name, span.highest))

    def _take_states(self, states: DataFrame, found: silver.BatchOverview) -> None:
        self.hit("lake.current")
        self.spark.sql(schemas.take_latest(self._path("current"), sorted(found.topics)), source=states)

    def _know(self, bronze: DataFrame, found: silver.BatchOverview, number: int) -> None:
        unknown = found.ids.keys() - self._known.keys()
        if not unknown:
            return
        stored = self._incarnations()
        if unknown - stored.keys():
            seen = silver.incarnations(silver.deliveries(bronze))
            self._append(seen.where(~F.col("incarnation").isin(list(stored))), "incarnations", number)
        for name in unknown & stored.keys():  # of any other, silver has nothing yet
            rows = self._table("silver")
            # Of all rows it is known without reading any.
            rows = rows if len(stored) == 1 else rows.where(F.col("incarnation") == name)
            for row in rows.agg(F.max("id").alias("highest")).where("highest IS NOT NULL").collect():
                self._highest[name] = row["highest"]
        self._known.update(self._incarnations())

    def _incarnations(self) -> dict[str, int]:
        stored = self._table("incarnations").select("incarnation", F.unix_micros("since").alias("since_us"))
        return {row["incarnation"]: row["since_us"] for row in stored.collect()}

    def _expanded(self, found: silver.BatchOverview) -> list[str]:
        return [topic for topic in self.payloads if topic in found.topics]

    def _names(self) -> list[str]:
        extra = [silver.payload_table(topic, payload).name for topic, payload in self.payloads.items()]
        return [*(table.name for table in schemas.TABLES), *extra]

    def _table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self._path(name))

    def _bronze(self, ranges: Sequence[streaming.Range]) -> tuple[DataFrame, silver.BatchOverview]:
        """The rows of these ranges. They are only appended to, so which files have them is asked once."""
        # In the job's session: in the stream's own, Spark plans without looking at how much there is.
        which = streaming.within(ranges)
        rows = self._table("bronze").where(which)
        if written := rows.inputFiles():
            read = self.spark.read.schema(schemas.BRONZE).option("basePath", self._path("bronze"))
            rows = read.parquet(*written)
        seen = silver.overview(rows).collect()
        if not all(streaming.inside(ranges, *(row[name] for name in _EXTENT)) for row in seen):
            # Compacted since, with rows of other batches. As a rule the files hold nothing else. Without the filter,
            # whose numbers are of this batch, code that Spark has compiled for the batch before is good for this one.
            rows = rows.where(which)
            seen = silver.overview(rows).collect()
        return rows, silver.summed_up(seen)

    def _path(self, name: str) -> str:
        return tables.path_of(self.root, name)

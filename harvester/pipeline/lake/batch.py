"""One batch of the lake: the tables to which it is written, and why it is safe to repeat.

A batch is decided before anything is written, from its own records and the ids that silver had after the previous
batch. These ids are kept in a file per batch next to the checkpoint's files, which is written last. So an interrupted
batch is repeated with the same records and the same ids, and decided in the same way. Its appends carry the
checkpoint's name and the batch number, by which tables skip what they already have. Their order does not matter, but
for cuts, which come last. These also depend on what the brokers say meanwhile; but a cut stays true (`cuts`).

After a batch that was abandoned half written, the next one takes the records that no table has, and repeats of ids that
silver lacks: it decides these again, since Kafka may have lost the first delivery.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from uuid import UUID

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.errors import CorruptSeenIds
from harvester.pipeline import schemas, streaming, tables
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.cuts import CutState
from harvester.pipeline.lake.ids import StoredIds
from harvester.pipeline.lake.silver import TopicValues
from harvester.pipeline.schemas import BAD_PAYLOAD
from harvester.pipeline.session import keep
from harvester.pipeline.source import Place
from harvester.pipeline.store import TableStore

_IN_A_FILE = 100_000
_KEPT = 5
_PACKED = "spark.sql.inMemoryColumnarStorage.compressed"


def ids_file(checkpoint: str, number: int) -> str:
    """The file with the ids after a batch. If it exists, the batch is complete."""
    return f"{checkpoint}/ids/{number}.json"


def to_do_again(since: int) -> str:
    """The content of the file for a batch that may be half written, and whose records the next batch reads again.

    The next batch skips what batches from `since` on have written.
    """
    return json.dumps({"again": since})


def done_again(text: str | None) -> int | None:
    """The inverse of `to_do_again`; None for anything else."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text or "")["again"])
    return None


def batch_name(number: int) -> str:
    """The value of the column `batch`, in the order of the number. Text, since Spark compiles numbers into its code."""
    return f"{number:020d}"


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """How many later deliveries and rejected records or values a batch has written."""

    batch: int
    repeats: int
    rejects: int


@dataclass(slots=True)
class LakeBatch:
    """Writes the batches of a lake. `owner` names the checkpoint, which is in the directory `checkpoint`.

    `hit` is called with a name before each write, `done` with what a batch has written. `require_same` raises if a
    recreated topic may have been read; called with True, it returns the high watermarks of all partitions.
    `_stored`: the ids that silver has after batch `_number`, `_cuts` the cuts. `_known`: the incarnations in their
    table.
    """

    store: TableStore
    checkpoint: str
    owner: str
    header: str
    payloads: Mapping[str, TopicValues]
    hit: Callable[[str], None] = lambda _: None
    done: Callable[[BatchCounts], None] = lambda _: None
    require_same: Callable[[bool], Mapping[Place, int]] = lambda _: {}
    _number: int | None = None
    _stored: StoredIds = field(default_factory=StoredIds)
    _cuts: CutState = field(default_factory=CutState)
    _known: set[str] = field(default_factory=set)

    def write(self, bronze: DataFrame, number: int) -> None:
        """Writes a batch, as schemas.BRONZE, to every table. Repeatable with the same batch after any interruption."""
        stored, cuts, again, is_there = self._stored, self._cuts, None, False
        if started := self._number != number - 1:
            stored, cuts, again = self._load(number)
            last = self.store.last_written(["silver"], self.owner)
            is_there = last is not None and last >= number
        with ExitStack() as stack:
            # On a cluster a batch is kept as columns. Compressing them would take longer than reading them.
            bronze.sparkSession.conf.set(_PACKED, "false")
            if again is not None:
                tables_of = [self._since("silver", again, number), self._since("repeats", again, number)]
                nameless = self._since("rejects", again, number).where(F.col("reason") != BAD_PAYLOAD)
                bronze = silver.unwritten(bronze, [*tables_of, nameless]).unionByName(self._undecided(again, number))
            bronze = _kept(bronze, stack)
            found = silver.summed_up(silver.overview(bronze).collect())
            read = streaming.planned(self.store.spark, self.checkpoint, number) or {}
            ends = self.require_same(cuts.needs_ends(found.marks, read, started=started))
            repeats, repeated = None, 0
            if suspects := found.ids.suspects(stored):
                before = self.store.table("silver").where(F.col("batch") < batch_name(number))
                repeats = _kept(silver.repeats(bronze, suspects, before), stack)
                repeated = repeats.count()
            self._know(found, number)
            rejected = self._append_all(bronze, repeats if repeated else None, repeated, found, number, again)
            cuts, advanced = cuts.after(found.marks, read, ends)
            if again is not None:
                at = self.store.at
                self.store.change(schemas.keep_latest(at("repeats"), at("silver"), batch_name(again)))
            if again is not None or is_there:
                # A repeated batch may find fewer records: only the latest were kept, or Kafka has compacted the topic.
                # Silver records what the batch has written.
                written = self.store.table("silver").where(F.col("batch") == batch_name(number))
                found = silver.summed_up(silver.overview(written).collect())
        self._number = None
        if advanced:
            # A cut must not be seen before its records.
            rows = silver.cuts(self.store.spark, advanced, self.store.version("silver"))
            self._append("cuts", rows.withColumn("batch", F.lit(batch_name(number))), number)
        stored.add(found.ids)
        self.hit("lake.ids")
        text = stored.to_text(cuts=cuts.to_json())
        tables.write_text(self.store.spark, ids_file(self.checkpoint, number), text)
        self._number, self._stored, self._cuts = number, stored, cuts
        if number % _KEPT == 0:
            old = range(number - 2 * _KEPT, number - _KEPT)
            tables.remove(self.store.spark, [ids_file(self.checkpoint, one) for one in old])
        self.hit("lake.end")
        self.done(BatchCounts(number, repeated, rejected))

    def _append_all(
        self,
        bronze: DataFrame,
        repeats: DataFrame | None,
        repeated: int,
        found: silver.BatchOverview,
        number: int,
        again: int | None,
    ) -> int:
        """Returns how many rows `rejects` gets."""
        new = silver.without(bronze, repeats)
        frames = []
        if found.topics:
            # One file for a few records, however many partitions they come from, without a shuffle.
            frames.append(("silver", self._rows(new, number).coalesce(_files(found.records))))
        if repeats is not None:
            # Few of the records read, so a shuffle is cheap.
            frames.append(("repeats", self._rows(repeats, number).repartition(_files(repeated))))
        rejected, rejects = silver.rejects(bronze) if found.rejected else None, found.rejected
        fresh = new.where("problem IS NULL")
        for topic in sorted(self.payloads.keys() & found.topics):
            values = self.payloads[topic]
            fitting, bad = values.split(fresh, number)
            frames.append((values.table, fitting))
            if again is not None:
                bad = silver.unwritten(bad, [self._since("rejects", again, number)])
            if misfits := bad.count():
                rejected, rejects = bad if rejected is None else rejected.unionByName(bad), rejects + misfits
        if rejected is not None:
            rejected = rejected.withColumn("batch", F.lit(batch_name(number)))
            frames.append(("rejects", rejected.repartition(_files(rejects))))
        if len(frames) <= 1:
            for frame in frames:
                self._append(*frame, number)
            return rejects
        with ThreadPoolExecutor(len(frames)) as pool:
            for written in [pool.submit(self._append, name, rows, number) for name, rows in frames]:
                written.result()
        return rejects

    def _rows(self, bronze: DataFrame, number: int) -> DataFrame:
        return silver.deliveries(bronze, self.header).withColumn("batch", F.lit(batch_name(number)))

    def _append(self, name: str, rows: DataFrame, number: int) -> None:
        self.hit(f"lake.{name.partition('/')[0]}")
        self.store.append(rows, name, (self.owner, number))

    def _know(self, found: silver.BatchOverview, number: int) -> None:
        """Writes new incarnations, before silver: views of states omit a row whose incarnation is missing."""
        if found.since_us.keys() <= self._known:
            return
        self._known.update(row["incarnation"] for row in self.store.table("incarnations").collect())
        if unknown := {name: us for name, us in found.since_us.items() if name not in self._known}:
            self._append("incarnations", silver.incarnations(self.store.spark, unknown), number)
            self._known.update(unknown)

    def _load(self, number: int) -> tuple[StoredIds, CutState, int | None]:
        """The ids and cuts after the previous batch, and the first batch whose records this one reads again.

        The latter is None if this batch rereads nothing. If the ids are lost, or were never kept, silver yields the
        highest ones.
        """
        text = tables.read_text(self.store.spark, ids_file(self.checkpoint, number - 1))
        # If this batch was interrupted, it may have written its cuts.
        highest = self.store.table("cuts").groupBy("incarnation").agg(F.max("id").alias("id"))
        cuts = CutState.restored(text, {row["incarnation"]: row["id"] for row in highest.collect()})
        if text is not None:
            with suppress(CorruptSeenIds):
                return StoredIds.from_text(text), cuts, None
        rows = self.store.table("silver").where(F.col("batch") < batch_name(number))
        floors = rows.groupBy("incarnation").agg(F.max("id").alias("id")).collect()
        return StoredIds(floors={UUID(row["incarnation"]): row["id"] for row in floors}), cuts, done_again(text)

    def _undecided(self, again: int, number: int) -> DataFrame:
        """The repeats in batches from `again` on, as schemas.BRONZE, whose ids silver lacks apart from this batch."""
        name, place = ["incarnation", "id"], ["topic", "partition", "offset", "timestamp"]
        rows = self.store.spark.sql(schemas.deliveries(self.store.at("repeats"), self.header))
        rows = rows.where((F.col("batch") >= batch_name(again)) & (F.col("batch") < batch_name(number)))
        before = self.store.table("silver").where(F.col("batch") < batch_name(number)).select(*name)
        there = before.join(rows.select(*name), name, "left_semi").distinct()
        rows = rows.join(there, name, "left_anti").dropDuplicates(place)
        return rows.withColumn("problem", F.lit(None).cast("string")).select(*schemas.BRONZE.names)

    def _since(self, name: str, first: int, number: int) -> DataFrame:
        """What batches from `first` on have written, except this one, and rows without a batch."""
        batch = F.coalesce("batch", F.lit(batch_name(first)))
        return self.store.table(name).where((batch >= batch_name(first)) & (batch < batch_name(number)))


def _kept(rows: DataFrame, until: ExitStack) -> DataFrame:
    # On disk, that is, mostly in the system's cache: in Java's own memory they cost more than they save.
    return keep(rows, until, StorageLevel.DISK_ONLY, eager=False)


def _files(records: int) -> int:
    return -(-records // _IN_A_FILE) or 1

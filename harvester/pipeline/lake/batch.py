"""One batch of the lake: which tables it is written to, and what makes that safe to repeat.

A batch is decided before anything is written, from its own records and from the ids that silver had after the batch
before. Those are kept in a file beside the checkpoint's own, one for each batch, written last. So a batch that is cut
off comes again with the same records and the same ids, and is decided alike. Its appends bear the checkpoint's name and
the batch's number, by which tables leave out what they have. In which order they come makes no difference.

After a batch that was given up half written, the next one takes the records that no table has, and repeats of ids that
silver lacks: it decides these anew, since Kafka may have lost the first delivery.
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
from pyspark.sql.types import StructType

from harvester.errors import CorruptSeenIds
from harvester.pipeline import schemas, tables
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.ids import StoredIds
from harvester.pipeline.schemas import BAD_PAYLOAD
from harvester.pipeline.store import TableStore

_IN_A_FILE = 100_000
_KEPT = 5
_PACKED = "spark.sql.inMemoryColumnarStorage.compressed"


def ids_file(checkpoint: str, number: int) -> str:
    """Where the ids after a batch are kept. Once it is there, so is all of the batch."""
    return f"{checkpoint}/ids/{number}.json"


def to_do_again(since: int) -> str:
    """What such a file has of a batch that may be half written, and whose records the next one reads again.

    That one leaves out what batches from `since` on have.
    """
    return json.dumps({"again": since})


def done_again(text: str | None) -> int | None:
    """Reads `to_do_again`; None for anything else."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text or "")["again"])
    return None


def batch_name(number: int) -> str:
    """The batch in the column `batch`: ordered like the number. Text, since Spark compiles numbers into its code."""
    return f"{number:020d}"


@dataclass(slots=True)
class LakeBatch:
    """What every batch of a lake needs to know. `owner` names the checkpoint, which is in the directory `checkpoint`.

    `hit` is told before each write which one comes. `require_same` raises if what was read may be of another topic.
    `_stored` are the ids that silver has after the batch `_number`, `_known` the incarnations that are in their table.
    """

    store: TableStore
    checkpoint: str
    owner: str
    header: str
    payloads: Mapping[str, StructType]
    hit: Callable[[str], None] = lambda _: None
    done: Callable[[int], None] = lambda _: None
    require_same: Callable[[], None] = lambda: None
    _number: int | None = None
    _stored: StoredIds = field(default_factory=StoredIds)
    _known: set[str] = field(default_factory=set)

    def write(self, bronze: DataFrame, number: int) -> None:
        """Write a batch, as schemas.BRONZE, to every table. May be cut off anywhere, and called again with the same."""
        stored, again, is_there = self._stored, None, False
        if self._number != number - 1:
            stored, again = self._load(number)
            last = self.store.last_written(["silver"], self.owner)
            is_there = last is not None and last >= number
        with ExitStack() as stack:
            # Fetched from Kafka once. To pack what is read twice would take longer than to read it.
            bronze.sparkSession.conf.set(_PACKED, "false")
            if again is not None:
                tables_of = [self._since("silver", again, number), self._since("repeats", again, number)]
                nameless = self._since("rejects", again, number).where(F.col("reason") != BAD_PAYLOAD)
                bronze = silver.unwritten(bronze, [*tables_of, nameless]).unionByName(self._undecided(again, number))
            bronze = self._kept(bronze, stack)
            found = silver.summed_up(silver.overview(bronze).collect())
            self.require_same()
            places, repeated = None, 0
            if suspects := found.ids.suspects(stored):
                before = self.store.table("silver").where(F.col("batch") < batch_name(number))
                places = self._kept(silver.repeats(bronze, suspects, before), stack)
                repeated = places.count()
            self._know(found, number)
            self._append_all(bronze, places if repeated else None, repeated, found, number, again)
            if again is not None:
                at = self.store.at
                self.store.change(schemas.keep_latest(at("repeats"), at("silver"), batch_name(again)))
            if again is not None or is_there:
                # Done once more, this batch may find less: the latest have been kept, or Kafka has compacted the topic.
                # Silver says what it has written.
                written = self.store.table("silver").where(F.col("batch") == batch_name(number))
                found = silver.summed_up(silver.overview(written).collect())
        self._number = None
        stored.add(found.ids)
        self.hit("lake.ids")
        tables.write_text(self.store.spark, ids_file(self.checkpoint, number), stored.to_text())
        self._number, self._stored = number, stored
        if number % _KEPT == 0:
            old = range(number - 2 * _KEPT, number - _KEPT)
            tables.remove(self.store.spark, [ids_file(self.checkpoint, one) for one in old])
        self.hit("lake.end")
        self.done(number)

    def _append_all(
        self,
        bronze: DataFrame,
        places: DataFrame | None,
        repeated: int,
        found: silver.BatchOverview,
        number: int,
        again: int | None,
    ) -> None:
        new = silver.without(bronze, places)
        frames = []
        if found.topics:
            # One file for a few records, however many partitions they come from; nothing is moved for it.
            frames.append(("silver", self._rows(new, number).coalesce(_files(found.records))))
        if places is not None:
            # Few of all that are read, so these are moved.
            frames.append(("repeats", self._rows(silver.at(bronze, places), number).repartition(_files(repeated))))
        rejected = silver.rejects(bronze) if found.rejected else None
        fresh = new.where("problem IS NULL")
        for topic in sorted(self.payloads.keys() & found.topics):
            payload = self.payloads[topic]
            frames.append((silver.payload_table(topic, payload).name, silver.expanded(fresh, topic, payload)))
            bad = silver.bad_payloads(fresh, topic, payload)
            if again is not None:
                bad = silver.unwritten(bad, [self._since("rejects", again, number)])
            if found.rejected or not bad.isEmpty():
                rejected = bad if rejected is None else rejected.unionByName(bad)
        if rejected is not None:
            rejected = rejected.withColumn("batch", F.lit(batch_name(number)))
            frames.append(("rejects", rejected.repartition(_files(found.rejected))))
        if len(frames) <= 1:
            for frame in frames:
                self._append(*frame, number)
            return
        with ThreadPoolExecutor(len(frames)) as pool:
            for written in [pool.submit(self._append, name, rows, number) for name, rows in frames]:
                written.result()

    def _rows(self, bronze: DataFrame, number: int) -> DataFrame:
        return silver.deliveries(bronze, self.header).withColumn("batch", F.lit(batch_name(number)))

    def _append(self, name: str, rows: DataFrame, number: int) -> None:
        self.hit(f"lake.{name.partition('/')[0]}")
        self.store.append(rows, name, (self.owner, number))

    def _know(self, found: silver.BatchOverview, number: int) -> None:
        """Incarnations come first: without its own a row of silver is in no view of states."""
        if found.since_us.keys() <= self._known:
            return
        self._known.update(row["incarnation"] for row in self.store.table("incarnations").collect())
        if unknown := {name: us for name, us in found.since_us.items() if name not in self._known}:
            self._append("incarnations", silver.incarnations(self.store.spark, unknown), number)
            self._known.update(unknown)

    def _load(self, number: int) -> tuple[StoredIds, int | None]:
        """The ids after the batch before; since which one batches have what this one reads again, None if none has.

        Where they are lost, or nobody kept them, silver knows the highest ones.
        """
        text = tables.read_text(self.store.spark, ids_file(self.checkpoint, number - 1))
        if text is not None:
            with suppress(CorruptSeenIds):
                return StoredIds.from_text(text), None
        rows = self.store.table("silver").where(F.col("batch") < batch_name(number))
        highest = rows.groupBy("incarnation").agg(F.max("id").alias("id")).collect()
        return StoredIds(floors={UUID(row["incarnation"]): row["id"] for row in highest}), done_again(text)

    def _undecided(self, again: int, number: int) -> DataFrame:
        """schemas.BRONZE of the repeats in batches from `again` on whose ids silver lacks without this batch."""
        name, place = ["incarnation", "id"], ["topic", "partition", "offset", "timestamp"]
        rows = self.store.spark.sql(schemas.deliveries(self.store.at("repeats"), self.header))
        rows = rows.where((F.col("batch") >= batch_name(again)) & (F.col("batch") < batch_name(number)))
        before = self.store.table("silver").where(F.col("batch") < batch_name(number)).select(*name)
        there = before.join(rows.select(*name), name, "left_semi").distinct()
        rows = rows.join(there, name, "left_anti").dropDuplicates(place)
        return rows.withColumn("problem", F.lit(None).cast("string")).select(*schemas.BRONZE.names)

    def _since(self, name: str, first: int, number: int) -> DataFrame:
        """What batches from the `first` on have written, without this one, and rows of which nobody knows."""
        batch = F.coalesce("batch", F.lit(batch_name(first)))
        return self.store.table(name).where((batch >= batch_name(first)) & (batch < batch_name(number)))

    def _kept(self, rows: DataFrame, stack: ExitStack) -> DataFrame:
        # On disk, for the most part the system's cache: in Java's own memory it costs more than it saves.
        kept = rows.persist(StorageLevel.DISK_ONLY)
        stack.callback(kept.unpersist)
        return kept


def _files(records: int) -> int:
    return -(-records // _IN_A_FILE) or 1

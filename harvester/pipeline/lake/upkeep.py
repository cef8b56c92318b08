"""Work of a lake outside its batches: folds states into `current`, compacts files, fills in new columns, rebuilds.

Folding and compaction take turns in one thread. Neither changes what a reader sees: the view of states is the same
before and after a fold, even if it is interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from urllib.parse import unquote

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas, streaming, tables
from harvester.pipeline.errors import InputMissing, TableMismatch
from harvester.pipeline.formats import DeltaStore, open_store
from harvester.pipeline.lake.batch import batch_name
from harvester.pipeline.lake.silver import TopicValues, deliveries, payload_table, unwritten
from harvester.pipeline.store import TableStore

# Slower to write, but these files are read again and again.
_CODEC = {"spark.sql.parquet.compression.codec": "zstd"}


class Upkeep:
    """Starts due work after each batch, unless earlier work still runs. The next call raises that work's error."""

    def __init__(
        self,
        store: TableStore,
        header: str,
        names: list[str],
        compact_every: int,
        fold_s: float,
        hit: Callable[[str], None] = lambda _: None,
        alone: AbstractContextManager[object] | None = None,
    ) -> None:
        """`names`: the tables partitioned by day. `compact_every`: batches; 0: never. `fold_s`: infinite: never.

        `alone`: entered while a table is compacted.
        """
        self._alone = alone or nullcontext()
        self._store, self._header, self._names = store.in_new_session(), header, names
        self._compact_every, self._fold_s, self._hit = compact_every, fold_s, hit
        for name, value in _CODEC.items():
            self._store.spark.conf.set(name, value)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lake-upkeep")
        self._at_it: Future[None] | None = None
        self._last: int | None = None
        self._compacted: int | None = None
        self._folded = -1
        self._folded_at = time.monotonic()

    def after(self, number: int) -> None:
        """Called when a batch is done."""
        self._last = number
        if self._compacted is None and self._compact_every:
            self._compacted = number // self._compact_every
        if self._at_it is not None and self._at_it.done():
            self._at_it.result()
            self._at_it = None
        is_due = time.monotonic() - self._folded_at >= self._fold_s or self._is_to_compact(number)
        if self._at_it is None and is_due:
            self._at_it = self._pool.submit(self._run, number)

    def close(self, *, finish: bool) -> None:
        """Waits for running work; with `finish`, also does what is left."""
        try:
            if self._at_it is not None:
                self._at_it.result()
            if self._last is not None and finish:
                self._run(self._last)
        finally:
            self._pool.shutdown()

    def _is_to_compact(self, number: int) -> bool:
        return self._compacted is not None and (number + 1) // self._compact_every > self._compacted

    def _run(self, number: int) -> None:
        if number > self._folded and not math.isinf(self._fold_s):
            self.fold(number)
            self._folded, self._folded_at = number, time.monotonic()
        if self._is_to_compact(number):
            self.compact()
            self._compacted = (number + 1) // self._compact_every

    def fold(self, number: int) -> None:
        """Folds the states of all batches up to this one into `current`. Idempotent."""
        at = self._store.at
        after = self._store.properties("current").get(tables.FOLDED)
        self._hit("lake.current")
        self._store.change(schemas.merge_states(at("current"), schemas.folded(at, self._header, after)))
        self._hit("lake.folded")
        self._store.set_property("current", tables.FOLDED, batch_name(number))

    def compact(self) -> None:
        """Compacts the small files of past days, and those of `current` and `cuts`."""
        self._hit("lake.compaction")
        today = datetime.now(UTC).date()
        for name in self._names:
            with self._alone:
                self._store.compact(name, today)
        for name in ("current", "cuts"):
            self._store.compact(name)


def fill_in(store: TableStore, header: str, values: TopicValues, say: Callable[[str], None]) -> None:
    """Rewrites the table of a topic's values from silver in one commit; values that do not fit go to `rejects`.

    Repeatable. No batch may be in progress, or half written and about to be repeated.
    """
    rows = store.spark.sql(schemas.deliveries(store.at("silver"), header)).where(F.col("topic") == values.topic)
    # An abandoned batch may have written values that silver lacks.
    if rows.isEmpty() and store.table(values.table).isEmpty():
        return
    say(f"filling in {values.table} from silver")
    known = store.table("rejects").where((F.col("reason") == schemas.BAD_PAYLOAD) & (F.col("topic") == values.topic))
    fitting, bad = values.split(rows)
    bad = unwritten(bad, [known])
    store.append(bad.withColumn("batch", F.lit(None).cast("string")), "rejects")
    store.replace(fitting, values.table)


def rebuild(spark: SparkSession, old: str, new: str, checkpoint: str | None = None) -> int:
    """Creates a lake of this version from one of an earlier version, which had a table `bronze`, in another directory.

    Returns its number of records. The new lake's job continues where the old one's ended: the checkpoint is copied,
    last, so that an interrupted rebuild is not a lake. The old lake is only read. Raises InputMissing, TableMismatch.
    """
    where = checkpoint or tables.path_of(old, "checkpoint")
    before, store = DeltaStore(spark, old), open_store(spark, new)
    if store.is_catalog or tables.listing(spark, new):
        raise TableMismatch(f"{new} is not an empty directory", hint="specify a new directory")
    text = tables.read_text(spark, f"{where}/{streaming.FILE}")
    done = [int(name) for name in tables.listing(spark, f"{where}/commits") if name.isdigit()]
    if text is None or not done or not before.exists("bronze"):
        raise InputMissing(
            f"no lake of an earlier version in {old}",
            hint="specify its directory, and its --checkpoint if that is elsewhere",
        )
    manifest, number = streaming.from_text(text, where), max(done)
    planned = streaming.planned(spark, where, number)
    assert planned is not None
    # The last batch may be half written; it will be repeated.
    whole = streaming.any_of([
        (F.col("topic") == topic) & (F.col("partition") == partition) & (F.col("offset") < end)
        for (topic, partition), end in planned.items()
    ])  # fmt: skip
    bronze = before.table("bronze").where(whole)
    first = before.table("silver").select("topic", "partition", "offset")
    values = {name: before.table(name) for name in before.values()}
    expanded = [
        payload_table(unquote(name.partition("/")[2]), rows.select("data.*").schema) for name, rows in values.items()
    ]
    store.prepare([*schemas.TABLES, *expanded], manifest.owner, manifest.header)
    # With the number of a batch, which reveals an outdated checkpoint.
    written = (manifest.owner, number)
    for name, how in (("silver", "left_semi"), ("repeats", "left_anti")):
        rows = deliveries(bronze.join(first, ["topic", "partition", "offset"], how), manifest.header)
        store.append(rows.withColumn("batch", F.lit(batch_name(number))), name, written)
    rejected = before.table("rejects").where(whole).withColumn("batch", F.lit(batch_name(number)))
    store.append(rejected.select(*schemas.REJECTS.names), "rejects", written)
    store.append(before.table("incarnations").select(*schemas.INCARNATIONS.names), "incarnations")
    names = store.table("silver").select("incarnation", "id")
    for name, rows in values.items():
        store.append(rows.join(names, ["incarnation", "id"], "left_semi").select(*rows.columns), name)
    upkeep = Upkeep(store, manifest.header, [], 0, 0.0)
    upkeep.fold(number)
    upkeep.close(finish=False)
    tables.copy(spark, where, tables.path_of(new, "checkpoint"))
    return spark.sql(schemas.bronze(store.at, manifest.header)).count()

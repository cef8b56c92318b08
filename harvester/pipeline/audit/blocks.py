"""Finds the records that an audit must examine, by blocks of ids and hashes of keys, without comparing all of them.

An audit of ten million records would sort and join all of them several times to find the few that are wrong. So it
first summarises what both sides have of each *block*, a stretch of 64 ids, in one number: a bit for each id. PostgreSQL
computes its own. From these bits follows exactly which blocks need a closer look, and the transforms of `checks` are
applied to their records and rows alone, as if there were no others:

    reread      an archived record is missing, or only some of the archived rows are in the range: the rows are needed
    examined    there are records, and the rows are needed, or records are repeated or not in the history

All records of an id are in one block, so whether one is a repeat, delivered, or known does not depend on what was left
out. Of a key, order is judged by itself: somewhere in a key that is out of order, a record comes right after one with a
higher id. All records of such a key are examined, too; if writers of a key do not wait for each other, that may be most
of the records. A key stands for its hash here, so others may be among them.

The history is read before the records. What it lists may move meanwhile, from the outbox into the archive; so rows that
are read later count only if the bits had them in the archive before. Rows that have left the archive cannot be judged.
"""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline.audit import checks
from harvester.pipeline.audit.checks import ARCHIVED, BEYOND, DELIVERED, PENDING, AuditScope, named, place_in_log
from harvester.pipeline.audit.schemas import BLOCKS, HISTORY_BLOCKS, MARKED, RECORDS, RecordSource
from harvester.pipeline.schemas import BITS, bit, block

BLOCK = ("incarnation", "block")


def of_records(records: DataFrame, expected: Column) -> DataFrame:
    """RECORDS with an origin → (BLOCK, records, ids, expected): their number, and the bits of all and of these."""
    one = F.expr(bit("id"))
    return records.groupBy("incarnation", F.expr(block("id")).alias("block")).agg(
        F.count(F.lit(1)).alias("records"),
        F.bit_or(one).alias("ids"),
        F.bit_or(F.when(expected, one).otherwise(F.lit(0))).alias("expected"),
    )


def compared(records: DataFrame, history: DataFrame, scope: AuditScope) -> DataFrame:
    """`of_records` and HISTORY_BLOCKS → BLOCKS, a row for each block of either."""
    assert {"ids", "rows", "first_at", "last_at"} <= set(HISTORY_BLOCKS.names)
    in_archive = F.col("source") == RecordSource.ARCHIVE
    some, whole = F.col("topic").isin(*scope.topics), F.lit(True)
    if scope.since is not None:
        some, whole = some & (F.col("last_at") >= F.lit(scope.since)), whole & (F.col("first_at") >= F.lit(scope.since))
    if scope.until is not None:
        some, whole = some & (F.col("first_at") < F.lit(scope.until)), whole & (F.col("last_at") < F.lit(scope.until))
    history = history.withColumns({"_some": in_archive & some, "_whole": in_archive & some & whole})

    def together(rows: Column) -> Column:
        return F.bit_or(F.when(rows, F.col("ids")).otherwise(F.lit(0)))

    known = history.groupBy(*BLOCK).agg(
        F.bit_or("ids").alias("known"),
        together(in_archive).alias("archived"),
        together(F.col("source") == RecordSource.OUTBOX).alias("waiting"),
        together(F.col("_whole")).alias("whole"),
        F.sum(F.when(F.col("_whole"), F.col("rows")).otherwise(F.lit(0))).alias("rows"),
        F.bool_or(F.col("_some") & ~F.col("_whole")).alias("partly"),
    )
    both = records.join(known, list(BLOCK), "full_outer").na.fill(0).na.fill(value=False)
    there = F.col("ids")
    lost = F.col("whole").bitwiseAND(F.bitwise_not(there)) != 0
    strange = F.col("expected").bitwiseAND(F.bitwise_not(F.col("known"))) != 0
    repeated = F.col("records") != F.bit_count(there)
    pending = F.bit_count(F.col("waiting").bitwiseAND(F.bitwise_not(there)))
    marked = both.withColumn("reread", lost | F.col("partly")).withColumn("pending", pending)
    examined = (F.col("records") > 0) & (F.col("reread") | strange | repeated)
    return marked.withColumn("examined", examined).select(*BLOCKS.names)


def tallies(blocks: DataFrame) -> DataFrame:
    """BLOCKS → (name, value): the archived rows of blocks that are not reread, all delivered, and all pending ones."""
    known = F.coalesce(F.sum(F.when(~F.col("reread"), F.col("rows"))), F.lit(0))
    pending = F.coalesce(F.sum("pending"), F.lit(0))
    return named(blocks, {ARCHIVED: known, DELIVERED: known, BEYOND: F.lit(0), PENDING: pending})


def in_blocks(marked: DataFrame, blocks: DataFrame) -> DataFrame:
    """MARKED → those in blocks that are examined: without the records that are examined because of their key."""
    wanted = blocks.where("examined").select(*BLOCK)
    return checks.matching(marked.withColumn("block", F.expr(block("id"))), wanted, BLOCK).select(*MARKED.names)


def origins(history: DataFrame) -> DataFrame:
    """HISTORY_BLOCKS → (origin): of the quarantined rows."""
    texts = history.where(F.col("origins").isNotNull()).select(F.explode(F.split("origins", " ")).alias("origin"))
    return texts.select(F.unhex("origin").alias("origin"))


def listed_ids(blocks: DataFrame) -> DataFrame:
    """BLOCKS → (incarnation, id): what the history listed, in blocks that are examined."""
    places = F.expr(f"filter(sequence(0, {2**BITS - 1}), place -> getbit(known, place) = 1)")
    rows = blocks.where("examined").select("incarnation", "block", F.explode(places).alias("place"))
    return rows.select("incarnation", F.expr(f"shiftleft(block, {BITS}) + place").alias("id"))


def reread_rows(archive: DataFrame, blocks: DataFrame) -> DataFrame:
    """HISTORY and BLOCKS → the rows of blocks that are to be reread, as far as they were archived before."""
    rows = archive.withColumn("block", F.expr(block("id")))
    wanted = checks.small(blocks.where("reread").select(*BLOCK, "archived"))
    return (
        rows.join(wanted, list(BLOCK))
        .where(F.col("archived").bitwiseAND(F.expr(bit("id"))) != 0)
        .drop("block", "archived")
    )


def are_all(rows: DataFrame, blocks: DataFrame) -> bool:
    """True if `reread_rows` has every id that was archived in these blocks when they were summarised."""
    wanted = blocks.where("reread").agg(F.sum(F.bit_count("archived"))).collect()[0][0]
    return not wanted or rows.select("incarnation", "id").distinct().count() == wanted


def disordered(records: DataFrame, anew: Collection[str] = ()) -> DataFrame:
    """RECORDS with an origin → (key_hash): of the keys with a record right after one with a higher id.

    `anew`: recreated topics, whose records are ordered by their timestamps.
    """
    rows = records.where(F.col("key").isNotNull()).withColumn("key_hash", _key_hash())
    key = Window.partitionBy("key_hash").orderBy(*place_in_log(anew))
    return rows.withColumn("_before", F.lag("id").over(key)).where("_before > id").select("key_hash").distinct()


def _key_hash() -> Column:
    return F.xxhash64("topic", "partition", "incarnation", "key")


def split(records: DataFrame, blocks: DataFrame, keys: DataFrame) -> tuple[DataFrame, DataFrame]:
    """RECORDS with an origin → those to examine; and the others, as MARKED: each the first of its id, and in order."""
    fine = {"first": F.lit(True), "after": F.lit(None).cast("bigint")}
    examined = blocks.where("examined").select(*BLOCK, F.lit(True).alias("_block"))
    if examined.isEmpty() and keys.isEmpty():
        return records.where(F.lit(False)), records.withColumns(fine).select(*MARKED.names)
    rows = records.withColumns({"block": F.expr(block("id")), "key_hash": _key_hash()})
    rows = rows.join(checks.small(examined), list(BLOCK), "left")
    rows = rows.join(checks.small(keys.withColumn("_key", F.lit(True))), "key_hash", "left")
    wrong = F.col("_block").isNotNull() | (F.col("_key").isNotNull() & F.col("key").isNotNull())
    return rows.where(wrong).select(*RECORDS.names), rows.where(~wrong).withColumns(fine).select(*MARKED.names)

"""What every job that follows topics does with its checkpoint, and how it begins. Thin."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from harvester.pipeline import checkpoint, files, tables
from harvester.pipeline.errors import CheckpointMismatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def claim(
    spark: SparkSession, where: str, job: str, topics: tuple[str, ...], header: str, table: str
) -> checkpoint.Manifest:
    """Whose the checkpoint `where` is from now on; CheckpointMismatch unless the job can go on with it.

    `table` is the path of one that the job fills: what was read before has to be there.
    """
    file = f"{where}/{checkpoint.FILE}"
    text = files.read_text(spark, file)
    stored = checkpoint.from_text(text, where) if text is not None else None
    used = bool({"offsets", "commits", "metadata"} & set(files.listing(spark, where)))
    wanted = checkpoint.Manifest(uuid.uuid4().hex, job, topics, header)
    decided = checkpoint.decide(stored, wanted, where, used=used)
    if used and not tables.exists(spark, table):
        raise CheckpointMismatch(
            f"the checkpoint {where} has read records into tables that are not in {table.rpartition('/')[0]}",
            hint="name the directory they are in, or begin anew in another one",
        )
    if decided != stored:
        files.write_text(spark, file, checkpoint.to_text(decided))
    return decided


def start(writer: Any, *, once: bool, trigger_s: float) -> StreamingQuery:
    """Begin a stream: `once` up to the ends that the topics have now, else a batch every `trigger_s` seconds."""
    if once:
        query: StreamingQuery = writer.trigger(availableNow=True).start()
    else:
        query = writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds").start()
    return query

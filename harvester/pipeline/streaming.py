"""What every job that follows topics does: claim its checkpoint, begin, and hear of each batch until the end. Thin."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from harvester.pipeline import checkpoint, files, tables
from harvester.pipeline.errors import CheckpointMismatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S = 0.5


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


def follow(query: StreamingQuery, stop: Callable[[], bool], take: Callable[[Mapping[str, Any]], None]) -> None:
    """Give `take` each report of the query, in order, until it ends or `stop()`; raises what ended the query.

    Reports are as Spark's manual shows them in JSON. There are some without a batch while nothing comes.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    reports, ended = Reports(query), False
    try:
        while not ended:
            failed = None
            try:
                ended = bool(query.awaitTermination(_LOOK_S))  # type: ignore[arg-type]
            except PySparkException as error:
                failed = error  # what was done before is still to be told
            if not ended and failed is None and stop():
                query.stop()
                ended = True
            for said in reports.new():
                take(said)
            if failed is not None:
                raise failed
    except (Py4JError, OSError, EOFError):
        # A signal to the whole process group ends the Java process as well, and may be quicker than we are.
        if not stop():
            raise


class Reports:
    """The reports of a query, each once.

    Spark keeps 100. PySpark's `recentProgress` makes objects of all, by hundreds of calls to Java for each: looked at
    twice a second, that is a core. Here only those are fetched that are new.
    """

    def __init__(self, query: StreamingQuery) -> None:
        self._query: Any = query
        self._last = ""

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call, oldest first."""
        kept = self._query._jsq.recentProgress()
        found: list[dict[str, Any]] = []
        for place in reversed(range(len(kept))):
            report = kept[place]
            if report.timestamp() == self._last:
                break
            found.append(json.loads(report.json()))
        if found:
            self._last = found[0]["timestamp"]
        return found[::-1]

"""What every job that follows topics does: claim its checkpoint, begin, and report each batch until the end.

Whose a checkpoint is: a file of ours beside Spark's, so that a job never goes on from another one's position.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harvester.pipeline import tables
from harvester.pipeline.errors import CheckpointMismatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FILE = "harvester.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """`owner` is a name made up for the checkpoint, which its tables bear as well."""

    owner: str
    job: str
    topics: tuple[str, ...]
    header: str


def to_text(manifest: Manifest) -> str:
    """As it is stored."""
    return json.dumps(
        {
            "version": _VERSION,
            "owner": manifest.owner,
            "job": manifest.job,
            "topics": list(manifest.topics),
            "header": manifest.header,
        }
    )


def from_text(text: str, where: str) -> Manifest:
    """Read `to_text`; CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            raise CheckpointMismatch(f"the checkpoint {where} is of version {stored['version']}, this is {_VERSION}")
        return Manifest(str(stored["owner"]), str(stored["job"]), tuple(stored["topics"]), str(stored["header"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{where}/{FILE} cannot be read", hint="restore it; without it nobody knows what was read"
        ) from error


def decide(stored: Manifest | None, wanted: Manifest, where: str, *, used: bool) -> Manifest:
    """What to store from now on. `used`: Spark has written there. CheckpointMismatch unless `wanted` can go on there.

    More topics than before are fine: the new ones are read from their beginning.
    """
    if stored is None:
        if used:
            raise CheckpointMismatch(
                f"{where} is the checkpoint of something else", hint="give each job a directory of its own"
            )
        return wanted
    if stored.job != wanted.job:
        raise CheckpointMismatch(
            f"the checkpoint {where} belongs to the job {stored.job}", hint="give each job a directory of its own"
        )
    if stored.header != wanted.header:
        raise CheckpointMismatch(
            f"the checkpoint {where} was made with the header {stored.header!r}, not {wanted.header!r}",
            hint="records before and after would be recognised by different names",
        )
    if gone := _missing(stored.topics, wanted.topics):
        raise CheckpointMismatch(
            f"the checkpoint {where} is for topics {', '.join(stored.topics)}; without {', '.join(gone)} it cannot"
            " be gone on from",
            hint="name these topics as well, or another directory",
        )
    return Manifest(stored.owner, wanted.job, wanted.topics, wanted.header)


def _missing(before: Collection[str], now: Collection[str]) -> list[str]:
    return [topic for topic in before if topic not in set(now)]


_LOOK_S = 0.5


def claim(spark: SparkSession, where: str, job: str, topics: tuple[str, ...], header: str, table: str) -> Manifest:
    """Whose the checkpoint `where` is from now on; CheckpointMismatch unless the job can go on with it.

    `table` is the path of one that the job fills: what was read before has to be there.
    """
    file = f"{where}/{FILE}"
    text = tables.read_text(spark, file)
    stored = from_text(text, where) if text is not None else None
    used = bool({"offsets", "commits", "metadata"} & set(tables.listing(spark, where)))
    wanted = Manifest(uuid.uuid4().hex, job, topics, header)
    decided = decide(stored, wanted, where, used=used)
    if used and not tables.exists(spark, table):
        raise CheckpointMismatch(
            f"the checkpoint {where} has read records into tables that are not in {table.rpartition('/')[0]}",
            hint="name the directory they are in, or begin anew in another one",
        )
    if decided != stored:
        tables.write_text(spark, file, to_text(decided))
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

"""Follows topics as a stream: starts the query, reports each batch until the end.

Spark writes the offsets at which a batch ends into the checkpoint before the batch begins; `planned` reads them. Our
own file next to Spark's, the manifest, names the checkpoint's owner, so that no job continues at another's position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from harvester.pipeline import tables
from harvester.pipeline.errors import CheckpointMismatch
from harvester.pipeline.source import Place

if TYPE_CHECKING:
    from harvester.pipeline.store import TableStore

FILE = "harvester.json"
_VERSION = 1
_LOOK_S = 0.5
# What Spark writes for a stream without state (OffsetSeqLog, CommitLog).
_ABOUT = '{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}'
_COMMITTED = '{"nextBatchWatermarkMs":0}'


@dataclass(frozen=True, slots=True)
class Plan:
    """A position that Spark has not recorded itself: the stream continues after batch `number`, at `start`.

    `ends`: the next batch rereads up to there what batch `number` may have written in part; rows already written are
    in batches from `since` on. `adopts`: the current owner of the tables, to be replaced by the checkpoint's.
    """

    number: int
    start: Mapping[Place, int]
    ends: Mapping[Place, int] | None = None
    since: int | None = None
    adopts: str | None = None


@dataclass(frozen=True, slots=True)
class TopicLog:
    """The log of a topic; its rows are in batches from `since` on. `id` is Kafka's: a recreated topic has a new one.

    `returned`: the first batch after it was retired and named again; 0: it never was.
    """

    id: str
    since: int
    returned: int = 0

    @property
    def read_since(self) -> int:
        """The batch from which on the topic has been read all the time."""
        return max(self.since, self.returned)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The owner and progress of a checkpoint. `owner`: a generated name, also noted on its tables.

    `payloads`: the columns of those tables of values that contain every record. `plan` is written ahead, so that the
    next start completes an interrupted one. `logs`: those of a lake's topics, including retired ones; empty if the
    brokers give topics no ids.
    """

    owner: str
    job: str
    topics: tuple[str, ...]
    header: str
    payloads: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    logs: Mapping[str, TopicLog] = field(default_factory=dict)


def to_text(manifest: Manifest) -> str:
    """The stored form of a manifest."""
    stored = {"version": _VERSION, **asdict(replace(manifest, plan=None))}
    if (plan := manifest.plan) is not None:
        ends = None if plan.ends is None else by_topic(plan.ends)
        stored["plan"] = {**asdict(plan), "start": by_topic(plan.start), "ends": ends}
    return json.dumps(stored)


def from_text(text: str, where: str) -> Manifest:
    """The inverse of `to_text`; raises CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            raise CheckpointMismatch(f"the checkpoint {where} has version {stored['version']}, not {_VERSION}")
        plan = stored.get("plan")
        if plan is not None:
            ends = None if plan["ends"] is None else places(plan["ends"])
            plan = Plan(**{**plan, "start": places(plan["start"]), "ends": ends})
        payloads = {str(topic): str(columns) for topic, columns in stored.get("payloads", {}).items()}
        owner, job, header = (str(stored[name]) for name in ("owner", "job", "header"))
        return Manifest(owner, job, tuple(stored["topics"]), header, payloads, plan, _logs(stored.get("logs", {})))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(
            f"{where}/{FILE} cannot be read", hint="restore it; it records what was read"
        ) from error


def logs_to_text(logs: Mapping[str, TopicLog]) -> str:
    """The form stored in a table's property."""
    return json.dumps({topic: asdict(log) for topic, log in logs.items()}, sort_keys=True)


def logs_from_text(text: str | None) -> dict[str, TopicLog]:
    """The inverse of `logs_to_text`; {} for None."""
    return _logs(json.loads(text or "{}"))


def _logs(stored: Mapping[str, Any]) -> dict[str, TopicLog]:
    return {
        str(topic): TopicLog(str(log["id"]), int(log["since"]), int(log.get("returned", 0)))
        for topic, log in stored.items()
    }


def decide(stored: Manifest | None, wanted: Manifest, where: str, *, used: bool) -> Manifest:
    """The manifest to store from now on; raises CheckpointMismatch unless `wanted` can continue there.

    `used`: Spark has written there. Topics may be added; new ones are read from their beginning.
    """
    if stored is None:
        if used:
            raise CheckpointMismatch(
                f"{where} is the checkpoint of something else", hint="give each job its own directory"
            )
        return wanted
    if stored.job != wanted.job:
        raise CheckpointMismatch(
            f"the checkpoint {where} belongs to the job {stored.job}", hint="give each job its own directory"
        )
    if stored.header != wanted.header:
        raise CheckpointMismatch(
            f"the checkpoint {where} was created with the header {stored.header!r}, not {wanted.header!r}",
            hint="earlier and later records would be identified by different headers",
        )
    if gone := [topic for topic in stored.topics if topic not in wanted.topics]:
        raise CheckpointMismatch(
            f"the checkpoint {where} is for topics {', '.join(stored.topics)}; it cannot continue without"
            f" {', '.join(gone)}",
            hint="name these topics too, drop them with --retire-topic, or use another directory",
        )
    return replace(stored, topics=wanted.topics)


def examine(spark: SparkSession, where: str) -> tuple[Manifest | None, bool]:
    """The manifest of a checkpoint, None if it does not exist, and whether Spark has written there."""
    text = tables.read_text(spark, f"{where}/{FILE}")
    used = bool({"offsets", "commits", "metadata"} & set(tables.listing(spark, where)))
    return (from_text(text, where) if text is not None else None), used


def require_table(into: TableStore, where: str, table: str, *, used: bool) -> None:
    """Raises CheckpointMismatch if the checkpoint has read records into a table that does not exist."""
    if used and not into.exists(table):
        raise CheckpointMismatch(
            f"the checkpoint {where} has read records into tables that are not in {into.root}",
            hint="specify the directory of these tables, or start over in another one",
        )


_TOGETHER = "restore it and its tables to the same point in time, or start over in another directory"


def outrun(
    into: TableStore, where: str, names: Iterable[str], owner: str, hint: str = _TOGETHER
) -> CheckpointMismatch | None:
    """An error if the owner's tables have batches that the checkpoint has not begun, as an old copy of it has not.

    Its next batches would reuse those numbers, and the tables would skip what they write.
    """
    begun, written = last_begun(into.spark, where), into.last_written(names, owner)
    if written is None or (begun is not None and written <= begun):
        return None
    known = "knows of no batch" if begun is None else f"ends with batch {begun}"
    return CheckpointMismatch(
        f"the checkpoint {where} is older than its tables: it {known}, and they have batch {written}", hint=hint
    )


def last_begun(spark: SparkSession, checkpoint: str) -> int | None:
    """The last batch that Spark has planned; None if there is none."""
    return max((int(name) for name in tables.listing(spark, f"{checkpoint}/offsets") if name.isdigit()), default=None)


def store(spark: SparkSession, where: str, manifest: Manifest) -> None:
    """Writes the manifest."""
    tables.write_text(spark, f"{where}/{FILE}", to_text(manifest))


def go_on(spark: SparkSession, where: str, plan: Plan) -> None:
    """Writes a plan in the form of Spark's files. Repeatable: the manifest keeps the plan until this is done."""
    before = plan.number - 1
    if plan.number and tables.read_text(spark, f"{where}/offsets/{before}") is None:
        # Spark needs the position at which its last batch began.
        tables.write_text(spark, f"{where}/offsets/{before}", _entry(plan.start))
    tables.write_text(spark, f"{where}/offsets/{plan.number}", _entry(plan.start))
    if plan.ends is not None:
        tables.write_text(spark, f"{where}/offsets/{plan.number + 1}", _entry(plan.ends))
    tables.write_text(spark, f"{where}/commits/{plan.number}", f"v1\n{_COMMITTED}")


def _entry(ends: Mapping[Place, int]) -> str:
    return f"v1\n{_ABOUT}\n{by_topic(ends)}"


def planned(spark: SparkSession, checkpoint: str, batch: int) -> dict[Place, int] | None:
    """The end of a batch in each partition, as recorded before it begins; None if it is not recorded, or no longer."""
    text = tables.read_text(spark, f"{checkpoint}/offsets/{batch}")
    return None if text is None else parse(text, checkpoint)


def parse(text: str, where: str) -> dict[Place, int]:
    """Parses a file of the directory `offsets`. Raises CheckpointMismatch, which names `where`, if it is invalid."""
    # A line with the format's version, one about the batch, and one for each source of the stream (OffsetSeqLog).
    try:
        version, _, ends = text.strip().splitlines()
        if version != "v1":
            raise ValueError(version)
        return places(ends)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"the checkpoint {where} was not written by a Spark that this harvester knows",
            hint="use the version of Spark that created it",
        ) from error


def any_of(conditions: Sequence[Column]) -> Column:
    """Whether any condition holds, built as a tree: a chain over a thousand partitions would be too deep for Spark."""
    half = len(conditions) // 2
    return any_of(conditions[:half]) | any_of(conditions[half:]) if half else conditions[0]


def by_topic(offsets: Mapping[Place, int]) -> str:
    """Offsets in the form of the options of Spark's Kafka source."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        found.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(found)


def places(text: str) -> dict[Place, int]:
    """The inverse of `by_topic`."""
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in json.loads(text).items()
        for partition, offset in partitions.items()
    }


def first_begins(spark: SparkSession, where: str) -> dict[Place, int]:
    """The offsets at which the very first batch begins, as Spark's Kafka source has recorded; empty if unknown."""
    _, _, first = (tables.read_text(spark, f"{where}/sources/0/0") or "").partition("\n")
    return places(first) if first else {}


def start(writer: Any, *, once: bool, trigger_s: float) -> StreamingQuery:
    """Starts a stream: `once` up to the current ends of the topics, otherwise a batch every `trigger_s` seconds."""
    trigger = {"availableNow": True} if once else {"processingTime": f"{round(trigger_s * 1000)} milliseconds"}
    query: StreamingQuery = writer.trigger(**trigger).start()
    return query


def follow(query: StreamingQuery, stop: Callable[[], bool], take: Callable[[Mapping[str, Any]], None]) -> None:
    """Passes the report of each batch to `take`, in order, until the query ends or `stop()`; raises the query's error.

    Reports have the JSON form that Spark's manual shows.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    reports, ended, last = Reports(query), False, -1
    try:
        while not ended:
            failed = None
            try:
                ended = bool(query.awaitTermination(_LOOK_S))  # type: ignore[arg-type]
            except PySparkException as error:
                failed = error  # finished batches are still to be reported
            if not ended and failed is None and stop():
                query.stop()
                ended = True
            for said in reports.new():
                # While no records arrive, Spark reports on a batch that did not take place.
                if said["batchId"] > last and "addBatch" in said["durationMs"]:
                    last = said["batchId"]
                    take(said)
            if failed is not None:
                raise failed
    except (Py4JError, OSError, EOFError):
        # A signal to the process group also ends the Java process, possibly before this one.
        if not stop():
            raise


class Reports:
    """The reports of a query, each once.

    Spark keeps 100. PySpark's `recentProgress` converts all of them, with hundreds of calls to Java for each; polled
    twice a second, that occupies a core. This class fetches only new ones.
    """

    def __init__(self, query: StreamingQuery) -> None:
        self._query: Any = query
        self._last = ""

    def new(self) -> list[dict[str, Any]]:
        """The reports since the last call, oldest first."""
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

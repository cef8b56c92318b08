"""Follows topics as a stream: claims its checkpoint, starts the query, reports each batch until the end.

Spark writes the offsets at which a batch ends into the checkpoint before the batch begins; `ranges` reads them. A file
of ours beside Spark's, the manifest, says whose the checkpoint is, so that no job goes on from another one's position.
"""

from __future__ import annotations

import json
import uuid
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
# What Spark writes of a stream without state (OffsetSeqLog, CommitLog).
_ABOUT = '{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}'
_COMMITTED = '{"nextBatchWatermarkMs":0}'


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a stream is to go on that Spark has not written down: behind the batch `number`, at `start`.

    `ends`: the next batch reads up to there again what that one may have written in part; its rows that are there
    already are of batches from `since` on. `adopts`: the tables bear this name, and are to bear the checkpoint's.
    """

    number: int
    start: Mapping[Place, int]
    ends: Mapping[Place, int] | None = None
    since: int | None = None
    adopts: str | None = None


@dataclass(frozen=True, slots=True)
class TopicLog:
    """What is read of a topic from the batch `since` on. `id` is Kafka's own: a topic that is made anew has another."""

    id: str
    since: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`owner` is a name made up for the checkpoint, which its tables bear as well.

    `payloads`: columns of the tables of values that have every record. `plan` is written ahead: a start that was cut
    off is continued by the next one. `logs` are those of the topics of a lake, also of retired ones, unless the brokers
    give topics no ids.
    """

    owner: str
    job: str
    topics: tuple[str, ...]
    header: str
    payloads: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    logs: Mapping[str, TopicLog] = field(default_factory=dict)


def to_text(manifest: Manifest) -> str:
    """The manifest as it is stored."""
    stored = {"version": _VERSION, **asdict(replace(manifest, plan=None))}
    if (plan := manifest.plan) is not None:
        ends = None if plan.ends is None else by_topic(plan.ends)
        stored["plan"] = {**asdict(plan), "start": by_topic(plan.start), "ends": ends}
    return json.dumps(stored)


def from_text(text: str, where: str) -> Manifest:
    """Reads `to_text`; raises CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            raise CheckpointMismatch(f"the checkpoint {where} is of version {stored['version']}, this is {_VERSION}")
        plan = stored.get("plan")
        if plan is not None:
            ends = None if plan["ends"] is None else places(plan["ends"])
            plan = Plan(**{**plan, "start": places(plan["start"]), "ends": ends})
        payloads = {str(topic): str(columns) for topic, columns in stored.get("payloads", {}).items()}
        owner, job, header = (str(stored[name]) for name in ("owner", "job", "header"))
        return Manifest(owner, job, tuple(stored["topics"]), header, payloads, plan, _logs(stored.get("logs", {})))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(
            f"{where}/{FILE} cannot be read", hint="restore it; without it nobody knows what was read"
        ) from error


def logs_to_text(logs: Mapping[str, TopicLog]) -> str:
    """As a property of a table has them."""
    return json.dumps({topic: asdict(log) for topic, log in logs.items()}, sort_keys=True)


def logs_from_text(text: str | None) -> dict[str, TopicLog]:
    """Reads `logs_to_text`; of None there are none."""
    return _logs(json.loads(text or "{}"))


def _logs(stored: Mapping[str, Any]) -> dict[str, TopicLog]:
    return {str(topic): TopicLog(str(log["id"]), int(log["since"])) for topic, log in stored.items()}


def decide(stored: Manifest | None, wanted: Manifest, where: str, *, used: bool) -> Manifest:
    """The manifest to store from now on; raises CheckpointMismatch unless `wanted` can go on there.

    `used`: Spark has written there. Topics may be added; the new ones are read from their beginning.
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
    if gone := [topic for topic in stored.topics if topic not in wanted.topics]:
        retire = ", drop them with --retire-topic," if wanted.job == "lake" else ""
        raise CheckpointMismatch(
            f"the checkpoint {where} is for topics {', '.join(stored.topics)}; it cannot continue without"
            f" {', '.join(gone)}",
            hint=f"name these topics as well{retire} or name another directory",
        )
    return replace(stored, topics=wanted.topics)


def examine(spark: SparkSession, where: str) -> tuple[Manifest | None, bool]:
    """The manifest of a checkpoint, None where there is none, and whether Spark has written there."""
    text = tables.read_text(spark, f"{where}/{FILE}")
    used = bool({"offsets", "commits", "metadata"} & set(tables.listing(spark, where)))
    return (from_text(text, where) if text is not None else None), used


def claim(
    into: TableStore, where: str, job: str, topics: tuple[str, ...], header: str, names: Sequence[str]
) -> Manifest:
    """Claims the checkpoint `where`; raises CheckpointMismatch unless the job can go on with it.

    `names` are the tables that the job fills: what was read before has to be in the first one.
    """
    stored, used = examine(into.spark, where)
    decided = decide(stored, Manifest(uuid.uuid4().hex, job, topics, header), where, used=used)
    require_table(into, where, names[0], used=used)
    if error := outrun(into, where, names, decided.owner):
        raise error
    if decided != stored:
        store(into.spark, where, decided)
    return decided


def require_table(into: TableStore, where: str, table: str, *, used: bool) -> None:
    """Raises CheckpointMismatch where the checkpoint has read records into a table that is not there."""
    if used and not into.exists(table):
        raise CheckpointMismatch(
            f"the checkpoint {where} has read records into tables that are not in {into.root}",
            hint="name the directory they are in, or begin anew in another one",
        )


_TOGETHER = "restore it and its tables as of the same time, or begin anew in another directory"


def outrun(
    into: TableStore, where: str, names: Iterable[str], owner: str, hint: str = _TOGETHER
) -> CheckpointMismatch | None:
    """An error if tables of the `owner` have batches that the checkpoint has not begun: it is an older one.

    Its next batches would bear the numbers of those, and the tables would leave out what they write.
    """
    begun, written = last_begun(into.spark, where), into.last_written(names, owner)
    if written is None or (begun is not None and written <= begun):
        return None
    known = "knows of no batch" if begun is None else f"ends with batch {begun}"
    return CheckpointMismatch(
        f"the checkpoint {where} is older than its tables: it {known}, and they have batch {written}", hint=hint
    )


def last_begun(spark: SparkSession, checkpoint: str) -> int | None:
    """The last batch that Spark has planned; None where there is none."""
    return max((int(name) for name in tables.listing(spark, f"{checkpoint}/offsets") if name.isdigit()), default=None)


def store(spark: SparkSession, where: str, manifest: Manifest) -> None:
    """Writes the manifest."""
    tables.write_text(spark, f"{where}/{FILE}", to_text(manifest))


def go_on(spark: SparkSession, where: str, plan: Plan) -> None:
    """Writes a plan as Spark's own files: repeatable. The manifest has it, and is to lose it afterwards."""
    before = plan.number - 1
    if plan.number and tables.read_text(spark, f"{where}/offsets/{before}") is None:
        # Spark wants to know where its last batch began.
        tables.write_text(spark, f"{where}/offsets/{before}", _entry(plan.start))
    tables.write_text(spark, f"{where}/offsets/{plan.number}", _entry(plan.start))
    if plan.ends is not None:
        tables.write_text(spark, f"{where}/offsets/{plan.number + 1}", _entry(plan.ends))
    tables.write_text(spark, f"{where}/commits/{plan.number}", f"v1\n{_COMMITTED}")


def _entry(ends: Mapping[Place, int]) -> str:
    return f"v1\n{_ABOUT}\n{by_topic(ends)}"


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What Spark writes down before a batch begins: where it ends in each partition, and the watermark it has."""

    watermark_ms: int
    ends: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class Range:
    """The offsets from `first`, or from the beginning, to before `end`."""

    topic: str
    partition: int
    first: int | None
    end: int


def planned(spark: SparkSession, checkpoint: str, batch: int) -> PlannedBatch | None:
    """What the checkpoint says of a batch; None where it says nothing (any more)."""
    text = tables.read_text(spark, f"{checkpoint}/offsets/{batch}")
    return None if text is None else parse(text, checkpoint)


def parse(text: str, where: str) -> PlannedBatch:
    """Reads an entry of the checkpoint's directory `offsets`; CheckpointMismatch, which names `where`, for others."""
    # A line with the format's version, one about the batch, and one for each source of the stream (OffsetSeqLog).
    try:
        version, about, ends = text.strip().splitlines()
        if version != "v1":
            raise ValueError(version)
        return PlannedBatch(int(json.loads(about)["batchWatermarkMs"]), places(ends))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"the checkpoint {where} was not written by a Spark that this harvester knows",
            hint="go on with the Spark that it was made with",
        ) from error


def ranges(before: PlannedBatch | None, now: PlannedBatch) -> list[Range]:
    """The offsets of a batch, given the one before; None for the first batch."""
    begun = {} if before is None else before.ends
    return [
        Range(*place, begun.get(place), end) for place, end in sorted(now.ends.items()) if end > begun.get(place, 0)
    ]


def any_of(conditions: Sequence[Column]) -> Column:
    """Whether one of these holds, as a tree: a chain of a thousand partitions would be too deep for Spark to walk."""
    half = len(conditions) // 2
    return any_of(conditions[:half]) | any_of(conditions[half:]) if half else conditions[0]


def by_topic(offsets: Mapping[Place, int]) -> str:
    """Offsets as options of Spark's Kafka source take them."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        found.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(found)


def places(text: str) -> dict[Place, int]:
    """Reads `by_topic`."""
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in json.loads(text).items()
        for partition, offset in partitions.items()
    }


def start(writer: Any, *, once: bool, trigger_s: float) -> StreamingQuery:
    """Starts a stream: `once` up to the ends that the topics have now, else a batch every `trigger_s` seconds."""
    trigger = {"availableNow": True} if once else {"processingTime": f"{round(trigger_s * 1000)} milliseconds"}
    query: StreamingQuery = writer.trigger(**trigger).start()
    return query


def follow(query: StreamingQuery, stop: Callable[[], bool], take: Callable[[Mapping[str, Any]], None]) -> None:
    """Gives `take` the report of each batch, in order, until the query ends or `stop()`; raises what ended the query.

    Reports are as Spark's manual shows them in JSON.
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
                failed = error  # what was done before is still to be told
            if not ended and failed is None and stop():
                query.stop()
                ended = True
            for said in reports.new():
                # While nothing comes there are reports on a batch that has not been.
                if said["batchId"] > last and "addBatch" in said["durationMs"]:
                    last = said["batchId"]
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

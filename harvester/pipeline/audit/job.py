"""The job `audit`: checks whether the topics contain what the database says was delivered, once and in order.

The order of its steps makes it correct while the harvester runs: first the history (purged rows had been acknowledged
before), then the ends of the topics, then the records up to there. `blocks` finds the records that need a closer look;
`checks` and `skew` define frames, which are collected here. The records of topics are read once and kept, those of a
lake, which are read quickly, several times.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StructType
from pyspark.sql.window import Window

from harvester.errors import ExitCode
from harvester.origin import HEADER
from harvester.outbox.tables import OutboxTable
from harvester.pipeline import tables
from harvester.pipeline.audit import blocks, checks, inputs, skew
from harvester.pipeline.audit.checks import ProducerStream
from harvester.pipeline.audit.inputs import history_facts, query, read_so_far, whole_since
from harvester.pipeline.audit.report import (
    EXAMPLES,
    AuditFinding,
    AuditReport,
    FindingGroup,
    HotKey,
    Latency,
    grouped,
    key_text,
    not_judged,
)
from harvester.pipeline.audit.schemas import (
    AUDITS_TABLE,
    FINDINGS,
    FINDINGS_TABLE,
    HISTORY,
    HISTORY_BLOCKS,
    FindingKind,
    RecordSource,
    Severity,
)
from harvester.pipeline.errors import PipelineError
from harvester.pipeline.formats import open_store
from harvester.pipeline.jdbc import jdbc_source
from harvester.pipeline.session import clear_errors, keep
from harvester.pipeline.store import TableStore

MARGIN = timedelta(hours=1)
_NEVER = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """What to audit: either `topics`, with `kafka` as options of Kafka's Java client, or a `lake`.

    `since` ≤ … < `until` is the range; reading begins `margin` before it. `dsn` None: without a history.
    `serial_keys`: writers of a key wait for each other, so that ids of a key out of order are a violation. `once`:
    repeats are not allowed. `to`: the location of the findings' tables. `checkpoint`: the lake's; None: next to it.
    """

    topics: tuple[str, ...] = ()
    lake: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
    header: str = HEADER
    dsn: str | None = None
    table: OutboxTable = field(default_factory=lambda: OutboxTable(None, "outbox"))
    since: datetime | None = None
    until: datetime | None = None
    margin: timedelta = MARGIN
    serial_keys: bool = True
    once: bool = False
    notice_topic: str = ""
    record_timestamps: bool = False
    to: str | None = None
    checkpoint: str | None = None


EVERY_S = 5.0


@contextmanager
def stages_told(spark: SparkSession, tell: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Reports how many tasks of the running stages are done, every `every_s` seconds during the block."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(spark, tell, every_s, ended), name="spark progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(spark: SparkSession, tell: Callable[[str], None], every_s: float, ended: threading.Event) -> None:
    from py4j.protocol import Py4JError

    tracker = spark.sparkContext.statusTracker()
    before = ""
    while not ended.wait(every_s):
        try:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except (Py4JError, OSError):
            return  # the Java process has ended; its user reports why
        done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
        tasks = sum(stage.numTasks for stage in stages if stage is not None)
        line = f"{done:,} of {tasks:,} tasks done"
        if tasks and line != before:
            tell(line)
            before = line


Progress = Callable[[str], None]


class AuditUnfinished(PipelineError):
    """Spark failed, so nothing was judged. That differs from a broken guarantee."""

    exit_code = ExitCode.UNAVAILABLE


def run(spark: SparkSession, settings: AuditSettings, *, progress: Progress = lambda _: None) -> AuditReport:
    """Runs an audit, and writes the findings if requested.

    Raises InputMissing, TableMismatch, BrokerUnavailable, DatabaseUnavailable, SchemaError, ConfigurationError, and
    AuditUnfinished for other failures to read; never because of a finding.
    """
    began = None if settings.since is None else settings.since - settings.margin
    with ExitStack() as kept, clear_errors("the audit", AuditUnfinished, "nothing was changed: repeat it"):
        inputs.require(spark, settings.kafka, settings.topics, settings.lake)
        if settings.to is not None:
            open_store(spark, settings.to).prepare([FINDINGS_TABLE, AUDITS_TABLE])
        past = _history(spark, settings, began, kept, progress)
        given = _input(spark, settings, began, progress)
        records = inputs.trimmed(given.bronze, settings.since, settings.until, settings.notice_topic)
        if settings.lake is None:
            records = keep(records, kept)
        read = read_so_far(records)
        whole_input = read.values()
        count, foreign = sum(one.records for one in whole_input), sum(one.foreign for one in whole_input)
        progress(f"{count:,} records read")
        whole, emptied = whole_since(given.bounds, read, began, given.late)
        topics = given.topics or tuple(sorted({topic for topic, _ in read}))
        compacted = given.bounds.compacted if given.bounds is not None else ()
        elsewhere = past.topics - set(topics)
        latest = None if given.bounds is not None else _end_of_lake(whole_input)
        until = _earlier(settings.until, latest)
        behind = inputs.behind(spark, settings.kafka, given, read, until)
        doubtful = {*compacted, *(topic for topic, _ in emptied), *behind}
        notes = inputs.lake_notes(spark, settings.lake, records, began)
        scope = checks.AuditScope(topics, settings.since, until, whole, doubtful, (*notes.losses, *notes.erasures))

        progress(f"comparing with {past.rows.get(RecordSource.ARCHIVE, 0):,} archived ids")
        compared = _compare(records, past, scope, notes.anew, kept)
        progress("looking for lost, repeated, misordered and missing records")
        given_up = inputs.given_up(spark, settings.lake, blocks.origins(past.blocks), records)
        stretches = keep(checks.number_blocks(compared.marked), kept)
        numbers = keep(checks.numbers(stretches, compared.marked, keep(given_up, kept)), kept)
        senders = keep(checks.streams(stretches), kept)
        holes, last = keep(checks.holes(numbers), kept), checks.last_streams(senders)
        gaps = keep(checks.gaps(holes, compared.marked, last, whole, _earlier(past.read_at, latest)), kept)
        places = keep(skew.places(compared.marked), kept)
        tallies = collect_tallies(
            checks.of_holes(gaps),
            checks.of_archive(compared.found),
            blocks.tallies(compared.blocks),
            checks.of_records(places),
        )
        # The records waiting in the outbox may have these numbers.
        waiting = tallies.get(checks.SequenceHole.OPEN, 0) <= tallies[checks.PENDING]
        parts = [
            checks.lost(compared.found, scope),
            checks.findings(
                compared.examined,
                repeats=_severity(settings.once),
                swaps=_severity(settings.serial_keys),
                anew=notes.anew,
            ),
            checks.open_gaps(gaps, _severity(not (doubtful or elsewhere or waiting)), notes.losses),
            checks.clashes(numbers),
            checks.scattered(places),
        ]
        if past.read_at is not None:
            strange, listed = blocks.in_blocks(compared.examined, compared.blocks), blocks.listed_ids(compared.blocks)
            parts.append(checks.unexpected(strange, listed, past.archive_began, past.read_at))
        findings = keep(reduce(lambda one, other: one.unionByName(other), parts), kept)
        grouped = collect_findings(findings)
        progress("measuring latency, keys and shards")
        streams, latency = collect_streams(senders), collect_latency(checks.by_hour(compared.marked))
        hot_keys, judged = collect_hot_keys(skew.hot_keys(places))

        limits = not_judged(
            history=past.read_at is not None, archive=past.has_archive, archived=tallies[checks.ARCHIVED],
            beyond=tallies[checks.BEYOND], records=count, foreign=foreign, pending=tallies[checks.PENDING],
            other_topics=elsewhere, compacted=compacted, emptied=[f"{name}[{number}]" for name, number in emptied],
            whole=whole, latest=latest, record_timestamps=settings.record_timestamps, anew=notes.anew,
            half_written=not given.is_whole, behind=behind,
        )  # fmt: skip
        report = AuditReport(
            audited_at=datetime.now(UTC), source=given.name, topics=topics, since=settings.since,
            until=settings.until,
            figures={"records": count, "foreign": foreign, **figures(past.quarantined, tallies, grouped)},
            found=grouped, not_judged=limits, latency=latency, hot_keys=hot_keys, skew=judged,
            streams=streams, terms=checks.terms(streams),
        )  # fmt: skip
        if settings.to is not None:
            write(open_store(spark, settings.to), report, findings)
        return report


@dataclass(frozen=True, slots=True)
class _Compared:
    """`blocks`: BLOCKS; `examined`, `marked`: of these records and of all; `found`: of the archive's reread rows."""

    blocks: DataFrame
    examined: DataFrame
    marked: DataFrame
    found: DataFrame


def _compare(
    records: DataFrame, past: _Past, scope: checks.AuditScope, anew: Collection[str], kept: ExitStack
) -> _Compared:
    sent = records.where(F.col("problem").isNull())
    expected = checks.expected(past.archive_began, past.read_at or _NEVER)
    compared = keep(blocks.compared(blocks.of_records(sent, expected), past.blocks, scope), kept)
    disordered = keep(blocks.disordered(sent, anew), kept)
    some, fine = blocks.split(sent, compared, disordered)
    examined = keep(checks.marked(some, anew), kept)
    rows = keep(blocks.reread_rows(past.archived(compared), compared), kept)
    if not blocks.are_all(rows, compared):
        raise AuditUnfinished("rows were removed from the archive during the audit", hint="repeat it")
    found = keep(checks.found(checks.archived(rows, scope), examined), kept)
    return _Compared(compared, examined, fine.unionByName(examined), found)


@dataclass(frozen=True, slots=True)
class _Past:
    """The history and facts about it. Without a history, `read_at` is None and the frames are empty.

    `blocks`: HISTORY_BLOCKS; `archived`: BLOCKS → the archive's rows of those that are to be reread, as HISTORY.
    """

    blocks: DataFrame
    archived: Callable[[DataFrame], DataFrame]
    rows: Mapping[str, int] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    has_archive: bool = False
    archive_began: datetime | None = None
    read_at: datetime | None = None

    @property
    def quarantined(self) -> int:
        return self.rows.get(RecordSource.QUARANTINE, 0)


def _history(
    spark: SparkSession, settings: AuditSettings, began: datetime | None, kept: ExitStack, progress: Progress
) -> _Past:
    nothing = _empty(spark, HISTORY)
    if settings.dsn is None:
        return _Past(_empty(spark, HISTORY_BLOCKS), lambda _: nothing)
    jdbc = jdbc_source(settings.dsn)
    facts = history_facts(settings.dsn, settings.table)
    listed = query(settings.table, facts, began)
    summary = keep(inputs.read_blocks(spark, jdbc, listed, facts.ids), kept)
    rows, topics, oldest = collect_history(summary)
    progress(f"{sum(rows.values()):,} rows of history read from {settings.table}")

    def archived(compared: DataFrame) -> DataFrame:
        few = compared.where("reread").select("block").distinct().limit(inputs.MOST_BLOCKS + 1)
        wanted = [row["block"] for row in few.collect()]
        return inputs.read_archived(spark, jdbc, settings.table, facts, began, wanted) if wanted else nothing

    return _Past(summary, archived, rows, topics, facts.has_archive, oldest, facts.at)


def _empty(spark: SparkSession, schema: StructType) -> DataFrame:
    # Rows made in Python would require Python on the executors.
    return spark.range(0).select(*(F.lit(None).cast(one.dataType).alias(one.name) for one in schema))


def _input(spark: SparkSession, settings: AuditSettings, began: datetime | None, progress: Progress) -> inputs.Input:
    if settings.lake is not None:
        return inputs.from_lake(spark, settings.lake, began, settings.checkpoint)
    return inputs.from_topics(spark, settings.kafka, settings.topics, settings.header, began, progress)


def figures(quarantined: int, tallies: Mapping[str, int], found: tuple[FindingGroup, ...]) -> dict[str, int]:
    """The figures, in the order of the documentation."""
    return {
        **{name: tallies[name] for name in checks.NAMES},
        "quarantined": quarantined,
        **{kind.name.lower(): sum(one.count for one in found if one.kind is kind) for kind in FindingKind},
        **{f"numbers_{hole.name.lower()}": tallies.get(hole, 0) for hole in checks.SequenceHole},
    }


def _end_of_lake(read: Collection[inputs.PartitionInput]) -> datetime:
    """The time up to which a lake is complete: it cannot know of records after its last one.

    The slack is needed because a number may be read before its predecessor from another partition, and purges are timed
    by another clock.
    """
    return max((one.last_at for one in read), default=_NEVER) - checks.SLACK


def _earlier(*moments: datetime | None) -> datetime | None:
    """The earliest of the given times; None if there is none."""
    return min((one for one in moments if one is not None), default=None)


def _severity(certain: bool) -> Severity:
    return Severity.VIOLATION if certain else Severity.SUSPECT


def collect_streams(streams: DataFrame) -> tuple[ProducerStream, ...]:
    """`checks.streams`, collected in order."""
    found = [ProducerStream(**row) for row in tables.collected(streams)]
    return tuple(sorted(found, key=lambda one: (one.incarnation, one.term, one.lane, one.first_at, one.producer)))


def collect_history(history: DataFrame) -> tuple[dict[str, int], frozenset[str], datetime | None]:
    """HISTORY_BLOCKS → the number of rows by source, the topics of the archive's rows, and the archive's beginning."""
    rows = tables.collected(
        history.groupBy("source", "topic").agg(F.sum("rows").alias("rows"), F.min("first_at").alias("oldest"))
    )
    counts = Counter[str]()
    for row in rows:
        counts[row["source"]] += row["rows"]
    archived = [row for row in rows if row["source"] == RecordSource.ARCHIVE]
    oldest = min((row["oldest"] for row in archived), default=None)
    return counts, frozenset(str(row["topic"]) for row in archived), oldest


def collect_tallies(*tallies: DataFrame) -> dict[str, int]:
    """Collects pairs of name and value from all frames at once; adds up the values of a name."""
    found = Counter[str]()
    for row in reduce(lambda one, other: one.unionByName(other), tallies).collect():
        found[row["name"]] += int(row["value"])
    return found


def collect_findings(findings: DataFrame) -> tuple[FindingGroup, ...]:
    """FINDINGS → the count of each kind, with its earliest findings as examples."""
    same = Window.partitionBy("kind", "severity")
    earliest = same.orderBy(F.asc_nulls_last("at"), "topic", "partition", "offset", "id")
    rows = tables.collected(
        findings.withColumn("count", F.count(F.lit(1)).over(same))
        .withColumn("nth", F.row_number().over(earliest))
        .where(F.col("nth") <= EXAMPLES)
        .select(*FINDINGS.names, "count", "nth")
    )
    found = []
    for row in sorted(rows, key=lambda one: (one["kind"], one["severity"], one["nth"])):
        kind, severity, key = FindingKind(row["kind"]), Severity(row["severity"]), key_text(row["key"])
        finding = {name: row[name] for name in FINDINGS.names} | {"kind": kind, "severity": severity, "key": key}
        found.append((AuditFinding(**finding), int(row["count"])))
    return grouped(found)


def collect_latency(latency: DataFrame) -> tuple[Latency, ...]:
    """`checks.by_hour`, collected: first all topics together, then each topic with its hours in order."""
    rows = tables.collected(latency)
    rows.sort(key=lambda row: (row["topic"] or "", row["hour"] is not None, row["hour"]))
    found = []
    for row in rows:
        p50, p90, p99 = row["quantiles_ms"] or (None, None, None)
        found.append(Latency(row["topic"], row["hour"], row["records"], p50, p90, p99, row["max_ms"]))
    return tuple(found)


def collect_hot_keys(counts: DataFrame) -> tuple[tuple[HotKey, ...], skew.Skew | None]:
    """`skew.hot_keys` → the hottest keys, and the resulting skew of shards; None if nothing was delivered."""
    hottest, buckets, keys, keyless = [], {}, 0, 0
    for row in counts.collect():
        if row["key"] is not None:
            hottest.append((bytes(row["key"]), int(row["records"])))
        elif row["bucket"] is None:
            keyless = int(row["records"])
        else:
            buckets[int(row["bucket"])] = int(row["records"])
            keys += int(row["keys"])
    hottest.sort(key=lambda pair: (-pair[1], pair[0]))
    if not (buckets or keyless):
        return (), None
    judged = skew.skew(buckets, keys, keyless, hottest[0][1] if hottest else 0)
    named = tuple(HotKey(key_text(key) or "", records, records / judged.records) for key, records in hottest)
    return named, judged


def write(store: TableStore, report: AuditReport, findings: DataFrame) -> None:
    """Appends the findings, then the report, so that a stored report has all its findings."""
    rows = findings.withColumn("audited_at", F.lit(report.audited_at)).select(*FINDINGS_TABLE.schema.names)
    store.append(rows, FINDINGS_TABLE.name)
    row = {"audited_at": report.audited_at, "holds": report.holds, "report": report.to_json()}
    one = store.spark.range(1).select(*(F.lit(row[name]).alias(name) for name in AUDITS_TABLE.schema.names))
    store.append(one, AUDITS_TABLE.name)

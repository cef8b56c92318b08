"""The job `audit`: whether what the database says was delivered is in the topics, once and in order.

The order of the steps lets it be right while the harvester runs: first the history (what is purged there had been
acknowledged before), then the ends of the topics, then the records up to there. Records are decoded once and kept,
and every figure is gathered from these. What is compared, and how, is in the modules `audit_…`.

What is to be audited, and by which rules.

How far Spark is: a line now and then while its stages run, as figures come from few and long actions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING

from harvester.errors import ExitCode
from harvester.origin import HEADER
from harvester.outbox.tables import OutboxTable
from harvester.pipeline import tables
from harvester.pipeline.audit import checks, collect, inputs, sequences
from harvester.pipeline.audit import checks as audit_latency
from harvester.pipeline.audit import checks as audit_order
from harvester.pipeline.audit import checks as leaders
from harvester.pipeline.audit import skew as audit_skew
from harvester.pipeline.audit.collect import write
from harvester.pipeline.audit.history import history_facts, query, read_history
from harvester.pipeline.audit.inputs import Read, read_so_far, whole_since
from harvester.pipeline.audit.report import AuditInput, AuditReport, FindingGroup, not_judged
from harvester.pipeline.audit.schemas import AUDITS_TABLE, FINDINGS_TABLE, HISTORY, FindingKind, RecordSource, Severity
from harvester.pipeline.errors import PipelineError
from harvester.pipeline.jdbc import jdbc_source
from harvester.pipeline.session import reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARGIN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Either `topics`, with `kafka` as Kafka's Java client names its options, or a `lake`.

    `since` ≤ … < `until` is the range; `margin` is how far before it reading begins. `dsn` None: without a history.
    `serial_keys`: writers of a key wait for each other, so that ids of a key out of order are a violation. `once`:
    nothing may be delivered twice. `to`: where the tables of findings are.
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


EVERY_S = 5.0


@contextmanager
def stages_told(spark: SparkSession, tell: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Tell how many tasks are done of the stages that run, every so often, until left."""
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
            return  # the Java process has ended; whoever works with it says why
        done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
        tasks = sum(stage.numTasks for stage in stages if stage is not None)
        line = f"{done:,} of {tasks:,} tasks done"
        if tasks and line != before:
            tell(line)
            before = line


Progress = Callable[[str], None]


class AuditUnfinished(PipelineError):
    """Spark could not go on. Nothing was judged, which is another answer than a guarantee that does not hold."""

    exit_code = ExitCode.UNAVAILABLE


def run(spark: SparkSession, settings: AuditSettings, *, progress: Progress = lambda _: None) -> AuditReport:
    """Audit, and write the findings if that is wanted.

    Raises InputMissing, TableMismatch, BrokerUnavailable, DatabaseUnavailable, SchemaError, ConfigurationError, and
    AuditUnfinished for what else keeps it from reading; never because of what it finds.
    """
    began = inputs.read_from(settings.since, settings.margin)
    with ExitStack() as kept, _clear("the audit"):
        inputs.require(spark, settings.kafka, settings.topics, settings.lake)
        if settings.to is not None:
            tables.prepare(spark, settings.to, [FINDINGS_TABLE, AUDITS_TABLE])
        past = _history(spark, settings, began, kept, progress)
        given = _input(spark, settings, began, progress)
        rows = inputs.trimmed(given.bronze, settings.since, settings.until, settings.notice_topic)
        records = _keep(rows, kept)
        read = read_so_far(records)
        progress(f"{read.records:,} records read")
        whole, emptied = whole_since(given.bounds, read, began)
        topics = given.topics or tuple(sorted({topic for topic, _ in read.places}))
        compacted = given.bounds.compacted if given.bounds is not None else ()
        doubtful = {*compacted, *(topic for topic, _ in emptied)}
        elsewhere = past.topics - set(topics)
        # A lake says nothing of what came after its last record.
        latest = read.latest if given.bounds is None else None
        until = min((one for one in (settings.until, latest) if one is not None), default=None)
        bounds = checks.AuditScope(topics, settings.since, until, whole, doubtful)

        marked = _keep(audit_order.marked(records), kept)
        streams = collect.collect_streams(leaders.streams(marked))
        progress(f"{len(streams):,} producers; comparing with {past.rows.get(RecordSource.ARCHIVE, 0):,} archived ids")
        numbers = sequences.numbers(marked, sequences.given_up(past.frame, records))
        last = sequences.last_streams(leaders.streams(marked))
        gaps = _keep(sequences.gaps(numbers, last, whole, past.read_at), kept)
        found = _keep(checks.found(checks.archived(past.frame, bounds), marked), kept)
        tallies = collect.collect_tallies(
            checks.of_holes(gaps),
            checks.of_archive(found),
            checks.of_outbox(past.frame, marked),
            checks.of_records(marked),
        )
        progress("looking for what is lost, repeated, out of order or missing")
        # So many records wait in the outbox, and may have these numbers.
        waiting = tallies.get(sequences.SequenceHole.OPEN, 0) <= tallies[checks.PENDING]
        places = _keep(audit_skew.places(marked), kept)
        parts = [
            checks.lost(found, bounds),
            audit_order.findings(marked, repeats=_severity(settings.once), swaps=_severity(settings.serial_keys)),
            sequences.open_gaps(gaps, _severity(not (doubtful or elsewhere or waiting))),
            sequences.clashes(numbers),
            audit_order.scattered(places),
        ]
        if past.read_at is not None:
            parts.append(checks.unexpected(marked, past.frame, past.archive_began, past.read_at))
        findings = _keep(_union(parts), kept)
        grouped = collect.collect_findings(findings)
        progress("measuring latency, keys and shards")
        latency = collect.collect_latency(audit_latency.by_hour(marked))
        hot_keys, skew = collect.collect_hot_keys(audit_skew.hot_keys(places))

        seen = AuditInput(
            history=past.read_at is not None, archive=past.has_archive, archived=tallies[checks.ARCHIVED],
            beyond=tallies[checks.BEYOND], records=read.records, foreign=read.foreign, pending=tallies[checks.PENDING],
            other_topics=elsewhere, compacted=compacted, emptied=[f"{name}[{number}]" for name, number in emptied],
            whole=whole, latest=latest, record_timestamps=settings.record_timestamps,
        )  # fmt: skip
        report = AuditReport(
            audited_at=datetime.now(UTC), source=given.name, topics=topics, since=settings.since,
            until=settings.until,
            figures=_figures(read, past, tallies, grouped),
            found=grouped, not_judged=not_judged(seen), latency=latency, hot_keys=hot_keys, skew=skew,
            streams=streams, terms=leaders.terms(streams),
        )  # fmt: skip
        if settings.to is not None:
            write(spark, settings.to, report, findings)
        return report


@dataclass(frozen=True, slots=True)
class _Past:
    """The history, and what is known of it. Without one, `read_at` is None and the frame is empty."""

    frame: DataFrame
    rows: Mapping[str, int] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    has_archive: bool = False
    archive_began: datetime | None = None
    read_at: datetime | None = None


def _history(
    spark: SparkSession, settings: AuditSettings, began: datetime | None, kept: ExitStack, progress: Progress
) -> _Past:
    if settings.dsn is None:
        return _Past(spark.createDataFrame([], HISTORY))
    jdbc = jdbc_source(settings.dsn)
    facts = history_facts(settings.dsn, settings.table)
    frame = _keep(read_history(spark, jdbc, query(settings.table, facts, began)), kept)
    rows, topics, oldest = collect.collect_history(frame)
    progress(f"{sum(rows.values()):,} rows of history read from {settings.table}")
    return _Past(frame, rows, topics, facts.has_archive, oldest, facts.at)


def _input(spark: SparkSession, settings: AuditSettings, began: datetime | None, progress: Progress) -> inputs.Input:
    if settings.lake is not None:
        return inputs.from_lake(spark, settings.lake, began)
    return inputs.from_topics(spark, settings.kafka, settings.topics, settings.header, began, progress)


def _figures(read: Read, past: _Past, tallies: Mapping[str, int], found: tuple[FindingGroup, ...]) -> dict[str, int]:
    """The order is that of the documentation."""
    return {
        "records": read.records,
        "foreign": read.foreign,
        **{name: tallies[name] for name in checks.NAMES},
        "quarantined": past.rows.get(RecordSource.QUARANTINE, 0),
        **{kind.name.lower(): sum(one.count for one in found if one.kind is kind) for kind in FindingKind},
        **{f"numbers_{hole.name.lower()}": tallies.get(hole, 0) for hole in sequences.SequenceHole},
    }


def _keep(frame: DataFrame, kept: ExitStack) -> DataFrame:
    frame = frame.persist()
    kept.callback(frame.unpersist)
    return frame


def _union(frames: list[DataFrame]) -> DataFrame:
    return reduce(lambda one, other: one.unionByName(other), frames)


def _severity(certain: bool) -> Severity:
    return Severity.VIOLATION if certain else Severity.SUSPECT


@contextmanager
def _clear(what: str) -> Iterator[None]:
    """Whatever Spark says becomes an AuditUnfinished of one line."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError, EOFError) as error:
        raise AuditUnfinished(f"{what}: {reason(error)}", hint="it changes nothing: it can be repeated") from error

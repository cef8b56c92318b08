"""The job `audit --incremental`: proves range after range that a lake has what the archive has, each record once.

A range begins where the last proof ended, and ends at the newest cut (`lake.cuts`). Below a cut nothing is under way:
each id was purged, and so is in the archive, or was given up; and the lake has all records that there are. So both
sides are final, and are compared by their sums alone. Where these differ, and only there, records are compared one by
one, and what is missing is judged like in an audit of everything.

PostgreSQL's archive and a lake's silver compute the sums alike: equal sums, equal records. They are kept by bucket, a
stretch of 4,096 ids, so few rows travel. Each side counts the records of a bucket, and adds up two numbers of each
record: one of its identity (id, topic, key), and one of its contents as well (value, headers). The numbers are the
first 48 bits of SHA-256. So a sum does not depend on the order, and two different sets of records agree by accident
once in 2^48 cases; the sums are no protection against deliberate forgery.

An archive may keep only ids. A row does not tell it from an archive that keeps tombstones; but if all of the archive's
rows of a bucket are bare, and not all of silver's, it did not keep the bucket's contents. If only some are, it may have
begun to keep contents there, and each record decides for itself: the contents of those that are bare in the archive
alone are not judged.

A lake has the digest of a large value instead of the value, in the headers that refer to it
(`claim_check.reference`). Trace headers are left out: with `tracing.enabled`, a record gets those of the harvester's
own span. Earlier versions put them behind the harvester's header, which silver then keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, reduce
from itertools import chain, pairwise
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.claim_check import reference
from harvester.errors import SchemaError
from harvester.outbox.archive import SILENCE_S
from harvester.outbox.connection import connect, database_errors, execute
from harvester.outbox.tables import OutboxTable, literal
from harvester.pipeline import schemas
from harvester.pipeline.audit import checks, inputs
from harvester.pipeline.audit.inputs import HistoryFacts
from harvester.pipeline.audit.job import (
    AuditSettings,
    AuditUnfinished,
    Progress,
    collect_findings,
    figures,
    write,
)
from harvester.pipeline.audit.report import AuditReport, FindingGroup
from harvester.pipeline.audit.schemas import (
    AUDITS_TABLE,
    FINDINGS_TABLE,
    PROOFS_TABLE,
    AuditVerdict,
    FindingKind,
    Severity,
    finding,
)
from harvester.pipeline.errors import InputMissing
from harvester.pipeline.formats import open_store
from harvester.pipeline.jdbc import jdbc_source
from harvester.pipeline.lake.batch import batch_name
from harvester.pipeline.lake.silver import local
from harvester.pipeline.schemas import text
from harvester.pipeline.session import clear_errors, keep
from harvester.pipeline.source import Place
from harvester.pipeline.store import TableStore

BITS = 12
_PIECE_IDS, _MOST_PIECES = 1 << 20, 64
_SUMS = ("records", "bare", "names", "contents")
_UNIT = "chr(31)"  # between headers, which rarely contain it
# The fields of the propagators that OTEL_PROPAGATORS may name, in lower case, as literals; baggage passes unchanged.
_TRACE_HEADERS = (
    "'traceparent', 'tracestate', 'b3', 'x-b3-traceid', 'x-b3-spanid', 'x-b3-parentspanid', 'x-b3-sampled',"
    " 'x-b3-flags', 'uber-trace-id', 'x-amzn-trace-id', 'ot-tracer-traceid', 'ot-tracer-spanid', 'ot-tracer-sampled'"
)


@dataclass(frozen=True, slots=True)
class BucketSums:
    """`bare`: records that have neither a value nor headers. `names`, `contents`: the sums; None: too large."""

    records: int
    bare: int
    names: int | None
    contents: int | None


NOTHING = BucketSums(0, 0, 0, 0)
Sums = Mapping[int, BucketSums]


def by_bucket(rows: Iterable[Any]) -> dict[int, BucketSums]:
    """Rows of (bucket, records, bare, names, contents)."""
    return {int(row[0]): BucketSums(*(None if one is None else int(one) for one in row[1:])) for row in rows}  # type: ignore[arg-type]


def unequal(silver: Sums, archive: Sums) -> list[int]:
    """The buckets whose records differ, ascending."""
    found = []
    for bucket in sorted(silver.keys() | archive.keys()):
        ours, theirs = silver.get(bucket, NOTHING), archive.get(bucket, NOTHING)
        same = ours.names is not None and (ours.records, ours.names) == (theirs.records, theirs.names)
        if not same or (_has_contents(ours, theirs) and ours.contents != theirs.contents):
            found.append(bucket)
    return found


def with_contents(silver: Sums, archive: Sums) -> int:
    """The number of the archive's records whose contents can be compared, too."""
    found = 0
    for at, theirs in archive.items():
        ours = silver.get(at, NOTHING)
        found += theirs.records - max(0, theirs.bare - ours.bare) if _has_contents(ours, theirs) else 0
    return found


def _has_contents(ours: BucketSums, theirs: BucketSums) -> bool:
    return not theirs.records == theirs.bare > ours.bare


@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids of an incarnation from `first` up to, but not including, `end`, in some topics."""

    incarnation: str
    first: int
    end: int
    topics: tuple[str, ...]

    def pieces(self) -> list[IdRange]:
        """The range in parts, each of whole buckets: small enough for one query, and not many if ids are sparse."""
        size = max(_PIECE_IDS, -(-(self.end - self.first) // _MOST_PIECES))
        size = -(-size >> BITS) << BITS
        cuts = range((self.first // size + 1) * size, self.end, size)
        return [replace(self, first=first, end=end) for first, end in pairwise([self.first, *cuts, self.end])]


def in_archive(table: OutboxTable, ids: IdRange, current: str, buckets: Collection[int] | None = None) -> str:
    """A query in PostgreSQL for (id, bucket, bare, name, content) of the archive's rows; None: of all buckets.

    `current`: the incarnation of rows that have none, as they were written while the term table was empty.
    """
    name = "concat(id, ' ', kafka_topic, ' ', coalesce(encode(kafka_key, 'hex'), '-'))"
    traced = f"lower(kafka_header_keys::text)::text[] && ARRAY[{_TRACE_HEADERS}]"
    listed = "unnest(kafka_header_keys, kafka_header_values) WITH ORDINALITY AS listed(k, v, n)"
    rest = f"{listed} WHERE lower(k) NOT IN ({_TRACE_HEADERS})"
    parts = (
        f"CASE WHEN {traced} THEN ARRAY(SELECT k FROM {rest} ORDER BY n) || ARRAY(SELECT v FROM {rest} ORDER BY n)"
        " ELSE kafka_header_keys || kafka_header_values END"
    )
    headers = f"coalesce(array_to_string({parts}, {_UNIT}), '')"
    content = f"concat({name}, ' ', coalesce(encode(sha256(kafka_value), 'hex'), '-'), ' ', {headers})"
    chosen = "" if buckets is None else f" AND id >> {BITS} = ANY('{{{','.join(map(str, buckets))}}}'::bigint[])"
    return (
        f"SELECT id, id >> {BITS} AS bucket, kafka_value IS NULL AND kafka_header_keys IS NULL AND"
        f" kafka_header_values IS NULL AS bare, {_in_postgres(name)} AS name, {_in_postgres(content)} AS content"
        f" FROM {table.archive} WHERE coalesce(incarnation, '{current}') = '{ids.incarnation}' AND id >= {ids.first}"
        f" AND id < {ids.end} AND kafka_topic = ANY(ARRAY[{', '.join(map(literal, ids.topics))}]){chosen}"
    )


def _in_postgres(words: str) -> str:
    return f"('x' || left(encode(sha256(convert_to({words}, 'UTF8')), 'hex'), 12))::bit(48)::bigint"


def summed_in_postgres(rows: str) -> str:
    """`in_archive` → a query for `by_bucket`."""
    return (
        "SELECT bucket, count(*), count(*) FILTER (WHERE bare), sum(name), sum(content)"
        f" FROM ({rows}) AS archived GROUP BY bucket"
    )


def in_silver(silver: DataFrame, ids: IdRange, header: str) -> DataFrame:
    """schemas.SILVER → its rows with these ids, with bucket, bare, name, content; as `in_archive` has them.

    `header`: the name of the harvester's.
    """
    untraced = f"filter(headers, one -> lower(one.key) NOT IN ({_TRACE_HEADERS}))"
    left = f"size(sent) < size(headers) AND try_element_at(sent, -1).key <=> {text(header)}"
    sent = f"CASE WHEN {left} THEN slice(sent, 1, size(sent) - 1) ELSE sent END"
    claim = (
        f"(try_element_at(sent, -3).key <=> {text(reference.HEADER)} AND try_element_at(sent, -3).value <=> value"
        f" AND try_element_at(sent, -1).key <=> {text(reference.DIGEST_HEADER)})"
    )
    own = f"CASE WHEN {claim} THEN slice(sent, 1, size(sent) - 3) ELSE sent END"
    value = f"CASE WHEN {claim} THEN CAST(try_element_at(sent, -1).value AS STRING) ELSE sha2(value, 256) END"
    parts = "concat(transform(own, one -> one.key), transform(own, one -> coalesce(CAST(one.value AS STRING), '')))"
    name = "concat(id, ' ', topic, ' ', coalesce(lower(hex(key)), '-'))"
    content = f"concat({name}, ' ', coalesce({value}, '-'), ' ', coalesce(array_join({parts}, {_UNIT}), ''))"
    rows = silver.where(
        (F.col("incarnation") == ids.incarnation)
        & F.col("id").between(ids.first, ids.end - 1)
        & F.col("topic").isin(*ids.topics)
    )
    rows = rows.withColumn("sent", F.expr(untraced)).withColumn("sent", F.expr(sent))
    return rows.withColumn("own", F.expr(own)).withColumns(
        {
            "bucket": F.expr(f"shiftright(id, {BITS})"),
            "bare": F.expr("value IS NULL AND coalesce(size(own), 0) <= 0"),
            "name": F.expr(_in_spark(name)),
            "content": F.expr(_in_spark(content)),
        }
    )


def _in_spark(words: str) -> str:
    return f"CAST(conv(left(sha2({words}, 256), 12), 16, 10) AS BIGINT)"


def summed_in_spark(rows: DataFrame) -> DataFrame:
    """`in_silver` → rows for `by_bucket`."""
    sums = {"records": "count(*)", "bare": "count_if(bare)", "names": "try_sum(name)", "contents": "try_sum(content)"}
    return rows.groupBy("bucket").agg(*(F.expr(f"{sums[name]} AS {name}") for name in _SUMS))


def doubled(silver: DataFrame) -> DataFrame:
    """`in_silver` → FINDINGS: ids that silver has more than once."""
    rows = silver.groupBy("incarnation", "id").agg(
        F.count(F.lit(1)).alias("times"), *(F.min(name).alias(name) for name in ("topic", "key", "timestamp"))
    )
    detail = F.format_string("%d times in silver", "times")
    return finding(rows.where("times > 1"), FindingKind.REPEAT, Severity.VIOLATION, detail, at=F.col("timestamp"))


def changed(silver: DataFrame, archive: DataFrame) -> DataFrame:
    """`in_silver` and `in_archive` → FINDINGS: records that the archive has otherwise."""
    theirs = archive.select("id", *(F.col(name).alias(f"their_{name}") for name in ("bare", "name", "content")))
    rows = silver.join(theirs, "id")
    contents = (F.col("bare") | ~F.col("their_bare")) & (F.col("content") != F.col("their_content"))
    other = F.col("name") != F.col("their_name")
    detail = F.when(other, "the archive has it with another topic or key").otherwise(
        "the archive has it with another value or other headers"
    )
    return finding(rows.where(other | contents), FindingKind.CHANGED, Severity.VIOLATION, detail, at=F.col("timestamp"))


@dataclass(frozen=True, slots=True)
class Proof:
    """A row of PROOFS_TABLE. `unequal`: of the `buckets`. `with_contents`: records whose contents were compared."""

    incarnation: str
    from_id: int
    to_id: int
    topics: str
    buckets: int
    unequal: int
    records: int
    with_contents: int
    verdict: AuditVerdict
    proved_at: datetime


def verdict_of(unequal: int, beyond: int, found: tuple[FindingGroup, ...]) -> AuditVerdict:
    """The verdict on a range with so many unequal buckets, in which this was found, and so much was not judged.

    Buckets that differ although none of their records does are suspect: the archive may list a record twice, or have
    the contents of only some.
    """
    severities = {one.severity for one in found}
    if Severity.VIOLATION in severities:
        return AuditVerdict.BROKEN
    if Severity.SUSPECT in severities or (unequal and not found and not beyond):
        return AuditVerdict.SUSPECT
    return AuditVerdict.EXPLAINED if unequal else AuditVerdict.EQUAL


def run(
    spark: SparkSession, settings: AuditSettings, *, progress: Progress = lambda _: None
) -> tuple[AuditReport, tuple[Proof, ...]]:
    """Proves what there is to prove in a lake, and appends it to its table `proofs`; both are empty if that is nothing.

    Needs `lake` and `dsn`; reads `table`, `checkpoint` and `to` of the settings. Raises as the audit does.
    """
    assert settings.lake is not None
    assert settings.dsn is not None
    with ExitStack() as kept, clear_errors("the audit", AuditUnfinished, "nothing was proved: repeat it"):
        store = open_store(spark, settings.lake)
        store.header()
        manifest = inputs.manifest_of(spark, settings.checkpoint or store.beside("checkpoint"))
        if manifest is None:
            raise InputMissing(
                f"the topics of the lake in {settings.lake} are unknown", hint="specify its --checkpoint"
            )
        store.prepare([PROOFS_TABLE])
        if settings.to is not None:
            open_store(spark, settings.to).prepare([FINDINGS_TABLE, AUDITS_TABLE])
        facts = inputs.history_facts(settings.dsn, settings.table)
        if not facts.has_archive:
            raise SchemaError(
                f"there is no archive {settings.table.archive} in this database",
                hint='without `archive = "ids"` or "rows" nobody knows what was purged',
            )
        work = _Work(spark, settings, store, settings.dsn, facts, kept, progress)
        proofs, found, parts = list[Proof](), list[FindingGroup](), list[DataFrame]()
        tallies = Counter[str]()
        topics = manifest.topics
        since = max((log.read_since for topic, log in manifest.logs.items() if topic in topics), default=0)
        for ids in work.to_prove(topics, since):
            proof, groups, findings = work.prove(ids, tallies)
            proofs.append(proof)
            found += groups
            parts += [] if findings is None else [findings]
        report = AuditReport(
            audited_at=datetime.now(UTC), source=f"lake {settings.lake}", topics=topics, since=None, until=None,
            figures={"records": tallies[checks.IDS], "foreign": 0, **figures(0, tallies, tuple(found))},
            found=tuple(found), not_judged=_limits(proofs, tallies),
        )  # fmt: skip
        columns = ", ".join(f"{one.name} {one.dataType.simpleString()}" for one in PROOFS_TABLE.schema)
        rows = [{**asdict(one), "proved_at": one.proved_at.isoformat()} for one in proofs]
        if rows:
            if settings.to is not None and parts:
                write(open_store(spark, settings.to), report, reduce(DataFrame.unionByName, parts))
            store.append(local(spark, rows, columns), "proofs")
        return report, tuple(proofs)


def _limits(proofs: list[Proof], tallies: Mapping[str, int]) -> tuple[str, ...]:
    said = [f"ids of {one.incarnation} from {one.to_id} on: not judged, the newest cut ends there" for one in proofs]
    if bare := sum(one.records - one.with_contents for one in proofs):
        said.append(f"contents: not judged for {bare:,} records, of which the archive has no values")
    if beyond := tallies[checks.BEYOND]:
        said.append(f"{beyond:,} records: not judged, older than what the lake or the archive has all of")
    return tuple(said)


@dataclass
class _Work:
    spark: SparkSession
    settings: AuditSettings
    store: TableStore
    dsn: str
    facts: HistoryFacts
    kept: ExitStack
    progress: Callable[[str], None]

    def to_prove(self, topics: tuple[str, ...], since: int) -> list[IdRange]:
        """The ranges from the last proof of all these topics, or the archive's beginning, to the newest cuts.

        `since`: the first batch that has all of the topics. An earlier cut says nothing of those added since.
        """
        made = self.store.load(schemas.CUTS_TABLE)
        if made.isEmpty():
            raise InputMissing(
                f"the lake in {self.store.root} has no cut yet", hint="`harvester pipeline lake` makes cuts as it reads"
            )
        made = made.where(F.col("batch") >= batch_name(since))
        cuts = made.groupBy("incarnation").agg(F.max("id").alias("id")).collect()
        ends: dict[str, int] = {}
        for row in self.store.load(PROOFS_TABLE).select("incarnation", "to_id", "topics").collect():
            if set(topics) <= set(row["topics"].split(",")):
                ends[row["incarnation"]] = max(row["to_id"], ends.get(row["incarnation"], row["to_id"]))
        found = []
        for name, end in sorted((row["incarnation"], row["id"]) for row in cuts):
            first = ends[name] if name in ends else self._first(name, end)
            if first is not None and first < end:
                found.append(IdRange(name, first, end, topics))
        return found

    def _first(self, incarnation: str, end: int) -> int | None:
        """The first archived id of which the lake may be expected to have the record; None: there is none."""
        whole, _ = self._whole
        since = "" if whole is None else f" AND create_time >= '{whole.isoformat()}'"
        query = (
            f"SELECT min(id) FROM {self.settings.table.archive} WHERE"
            f" coalesce(incarnation, '{self.facts.incarnation}') = '{incarnation}' AND id < {end}{since}"
        )
        found: int | None = self._asked(query)[0][0]
        return found

    def _asked(self, query: str) -> list[Any]:
        """The rows of a query on the archive."""
        with (
            connect(self.dsn, application_name="harvester audit", silence_s=SILENCE_S) as connection,
            database_errors("read the archive"),
        ):
            return execute(connection, query).fetchall()

    def _given(self) -> tuple[DataFrame, Collection[Place]]:
        """The lake's records, and the partitions that it may not have read from their beginning."""
        assert self.settings.lake is not None
        given = inputs.from_lake(self.spark, self.settings.lake, None, self.settings.checkpoint)
        return inputs.trimmed(given.bronze, None, None, ""), given.late

    @cached_property
    def _whole(self) -> tuple[datetime | None, frozenset[str]]:
        """As `whole_since` has it, with the topics instead of their partitions."""
        records, late = self._given()
        whole, emptied = inputs.whole_since(None, inputs.read_so_far(records), None, late)
        return whole, frozenset(topic for topic, _ in emptied)

    def prove(self, ids: IdRange, tallies: Counter[str]) -> tuple[Proof, tuple[FindingGroup, ...], DataFrame | None]:
        """Compares a range; adds to the tallies what was counted."""
        self.progress(f"comparing ids from {ids.first} to before {ids.end} of {ids.incarnation}")
        current = str(self.facts.incarnation)
        queries = [summed_in_postgres(in_archive(self.settings.table, one, current)) for one in ids.pieces()]
        with ThreadPoolExecutor(inputs.SESSIONS) as sessions:
            archive = by_bucket(chain.from_iterable(sessions.map(self._asked, queries)))
        rows = in_silver(self.store.table("silver"), ids, self.store.header())
        silver = by_bucket(summed_in_spark(rows).collect())
        differing = unequal(silver, archive)
        tallies[checks.DELIVERIES] += sum(one.records for one in silver.values())
        tallies[checks.ARCHIVED] += (archived := sum(one.records for one in archive.values()))
        found: tuple[FindingGroup, ...] = ()
        findings, missing, beyond = None, 0, 0
        if differing:
            self.progress(f"{len(differing):,} of {len(silver.keys() | archive.keys()):,} buckets differ")
            findings, missing, beyond = self._drill(ids, differing)
            found = collect_findings(findings)
            tallies[checks.BEYOND] += beyond
        tallies[checks.DELIVERED] += archived - missing
        tallies[checks.IDS] += archived - missing
        proof = Proof(
            ids.incarnation, ids.first, ids.end, ",".join(ids.topics), len(silver.keys() | archive.keys()),
            len(differing), archived, with_contents(silver, archive), verdict_of(len(differing), beyond, found),
            datetime.now(UTC),
        )  # fmt: skip
        return proof, found, findings

    def _drill(self, ids: IdRange, differing: list[int]) -> tuple[DataFrame, int, int]:
        """The findings in these buckets, how many archived records silver lacks, and how many were not judged."""
        jdbc, none = jdbc_source(self.dsn), F.lit(None).cast("string")
        listed = local(self.spark, [{"bucket": one} for one in differing], "bucket bigint")
        rows = in_silver(self.store.table("silver"), ids, self.store.header())
        rows = keep(rows.join(F.broadcast(listed), "bucket", "left_semi"), self.kept)
        marked = keep(checks.marked(inputs.trimmed(rows.withColumn("problem", none), None, None, "")), self.kept)
        chosen = (
            f"SELECT * FROM ({inputs.query(self.settings.table, self.facts, None)}) AS known WHERE id >= {ids.first}"
            f" AND id < {ids.end} AND id >> {BITS} = ANY('{{{','.join(map(str, differing))}}}'::bigint[])"
        )
        past = inputs.read_history(self.spark, jdbc, chosen, (0, 0))
        past = keep(past.where(F.col("incarnation") == ids.incarnation), self.kept)
        current = str(self.facts.incarnation)
        archive = inputs.read_query(self.spark, jdbc, in_archive(self.settings.table, ids, current, differing))
        records, _ = self._given()
        whole_since, doubtful = self._whole
        assert self.settings.lake is not None
        notes = inputs.lake_notes(self.spark, self.settings.lake, records, None)
        scope = checks.AuditScope(
            ids.topics, whole=whole_since, doubtful=doubtful, losses=(*notes.losses, *notes.erasures)
        )
        there = keep(checks.found(checks.archived(past, scope), marked), self.kept)
        lost = checks.lost(there, scope)
        began = self._asked(f"SELECT min(purged_at) FROM {self.settings.table.archive}")[0][0]
        unexpected = checks.unexpected(marked, past, began, self.facts.at)
        strange = marked.where("first").join(past.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
        missing = there.where("NOT delivered").count()
        beyond = there.where("NOT judged AND NOT delivered").count() + strange.count() - unexpected.count()
        parts = [lost, unexpected, doubled(rows), changed(rows, archive)]
        return keep(reduce(DataFrame.unionByName, parts), self.kept), missing, beyond

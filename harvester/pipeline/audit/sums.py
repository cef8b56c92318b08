"""Sums over buckets of ids, which PostgreSQL's archive and a lake's silver compute alike: equal sums, equal records.

A bucket is a stretch of 4,096 ids. Each side counts its records, and adds up two numbers of each: one of its identity
(id, topic, key), and one of its contents as well (value, headers). The numbers are the first 48 bits of SHA-256, so a
sum does not depend on the order, and an accident leaves it as it was once in 2^48 cases; somebody who wants to deceive
could do so. Few rows have to travel, one a bucket.

An archive may keep only ids. It cannot be told from one that keeps tombstones by the rows of one bucket alone; but a
bucket of which the archive keeps more bare rows than silver has is one whose contents it did not keep.

A large value is not in the lake: its digest is, in the headers that refer to it (`claim_check.reference`). The headers
of a trace are left out: with `tracing.enabled` a record gets those of the harvester's own span. Earlier versions put
them behind the harvester's header, which silver then keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.claim_check import reference
from harvester.outbox.tables import OutboxTable, literal
from harvester.pipeline.audit.schemas import FindingKind, Severity, finding
from harvester.pipeline.schemas import text

BITS = 12
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
    return sum(theirs.records for at, theirs in archive.items() if _has_contents(silver.get(at, NOTHING), theirs))


def _has_contents(ours: BucketSums, theirs: BucketSums) -> bool:
    return theirs.bare <= ours.bare


@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids of an incarnation from `first` up to, but not including, `end`, in some topics."""

    incarnation: str
    first: int
    end: int
    topics: tuple[str, ...]


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
        f"(try_element_at(sent, -3).key <=> {text(reference.HEADER)}"
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
            "bare": F.expr("value IS NULL AND coalesce(size(headers), 0) = 0"),
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


def changed(silver: DataFrame, archive: DataFrame, whole: Collection[int]) -> DataFrame:
    """`in_silver` and `in_archive` → FINDINGS: records that the archive has otherwise.

    `whole`: the buckets whose contents the archive keeps.
    """
    theirs = archive.select("id", *(F.col(name).alias(f"their_{name}") for name in ("name", "content")))
    rows = silver.join(theirs, "id")
    contents = _any_bucket(whole) & (F.col("content") != F.col("their_content"))
    other = F.col("name") != F.col("their_name")
    detail = F.when(other, "the archive has it with another topic or key").otherwise(
        "the archive has it with another value or other headers"
    )
    return finding(rows.where(other | contents), FindingKind.CHANGED, Severity.VIOLATION, detail, at=F.col("timestamp"))


def _any_bucket(buckets: Collection[int]) -> Column:
    return F.col("bucket").isin(*buckets) if buckets else F.lit(False)

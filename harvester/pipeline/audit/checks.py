"""The checks of an audit, as transforms of frames: lost records, repeats, order, latency, terms, and their counts.

*Lost.* A row is purged only after the broker's acknowledgement, so every archived id must be in one of the topics.
An id is judged if its row was purged within the range, and *created* at a time from which the topics are complete: a
record cannot be in the log before its row was created, so it is among those read, whichever clock set its timestamp.

*Order.* Within a key of a partition, the log's order is the order of delivery, and ids give the correct order
(invariant I2): a writer that locks the entity of the key before it inserts takes ids in commit order (docs/outbox.md).
A record with a lower id than an earlier record of its key is either

    repeated after a successor      already delivered before: never correct
    delivered after a successor     not delivered before: wrong, unless its writers were concurrent, which the audit
                                    cannot know

Records without a key have no order, and the log defines none between partitions or topics.

*Numbers.* These checks are `harvester.verify.sequences` as window functions. Every producer of a lane numbers the
records that it sends under a term 1, 2, 3, …, across all topics, so a number missing below the highest one is a record
that was numbered and is not in the log. It was given up (the quarantine, or a notice, names it), left to a successor (a
later producer or term sent it again), or is open: under way or lost. The id of a missing number is known only for
records that were given up, so an audit cannot tell whether its record was delivered under another number. Unlike
`verify`, an audit also considers edges: what retention removed, or what lies before the range, looks like a hole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline.audit.schemas import (
    GIVEN_UP,
    MARKED,
    NUMBERS,
    RECORDS,
    STREAM,
    FindingKind,
    RecordSource,
    Severity,
    finding,
)
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.schemas import KAFKA, bit, block


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """Records that a lake is known to lack. `after`, `before`: the times in Kafka between which they were sent.

    `room`: their number at most. None: unknown.
    """

    topic: str
    room: int | None
    after: datetime | None
    before: datetime | None


SLACK = timedelta(minutes=1)
"""The tolerated difference between the clocks of database, producers and brokers."""


def explained(
    losses: Collection[AcceptedLoss], *, begun: str, ended: str, size: Column, topic: str | None = None
) -> Column:
    """Whether a row's missing records, sent between its times `begun` and `ended`, may belong to an accepted loss.

    False if more records are missing than the losses have room for: all losses together, or those at that time.
    `size`: the number of records that the row stands for. `topic`: its column; None if only times are known.
    """
    found, room, own = F.lit(False), F.lit(0).cast("bigint"), F.lit(0).cast("bigint")
    fits: list[Column] = []  # for each loss, whether it matches in topic and time
    for loss in losses:
        here = F.lit(True) if topic is None else F.col(topic) == loss.topic
        there = here
        if loss.after is not None:
            there = there & (F.col(ended) >= F.lit(loss.after - SLACK))
        if loss.before is not None:
            there = there & F.coalesce(F.col(begun) <= F.lit(loss.before + SLACK), F.lit(True))
        fits.append(F.coalesce(there, F.lit(False)))
        found = found | fits[-1]
        size_of_loss = _ROOM if loss.room is None else loss.room
        room = F.least(room + F.when(here, size_of_loss).otherwise(0), F.lit(_ROOM))
        own = F.least(own + F.when(fits[-1], size_of_loss).otherwise(0), F.lit(_ROOM))
    if not losses:
        return found
    group = F.lit(1) if topic is None else F.col(topic)
    missing = F.try_sum(F.when(found, size))

    def has_room(available: Column, *by: Column) -> Column:
        return F.coalesce(missing.over(Window.partitionBy(group, *by)), F.lit(_MOST)) <= available

    return found & has_room(room) & has_room(own, F.array(*fits))


@dataclass(frozen=True, slots=True)
class AuditScope:
    """What can be judged: rows of `topics` with `since` ≤ purged_at < `until`.

    `whole`: the time from which the topics are complete; None: from their beginning. `doubtful`: topics that may lack
    records (compacted, emptied, or not read far enough).
    """

    topics: tuple[str, ...]
    since: datetime | None = None
    until: datetime | None = None
    whole: datetime | None = None
    doubtful: Collection[str] = ()
    losses: Collection[AcceptedLoss] = ()


def archived(history: DataFrame, bounds: AuditScope) -> DataFrame:
    """HISTORY → the archive's rows of the range and the topics read, with `judged`: whether their loss would show."""
    rows = history.where((F.col("source") == RecordSource.ARCHIVE) & F.col("topic").isin(*bounds.topics))
    if bounds.since is not None:
        rows = rows.where(F.col("at") >= F.lit(bounds.since))
    if bounds.until is not None:
        rows = rows.where(F.col("at") < F.lit(bounds.until))
    whole = (
        F.lit(True) if bounds.whole is None else F.coalesce(F.col("created_at") >= F.lit(bounds.whole), F.lit(False))
    )
    return rows.withColumn("judged", whole)


def found(archived: DataFrame, marked: DataFrame) -> DataFrame:
    """`archived` and MARKED → `archived` with `delivered`: whether the id was read, from whichever topic."""
    ids = marked.where("first").select("incarnation", "id", F.lit(True).alias("_there"))
    joined = archived.join(ids, ["incarnation", "id"], "left")
    return joined.withColumn("delivered", F.col("_there").isNotNull()).drop("_there")


def lost(found: DataFrame, bounds: AuditScope) -> DataFrame:
    """`found` → FINDINGS: judged ids that are in none of the topics."""
    doubtful = _among(bounds.doubtful)
    rows = found.where(F.col("judged") & ~F.col("delivered"))
    accepted = explained(bounds.losses, begun="created_at", ended="at", size=F.lit(1), topic="topic")
    rows = rows.withColumn("_accepted", accepted)
    kind = F.when(F.col("_accepted"), FindingKind.ACCEPTED).otherwise(FindingKind.LOST)
    severity = F.when(F.col("_accepted"), Severity.ACCEPTED).when(doubtful, Severity.SUSPECT)
    detail = F.when(
        F.col("_accepted"), "may be among the records that the lake continued without, or that were erased from it"
    ).otherwise("purged as delivered, but in none of the topics")
    return finding(rows, kind, severity.otherwise(Severity.VIOLATION), detail)


def expected(began: datetime | None, read_at: datetime) -> Column:
    """Of RECORDS: whether a record must be in the outbox, the quarantine or the archive.

    Only records from the archive's beginning on, whose rows were created before the history was read. `began` None:
    there is no archive, and no record.
    """
    if began is None:
        return F.lit(False)
    created = F.coalesce(F.col("created_us"), F.lit(0))
    return F.col("inside") & (F.col("timestamp") >= F.lit(began)) & (created < F.unix_micros(F.lit(read_at)))


def unexpected(marked: DataFrame, history: DataFrame, began: datetime | None, read_at: datetime) -> DataFrame:
    """MARKED and HISTORY → FINDINGS: `expected` records that are not in the history."""
    rows = marked.where(expected(began, read_at) & F.col("first"))
    strange = rows.join(history.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
    detail = "not in the outbox, its quarantine or its archive"
    return finding(strange, FindingKind.UNEXPECTED, Severity.SUSPECT, detail, at=F.col("timestamp"))


_NOTHING_BEFORE = (Window.unboundedPreceding, -1)


def marked(records: DataFrame, anew: Collection[str] = ()) -> DataFrame:
    """RECORDS → MARKED: the records with an origin.

    `anew`: recreated topics, of which a lake has the records of two logs. Where the second log begins is unknown, so
    these records are ordered by their timestamps.
    """
    sent, place = records.where(F.col("problem").isNull()), place_in_log(anew)
    # Within a partition the offset tells which delivery was first: a repeat's timestamp may be earlier.
    one = Window.partitionBy("incarnation", "id")
    here = Window.partitionBy("incarnation", "id", "topic", "partition")
    sent = sent.withColumn("_began", F.min("timestamp").over(here)).withColumn(
        "first", F.row_number().over(one.orderBy("_began", "topic", "partition", *place)) == 1
    )
    # Each record without a key is its own group: otherwise one task would process all of them.
    alone = F.when(F.col("key").isNull(), F.col("id"))
    key = Window.partitionBy("topic", "partition", "incarnation", "key", "_alone").orderBy(*place)
    top = F.max("id").over(key.rowsBetween(*_NOTHING_BEFORE))
    sent = sent.withColumn("_alone", alone).withColumn("_top", top)
    return sent.withColumn("after", F.when(F.col("_top") > F.col("id"), F.col("_top"))).select(*MARKED.names)


def place_in_log(anew: Collection[str]) -> tuple[Column, Column]:
    """The columns that give the order of a partition's records. `anew`: topics that are ordered by timestamps."""
    return F.when(_among(anew), F.col("timestamp")), F.col("offset")


def findings(marked: DataFrame, *, repeats: Severity, swaps: Severity, anew: Collection[str] = ()) -> DataFrame:
    """MARKED → FINDINGS: every delivery of an id after its first, and every one after a higher id of its key.

    `repeats`, `swaps`: the severities of repeats, and of first deliveries after a successor. `anew`: as in `marked`;
    the order of these topics proves nothing, so such findings are only suspect.
    """
    again, late = ~F.col("first"), F.col("after").isNotNull()
    kind = F.when(again & late, FindingKind.LATE_REPEAT).when(again, FindingKind.REPEAT).when(late, FindingKind.SWAPPED)
    severity = F.when(late & _among(anew), Severity.SUSPECT).when(again & late, Severity.VIOLATION)
    severity = severity.when(again, repeats.value).when(late, swaps.value)
    detail = F.when(late, F.format_string("delivered after id %d of its key", "after")).otherwise(
        F.lit("delivered before")
    )
    wrong = marked.where(F.col("inside") & (again | late))
    return finding(wrong, kind, severity, detail, at=F.col("timestamp"))


def _among(topics: Collection[str]) -> Column:
    return F.col("topic").isin(*topics) if topics else F.lit(False)


def scattered(places: DataFrame) -> DataFrame:
    """`skew.places` → FINDINGS: keys with records in several partitions of a topic."""
    keyed = places.where(F.col("key").isNotNull())
    apart = keyed.groupBy("topic", "key").agg(
        F.count("partition").alias("partitions"), F.min("partition").alias("low"), F.max("partition").alias("high")
    )
    detail = F.format_string(
        "in %d partitions, from %d to %d, between which there is no order", "partitions", "low", "high"
    )
    return finding(apart.where(F.col("partitions") > 1), FindingKind.SCATTERED, Severity.SUSPECT, detail)


QUANTILES = (0.5, 0.9, 0.99)
_ACCURACY = 1_000


def by_hour(marked: DataFrame) -> DataFrame:
    """MARKED → (topic, hour, records, quantiles_ms, max_ms), including a row for each topic and one for all topics.

    In these, `hour`, or both `hour` and `topic`, are NULL. `records` counts all deliveries. The latencies are those of
    first deliveries, from the creation of the row to Kafka's timestamp, which has whole milliseconds. The rank of a
    quantile is accurate to 0.1 % of the records.
    """
    assert {"created_us", "first"} <= set(MARKED.names)
    # try_: a header may contain any time.
    took_ms = F.try_subtract(F.unix_micros("timestamp"), F.col("created_us")) / F.lit(1000.0)
    rows = marked.where("inside").select(
        "topic", F.date_trunc("hour", "timestamp").alias("hour"), F.when(F.col("first"), took_ms).alias("took_ms")
    )
    return (
        rows.rollup("topic", "hour")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.percentile_approx("took_ms", list(QUANTILES), _ACCURACY).alias("quantiles_ms"),
            F.max("took_ms").alias("max_ms"),
        )
        .select("topic", "hour", "records", "quantiles_ms", "max_ms")
    )


DELIVERIES, IDS = "deliveries", "ids"
ARCHIVED, DELIVERED, BEYOND = "archived", "delivered", "beyond"
PENDING = "pending"
_MOST = 2**63 - 1
_ROOM = 2**61
NAMES = (DELIVERIES, IDS, ARCHIVED, DELIVERED, BEYOND, PENDING)


def of_holes(gaps: DataFrame) -> DataFrame:
    """`gaps` → (name, value): how many numbers of the range are missing, by kind of hole."""
    # try_: a header may contain any number.
    numbers = F.coalesce(F.try_sum(F.col("last") - F.col("first") + 1), F.lit(_MOST))
    return gaps.where("at.inside").groupBy(F.col("hole").alias("name")).agg(numbers.alias("value"))


def of_archive(found: DataFrame) -> DataFrame:
    """`found` → (name, value): the counts of archived ids, of those that cannot be judged, and of delivered ones."""
    beyond = ~F.col("judged") & ~F.col("delivered")
    delivered = F.count_if(F.col("delivered"))
    return named(found, {ARCHIVED: F.count(F.lit(1)), BEYOND: F.count_if(beyond), DELIVERED: delivered})


def of_records(places: DataFrame) -> DataFrame:
    """`skew.places` → (name, value): the counts of deliveries in the range, and of ids first delivered in it."""
    totals = {DELIVERIES: F.sum("records"), IDS: F.sum("ids")}
    return named(places, {name: F.coalesce(total, F.lit(0)) for name, total in totals.items()})


_SMALL = 200_000


def matching(rows: DataFrame, wanted: DataFrame, by: Collection[str]) -> DataFrame:
    """The rows that match one that is wanted. Counts these at once; if there are none, nothing is read later."""
    count = wanted.count()
    return rows.join(_sent(wanted, count), list(by), "left_semi") if count else rows.where(F.lit(False))


def small(rows: DataFrame) -> DataFrame:
    """The same, counted at once; sent to each task if they are few."""
    return _sent(rows, rows.count())


def _sent(rows: DataFrame, count: int) -> DataFrame:
    return F.broadcast(rows) if count <= _SMALL else rows


def named(rows: DataFrame, counts: Mapping[str, Column]) -> DataFrame:
    """Aggregates → (name, value)."""
    pairs = (F.struct(F.lit(name).alias("name"), F.col(name).alias("value")) for name in counts)
    return rows.agg(*(count.alias(name) for name, count in counts.items())).select(F.inline(F.array(*pairs)))


@dataclass(frozen=True, slots=True)
class ProducerStream:
    """What one producer of a lane sent under one term. Times are Kafka's."""

    incarnation: str
    term: int
    lane: int
    producer: int
    records: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Term:
    """A leadership. `silence_s`: from the previous term's last record to its first one; negative if they overlap."""

    incarnation: str
    term: int
    lanes: int
    producers: int
    records: int
    first_at: datetime
    last_at: datetime
    silence_s: float | None


def streams(blocks: DataFrame) -> DataFrame:
    """`number_blocks` → (STREAM, records, first_at, last_at): only a few rows for each leadership."""
    return blocks.groupBy(*STREAM).agg(
        F.sum("records").alias("records"), F.min("first_at").alias("first_at"), F.max("last_at").alias("last_at")
    )


def terms(streams: Iterable[ProducerStream]) -> tuple[Term, ...]:
    """Terms from their streams, ordered by the first record of their incarnation, then by term."""
    grouped: dict[tuple[str, int], list[ProducerStream]] = {}
    began: dict[str, datetime] = {}
    for one in streams:
        grouped.setdefault((one.incarnation, one.term), []).append(one)
        began[one.incarnation] = min(one.first_at, began.get(one.incarnation, one.first_at))
    found: list[Term] = []
    for (incarnation, term), members in sorted(grouped.items(), key=lambda item: (began[item[0][0]], item[0])):
        first_at = min(one.first_at for one in members)
        before = found[-1] if found and found[-1].incarnation == incarnation else None
        silence_s = None if before is None else (first_at - before.last_at).total_seconds()
        lanes, records = len({one.lane for one in members}), sum(one.records for one in members)
        last_at = max(one.last_at for one in members)
        found.append(Term(incarnation, term, lanes, len(members), records, first_at, last_at, silence_s))
    return tuple(found)


_NUMBER = (*STREAM, "sequence")


class SequenceHole(StrEnum):
    """Why numbers are missing. The first three kinds are those of `verify`; the last two cannot be judged."""

    GIVEN_UP = "given up"
    HANDED_OVER = "left to a successor"
    OPEN = "under way or lost"
    RECENT = "newer than the snapshot of the outbox, or than the complete part of a lake"
    EDGE = "at the edge of what was read"


def given_up(origins: DataFrame, records: DataFrame) -> DataFrame:
    """(origin) and RECORDS → GIVEN_UP: the numbers of quarantined records, and those named by notices."""
    assert "notice" in RECORDS.names
    raw = origins.select("origin").unionByName(records.select(F.col("notice").alias("origin")))
    raw = raw.where(F.col("origin").isNotNull())
    # Shaped like Kafka's rows, so that `bronze_columns` remains the only decoder of the header.
    header = F.array(F.struct(F.lit("harvester").alias("key"), F.col("origin").alias("value")))
    nothing = {one.name: F.lit(None).cast(one.dataType) for one in KAFKA}
    rows = raw.withColumns({**nothing, "headers": header})
    decoded = bronze_columns(rows, "harvester").where(F.col("problem").isNull())
    return decoded.select(*GIVEN_UP.names).distinct()


def number_blocks(marked: DataFrame) -> DataFrame:
    """MARKED → (STREAM, block, records, bits, first, last, first_at, last_at): what is there of 64 numbers each."""
    assert set(_NUMBER) <= set(MARKED.names)
    return marked.groupBy(*STREAM, F.expr(block("sequence")).alias("block")).agg(
        F.count(F.lit(1)).alias("records"),
        F.bit_or(F.expr(bit("sequence"))).alias("bits"),
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.min("timestamp").alias("first_at"),
        F.max("timestamp").alias("last_at"),
    )


def numbers(blocks: DataFrame, marked: DataFrame, given_up: DataFrame) -> DataFrame:
    """`number_blocks`, MARKED and GIVEN_UP → NUMBERS: stretches that one record each has, all others one by one."""
    named_too = given_up.select(
        *STREAM, F.expr(block("sequence")).alias("block"), F.lit(True).alias("_given_up")
    ).distinct()
    once = (F.col("records") == F.bit_count("bits")) & (F.col("records") == F.col("last") - F.col("first") + 1)
    judged = blocks.join(named_too, [*STREAM, "block"], "left").withColumn("whole", once & F.col("_given_up").isNull())
    nowhere = F.lit(None).cast(NUMBERS["at"].dataType).alias("at")
    stretches = judged.where("whole").select(*STREAM, "first", "last", F.lit(1).alias("ids"), nowhere)
    rest = judged.where("NOT whole").select(*STREAM, "block")
    rows = matching(marked.withColumn("block", F.expr(block("sequence"))), rest, (*STREAM, "block"))
    seen = rows.groupBy(*_NUMBER).agg(F.size(F.collect_set("id")).alias("ids"), F.max(_at()).alias("at"))
    single = seen.join(given_up, list(_NUMBER), "full_outer").select(
        *STREAM, F.col("sequence").alias("first"), F.col("sequence").alias("last"), F.coalesce("ids", F.lit(0)), "at"
    )
    return single.toDF(*NUMBERS.names).unionByName(stretches)


def _at() -> Column:
    return F.struct("timestamp", "topic", "partition", "offset", "id", "inside")


def holes(numbers: DataFrame) -> DataFrame:
    """NUMBERS → the missing numbers `first` … `last` of a stream, and whether they are `given_up`.

    `next` and `past`: the next and the last number with a record, and where that is (`at`), if it is known.
    """
    before = Window.partitionBy(*STREAM).orderBy("first")
    # Sorted descending: a window ahead would be quadratic.
    behind = Window.partitionBy(*STREAM).orderBy(F.desc("first"))
    up_to_here = behind.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    first, end = (F.when(F.col("ids") > 0, F.struct(F.col(one).alias("number"), "at")) for one in ("first", "last"))
    rows = (
        numbers.withColumn("next", F.last(first, ignorenulls=True).over(up_to_here))
        .withColumn("previous", F.lag("last", 1, 0).over(before))
        .withColumn("past", F.last(end, ignorenulls=True).over(before.rowsBetween(*_NOTHING_BEFORE)))
        .where(F.col("next").isNotNull())
    )

    def missing(first: Column, last: Column, *, given_up: bool) -> tuple[Column | str, ...]:
        known = F.lit(given_up).alias("given_up")
        return (*STREAM, first.alias("first"), last.alias("last"), "next", "past", known)

    number, previous = F.col("first"), F.col("previous")
    unknown = rows.where(number > previous + 1).select(*missing(previous + 1, number - 1, given_up=False))
    known = rows.where(F.col("ids") == 0).select(*missing(number, number, given_up=True))
    return unknown.unionByName(known)


def gaps(
    holes: DataFrame, marked: DataFrame, last: DataFrame, whole: datetime | None, read_at: datetime | None
) -> DataFrame:
    """`holes`, MARKED and `last_streams` → the missing numbers `first` … `last` of a stream, and why: `hole`.

    `at`: the next record; `previous_at`: the time of the record before. `whole`: the time from which the topics are
    complete; None: from their beginning. `read_at`: the time up to which they are complete, or at which the outbox was
    read; a hole is RECENT if its next record is later. None: no hole is.
    """
    found = _with_records(holes, marked)
    found = found.join(F.broadcast(last.withColumn("_last", F.lit(True))), list(STREAM), "left")
    edge = F.lit(False) if whole is None else F.coalesce(F.col("previous_at") < F.lit(whole), F.lit(True))
    recent = F.lit(False) if read_at is None else F.coalesce(F.col("at.timestamp") > F.lit(read_at), F.lit(False))
    hole = (
        F.when(F.col("given_up"), SequenceHole.GIVEN_UP)
        .when(edge, SequenceHole.EDGE)
        .when(F.col("_last").isNull(), SequenceHole.HANDED_OVER)
        .when(recent, SequenceHole.RECENT)
        .otherwise(SequenceHole.OPEN)
    )
    return found.withColumn("hole", hole).select(*STREAM, "first", "last", "previous_at", "at", "hole")


def _with_records(holes: DataFrame, marked: DataFrame) -> DataFrame:
    """Adds the record with the number `next` as `at`, and the time of that of `past` as `previous_at`."""
    ends = [holes.select(*STREAM, F.col(f"{name}.*")) for name in ("next", "past")]
    unknown = ends[0].union(ends[1]).where("at IS NULL AND number IS NOT NULL")
    wanted = unknown.select(*STREAM, F.col("number").alias("sequence")).distinct()
    there = matching(marked, wanted, _NUMBER).groupBy(*_NUMBER).agg(F.max(_at()).alias("at"))
    after = there.select(*STREAM, F.col("sequence").alias("_next"), F.col("at").alias("_after"))
    before = there.select(*STREAM, F.col("sequence").alias("_past"), F.col("at.timestamp").alias("_before"))
    keyed = holes.withColumns({"_next": F.col("next.number"), "_past": F.col("past.number")})
    joined = keyed.join(after, [*STREAM, "_next"], "left").join(before, [*STREAM, "_past"], "left")
    return joined.withColumns(
        {"at": F.coalesce("next.at", "_after"), "previous_at": F.coalesce("past.at.timestamp", "_before")}
    )


def last_streams(streams: DataFrame) -> DataFrame:
    """(STREAM, last_at) → STREAM: for each lane of an incarnation's last term, the stream with the latest record."""
    incarnation = Window.partitionBy("incarnation")
    lane = Window.partitionBy("incarnation", "lane").orderBy(F.desc("last_at"), F.desc("producer"))
    latest = streams.withColumn("_term", F.max("term").over(incarnation)).where(F.col("term") == F.col("_term"))
    return latest.withColumn("_nth", F.row_number().over(lane)).where(F.col("_nth") == 1).select(*STREAM)


def open_gaps(gaps: DataFrame, severity: Severity, losses: Collection[AcceptedLoss] = ()) -> DataFrame:
    """`gaps` → FINDINGS: the open ones, each at the record with the next number."""
    rows = gaps.where((F.col("hole") == SequenceHole.OPEN) & F.col("at.inside"))
    size = F.try_add(F.try_subtract("last", "first"), F.lit(1))
    accepted = explained(losses, begun="previous_at", ended="at.timestamp", size=size)
    rows = rows.withColumn("_accepted", accepted)
    kind = F.when(F.col("_accepted"), FindingKind.ACCEPTED).otherwise(FindingKind.GAP)
    judged = F.when(F.col("_accepted"), Severity.ACCEPTED).otherwise(severity.value)
    numbers = F.when(F.col("first") == F.col("last"), F.format_string("number %d is", "first")).otherwise(
        F.format_string("numbers %d to %d are", "first", "last")
    )
    detail = F.format_string("term %d, lane %d, producer %d: %s missing", "term", "lane", "producer", numbers)
    return _at_record(rows, kind, judged, detail, id=F.lit(None))


def clashes(numbers: DataFrame) -> DataFrame:
    """NUMBERS → FINDINGS: numbers with several ids, which a reader of committed records must never see."""
    rows = numbers.where((F.col("ids") > 1) & F.col("at.inside"))
    detail = F.format_string(
        "term %d, lane %d, producer %d: number %d has %d ids", "term", "lane", "producer", "first", "ids"
    )
    return _at_record(rows, FindingKind.CLASH, Severity.VIOLATION, detail)


def _at_record(
    rows: DataFrame, kind: Column | FindingKind, severity: Column | Severity, detail: Column, **other: Column
) -> DataFrame:
    place = {name: F.col(f"at.{name}") for name in ("topic", "partition", "offset", "id")}
    place |= {"key": F.lit(None), "at": F.col("at.timestamp")}
    return finding(rows, kind, severity, detail, **{**place, **other})

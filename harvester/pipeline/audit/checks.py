"""The checks of an audit, as transforms of frames: lost records, repeats, order, latency, terms, and their counts.

A row is purged after the broker's acknowledgement, so whatever the archive names has to stand in the topics,
wherever. Judged is what was purged within the range and *created* since the topics are whole: a record cannot be in
the log before its row was made, so what is asked for lies within what was read, whatever clock its timestamp is of.

Within a key of a partition the log's own order is the order of delivery, and the ids say what is right (invariant
I2): a writer that locks what the key stands for, and then inserts, takes ids in the order of its commits
(docs/outbox.md). A record that comes below an id that is already there is either

    repeated after a successor      it had been delivered before: never right
    delivered after a successor     it had not: wrong, unless its writers were not serial, which nothing here can tell

Records without a key have no order, and between partitions or topics the log defines none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline.audit.schemas import MARKED, STREAM, FindingKind, RecordSource, Severity, finding


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """What a lake is known not to have, sent between these times of Kafka's; None: nobody knows.

    `room`: how many records there were at most; None, too.
    """

    topic: str
    room: int | None
    after: datetime | None
    before: datetime | None


SLACK = timedelta(minutes=1)
"""Between the clocks of the database, of producers and of brokers."""


def explained(
    losses: Collection[AcceptedLoss], *, begun: str, ended: str, size: Column, topic: str | None = None
) -> Column:
    """Whether what is missing may lie in an accepted loss: it was sent at some time from `begun` to `ended`.

    Nothing does where that would be more than there was room for: in all losses, or in those that were at its time.
    `topic`: None where only times are known.
    """
    found, room, own = F.lit(False), F.lit(0).cast("bigint"), F.lit(0).cast("bigint")
    fits: list[Column] = []  # for each loss, whether it was at the time
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
    """What can be judged. `whole`: since when the topics have everything; None: from their beginning.

    `since` ≤ purged_at < `until`. `doubtful`: topics that may lack records (compacted, emptied, or not read that far).
    """

    topics: tuple[str, ...]
    since: datetime | None = None
    until: datetime | None = None
    whole: datetime | None = None
    doubtful: Collection[str] = ()
    losses: Collection[AcceptedLoss] = ()


def archived(history: DataFrame, bounds: AuditScope) -> DataFrame:
    """HISTORY → HISTORY with `judged`: what the archive has of the range and of the topics that were read."""
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
    """`archived` and MARKED → the first with `delivered`: whether the log has it, in whichever topic."""
    ids = marked.where("first").select("incarnation", "id", F.lit(True).alias("_there"))
    joined = archived.join(ids, ["incarnation", "id"], "left")
    return joined.withColumn("delivered", F.col("_there").isNotNull()).drop("_there")


def lost(found: DataFrame, bounds: AuditScope) -> DataFrame:
    """`found` → FINDINGS: purged, and in none of the topics."""
    doubtful = _among(bounds.doubtful)
    rows = found.where(F.col("judged") & ~F.col("delivered"))
    accepted = explained(bounds.losses, begun="created_at", ended="at", size=F.lit(1), topic="topic")
    rows = rows.withColumn("_accepted", accepted)
    kind = F.when(F.col("_accepted"), FindingKind.ACCEPTED).otherwise(FindingKind.LOST)
    severity = F.when(F.col("_accepted"), Severity.ACCEPTED).when(doubtful, Severity.SUSPECT)
    detail = F.when(
        F.col("_accepted"), "may be among what the lake went on without, or what was erased from it"
    ).otherwise("purged as delivered, and in none of the topics")
    return finding(rows, kind, severity.otherwise(Severity.VIOLATION), detail)


def unexpected(marked: DataFrame, history: DataFrame, began: datetime | None, read_at: datetime) -> DataFrame:
    """MARKED and HISTORY → FINDINGS: records of which outbox, quarantine and archive know nothing.

    Only those between the archive's beginning and the moment at which the history was read: before, nobody noted
    them; after, their rows are newer.
    """
    if began is None:
        rows = marked.limit(0)
    else:
        created = F.coalesce(F.col("created_us"), F.lit(0))
        since, until = F.lit(began), F.unix_micros(F.lit(read_at))
        rows = marked.where(F.col("inside") & F.col("first") & (F.col("timestamp") >= since) & (created < until))
    strange = rows.join(history.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
    detail = "neither in the outbox nor in its quarantine and archive"
    return finding(strange, FindingKind.UNEXPECTED, Severity.SUSPECT, detail, at=F.col("timestamp"))


_NOTHING_BEFORE = (Window.unboundedPreceding, -1)


def marked(records: DataFrame, anew: Collection[str] = ()) -> DataFrame:
    """RECORDS → MARKED: those with an origin, each with what came before it.

    `anew`: topics that were deleted and made anew, of which a lake has the records of two logs. Where the second begins
    nobody knows, so theirs are in the order of their times.
    """
    sent = records.where(F.col("problem").isNull())
    place = (F.when(_among(anew), F.col("timestamp")), F.col("offset"))
    # Of a repeat the clock may be behind: within a partition the offset says which was first.
    one = Window.partitionBy("incarnation", "id")
    here = Window.partitionBy("incarnation", "id", "topic", "partition")
    sent = sent.withColumn("_began", F.min("timestamp").over(here)).withColumn(
        "first", F.row_number().over(one.orderBy("_began", "topic", "partition", *place)) == 1
    )
    # Without a key each record is alone, instead of all of them being one task.
    alone = F.when(F.col("key").isNull(), F.col("id"))
    key = Window.partitionBy("topic", "partition", "incarnation", "key", "_alone").orderBy(*place)
    top = F.max("id").over(key.rowsBetween(*_NOTHING_BEFORE))
    sent = sent.withColumn("_alone", alone).withColumn("_top", top)
    return sent.withColumn("after", F.when(F.col("_top") > F.col("id"), F.col("_top"))).select(*MARKED.names)


def findings(marked: DataFrame, *, repeats: Severity, swaps: Severity, anew: Collection[str] = ()) -> DataFrame:
    """MARKED → FINDINGS: every delivery beyond the first of an id, and every one that comes after a successor.

    `anew`: as in `marked`; their order is no proof.
    """
    again, late = ~F.col("first"), F.col("after").isNotNull()
    kind = F.when(again & late, FindingKind.LATE_REPEAT).when(again, FindingKind.REPEAT).when(late, FindingKind.SWAPPED)
    severity = F.when(late & _among(anew), Severity.SUSPECT).when(again & late, Severity.VIOLATION)
    severity = severity.when(again, repeats.value).when(late, swaps.value)
    detail = F.when(late, F.format_string("id %d of its key had come before it", "after")).otherwise(
        F.lit("delivered before")
    )
    wrong = marked.where(F.col("inside") & (again | late))
    return finding(wrong, kind, severity, detail, at=F.col("timestamp"))


def _among(topics: Collection[str]) -> Column:
    return F.col("topic").isin(*topics) if topics else F.lit(False)


def scattered(places: DataFrame) -> DataFrame:
    """(topic, key, partition, records) → FINDINGS: keys of which one topic has records in several partitions."""
    keyed = places.where(F.col("key").isNotNull())
    apart = keyed.groupBy("topic", "key").agg(
        F.count("partition").alias("partitions"), F.min("partition").alias("low"), F.max("partition").alias("high")
    )
    detail = F.format_string(
        "in %d partitions, from %d to %d: between them there is no order", "partitions", "low", "high"
    )
    return finding(apart.where(F.col("partitions") > 1), FindingKind.SCATTERED, Severity.SUSPECT, detail)


QUANTILES = (0.5, 0.9, 0.99)
_ACCURACY = 1_000


def by_hour(marked: DataFrame) -> DataFrame:
    """MARKED → (topic, hour, records, quantiles_ms, max_ms), with a row for each topic and one for all of them.

    Of these hour, or topic as well, is NULL. `records` counts all deliveries; the times are those of first ones, from
    the creation of the row to Kafka's timestamp, which has whole milliseconds. Quantiles are off by 0.1 % of the
    records at most.
    """
    assert {"created_us", "first"} <= set(MARKED.names)
    # try_: a header may name any time.
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
    """`gaps` → (name, value): numbers of the range that are missing, by the kind of hole."""
    # try_: a header may bear any number.
    numbers = F.coalesce(F.try_sum(F.col("last") - F.col("first") + 1), F.lit(_MOST))
    return gaps.where("at.inside").groupBy(F.col("hole").alias("name")).agg(numbers.alias("value"))


def of_archive(found: DataFrame) -> DataFrame:
    """`found` → (name, value): ids of the range, those that cannot be judged, those delivered."""
    beyond = ~F.col("judged") & ~F.col("delivered")
    delivered = F.count_if(F.col("delivered"))
    return _named(found, {ARCHIVED: F.count(F.lit(1)), BEYOND: F.count_if(beyond), DELIVERED: delivered})


def of_outbox(history: DataFrame, marked: DataFrame) -> DataFrame:
    """HISTORY and MARKED → (name, value): rows of the outbox that have not been delivered."""
    waiting = history.where(F.col("source") == RecordSource.OUTBOX)
    waiting = waiting.join(marked.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
    return _named(waiting, {PENDING: F.count(F.lit(1))})


def of_records(marked: DataFrame) -> DataFrame:
    """MARKED → (name, value): deliveries of the range, and ids."""
    return _named(marked.where("inside"), {DELIVERIES: F.count(F.lit(1)), IDS: F.count_if(F.col("first"))})


def _named(rows: DataFrame, counts: Mapping[str, Column]) -> DataFrame:
    pairs = (F.struct(F.lit(name).alias("name"), F.col(name).alias("value")) for name in counts)
    return rows.agg(*(count.alias(name) for name, count in counts.items())).select(F.inline(F.array(*pairs)))


@dataclass(frozen=True, slots=True)
class ProducerStream:
    """What one producer of a lane sent under a term. Times are Kafka's."""

    incarnation: str
    term: int
    lane: int
    producer: int
    records: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Term:
    """A leadership. `silence_s`: from the last record of the term before to its first; below 0: they overlap."""

    incarnation: str
    term: int
    lanes: int
    producers: int
    records: int
    first_at: datetime
    last_at: datetime
    silence_s: float | None


def streams(marked: DataFrame) -> DataFrame:
    """MARKED → (STREAM, records, first_at, last_at): few rows, a handful for each leadership."""
    assert set(STREAM) <= set(MARKED.names)
    return marked.groupBy(*STREAM).agg(
        F.count(F.lit(1)).alias("records"),
        F.min("timestamp").alias("first_at"),
        F.max("timestamp").alias("last_at"),
    )


def terms(streams: Iterable[ProducerStream]) -> tuple[Term, ...]:
    """In the order of the incarnations' first records, then of the terms."""
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

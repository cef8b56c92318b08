"""The audit's transforms on small frames: order and repeats, numbers, the history, latency, keys, Kafka's hash."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.delivery import partitioner
from harvester.origin import decode
from harvester.pipeline.audit import checks
from harvester.pipeline.audit import skew as audit_skew
from harvester.pipeline.audit.checks import SequenceHole
from harvester.pipeline.audit.job import collect_findings, collect_hot_keys, collect_latency, collect_streams
from harvester.pipeline.audit.schemas import FINDINGS, MARKED, RECORDS, FindingKind, Severity
from harvester.pipeline.audit.skew import murmur2
from harvester.verify import sequences as plain
from tests.support.audits import A, Sent, at, history, numbered, records
from tests.support.sparks import assert_rows, assert_same_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

B = UUID(int=2)


def marked(spark: SparkSession, *sent: Sent) -> DataFrame:
    return checks.marked(records(spark, sent)).persist()


def kinds(frame: DataFrame) -> list[tuple[str, str, int | None, int | None]]:
    rows = frame.select("kind", "severity", "id", "offset").collect()
    return sorted((row["kind"], row["severity"], row["id"], row["offset"]) for row in rows)


def test_order_and_repeats_are_judged_within_a_key_of_a_partition(spark: SparkSession) -> None:
    sent = [
        Sent(1, b"fine"), Sent(2, b"fine"), Sent(4, b"fine"),  # 3 is another key's
        Sent(3, b"swap"), Sent(10, b"late"), Sent(11, b"late"),
        Sent(9, b"swap"), Sent(8, b"swap"),  # @7
        Sent(10, b"late"),  # @8, after 11
        Sent(20, b"twice"), Sent(20, b"twice"), Sent(21, b"twice"),  # @10
        Sent(31, None), Sent(30, None), Sent(31, None),  # no order, but @14 is a repeat
        Sent(41, b"apart", partition=1), Sent(40, b"apart", partition=2),
        Sent(2, b"fine", incarnation=B), Sent(1, b"other", incarnation=B),
        # The clock of the second sender is behind: the offset says which is the repeat (@20).
        Sent(50, b"clock", seconds=9), Sent(50, b"clock", seconds=3),
        Sent(60, b"x", header=False), Sent(60, b"x", header=False),
    ]  # fmt: skip
    frame = marked(spark, *sent)
    assert_same_columns(records(spark, sent), RECORDS)
    assert_same_columns(frame, MARKED)
    findings = checks.findings(frame, repeats=Severity.SUSPECT, swaps=Severity.VIOLATION)
    assert_same_columns(findings, FINDINGS)
    assert kinds(findings) == [
        ("delivered after a successor", "violation", 8, 7),
        ("repeated", "suspect", 20, 10),
        ("repeated", "suspect", 31, 14),
        ("repeated", "suspect", 50, 20),
        ("repeated after a successor", "violation", 10, 8),
    ]
    [swapped, *_] = collect_findings(findings.where(F.col("kind") == FindingKind.SWAPPED))
    assert str(swapped.examples[0]) == (
        f"delivered after a successor: id 8 of {A}, key 'swap', orders[0]@7: delivered after id 9 of its key"
    )
    scattered = checks.scattered(audit_skew.places(frame))
    assert_same_columns(scattered, FINDINGS)
    assert_rows(scattered, [{"kind": "key in several partitions", "key": b"apart", "topic": "orders"}])


streams = st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(1, 2))
numbers = st.sampled_from([*range(1, 6), *range(62, 67), 128])  # in three blocks
deliveries = st.lists(
    st.builds(
        lambda stream, sequence, number, seconds: Sent(
            number, b"key", sequence, seconds, term=stream[0], lane=stream[1], producer=stream[2]
        ),
        streams, numbers, st.integers(1, 12), st.integers(0, 50),
    ),
    max_size=25,
)  # fmt: skip
given_up = st.lists(st.tuples(streams, numbers), max_size=6)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes=st.lists(st.tuples(deliveries, given_up), min_size=1, max_size=40))
def test_numbers_are_judged_as_verify_judges_them(
    spark: SparkSession, scenes: list[tuple[list[Sent], list[tuple[tuple[int, int, int], int]]]]
) -> None:
    """Many scenes at once, each in an incarnation of its own."""
    expected: dict[str, int] = dict.fromkeys(("clashes", *(hole.value for hole in plain.Hole)), 0)
    sent: list[Sent] = []
    past: list[dict[str, Any]] = []
    for number, (rows, lost) in enumerate(scenes, start=1):
        incarnation = UUID(int=number)
        own = [replace(one, incarnation=incarnation) for one in rows]
        judge = plain.Sequences()
        for one in own:
            origin = decode(one.origin)
            assert origin is not None
            judge.add(origin, int(at(one.seconds).timestamp() * 1000))
        judged = judge.judge([(plain.Stream(incarnation, *stream), at_) for stream, at_ in lost])
        expected["clashes"] += judged.clashes
        for hole, count in judged.holes.items():
            expected[hole] += count
        sent += own
        past += [
            {
                "source": "quarantine", "id": 0,
                "origin": Sent(0, None, at_, 0, incarnation, *stream).origin,
            }
            for stream, at_ in lost
        ]  # fmt: skip
    frame = records(spark, sent)
    kept = checks.marked(frame)
    stretches = checks.number_blocks(kept)
    numbers = checks.numbers(stretches, kept, checks.given_up(history(spark, *past), frame))
    last = checks.last_streams(checks.streams(stretches))
    gaps = checks.gaps(checks.holes(numbers), kept, last, None, None)
    size = F.sum(F.col("last") - F.col("first") + 1).alias("size")
    counted = (
        gaps.groupBy("hole")
        .agg(size)
        .unionByName(
            numbers.where("ids > 1").agg(F.lit("clashes").alias("hole"), F.sum(F.col("ids") - 1).alias("size"))
        )
    )
    found = {row["hole"]: row["size"] or 0 for row in counted.collect()}
    assert {**dict.fromkeys(expected, 0), **found} == expected


def test_a_gap_is_told_with_the_record_that_comes_next(spark: SparkSession) -> None:
    notice = Sent(0, None, 4).origin.hex()
    sent = [
        Sent(1, b"a", 1), Sent(2, b"b", 3, seconds=1), Sent(5, b"c", 5, seconds=2),
        Sent(6, b"n", 6, seconds=3, topic="notices", value=f'{{"origin": "{notice}"}}'.encode()),
        Sent(7, b"n", 7, seconds=3, topic="notices", value=b"\xff"),
        Sent(8, b"n", 8, seconds=3, topic="notices", value=b'{"origin": "xyz"}'),
        Sent(9, b"d", 10, seconds=90),
        Sent(10, b"e", 2, lane=1, seconds=5), Sent(11, b"e", 2, lane=1, seconds=6),
    ]  # fmt: skip
    frame = records(spark, sent, "notices")
    kept = checks.marked(frame)
    stretches = checks.number_blocks(kept)
    numbers = checks.numbers(stretches, kept, checks.given_up(history(spark), frame)).persist()
    last = checks.last_streams(checks.streams(stretches))
    gaps = checks.gaps(checks.holes(numbers), kept, last, None, at(60)).persist()
    assert_rows(
        gaps,
        [
            {"lane": 0, "first": 2, "last": 2, "hole": SequenceHole.OPEN.value},
            {"lane": 0, "first": 4, "last": 4, "hole": SequenceHole.GIVEN_UP.value},
            {"lane": 0, "first": 9, "last": 9, "hole": SequenceHole.RECENT.value},
            {"lane": 1, "first": 1, "last": 1, "hole": SequenceHole.OPEN.value},
        ],
    )
    findings = checks.open_gaps(gaps, Severity.VIOLATION).unionByName(checks.clashes(numbers))
    assert_same_columns(findings, FINDINGS)
    assert_rows(
        findings,
        [
            {"kind": "gap in a lane", "offset": 1, "detail": "term 1, lane 0, producer 1: number 2 is missing"},
            {"kind": "gap in a lane", "offset": 8, "detail": "term 1, lane 1, producer 1: number 1 is missing"},
            {"kind": "number of several ids", "offset": 8,
             "detail": "term 1, lane 1, producer 1: number 2 has 2 ids"},
        ],
    )  # fmt: skip
    # What retention removed is no gap: the first record that is whole is that of number 3.
    edges = checks.gaps(checks.holes(numbers), kept, last, at(1), at(60))
    assert_rows(
        edges.where("hole = 'at the edge of what was read'"), [{"lane": 0, "first": 2}, {"lane": 1, "first": 1}]
    )


def test_the_history_says_what_is_lost(spark: SparkSession) -> None:
    sent = [
        Sent(1), Sent(2, topic="payments"), Sent(3, incarnation=B), Sent(7, seconds=5), Sent(8), Sent(9, seconds=80),
    ]  # fmt: skip
    past = history(
        spark,
        {"id": 1}, {"id": 2},  # 2 went elsewhere, but it is there
        {"id": 3},  # there is one of B only
        {"id": 4, "at": at(100)},  # behind the range
        {"id": 5, "created_at": at(-99)}, {"id": 6, "created_at": None},  # too old to be judged
        {"id": 10, "topic": "notes"}, {"id": 11, "topic": "payments"},  # a topic that is not read; one that is doubtful
        {"id": 12, "source": "outbox"}, {"id": 13, "source": "quarantine"},
        {"id": 8, "source": "outbox"},
    )  # fmt: skip
    kept = marked(spark, *sent)
    bounds = checks.AuditScope(("orders", "payments"), at(0), at(50), at(-10), ("payments",))
    found = checks.found(checks.archived(past, bounds), kept).persist()
    lost = checks.lost(found, bounds)
    assert_same_columns(lost, FINDINGS)
    assert kinds(lost) == [("lost", "suspect", 11, None), ("lost", "violation", 3, None)]
    assert found.where("NOT judged").count() == 2
    strange = checks.unexpected(kept, past, at(0), at(60))
    assert_same_columns(strange, FINDINGS)
    # 9 was created after the history had been read.
    assert kinds(strange) == [("not in the history", "suspect", 3, 2), ("not in the history", "suspect", 7, 3)]


def test_latency_is_that_of_first_deliveries_by_topic_and_hour(spark: SparkSession) -> None:
    quick = [Sent(number, seconds=number, took_s=0.01) for number in range(100)]
    slow = [Sent(number, seconds=4000, took_s=2.0) for number in range(100, 110)]
    again = [Sent(5, seconds=100, took_s=90.0)]
    found = collect_latency(checks.by_hour(marked(spark, *quick, *slow, *again)))
    assert [(one.topic, one.hour, one.records) for one in found] == [
        (None, None, 111), ("orders", None, 111), ("orders", at(0), 101), ("orders", at(3600), 10),
    ]  # fmt: skip
    assert [(one.p50_ms, one.p90_ms, one.p99_ms, one.max_ms) for one in found[1:]] == [
        (10.0, 10.0, 2000.0, 2000.0), (10.0, 10.0, 10.0, 10.0), (2000.0, 2000.0, 2000.0, 2000.0),
    ]  # fmt: skip


def test_hot_keys_and_terms(spark: SparkSession) -> None:
    sent = numbered(
        [
            *(Sent(number, b"hot", seconds=number) for number in range(60)),
            *(Sent(number, b"key %d" % number, seconds=number, lane=1) for number in range(60, 90)),
            *(Sent(number, None, seconds=number + 30, term=3) for number in range(90, 100)),
        ]
    )
    kept = marked(spark, *sent)
    hot, skew = collect_hot_keys(audit_skew.hot_keys(audit_skew.places(kept)))
    assert skew is not None
    assert (hot[0].key, hot[0].records, hot[0].share, len(hot)) == ("hot", 60, 0.6, audit_skew.HOT)
    assert (skew.records, skew.keys, skew.keyless) == (100, 31, 10)
    for load in skew.loads:
        held = [10 / load.shards] * load.shards
        for one in sent:
            if one.key is not None:
                held[partitioner.murmur2(one.key) % load.shards] += 1
        assert load.busiest == pytest.approx(max(held) / 100)
    [first, second] = checks.terms(collect_streams(checks.streams(checks.number_blocks(kept))))
    assert (first.term, first.lanes, first.records, first.silence_s) == (1, 2, 90, None)
    assert (second.term, second.lanes, second.records, second.silence_s) == (3, 1, 10, 31.0)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(keys=st.lists(st.binary(max_size=21), min_size=1, max_size=200))
def test_the_hash_is_kafkas(spark: SparkSession, keys: list[bytes]) -> None:
    frame = spark.createDataFrame([(bytearray(key),) for key in [*keys, b"\xff" * 300]], "key binary")
    rows = frame.select("key", murmur2(F.col("key")).alias("hash")).collect()
    assert [row["hash"] for row in rows] == [partitioner.murmur2(bytes(row["key"])) for row in rows]

"""What a batch is told by: its ranges of offsets, and the overview of what is in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvester.origin import HEADER, Origin, encode
from harvester.pipeline import streaming
from harvester.pipeline.errors import CheckpointMismatch
from harvester.pipeline.lake import silver
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.streaming import Range, parse
from tests.support.sparks import assert_rows, kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted_queries")]

A = UUID(int=2**127)
LAST = 2**63 - 1
ids = st.integers(-70, 70) | st.sampled_from([-(2**63), LAST, LAST - 64])


def written(ends: Any, version: str = "v1") -> str:
    """As Spark's OffsetSeqLog has it."""
    return f'{version}\n{{"batchWatermarkMs":0}}\n{json.dumps(ends)}'


def test_a_batch_is_what_lies_between_two_ends() -> None:
    before = parse(written({"orders": {"0": 5, "1": 7}}), "there")
    now = parse(written({"orders": {"0": 9, "1": 7, "2": 1}, "payments": {"0": 0, "1": 3}}), "there")
    assert streaming.ranges(before, now) == [
        Range("orders", 0, 5, 9), Range("orders", 2, None, 1), Range("payments", 1, None, 3)
    ]  # fmt: skip
    assert streaming.ranges(None, before) == [Range("orders", 0, None, 5), Range("orders", 1, None, 7)]
    assert streaming.ranges(now, now) == []


@pytest.mark.parametrize("text", ["", "v1", written({}, "v2"), written([]), written({"orders": 3}), "v1\n{}\n{"])
def test_an_unknown_way_of_writing_offsets_is_told(text: str) -> None:
    with pytest.raises(CheckpointMismatch, match="there was not written by a Spark"):
        parse(text, "there")


def test_rows_of_the_ranges_and_no_others(spark: SparkSession) -> None:
    rows = kafka_rows(spark, ({"partition": one % 3, "offset": one} for one in range(12)))
    found = [Range("orders", 0, 3, 9), Range("orders", 1, None, 4), Range("payments", 2, None, 99)]
    assert_rows(rows.where(streaming.within(found)), [{"offset": 1}, {"offset": 3}, {"offset": 6}])
    assert rows.where(streaming.within([])).isEmpty()
    many = [Range("orders", one, one, one + 2) for one in range(200)]
    assert rows.where(streaming.within(many)).count() == 3


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("orders", 0, 3, 8), True),
        (("orders", 0, 2, 8), False),  # begins before
        (("orders", 0, 3, 9), False),  # ends behind
        (("orders", 1, 0, 3), True),  # from the beginning
        (("orders", 2, 3, 3), False),
        (("payments", 0, 3, 3), False),
    ],
)
def test_whether_a_stretch_of_offsets_is_all_in_a_range(place: tuple[str, int, int, int], expected: bool) -> None:
    found = [Range("orders", 0, 3, 9), Range("orders", 1, None, 4)]
    assert streaming.inside(found, *place) is expected


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(named=st.lists(st.tuples(st.sampled_from([A, UUID(int=5)]), ids), min_size=1, max_size=60))
def test_repeats_are_all_but_the_first_of_a_name(spark: SparkSession, named: list[tuple[UUID, int]]) -> None:
    bronze = bronze_columns(kafka_rows(spark, [origin(*one) for one in named]))
    seen: set[tuple[UUID, int]] = set()
    expected = []
    for offset, one in enumerate(named):
        if one in seen:
            expected.append({"offset": offset})
        seen.add(one)
    assert_rows(silver.later_deliveries(bronze, len(named)), expected)


def test_the_overview_has_every_day_of_creation_and_the_ends_of_the_ids(spark: SparkSession) -> None:
    day = 86_400_000_000
    created = [0, -1, day - 1, -day, -day - 1, 5 * day, LAST, -(2**63), 253_402_300_799_999_999]
    rows = [
        {"headers": [(HEADER, encode(Origin(A, one, 1, 0, 1, 1, created_us)))]}
        for one, created_us in enumerate(created)
    ]
    bronze = bronze_columns(kafka_rows(spark, [*rows, *rows[:2], {"topic": "payments"}]))
    found = silver.summed_up(silver.overview(bronze).collect())
    days = {row["day"] for row in silver.deliveries(bronze).select("day").collect()}
    assert set(found.days) == days
    assert (found.rejected, found.ids) == (True, {str(A): silver.Span(0, len(created) - 1)})
    assert set(found.topics) == {"orders"}
    assert_rows(silver.later_deliveries(bronze, 99), [{"offset": len(rows)}, {"offset": len(rows) + 1}])
    nothing = silver.summed_up(silver.overview(bronze.where("topic = 'payments'")).collect())
    assert (nothing.rejected, nothing.ids, nothing.days) == (True, {}, ())


def origin(incarnation: UUID, number: int) -> dict[str, Any]:
    return {"headers": [(HEADER, encode(Origin(incarnation, number, 1, 0, 1, 1, number)))]}


def test_what_the_table_has_is_found_among_what_is_not_above_it(spark: SparkSession) -> None:
    b, c = UUID(int=5), UUID(int=6)
    stored = silver.deliveries(bronze_columns(kafka_rows(spark, [origin(A, one) for one in (3, 5, 9)])))
    rows = [origin(A, 3), origin(A, 4), origin(A, 9), origin(A, 10), origin(b, 3), origin(c, 5), {"value": b"stranger"}]
    bronze = bronze_columns(kafka_rows(spark, rows))
    found = silver.summed_up(silver.overview(bronze).collect())
    highest = {str(A): 9, str(c): 5}
    places = silver.stored_before(bronze, stored, found, highest)
    assert places is not None
    assert_rows(places, [{"offset": 0}, {"offset": 2}])
    late = bronze_columns(kafka_rows(spark, [origin(A, 10), origin(b, 1)]))
    nothing = silver.summed_up(silver.overview(late).collect())
    assert silver.stored_before(late, stored, nothing, highest) is None
    assert silver.stored_before(late, stored, nothing, {}) is None


def test_states_follow_the_age_of_their_incarnation_whatever_the_ids_are(spark: SparkSession) -> None:
    """Also where ids are as low and as high as they can be, and many records name the same key."""
    b, low, high = UUID(int=5), -(2**63), 2**63 - 1
    rows = [origin(b, low), origin(b, low + 1), origin(A, high), origin(A, high - 1), origin(A, low)]
    deliveries = silver.deliveries(bronze_columns(kafka_rows(spark, rows)))
    for younger, expected in ((b, low + 1), (A, high)):
        since_us = {str(A): -1, str(b): -1} | {str(younger): 1_772_409_600_000_001}
        for most in (5, 10**9):
            states = silver.latest_states(deliveries, since_us, most)
            assert_rows(
                states.selectExpr("incarnation", "id", "unix_micros(since) AS us"),
                [{"incarnation": str(younger), "id": expected, "us": 1_772_409_600_000_001}],
            )
    twice = bronze_columns(kafka_rows(spark, [*rows, *rows]))
    once = silver.latest_states(
        silver.deliveries(twice), {str(A): -1, str(b): 0}, 10, silver.later_deliveries(twice, 10)
    )
    assert_rows(once.select("incarnation", "id"), [{"incarnation": str(b), "id": low + 1}])
    alone = silver.latest_states(deliveries.where(f"incarnation = '{A}'"), {str(A): -1}, 5)
    assert_rows(alone.selectExpr("id", "unix_micros(since) AS us"), [{"id": high, "us": -1}])

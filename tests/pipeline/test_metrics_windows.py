"""Counts, windows, hottest keys and hours, against a plain computation of the same; the days of records."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.origin import HEADER, Origin
from harvester.pipeline import schemas, windows
from harvester.pipeline.formats import open_store
from harvester.pipeline.origin_columns import bronze_columns
from harvester.telemetry.latency import Histogram
from tests.support.lakes import make_lake
from tests.support.longs import long
from tests.support.sparks import assert_rows, assert_same_columns, kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # the first one starts Spark, maybe beside all other workers

START = datetime(2026, 3, 1, 9, 58, tzinfo=UTC)
A = UUID(int=2**127)


def sent(second: float, latency_ms: float | None, *, lane: int = 0, created_us: int | None = None, **row: Any) -> Any:
    """A record published so many seconds after START; without a latency it is nobody's."""
    published = START + timedelta(seconds=second)
    made = created_us
    if made is None and latency_ms is not None:
        made = round(published.timestamp() * 1e6) - round(latency_ms * 1000)
    headers = None if made is None else [(HEADER, origin.encode(Origin(A, 1, 1, lane, 1, 1, made)))]
    return {"timestamp": published, "headers": headers, **row}


def percentile(latencies_ms: list[float], p: int) -> float | None:
    counted = Histogram()
    counted.add_all([one * 1000 for one in latencies_ms])
    return counted.percentile(p)


def near(found: float | None, expected: float | None) -> bool:
    return found == expected if found is None or expected is None else math.isclose(found, expected, rel_tol=1e-9)


@pytest.mark.usefixtures("compiled_queries")
def test_windows_and_hours_say_what_counting_says(spark: SparkSession) -> None:
    chance, made = random.Random(7), list[tuple[int, int, int | None, int | None, float | None]]()
    for _ in range(400):
        topic, minute = chance.randrange(2), chance.randrange(4)  # minutes 0 and 1 are of the hour before
        key = None if chance.random() < 0.1 else int(chance.paretovariate(1.0)) % 9
        latency = None if chance.random() < 0.2 else chance.lognormvariate(3, 2)
        made.append((topic, minute, key, chance.randrange(3) if latency is not None else None, latency))
    rows = [
        sent(
            minute * 60 + chance.uniform(0, 59.9), latency, lane=lane or 0, topic=("orders", "payments")[topic],
            key=None if key is None else b"%d" % key, value=None if key == 3 else b"12345",
        )
        for topic, minute, key, lane, latency in made
    ]  # fmt: skip
    counts = windows.counts(bronze_columns(kafka_rows(spark, rows)), 60).persist()
    assert_same_columns(counts, windows.COUNTS)
    metrics = windows.windows(counts).persist()
    assert_same_columns(metrics, windows.METRICS.schema)
    found = {(one["topic"], int((one["start"] - START.timestamp()) / 60)): one
             for one in metrics.withColumn("start", F.unix_seconds("window_start")).collect()}  # fmt: skip
    assert len(found) == 8
    for (topic, minute), one in found.items():
        inside = [row for row in made if row[0] == ("orders", "payments").index(topic) and row[1] == minute]
        latencies = [row[4] for row in inside if row[4] is not None]
        keys = Counter(b"%d" % row[2] for row in inside if row[2] is not None)
        hottest = max(keys, key=lambda key: (keys[key], key))
        assert one["records"] == len(inside)
        assert one["bytes"] == sum((row[2] is not None) + 5 * (row[2] != 3) for row in inside)
        assert one["with_origin"] == len(latencies)
        assert [tuple(lane) for lane in one["lanes"]] == sorted(
            Counter(row[3] for row in inside if row[4] is not None).items()
        )
        assert sum(bucket["records"] for bucket in one["latency"]) == len(latencies)
        assert all(near(one[f"p{p}_ms"], percentile(latencies, p)) for p in (50, 90, 99))
        assert one["max_ms"] == pytest.approx(max(latencies), abs=1e-3)
        assert (one["keys"], bytes(one["hottest_key"])) == (len(keys), hottest)
        assert one["hottest_share"] == keys[hottest] / len(inside)

    top = windows.top_keys(counts, 2)
    assert_same_columns(top, windows.KEYS.schema)
    listed = sorted((one["topic"], one["window_start"], one["rank"], bytes(one["key"]), one["share"])
                    for one in top.collect())  # fmt: skip
    assert len(listed) == 16
    firsts = {(one["topic"], one["window_start"], bytes(one["hottest_key"]), one["hottest_share"])
              for one in found.values()}  # fmt: skip
    assert {(topic, window, key, share) for topic, window, rank, key, share in listed if rank == 1} == firsts

    hours = windows.throughput(metrics)
    assert_same_columns(hours, windows.THROUGHPUT)
    for one in hours.withColumn("of", F.date_format("hour", "HH")).collect():
        inside = [row for row in made if row[0] == ("orders", "payments").index(one["topic"])
                  and (row[1] >= 2) == (one["of"] == "10")]  # fmt: skip
        latencies = [row[4] for row in inside if row[4] is not None]
        assert (one["records"], one["with_origin"]) == (len(inside), len(latencies))
        assert all(near(one[f"p{p}_ms"], percentile(latencies, p)) for p in (50, 90, 99))
        minutes = Counter(row[1] for row in inside)
        assert one["peak_per_s"] == pytest.approx(max(minutes.values()) / 60)
    counts.unpersist()
    metrics.unpersist()


def test_windows_without_keys_or_origins_have_no_value_for_them(spark: SparkSession) -> None:
    rows = bronze_columns(kafka_rows(spark, [sent(0, None, key=b"a"), sent(1, None, key=b"b")]))
    counts = windows.counts(rows, 60, keys=False)
    assert_same_columns(counts, windows.COUNTS)
    assert_rows(
        windows.windows(counts),
        [
            {
                "records": 2, "with_origin": 0, "lanes": [], "latency": [], "p50_ms": None, "max_ms": None,
                "keys": None, "hottest_key": None, "hottest_share": None,
            }
        ],
    )  # fmt: skip


def test_latencies_fall_into_the_buckets_of_the_relay(spark: SparkSession) -> None:
    # Whole microseconds never lie on a bound, but at the ends.
    chance = random.Random(3)
    latencies = [-(2**62), -1, 0, 99, 100, 101, 3_599_999_999, 3_600_000_000, 2**62]
    latencies += [int(10 ** chance.uniform(2, 9.6)) for _ in range(300)]
    expected = []
    for latency in latencies:
        counted = Histogram()
        counted.add_all([latency])
        expected.append({"us": latency, "bucket": struct.unpack("<HQ", counted.pack())[0]})
    frame = spark.createDataFrame([(one,) for one in latencies], "us bigint")
    assert_rows(frame.withColumn("bucket", windows.bucket(F.col("us"))), expected)


def test_no_time_of_creation_stops_the_count(spark: SparkSession) -> None:
    rows = [sent(0, 0, created_us=one) for one in (-(2**63), 2**63 - 1, 0)]
    found = windows.windows(windows.counts(bronze_columns(kafka_rows(spark, rows)), 60))
    assert_rows(found, [{"records": 3, "with_origin": 3}])


def test_a_record_belongs_to_the_hour_in_which_its_window_begins(spark: SparkSession) -> None:
    chance, hour_us = random.Random(11), 3_600_000_000
    first = round(START.timestamp()) // 3600
    hours = {-25, -1, 0, first, first + 1, first + 3, first + 50}
    at = [-(2**62), 2**62, -1, 0, -hour_us, hour_us - 1, hour_us]
    at += [round((START.timestamp() + chance.uniform(-5, 60) * 3600) * 1e6) for _ in range(200)]
    rows = spark.createDataFrame([(one,) for one in at], "us bigint")
    rows = rows.select("us", F.timestamp_micros("us").alias("timestamp"))
    for window_s in (1, 60, 420, 20_000):
        begins = F.unix_micros(F.window("timestamp", f"{window_s} seconds")["start"])
        found = rows.select("us", begins.alias("begins"), windows.hour("timestamp", window_s).alias("hour"),
                            windows.begins_in(hours, window_s).alias("is_in")).collect()  # fmt: skip
        for row in found:
            expected = row["begins"] // hour_us if abs(row["us"]) < 2**55 else None
            assert (row["hour"], bool(row["is_in"])) == (expected, expected in hours), row
        assert sum(bool(row["is_in"]) for row in found) > 3
    assert rows.where(windows.begins_in([], 60)).isEmpty()
    many = range(first - 1000, first, 3)  # too many to name the times between them
    assert rows.where(windows.begins_in(many, 60)).count() == sum(one // hour_us in many for one in at)
    assert windows.days(hours) == [
        date(1969, 12, 30), date(1969, 12, 31), date(1970, 1, 1), date(2026, 3, 1), date(2026, 3, 3)
    ]  # fmt: skip


@long
def test_files_without_a_record_of_the_hours_are_skipped(spark: SparkSession, tmp_path: Path) -> None:
    store = open_store(spark, make_lake(spark, tmp_path / "lake", *([sent(3600 * one, 1)] for one in range(4))))
    first = round(START.timestamp()) // 3600
    rows = spark.sql(schemas.bronze(store.at, HEADER)).where(windows.begins_in([first + 1, first + 3], 60))
    assert rows.count() == 2
    assert len(rows.inputFiles()) == 2

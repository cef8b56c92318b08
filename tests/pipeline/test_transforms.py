"""The pure transforms: header to columns, one row an id, the state of each key, JSON by topic."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.origin import HEADER, Origin
from harvester.pipeline import origin_columns, schemas, tables
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.upkeep import Upkeep
from harvester.pipeline.origin_columns import NEWER, NO_HEADER, UNSOUND, JavaBytes, SqlBytes, bronze_columns
from tests.support.lakes import first_deliveries, make_lake
from tests.support.longs import is_nightly
from tests.support.sparks import assert_rows, assert_same_columns, kafka_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)  # the first one starts Spark, maybe beside all other workers

A, B = UUID(int=2**127), UUID(int=1)
LAST = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

numbers = st.integers(-(2**63), LAST)
short = st.integers(0, 2**32 - 1)
origins = st.builds(
    Origin, incarnation=st.uuids(), id=numbers, term=numbers, lane=short, producer=short,
    sequence=st.integers(-1, 3) | numbers, created_us=numbers, low_water=st.none() | numbers,
)  # fmt: skip


def damaged(value: bytes, at: int, byte: int) -> bytes:
    return value[: at % origin.SIZE] + bytes((byte,)) + value[at % origin.SIZE + 1 :]


sound = origins.map(origin.encode)
values = (
    sound
    | st.builds(damaged, sound, st.integers(0, 3) | st.integers(0, 65), st.integers(0, 255))
    | st.binary(max_size=68)
    | st.none()
)
headers = st.none() | st.lists(st.tuples(st.sampled_from([HEADER, "Harvester", "other"]), values), max_size=3)


def at(seconds: float) -> datetime:
    return datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def sent(number: int, incarnation: UUID = A, created_us: int = 1_700_000_000_000_000, **row: Any) -> dict[str, Any]:
    value = origin.encode(Origin(incarnation, number, 1, 0, 1, 1, created_us))
    return {"headers": [(HEADER, value)], **row}


def silver_of(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    return first_deliveries(bronze_columns(kafka_rows(spark, rows)))


@pytest.mark.usefixtures("compiled_queries")
@pytest.mark.parametrize("kind", [JavaBytes, SqlBytes])
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(headers, min_size=1, max_size=40))
def test_headers_are_read_as_the_codec_reads_them(spark: SparkSession, kind: type, batch: list[Any]) -> None:
    reader = SqlBytes() if kind is SqlBytes else origin_columns.fastest_reader(spark)
    assert type(reader) is kind
    bronze = bronze_columns(kafka_rows(spark, ({"headers": one} for one in batch)), reader=reader)
    assert_same_columns(bronze, schemas.BRONZE)
    expected = []
    for offset, one in enumerate(batch):
        value = origin.find(one)
        found = origin.decode(value)
        problem = None
        if found is None:
            newer = (origin.version(value) or 0) > origin.VERSION
            problem = NO_HEADER if value is None else NEWER if newer else UNSOUND
        names = ("id", "term", "lane", "producer", "sequence", "low_water", "created_us")
        expected.append(
            {
                "offset": offset,
                "problem": problem,
                "incarnation": str(found.incarnation) if found else None,
                **{name: getattr(found, name, None) for name in names},
            }
        )
    assert_rows(bronze, expected)


@pytest.mark.usefixtures("compiled_queries")
def test_times_are_of_utc_and_null_where_no_calendar_has_them(spark: SparkSession) -> None:
    microseconds = [0, -1, 86_400_000_000, -86_400_000_001, LAST, -(2**63), 253_402_300_799_999_999]
    rows = [sent(number, created_us=one) for number, one in enumerate(microseconds)]
    bronze = bronze_columns(kafka_rows(spark, rows)).withColumn("created", F.unix_micros("created_at"))
    usual = [one if abs(one) < 2**62 else None for one in microseconds]
    assert_rows(bronze, [{"id": number, "created": one} for number, one in enumerate(usual)])
    days = [date(1970, 1, 1), date(1969, 12, 31), date(1970, 1, 2), date(1969, 12, 30)]
    days += [date(1970, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]
    found = silver.deliveries(first_deliveries(bronze), HEADER)
    assert_rows(found, [{"id": number, "day": day} for number, day in enumerate(days)])


def test_of_repeats_the_first_delivery_is_kept(spark: SparkSession) -> None:
    found = silver_of(
        spark,
        sent(1, timestamp=at(9), offset=7),
        sent(1, timestamp=at(5), offset=3),
        sent(1, timestamp=at(5), offset=2, partition=1),
        # Of one partition the offset decides: the clock of a repeat's sender may be behind.
        sent(2, timestamp=at(8), offset=4),
        sent(2, timestamp=at(4), offset=6),
        sent(2, timestamp=at(7), offset=1, partition=1),
        sent(1, B, timestamp=at(9), offset=8, value=None),
        {"headers": None, "offset": 9},
    )
    assert_rows(
        found,
        [
            {"incarnation": str(A), "id": 1, "partition": 0, "offset": 3, "value": b"value"},
            {"incarnation": str(A), "id": 2, "partition": 0, "offset": 4, "value": b"value"},
            {"incarnation": str(B), "id": 1, "partition": 0, "offset": 8, "value": None},
        ],
    )


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(st.lists(st.tuples(st.sampled_from([HEADER, "other"]), values), max_size=3), min_size=1, max_size=30)
)
def test_headers_are_as_they_were_though_the_own_one_is_not_stored(spark: SparkSession, batch: list[Any]) -> None:
    bronze = bronze_columns(kafka_rows(spark, ({"headers": one or None} for one in batch)))
    stored = silver.deliveries(bronze, HEADER).withColumn("batch", F.lit("1"))
    assert_same_columns(stored, schemas.SILVER)
    stored.createOrReplaceTempView("stored_rows")
    found = spark.sql(schemas.deliveries("stored_rows", HEADER))
    assert_same_columns(found, schemas.DELIVERIES)
    wanted = {
        offset: one
        for offset, one in enumerate(batch)
        if origin.decode(origin.find(one)) is not None and one.count((HEADER, origin.find(one))) == 1
    }
    got = {
        row["offset"]: [(key, None if value is None else bytes(value)) for key, value in row["headers"]]
        for row in found.select("offset", "headers").collect()
    }
    assert {offset: one for offset, one in got.items() if offset in wanted} == wanted
    for row in stored.select("offset", "headers").collect():
        assert len(row["headers"] or ()) in (len(batch[row["offset"]]) - 1, len(batch[row["offset"]]))
        if batch[row["offset"]][-1][0] == HEADER:
            assert len(row["headers"] or ()) == len(batch[row["offset"]]) - 1


def test_the_last_state_is_of_the_highest_id_of_the_latest_incarnation(spark: SparkSession, tmp_path: Path) -> None:
    rows = [
        # Of one incarnation the id counts, whatever came last: 5 was committed beside 6.
        sent(6, key=b"a", value=b"six", timestamp=at(1)),
        sent(5, key=b"a", value=b"five", timestamp=at(2)),
        # A deleted key stays deleted; the same key of another topic is another one.
        sent(7, key=b"b", value=b"seven"),
        sent(8, key=b"b", value=None),
        sent(9, key=b"b", topic="payments"),
        # B came after A. What A still sends then is not the younger state, and its ids are higher.
        sent(LAST, A, key=b"c", value=b"old", timestamp=at(0)),
        sent(-(2**63), B, key=b"c", value=b"older", timestamp=at(10)),
        sent(-(2**63) + 1, B, key=b"c", value=b"new", timestamp=at(10)),
        sent(91, A, key=b"c", value=b"late", timestamp=at(20)),
        sent(10, key=None),
    ]
    store = open_store(spark, make_lake(spark, tmp_path / "lake", rows[:6], rows[6:]))
    expected: list[dict[str, Any]] = [
        {"topic": "orders", "key": b"a", "value": b"six", "deleted": False, "incarnation": str(A), "id": 6},
        {"topic": "orders", "key": b"b", "value": None, "deleted": True, "incarnation": str(A), "id": 8},
        {"topic": "payments", "key": b"b", "value": b"value", "deleted": False, "incarnation": str(A), "id": 9},
        {"topic": "orders", "key": b"c", "value": b"new", "deleted": False, "incarnation": str(B), "id": -(2**63) + 1},
    ]
    states = spark.sql(schemas.current(store.at, HEADER))
    assert_same_columns(states, schemas.CURRENT)
    assert_rows(states, expected)

    def cut_off(place: str) -> None:
        if place == "lake.folded":
            raise InterruptedError(place)

    # The table has the states then, and does not say so.
    with pytest.raises(InterruptedError):
        Upkeep(store, HEADER, [], 0, 0.0, cut_off).fold(1)
    assert_rows(spark.sql(schemas.current(store.at, HEADER)), expected)
    upkeep = Upkeep(store, HEADER, [], 0, 0.0)
    for number in (0, 1, 1) if is_nightly() else (1, 1):  # also again
        upkeep.fold(number)
        after = store.properties("current")[tables.FOLDED]
        assert_rows(spark.sql(schemas.current(store.at, HEADER, after)), expected)
    assert_rows(store.table("current"), expected)
    upkeep.close(finish=False)


def test_the_history_of_a_key_has_neither_gaps_nor_overlaps(spark: SparkSession, tmp_path: Path) -> None:
    def created(seconds: float) -> int:
        return (at(seconds) - EPOCH) // timedelta(microseconds=1)

    rows = [
        sent(1, A, created(10), key=b"a", value=b"one", timestamp=at(100)),
        sent(3, A, created(30), key=b"a", value=None, timestamp=at(101)),
        sent(2, A, created(5), key=b"a", value=b"two", timestamp=at(102)),  # its clock was behind
        sent(4, A, LAST, key=b"a", value=b"four", timestamp=at(103)),  # its time is in no calendar
        sent(0, B, created(200), key=b"a", value=b"other", timestamp=at(200)),
        sent(5, A, created(40), key=b"a", topic="payments", timestamp=at(104)),
        sent(6, A, created(50), key=None, timestamp=at(105)),
    ]
    root = make_lake(spark, tmp_path / "lake", [*rows, rows[0]])
    history = spark.sql(schemas.history(open_store(spark, root).at, HEADER))
    assert_same_columns(history, schemas.HISTORY)
    states = [
        (b"one", 10, 10), (b"two", 10, 30), (None, 30, 103), (b"four", 103, 200), (b"other", 200, None),
    ]  # fmt: skip
    found = history.where("topic = 'orders'").withColumns(
        {name: F.unix_micros(name) - created(0) for name in ("valid_from", "valid_to")}
    )
    expected = [
        {"value": value, "deleted": value is None, "valid_from": begun * 10**6, "valid_to": ended and ended * 10**6}
        for value, begun, ended in states
    ]
    assert_rows(found, expected)
    as_of = found.where("valid_from <= 50000000 AND (valid_to > 50000000 OR valid_to IS NULL)")
    assert [row["id"] for row in as_of.collect()] == [3]
    assert history.where("topic = 'payments'").count() == 1


@pytest.mark.usefixtures("compiled_queries")
def test_values_that_fit_become_columns_and_the_others_rejects(spark: SparkSession) -> None:
    kinds = silver.from_ddl("total INT, note STRING")
    bad = [b"", b"{", b"7", b'{"total": "many"}', b'{"note": "\xff"}', b"\x00\x00\x00{", b'{"total": 99999999999}']
    good = [b'{"total": 1, "note": "x", "more": [1]}', b"{}"]
    rows = [sent(number, value=value) for number, value in enumerate([*good, None, *bad])]
    found = silver_of(spark, *rows, sent(50, topic="payments", value=b"{}"))
    expanded, rejected = silver.JsonValues("orders", kinds).split(found)
    assert_same_columns(expanded, silver.payload_table("orders", kinds).schema)
    assert_rows(
        expanded.withColumns({"total": F.col("data.total"), "note": F.col("data.note"), "has": F.isnotnull("data")}),
        [
            {"id": 0, "total": 1, "note": "x", "has": True, "tombstone": False},
            {"id": 1, "total": None, "note": None, "has": True, "tombstone": False},
            {"id": 2, "total": None, "note": None, "has": False, "tombstone": True},
        ],
    )
    assert_same_columns(rejected, [field for field in schemas.REJECTS if field.name != "batch"])
    assert_rows(rejected, [{"value": value, "reason": "bad payload"} for value in bad])


@pytest.mark.usefixtures("compiled_queries")
def test_a_number_that_a_column_would_change_is_rejected(spark: SparkSession) -> None:
    """Wherever it stands. Times in milliseconds are years that nobody reads; larger ones may wrap into any year."""
    kinds = silver.from_ddl(
        "total DECIMAL(10,2), count DECIMAL, big DECIMAL(38,0), at TIMESTAMP, day DATE, plain TIMESTAMP_NTZ,"
        " items ARRAY<STRUCT<price: DECIMAL(5,1)>>, times MAP<STRING, TIMESTAMP>, tiny TINYINT"
    )
    wraps = 2**64 // 10**6 + 1  # into 1970
    bad = [
        b'{"total": 10.999}', b'{"total": 10.99999999996}', b'{"total": "10.999"}', b'{"count": 1.5}',
        b'{"big": 1.5}', b'{"at": 1772409600000}', b'{"at": 1772409600000000}', b'{"at": %d}' % wraps,
        b'{"at": -%d}' % wraps, b'{"at": "58000-01-01T00:00:00Z"}', b'{"day": "58000-01-01"}',
        b'{"plain": "58000-01-01T00:00:00"}', b'{"items": [{"price": 1.5}, {"price": 1.25}]}',
        b'{"times": {"x": %d}}' % wraps, b'{"times": {"x": 1772409600000}}', b'{"tiny": 200}', b'{"tiny": -129}',
        b'{"at": "08:30"}', b'{"at": "T08:30"}', b'{"at": "T8"}', b'{"day": "2026-03-01 x"}',
        b'{"day": "2026-03-01T23:30:00-08:00"}',
    ]  # fmt: skip
    good = [
        b'{"total": 10.990, "count": 2.0, "at": 1772409600}', b'{"total": 1e1, "big": %d}' % (10**38 - 1),
        b'{"total": null, "at": "2026-03-01T10:00:00.123456Z", "day": "2026-03-01"}', b'{"tiny": -128}',
        b'{"day": "2026-03-01T00:00:00Z"}', b'{"day": "2026-03-01 00:00:00.000"}',
        b'{"plain": "9999-12-31T23:59:59.999999", "at": "9999-12-31T23:59:59.999999Z", "day": "9999-12-31"}',
        b'{"items": [{"price": 1.50}, {"price": null}, null], "times": {"x": "2026-03-01", "y": null, "z": 0}}',
    ]  # fmt: skip
    rows = silver_of(spark, *(sent(number, value=value) for number, value in enumerate([*good, None, *bad])))
    fitting, rejected = silver.JsonValues("orders", kinds).split(rows)
    assert_rows(rejected, [{"value": value} for value in bad])
    found = fitting.select("id", F.col("data.total").cast("string").alias("total"))
    totals = {0: "10.99", 1: "10.00"}
    assert_rows(found, [{"id": number, "total": totals.get(number)} for number in range(len(good) + 1)])


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(st.binary(max_size=12) | st.text(max_size=9).map(str.encode), min_size=1, max_size=40))
def test_no_value_stops_the_stream(spark: SparkSession, batch: list[bytes]) -> None:
    kinds = silver.from_ddl("total INT")
    rows = silver_of(spark, *(sent(number, value=value) for number, value in enumerate(batch)))
    fitting, rejected = silver.JsonValues("orders", kinds).split(rows)
    assert fitting.count() + rejected.count() == len(batch)


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("total", "not a list of columns"), ("total WHAT", "not a list of columns"), ("", "not a list of columns"),
        ("_corrupt_record STRING", "by Spark"), ("`order id` INT", "'order id' cannot be a column name"),
        ("items ARRAY<STRUCT<`a;b`: INT>>", "'a;b' cannot be"), ("total INT, Total INT", "the same to Spark"),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_told(spark: SparkSession, ddl: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        silver.from_ddl(ddl)

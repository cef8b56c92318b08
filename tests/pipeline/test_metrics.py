"""The metrics of a lake: late records and repeats correct them, and a run that was killed is repeated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from harvester_cli.main import app
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from typer.testing import CliRunner

from harvester import origin
from harvester.errors import ExitCode
from harvester.failpoints import VARIABLE
from harvester.origin import HEADER, Origin
from harvester.pipeline import metrics, windows
from harvester.pipeline.errors import InputMissing, PipelineError, TableMismatch
from harvester.pipeline.formats import DeltaStore, open_store
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.metrics import MetricsDone, MetricsSettings, run
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.windows import KEYS, METRICS
from tests.support.drivers import START_S, Driver
from tests.support.formats import known, where
from tests.support.harvested import KEPT, SENT_MS, Sent, Writer
from tests.support.hooks import Plan
from tests.support.lakes import Lake, assert_same, make_lake
from tests.support.longs import long
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

pytestmark = pytest.mark.timeout(600)  # the first one starts Spark, maybe beside all other workers

START = datetime(2026, 3, 1, tzinfo=UTC)
A = UUID(int=2**127)
PLACES = ("metrics.metrics_keys", "metrics.metrics", "metrics.seen")
Row = Mapping[str, Any]


class Interrupter:
    """Ends a run at one place."""

    place = ""

    def hit(self, place: str, **_: Any) -> None:
        if place == self.place:
            raise InterruptedError(place)


interrupter = Interrupter()


def hooks() -> Interrupter:
    """What HARVESTER_TEST_HOOKS names."""
    return interrupter


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupter]:
    monkeypatch.setenv(VARIABLE, f"{__name__}:hooks")
    yield interrupter
    interrupter.place = ""


def sent(number: int, minute: float, key: bytes | None = b"a", *, topic: str = "orders", named: bool = True) -> Row:
    """A record published so many minutes after START; one that is not `named` is nobody's."""
    at = START + timedelta(minutes=minute)
    created_us = round(at.timestamp() * 1e6) - 20_000
    headers = [(HEADER, origin.encode(Origin(A, number, 1, 0, 1, 1, created_us)))] if named else None
    return {"timestamp": at, "headers": headers, "key": key, "topic": topic}


class Written:
    """A lake without Kafka, and all that was written to it."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.root, self.rows = make_lake(spark, root), list[Row]()
        self._spark, self._offsets, self._numbers = spark, count(), count()
        self.store = open_store(spark, self.root)
        self.batch = self._batch()

    def write(self, *rows: Row) -> None:
        placed = [{**row, "offset": next(self._offsets)} for row in rows]
        self.batch.write(bronze_columns(kafka_rows(self._spark, placed)), next(self._numbers))
        self.rows += placed

    def interrupted(self, monkeypatch: pytest.MonkeyPatch, *rows: Row) -> Callable[[], None]:
        """A batch that lacks its repeats; returns what completes it."""
        placed, number = [{**row, "offset": next(self._offsets)} for row in rows], next(self._numbers)
        bronze, append = bronze_columns(kafka_rows(self._spark, placed)), DeltaStore.append

        def fail(store: DeltaStore, rows: Any, name: str, transaction: tuple[str, int] | None = None) -> None:
            if name == "repeats":
                raise InterruptedError(name)
            append(store, rows, name, transaction)

        with monkeypatch.context() as patched:
            patched.setattr(DeltaStore, "append", fail)
            with pytest.raises(InterruptedError):
                self.batch.write(bronze, number)
        self.rows += placed

        def complete() -> None:
            self.batch = self._batch()
            self.batch.write(bronze, number)

        return complete

    def _batch(self) -> LakeBatch:
        return LakeBatch(self.store, f"{self.root}/checkpoint", "test", HEADER, {})


def plain(rows: DataFrame) -> list[tuple[Any, ...]]:
    def value(one: Any) -> Any:
        if isinstance(one, list):
            return tuple(map(tuple, one))
        return bytes(one) if isinstance(one, bytearray) else one

    return [tuple(map(value, row)) for row in rows.collect()]


def assert_counted(spark: SparkSession, lake: Written, window_s: int = 60, most_keys: int = 10) -> None:
    """The tables are as if all records had been there when they were first counted."""
    counted = windows.counts(bronze_columns(kafka_rows(spark, lake.rows)), window_s, keys=bool(most_keys))
    assert_same(plain(windows.windows(counted)), plain(lake.store.table(METRICS.name).select(*METRICS.schema.names)))
    assert_same(plain(windows.top_keys(counted, most_keys)), plain(lake.store.table(KEYS.name)))


def versions(lake: Written) -> list[int]:
    return [lake.store.version(name) for name in (METRICS.name, KEYS.name)]


@pytest.mark.usefixtures("compiled_queries")
@long  # at random; the next tests count parts of it every day, and test_the_command… begins again
@pytest.mark.parametrize("kind", ["delta directory", "iceberg directory"])
def test_late_records_and_repeats_correct_what_was_written_and_a_killed_run_is_repeated(
    spark: SparkSession, tmp_path: Path, cut: Interrupter, kind: str
) -> None:
    chance, numbers = Random(5), count(1)
    with known(spark, where(kind, tmp_path, "")):
        lake = Written(spark, tmp_path / "lake")
        settings = MetricsSettings(lake.root, most_keys=2)
        assert run(spark, settings) == MetricsDone()
        # On both sides of midnight and of a day between that has nothing; later ones come first.
        for days, place in (((1, 2), ""), ((0, 1), PLACES[0]), ((2, 3), PLACES[1]), ((0, 3), PLACES[2])):
            for _ in range(2):
                rows = [
                    sent(
                        next(numbers), 1440 * chance.choice(days) + chance.uniform(-2, 2),
                        chance.choice([b"a", b"b", b"c", None]), topic=chance.choice(["orders", "payments"]),
                        named=chance.random() < 0.9,
                    )
                    for _ in range(12)
                ]  # fmt: skip
                repeats = [row for row in lake.rows if row["headers"] and chance.random() < 0.2]
                hour = timedelta(hours=1)
                lake.write(*rows, *({**row, "timestamp": row["timestamp"] + hour} for row in repeats))
            cut.place = place
            if place:
                with pytest.raises(PipelineError):
                    run(spark, settings)
            cut.place = ""
            done = run(spark, settings)
            assert done.hours > 0
            assert_counted(spark, lake, most_keys=2)
            before = versions(lake)
            assert run(spark, settings) == MetricsDone()
            assert versions(lake) == before


@long  # test_repeats_that_a_batch_of_the_lake_writes_later_are_counted corrects hours every day
def test_a_run_counts_only_the_hours_of_which_there_is_something_new(spark: SparkSession, tmp_path: Path) -> None:
    lake = Written(spark, tmp_path / "lake")
    settings = MetricsSettings(lake.root)
    lake.write(*(sent(number, 1440 * number) for number in range(4)), sent(4, 90))
    assert run(spark, settings) == MetricsDone(5, 5, 5)

    def files() -> dict[int, str]:
        found = lake.store.table(METRICS.name).selectExpr("day(day) AS day", "_metadata.file_path").distinct().collect()
        assert len(found) == len({row["day"] for row in found}), "a file for each day"
        return {row["day"]: row["file_path"] for row in found}

    spark.sql(f"ALTER TABLE {lake.store.at(METRICS.name)} ADD COLUMNS (note STRING)")  # the user's own
    lake.write(sent(5, 1440 * 2 + 61))
    # The last batch that was seen may have been incomplete, so its hours come again.
    assert run(spark, settings) == MetricsDone(6, 6, 6)
    before = files()
    spark.sql(f"UPDATE {lake.store.at(METRICS.name)} SET note = 'seen'")
    lake.write(sent(6, 30.5), sent(6, 30.5))
    assert run(spark, settings) == MetricsDone(2, 3, 4)
    assert_counted(spark, lake)
    noted = lake.store.table(METRICS.name).where("note = 'seen'").select(F.date_format("window_start", "dd HH:mm"))
    assert_same(["01 01:30", "02 00:00", "03 00:00", "04 00:00"], [row[0] for row in noted.collect()])
    after = files()
    lake.write(sent(7, 1440 + 5))
    assert run(spark, settings).hours == 2
    last = files()
    assert before.keys() == last.keys() == {1, 2, 3, 4}
    assert {day for day in last if last[day] != after[day]} == {1, 2}
    assert_counted(spark, lake)


def test_repeats_that_a_batch_of_the_lake_writes_later_are_counted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Written(spark, tmp_path / "lake")
    settings = MetricsSettings(lake.root)
    lake.write(sent(1, 0))
    complete = lake.interrupted(monkeypatch, sent(2, 1440), sent(1, 2880))
    assert run(spark, settings).records == 2
    complete()
    assert run(spark, settings) == MetricsDone(2, 2, 2)
    assert_counted(spark, lake)


@long
def test_other_settings_count_everything_again(spark: SparkSession, tmp_path: Path, cut: Interrupter) -> None:
    lake = Written(spark, tmp_path / "lake")
    lake.write(sent(1, 0), sent(2, 0.75), sent(8, 61), sent(3, 1500, topic="payments"))
    usual, longer = MetricsSettings(lake.root), MetricsSettings(lake.root, window_s=7200)
    assert run(spark, usual) == MetricsDone(3, 3, 4)
    # Longer windows begin in other hours, but no record counts twice, also if their run is killed and not repeated.
    cut.place = "metrics.seen"
    with pytest.raises(PipelineError):
        run(spark, longer)
    cut.place = ""
    assert run(spark, usual) == MetricsDone(4, 3, 4)
    assert_counted(spark, lake)
    assert run(spark, longer) == MetricsDone(4, 2, 4)
    assert_counted(spark, lake, window_s=7200)
    assert run(spark, MetricsSettings(lake.root, window_s=30, most_keys=0)).records == 4
    assert_counted(spark, lake, window_s=30, most_keys=0)
    # An hour that the lake has lost is kept as it was.
    spark.sql(f"DELETE FROM {lake.store.at('silver')} WHERE topic = 'payments'")
    assert run(spark, MetricsSettings(lake.root)) == MetricsDone(2, 2, 3)
    assert [row["records"] for row in lake.store.table(METRICS.name).orderBy("window_start").collect()] == [2, 1, 1]
    # Elsewhere, and only a topic.
    elsewhere = MetricsSettings(lake.root, str(tmp_path / "metrics"), ("payments",))
    lake.write(sent(4, 2880, topic="payments"), sent(5, 4320))
    assert run(spark, elsewhere) == MetricsDone(1, 1, 1)
    assert run(spark, elsewhere) == MetricsDone()
    lake.write(sent(6, 4320))
    assert run(spark, elsewhere) == MetricsDone(1, 1, 1)  # the last batch that was seen
    lake.write(sent(7, 4320))
    assert run(spark, elsewhere) == MetricsDone()
    # Fewer topics: of the others nothing is left where the lake has records, even of hours that are not counted.
    assert run(spark, MetricsSettings(lake.root, topics=("payments",))) == MetricsDone(3, 1, 1)
    kept = lake.store.table(METRICS.name).selectExpr("topic", "date_format(window_start, 'dd HH:mm') AS at").collect()
    assert_same([("payments", "02 01:00"), ("payments", "03 00:00")], [tuple(row) for row in kept])


def test_what_cannot_be_continued_is_refused_with_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no table silver"):
        run(spark, MetricsSettings(str(tmp_path / "nothing")))
    lake = Written(spark, tmp_path / "lake")
    lake.write(sent(1, 0))
    lake.store.prepare([METRICS, KEYS], "a stream's checkpoint")
    with pytest.raises(TableMismatch, match="written by a stream") as refused:
        run(spark, MetricsSettings(lake.root))
    assert "drop the tables metrics and metrics_keys" in str(refused.value.hint)
    assert lake.store.table(METRICS.name).isEmpty()
    for name in (METRICS.name, KEYS.name):
        Path(lake.root, name).rename(tmp_path / name)
    assert run(spark, MetricsSettings(lake.root)).records == 1


def test_the_command_runs_once_or_until_a_signal(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def running(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr("harvester.pipeline.session.session", running)
    lake = Written(spark, tmp_path / "lake")
    lake.write(sent(1, 0), sent(2, 1))
    line = ["pipeline", "metrics", "--lake", lake.root, "--set", "leader_group_id=test"]
    done = CliRunner().invoke(app, [*line, "--once"])
    assert done.exit_code == 0, done.output
    assert "hours counted: 1; rows of `metrics`: 2; records: 2" in done.stderr

    def more(*given: Any) -> MetricsDone:
        found = run(*given)
        if found.records == 3:
            signal.raise_signal(signal.SIGTERM)
        elif not found.records:
            lake.write(sent(3, 2))
        return found

    monkeypatch.setattr(metrics, "run", more)
    done = CliRunner().invoke(app, [*line, "--every", "100ms"])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("hours counted") == 1
    assert_counted(spark, lake)
    for extra, said in ((("--window", "90ms"), "--window"), (("--every", "soon"), "--every")):
        refused = CliRunner().invoke(app, [*line, *extra])
        assert (refused.exit_code, said in refused.output) == (ExitCode.USAGE, True), refused.output


@long
@pytest.mark.parametrize("place", PLACES)
def test_a_job_that_is_killed_between_its_writes_is_repeated(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path, place: str
) -> None:
    topic, writer = make_topic(2, KEPT), Writer(servers.bootstrap)
    lake, plan = Lake(spark, tmp_path / "lake", servers.bootstrap), Plan(tmp_path / "plan")
    writer.send(topic, [Sent(number, b"k-%d" % (number % 3)) for number in range(1, 7)])
    lake.once(topic)
    settings = MetricsSettings(str(lake.root))
    assert run(spark, settings).records == 6
    late = [Sent(7, b"late", at_ms=SENT_MS - 86_400_000), Sent(1, b"k-1").again(1)]
    writer.send(topic, late)
    lake.once(topic)
    args = ("--lake", str(lake.root), "--once", "--set", "leader_group_id=test")
    with plan.blocked(place), Driver("metrics", *args, env=plan.env) as driver:
        driver.wait_held(plan, place, START_S)
        driver.kill()
    assert run(spark, settings) == MetricsDone(3, 3, 8)
    rows = lake.rows(METRICS.name, "records")
    assert sorted(row["records"] for row in rows) == [1, 1, 6]

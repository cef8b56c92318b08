"""The metrics as a stream from real topics: windows close once, late records are told, what is kept stays bounded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from confluent_kafka import Producer
from harvester_cli.main import app
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from typer.testing import CliRunner

from harvester import origin
from harvester.errors import ExitCode
from harvester.origin import HEADER, Origin
from harvester.pipeline import session as sessions
from harvester.pipeline.errors import CheckpointMismatch, PipelineError
from harvester.pipeline.formats import DeltaStore, open_store
from harvester.pipeline.metrics.job import MetricsBatchDone, MetricsSettings, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

pytestmark = pytest.mark.timeout(600)  # the first one starts Spark, maybe beside all other workers

START_MS = round(datetime(2026, 3, 1, tzinfo=UTC).timestamp() * 1000)
A = UUID(int=1)
KEPT = {"retention.ms": "-1"}  # the times of the test's choice are long ago


class Sender:
    """Puts records into topics at times of the test's choice."""

    def __init__(self, servers: Servers) -> None:
        self._producer = Producer(
            {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4", "acks": "all"}
        )

    def send(self, topic: str, *seconds: float, partition: int = 0, key: str | None = None) -> None:
        for second in seconds:
            moment = START_MS + round(second * 1000)
            value = origin.encode(Origin(A, 1, 1, 0, 1, 1, (moment - 20) * 1000))
            self._producer.produce(
                topic, value=b"12345", key=key or f"{second}", partition=partition, timestamp=moment,
                headers=[(HEADER, value)],
            )  # fmt: skip
        assert self._producer.flush(30) == 0


@pytest.fixture
def sender(servers: Servers) -> Sender:
    return Sender(servers)


def windows(spark: SparkSession, root: str, name: str = "metrics") -> list[tuple[str, int, int]]:
    """(topic, second the window begins at, records), as often as they are there."""
    rows = open_store(spark, root).table(name)
    found = rows.select("topic", F.unix_millis("window_start").alias("start"), "records").collect()
    return sorted((one["topic"], (one["start"] - START_MS) // 1000, one["records"]) for one in found)


@pytest.mark.usefixtures("compiled_queries")
def test_windows_close_once_and_whole_and_late_records_are_told(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, sender: Sender, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    busy, idle, root = make_topic(2, KEPT), make_topic(1, KEPT), str(tmp_path)
    settings = MetricsSettings(
        (busy, idle), root, {"bootstrap.servers": servers.bootstrap}, once=True, late_s=60, most_keys=2
    )
    sender.send(busy, *range(0, 180, 10), partition=0)
    sender.send(busy, 5, 15, 180, partition=1, key="hot")
    sender.send(idle, 30)
    first = run(spark, settings)
    # The watermark is a minute behind the newest, at 120: two windows have ended by then, also where it is idle.
    closed = sorted([(busy, 0, 8), (idle, 0, 1), (busy, 60, 6)])
    assert windows(spark, root) == closed
    assert (first.records, first.windows, first.late) == (22, 3, {})
    assert first.open_counts == 7

    # On both sides of the last window that is closed. The run is cut off between its two tables.
    sender.send(busy, 0, 30, 119.999, partition=1)
    sender.send(idle, 59.999)
    sender.send(busy, 120, 121, partition=1)
    sender.send(busy, 500, partition=0)
    append = DeltaStore.append

    def fail(store: DeltaStore, rows: Any, name: str, transaction: tuple[str, int]) -> None:
        if name == "metrics_keys":
            raise OSError("gone")
        append(store, rows, name, transaction)

    monkeypatch.setattr(DeltaStore, "append", fail)
    reports: list[MetricsBatchDone] = []
    with pytest.raises(PipelineError, match="the metrics"):
        run(spark, settings, progress=reports.append)
    monkeypatch.undo()
    assert [one.late for one in reports] == [{busy: 3, idle: 1}]
    closed = sorted([*closed, (busy, 120, 8), (busy, 180, 1)])
    assert windows(spark, root) == closed  # written, and not yet known to be

    last = run(spark, settings)
    assert windows(spark, root) == closed
    assert last.open_counts == 1
    top = [one for one in windows(spark, root, "metrics_keys") if one[1] == 120]
    assert top == [(busy, 120, 1), (busy, 120, 2)]  # 120 came twice
    shares = open_store(spark, root).table("metrics").where(F.col("topic") == busy)
    hottest = shares.orderBy("window_start").select("hottest_key", "hottest_share").first()
    assert hottest is not None
    assert (bytes(hottest["hottest_key"]), hottest["hottest_share"]) == (b"hot", 2 / 8)

    with pytest.raises(CheckpointMismatch, match="60 s windows"):
        run(spark, MetricsSettings((busy, idle), root, settings.kafka, once=True, window_s=30))


def test_a_checkpoint_that_is_older_than_its_tables_is_refused(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, sender: Sender, tmp_path: Path
) -> None:
    """Windows that it closes would bear the numbers of batches that the tables have, and be left out."""
    topic, root, where = make_topic(1, KEPT), str(tmp_path / "lake"), tmp_path / "checkpoint"
    settings = MetricsSettings(
        (topic,), root, {"bootstrap.servers": servers.bootstrap}, str(where), once=True, late_s=60, most_keys=0
    )
    sender.send(topic, 0, 30)
    run(spark, settings)
    shutil.copytree(where, tmp_path / "copy")
    sender.send(topic, 300)
    assert run(spark, settings).windows == 1
    shutil.rmtree(where)
    (tmp_path / "copy").rename(where)
    with pytest.raises(CheckpointMismatch, match="older than its tables"):
        run(spark, settings)


def test_what_is_kept_does_not_grow_with_what_was_read(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, sender: Sender, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    topic, root = make_topic(1, KEPT), str(tmp_path)
    # Each second has a key of its own. The third batch has two records that are old: when it began, the window of the
    # one was closed, and that of the other was to be closed with this batch.
    sender.send(topic, *range(600), 10, 200, *range(600, 1198))

    @contextmanager
    def running(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(sessions, "session", running)
    line = ["pipeline", "metrics", "--topic", topic, "--to", root, "--bootstrap", servers.bootstrap, "--once"]
    line += ["--set", "leader_group_id=test"]
    done = CliRunner().invoke(app, [*line, "--late", "2m", "--max-records", "300"])
    assert done.exit_code == 0, done.output
    kept = [int(one) for one in re.findall(r"batch .* ([\d,]+) counts", done.stderr.replace(",", ""))]
    # A batch of 300 s, two minutes of delay, and the windows at both ends.
    assert len(kept) >= 4
    assert max(kept) <= 300 + 120 + 120
    assert kept[-1] <= 120 + 60
    assert windows(spark, root) == [(topic, second, 61 if second == 180 else 60) for second in range(0, 1020, 60)]
    assert "1,200 records read, 17 windows written" in done.stdout
    assert f"late and not counted: 1 of {topic};" in done.stdout
    for extra, said in ((("--window", "90ms"), "--window"), (("--late", "soon"), "--late")):
        refused = CliRunner().invoke(app, [*line, *extra])
        assert (refused.exit_code, said in refused.output) == (ExitCode.USAGE, True), refused.output

"""What a query has reported is told once, however long it runs and however often it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from harvester.pipeline import streaming

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BATCHES = 6


def read(rows: DataFrame, _: int) -> None:
    """Without this no row would be read, nor reported."""
    rows.count()


def begun(spark: SparkSession, place: Path, write: Callable[[DataFrame, int], None] = read) -> StreamingQuery:
    """A query with a batch for each of some files, which ends by itself."""
    source = place / "source"
    source.mkdir()
    for number in range(BATCHES):
        (source / f"{number}.txt").write_text(f"{number}\n")
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", "1").load(str(source))
    writer = lines.writeStream.foreachBatch(write).option("checkpointLocation", str(place / "checkpoint"))
    return streaming.start(writer, once=True, trigger_s=1)


def test_each_report_is_told_once_and_in_order(spark: SparkSession, tmp_path: Path) -> None:
    told: list[Any] = []
    streaming.follow(begun(spark, tmp_path), lambda: False, told.append)
    assert [said["batchId"] for said in told if said["numInputRows"]] == list(range(BATCHES))
    assert len({said["timestamp"] for said in told}) == len(told)


def test_a_look_costs_the_same_however_many_reports_are_kept(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = begun(spark, tmp_path)
    query.awaitTermination()
    reports = streaming.Reports(query)
    assert len(reports.new()) >= BATCHES

    calls: list[str] = []
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    send = client.send_command

    def counted(command: str, *given: Any, **named: Any) -> Any:
        if not command.startswith("m"):  # which tells Java of an object that Python has dropped
            calls.append(command)
        return send(command, *given, **named)

    monkeypatch.setattr(client, "send_command", counted)
    assert reports.new() == []
    assert len(calls) < BATCHES


def test_what_was_done_is_told_before_what_ended_the_query(spark: SparkSession, tmp_path: Path) -> None:
    def fail(rows: DataFrame, number: int) -> None:
        read(rows, number)
        if number == BATCHES - 1:
            raise ValueError("gone wrong")

    told: list[Any] = []
    with pytest.raises(StreamingQueryException, match="gone wrong"):
        streaming.follow(begun(spark, tmp_path, fail), lambda: False, told.append)
    assert [said["batchId"] for said in told if said["numInputRows"]] == list(range(BATCHES - 1))

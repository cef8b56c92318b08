"""Replay: which rows and in which order, and the job with a real topic: paced, stopped, cut off and gone on with."""

from __future__ import annotations

import random
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from harvester_cli.main import app
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from typer.testing import CliRunner

from harvester import origin
from harvester.errors import ExitCode
from harvester.origin import HEADER, Origin
from harvester.pipeline import replay, schemas
from harvester.pipeline import replay_plan as replay_rows
from harvester.pipeline import session as sessions
from harvester.pipeline.errors import InputMissing, PipelineError
from harvester.pipeline.formats import open_store
from harvester.pipeline.replay_plan import By, Destination, ReplayRate, ReplayRequest, Selection
from tests.support.consuming import Published, read_topic
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake
from tests.support.sparks import assert_rows, assert_same_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from harvester.pipeline.store import TableStore
    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

pytestmark = pytest.mark.timeout(600)  # the first one starts Spark, maybe beside all other workers

A = UUID(int=2**127)
START = datetime(2026, 3, 1, tzinfo=UTC)
DELIVERIES = schemas.DELIVERIES


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def row(number: int, **given: Any) -> dict[str, Any]:
    created = at(number)
    value = origin.encode(Origin(A, number, 1, 0, 1, 1, round(created.timestamp() * 1e6)))
    defaults = {
        "day": created.date(), "incarnation": str(A), "id": number, "term": 1, "lane": 0, "producer": 1, "sequence": 1,
        "low_water": None, "created_us": round(created.timestamp() * 1e6), "created_at": created, "topic": "orders",
        "partition": 0, "offset": number, "timestamp": created, "key": b"key", "value": str(number).encode(),
        "headers": [("mine", None), (HEADER, value)], "tombstone": False, "batch": "0",
    }  # fmt: skip
    return {**defaults, **given}


def silver(spark: SparkSession, rows: list[dict[str, Any]]) -> DataFrame:
    """As the view gives them."""
    return spark.createDataFrame([tuple(one[name] for name in DELIVERIES.names) for one in rows], DELIVERIES)


def many(count: int, keys: int = 20) -> list[dict[str, Any]]:
    """Two topics with three partitions each; a partition's timestamps go back and forth by up to a minute."""
    chance, offsets, made = random.Random(1), defaultdict[tuple[str, int], int](int), []
    for number in range(count):
        key = chance.randrange(keys)
        topic, partition = ("orders", "payments")[key % 2], key % 3
        offsets[topic, partition] += chance.randint(1, 3)
        made.append(
            row(
                number, topic=topic, partition=partition, offset=offsets[topic, partition],
                key=b"%d" % key if key else None, timestamp=at(number + chance.uniform(-30, 30)),
                tombstone=number % 10 == 3, value=None if number % 10 == 3 else b"%d" % number,
            )
        )  # fmt: skip
    return made


def moved() -> list[dict[str, Any]]:
    """A key that changed its partition whenever its topic got more of them."""
    been = (4, 2, 6, 1, 5)
    return [
        row(1000 + one, topic="grown", key=b"moved", partition=been[one // 2], offset=one % 2, timestamp=at(one))
        for one in range(10)
    ]


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> str:
    """A lake with the rows of `many`; of keys 0 … 19, in topics orders and payments."""
    open_store(spark, str(tmp_path)).prepare([schemas.SILVER_TABLE], "somebody", HEADER)
    append(spark, str(tmp_path), many(300))
    return str(tmp_path)


def append(spark: SparkSession, root: str, rows: list[dict[str, Any]]) -> None:
    stored = silver(spark, rows).select(*schemas.SILVER.names)
    open_store(spark, root).append(stored, "silver")


def test_rows_are_chosen_by_time_topic_and_key(spark: SparkSession) -> None:
    rows = silver(
        spark,
        [
            row(1, timestamp=at(60)),
            row(2, timestamp=at(70), key=b"other"),
            row(3, timestamp=at(80), key=None, topic="payments"),
            row(4, timestamp=at(99), created_at=None, created_us=2**62, day=date(1970, 1, 1)),
        ],
    )
    published = Selection(since=at(60), until=at(80))
    wanted = {
        "time": (published, [1, 2]),
        "created": (replace(published, by=By.CREATED, since=at(2), until=at(90)), [2, 3]),
        "open": (Selection(by=By.CREATED), [1, 2, 3, 4]),
        "topic": (Selection(topics=("payments", "x")), [3]),
        "key": (Selection(keys=(b"other", b"x")), [2]),
    }
    found = [replay_rows.selected(rows, one).withColumn("_of", F.lit(name)) for name, (one, _) in wanted.items()]
    together = found[0]
    for one in found[1:]:
        together = together.unionByName(one)
    assert_rows(together, [{"_of": name, "id": one} for name, (_, ids) in wanted.items() for one in ids])


def test_slices_follow_the_order_of_each_partition_and_hold_every_row_once(spark: SparkSession) -> None:
    given = many(300) + moved()
    rows = silver(spark, given).persist()
    planned = list(replay_rows.slices(replay_rows.cuts(rows, 7).collect()))
    assert all(one.records <= 7 for one in planned)
    assert sum(one.records for one in planned) == len(given)
    assert len(planned) <= len(given) / 7 + 2  # one for each task's end

    done: dict[tuple[str, int], int] = {}
    order: list[int] = []
    for one in planned:
        inside = [
            row for row in given
            if row["offset"] <= one.upto.get((row["topic"], row["partition"]), -1)
            and row["offset"] > done.get((row["topic"], row["partition"]), -1)
        ]  # fmt: skip
        assert len(inside) == one.records
        done.update(one.upto)
        order += [row["id"] for row in inside]
    assert sorted(order) == sorted(row["id"] for row in given)
    # many() numbers records in the order of the log, and moved ones before they moved come first.
    assert [one for one in order if one >= 1000] == list(range(1000, 1010))

    half = {place: offset for one in planned[:20] for place, offset in one.upto.items()}
    some = {place: offset for one in planned[:10] for place, offset in one.upto.items()}
    parts = replay_rows.between(rows, {}, some).withColumn("_of", F.lit(0))
    parts = parts.unionByName(replay_rows.between(rows, some, half).withColumn("_of", F.lit(1)))
    parts = parts.unionByName(replay_rows.behind(rows, half).withColumn("_of", F.lit(2)))
    counted = {one["_of"]: one["count"] for one in parts.groupBy("_of").count().collect()}
    assert counted == {0: sum(one.records for one in planned[:10]), 1: sum(one.records for one in planned[10:20]),
                       2: sum(one.records for one in planned[20:])}  # fmt: skip
    rows.unpersist()


def test_a_key_is_in_one_task_and_in_order_and_says_that_it_is_replayed(spark: SparkSession) -> None:
    given = [*many(200), *moved(), row(900, headers=None, key=b"bare", offset=10_000)]
    targets = {"orders": "all", "payments": "all", "grown": "all"}
    mixed = silver(spark, random.Random(2).sample(given, len(given)))
    sent = replay_rows.outgoing(replay_rows.placed(mixed), targets, "the id", HEADER)
    assert_same_columns(sent.select("topic"), [schemas.KAFKA["topic"]])
    found = sent.withColumn("_task", F.spark_partition_id()).collect()
    tasks, orders = defaultdict[Any, set[int]](set), defaultdict[Any, list[Any]](list)
    for one in found:
        assert one["topic"] == "all"
        headers = [(name, None if value is None else bytes(value)) for name, value in one["headers"]]
        bare = one["key"] == b"bare"
        assert headers == [*([] if bare else [("mine", None)]), (replay_rows.HEADER, b"the id")]
        if one["key"] is not None:
            tasks[bytes(one["key"])].add(one["_task"])
            orders[bytes(one["key"])].append(one["value"] and bytes(one["value"]))
    assert {len(ids) for ids in tasks.values()} == {1}
    for key, values in orders.items():
        assert values == [row["value"] for row in given if row["key"] == key]


class Clock:
    """Only `sleep` lets time go by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 1
        self.now += seconds


def kafka(servers: Servers) -> dict[str, str]:
    return {"bootstrap.servers": servers.bootstrap, "acks": "0"}


def test_nobody_can_ask_for_records_to_be_lost() -> None:
    asked = {"bootstrap.servers": "a:1", "acks": "0", "enable.idempotence": "false"}
    forced = {"kafka.bootstrap.servers": "a:1", "kafka.acks": "all", "kafka.enable.idempotence": "true"}
    forced |= {"kafka.batch.size": "16384", "kafka.compression.type": "none"}  # KAFKA-19479
    assert replay.sink_options(asked) == forced


def plain(one: dict[str, Any], replay_id: str) -> tuple[Any, ...]:
    return one["key"], one["value"], [*one["headers"], (replay_rows.HEADER, replay_id.encode())]


def by_key(records: list[Published]) -> Mapping[bytes | None, list[Any]]:
    found = defaultdict[bytes | None, list[Any]](list)
    for one in records:
        found[one.key].append((one.key, one.value, one.headers))
    return found


@pytest.mark.usefixtures("compiled_queries")
def test_a_replay_is_paced_stopped_cut_off_and_gone_on_with(
    spark: SparkSession, lake: str, servers: Servers, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock, reports = make_topic(3), Clock(), list[tuple[float, int]]()
    request = ReplayRequest(Selection(until=at(10_000)), Destination(topic=target))
    progress = replay.begin(spark, lake, request)
    append(spark, lake, [row(5000, offset=5000)])  # is none of it: the lake was younger then
    assert [(one.topic, one.records, one.tombstones) for one in replay.preview(spark, lake, progress)] == [
        (topic, len(rows), sum(row["tombstone"] for row in rows))
        for topic in ("orders", "payments")
        for rows in [[row for row in many(300) if row["topic"] == topic]]
    ]
    settings = replay.ReplaySettings(lake, kafka(servers), ReplayRate(60.0))

    def tell(done: replay.ReplaySliceDone) -> None:
        reports.append((clock.now, done.records))
        assert done.total == 300

    stopped = replay.run(
        spark, settings, progress, stop=lambda: len(reports) >= 2, report=tell, clock=clock, sleep=clock.sleep
    )
    assert (stopped.records, stopped.finished) == (120, False)
    assert [records for _, records in reports] == [60, 120]
    assert [moment for moment, _ in reports] == pytest.approx([0, 1], abs=0.3)
    assert replay.load(spark, lake, progress.id) == stopped

    # Cut off between the third slice and the note of it.
    store, stores = replay._store, list[int]()

    def fail(where: TableStore, progress: Any) -> None:
        stores.append(progress.records)
        if len(stores) == 2:
            raise OSError("gone")
        store(where, progress)

    monkeypatch.setattr(replay, "_store", fail)
    with pytest.raises(PipelineError) as caught:
        replay.run(spark, settings, stopped, clock=clock, sleep=clock.sleep)
    assert progress.id in (caught.value.hint or "")
    monkeypatch.undo()
    before = len(read_topic(servers.bootstrap, target))
    assert before == 180

    left = replay.load(spark, lake, progress.id)
    assert left == stopped
    finished = replay.run(spark, replace(settings, pace=ReplayRate()), left)
    assert (finished.records, finished.finished) == (300, True)
    assert replay.run(spark, settings, replay.load(spark, lake, progress.id)).finished

    written = read_topic(servers.bootstrap, target)
    assert len(written) == 300 + 60  # the slice that was cut off
    for key, rows in by_key(written).items():
        first = list(dict.fromkeys(map(repr, rows)))
        expected = [repr(plain(row, progress.id)) for row in many(300) if row["key"] == key]
        assert (sorted(first) if key is None else first) == (sorted(expected) if key is None else expected)
        assert key is None or len({one.partition for one in written if one.key == key}) == 1


def test_without_a_rate_topics_keep_their_names_but_for_a_suffix(
    spark: SparkSession, tmp_path: Path, servers: Servers, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root, suffix = f"test-{uuid.uuid4().hex[:8]}", str(tmp_path), "-again"
    open_store(spark, root).prepare([schemas.SILVER_TABLE], "somebody", HEADER)
    append(spark, root, [row(number, topic=source) for number in range(50)])
    settings = replay.ReplaySettings(root, {"bootstrap.servers": servers.bootstrap})
    request = ReplayRequest(Selection(keys=(b"key",)), Destination(suffix=suffix), as_new=True)
    progress = replay.begin(spark, root, request)
    with pytest.raises(InputMissing, match=f"no topic {source}{suffix}") as caught:
        replay.run(spark, settings, progress)
    assert caught.value.exit_code is ExitCode.INPUT
    target = make_topic(2)
    # The topic that exists is named like the one that records come from.
    append(spark, root, [row(number, topic=target[:-3], offset=number) for number in range(100, 140)])

    @contextmanager
    def running(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(sessions, "session", running)
    line = ["pipeline", "replay", "--lake", root, "--bootstrap", servers.bootstrap, "--topic", target[:-3]]
    line += ["--set", "leader_group_id=test"]
    line += ["--suffix", target[-3:], "--as-new", "--by", "created", "--from", "2026-03-01T00:01:40"]
    dry = CliRunner().invoke(app, [*line, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert f"{target[:-3]} → {target}: 40 records (0 tombstones), 2026-03-01T00:01:40+00:00 to" in dry.stdout
    assert read_topic(servers.bootstrap, target) == []
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "40 of 40 records" in done.stderr
    assert "40 records written by replay" in done.stdout
    written = read_topic(servers.bootstrap, target)
    assert [one.value for one in written] == [b"%d" % number for number in range(100, 140)]
    assert {name for one in written for name, _ in one.headers} == {"mine", replay_rows.HEADER}
    with pytest.raises(PipelineError, match="written back"):
        replay.preview(spark, root, replay.begin(spark, root, ReplayRequest(Selection(), Destination(topic=source))))


def test_live_records_follow_a_replay_without_a_gap_and_none_twice(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lake has repeats behind the last first delivery, and reads on after the replay."""
    topic, other, target = make_topic(2, KEPT), make_topic(1, KEPT), make_topic(1)
    writer, lake, file = Writer(servers.bootstrap), Lake(spark, tmp_path / "lake", servers.bootstrap), tmp_path / "csv"
    lake.folds = False
    sent = [Sent(number, b"%d" % number, partition=number % 2) for number in range(1, 30)]
    writer.send(other, [Sent(100, partition=0)])
    for some in (sent[:10], [*sent[10:20], *(one.again(1) for one in sent[4:8])]):
        writer.send(topic, some)
        lake.once(topic, other)
    monkeypatch.setattr(sessions, "session", lambda *_, **__: nullcontext(spark))
    line = ["pipeline", "replay", "--lake", lake.address, "--bootstrap", servers.bootstrap, "--topic", topic]
    line += ["--set", "leader_group_id=test", "--to-topic", target, "--live-offsets", str(file)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    writer.send(topic, sent[20:])
    lake.once(topic, other)
    writer.send(topic, [one.again(2) for one in sent[:2]])

    assert file.read_text() == f"{topic},0,12\n{topic},1,12\n"
    replayed = read_topic(servers.bootstrap, target)
    live = [one for one in read_topic(servers.bootstrap, topic) if one.offset >= 12]
    keys = sorted(int(one.key or b"") for one in [*replayed, *live])
    assert keys == sorted([*range(1, 30), 1, 2]), "the last two are repeats that came later"
    refused = CliRunner().invoke(app, [*line, "--until", "1m"])
    assert "leaves a gap" in str(refused.exception)


def test_live_records_of_a_topic_that_was_made_anew_begin_with_its_own(spark: SparkSession) -> None:
    rows = [
        row(1, offset=90, batch="1"), row(2, offset=3, batch="2"), row(3, partition=1, offset=80, batch="1"),
        row(4, topic="payments", offset=7, batch="1"),
    ]  # fmt: skip
    again = [row(2, offset=5, batch="2"), row(2, offset=9, batch="3")]
    found = replay_rows.ends(silver(spark, rows), silver(spark, again), {"orders": "2"})
    assert sorted(map(tuple, found.collect())) == [("orders", 0, 5), ("payments", 0, 7)]


def test_the_header_of_the_lake_is_left_out_whatever_it_is_called_today(
    spark: SparkSession, tmp_path: Path, servers: Servers, make_topic: MakeTopic
) -> None:
    target, root = make_topic(1), str(tmp_path)
    open_store(spark, root).prepare([schemas.SILVER_TABLE], "somebody", "origin")
    append(spark, root, [row(1, headers=[("mine", None)])])
    progress = replay.begin(spark, root, ReplayRequest(Selection(), Destination(topic=target), as_new=True))
    replay.run(spark, replay.ReplaySettings(root, kafka(servers)), progress)
    [written] = read_topic(servers.bootstrap, target)
    assert [name for name, _ in written.headers] == ["mine", replay_rows.HEADER]


def test_what_is_not_there_is_told(spark: SparkSession, tmp_path: Path) -> None:
    request = ReplayRequest(Selection(), Destination(original=True))
    with pytest.raises(InputMissing, match="no table silver"):
        replay.begin(spark, str(tmp_path), request)
    open_store(spark, str(tmp_path)).prepare([schemas.SILVER_TABLE], "somebody", HEADER)
    with pytest.raises(InputMissing, match="no replay that"):
        replay.load(spark, str(tmp_path), "that")
    empty = replay.begin(spark, str(tmp_path), request)
    settings = replay.ReplaySettings(str(tmp_path), {"bootstrap.servers": "127.0.0.1:1"})
    assert replay.run(spark, settings, empty) == replace(empty, finished=True)  # asks no broker

"""The audit on real servers: it finds each planted defect, and reports none on clean data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from harvester.errors import BrokerUnavailable, DatabaseUnavailable, ExitCode, SchemaError
from harvester.origin import HEADER
from harvester.pipeline import streaming
from harvester.pipeline.audit import checks, inputs
from harvester.pipeline.audit.inputs import half_written, topic_bounds
from harvester.pipeline.audit.job import AuditSettings, collect_findings, run
from harvester.pipeline.audit.report import AuditReport, FindingGroup
from harvester.pipeline.audit.schemas import FINDINGS_TABLE, Severity
from harvester.pipeline.errors import InputMissing, TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import LakeBatch, batch_name, to_do_again
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.schemas import LOSSES_TABLE
from harvester.pipeline.source import Place
from harvester.pipeline.streaming import Plan
from tests.conftest import MakeTopic
from tests.support.audits import Scene, Sent, at, audit_command, history, numbered
from tests.support.lakes import make_lake
from tests.support.longs import long
from tests.support.outboxes import poor_role
from tests.support.servers import Servers
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.servers

Change = Callable[[list[Sent]], list[Sent]]


TABLES = ("outbox", "outbox_term", "outbox_quarantine", "outbox_archive")
READ = [f"GRANT SELECT ON {table} TO {{role}}" for table in TABLES]


@pytest.fixture
def scene(database: str, make_topic: MakeTopic, servers: Servers) -> Scene:
    # The records are of a time of their own, which a broker would soon remove.
    return Scene(database, servers.bootstrap, make_topic(3, {"retention.ms": "-1"}))


def clean() -> list[Sent]:
    """Two lanes, two terms, three partitions, some records without a key; a hand-over between 20 and 21."""
    sent = []
    for number in range(1, 41):
        key = None if number % 10 == 0 else b"key %d" % (number % 6)
        term, producer = (1, 5) if number <= 20 else (2, 9)
        one = Sent(number, key, seconds=number, term=term, producer=producer, took_s=0.02)
        sent.append(replace(one, partition=number % 3, lane=number % 2))
    return sent


def settings(scene: Scene, **more: Any) -> AuditSettings:
    kafka = {"bootstrap.servers": scene.bootstrap}
    return AuditSettings(**{"topics": (scene.topic,), "kafka": kafka, "dsn": scene.dsn, **more})


def findings(report: AuditReport) -> list[tuple[str, str, int, list[int | None]]]:
    """Kind, severity, count, and the ids of the examples."""
    return listed(report.found)


def listed(found: Iterable[FindingGroup]) -> list[tuple[str, str, int, list[int | None]]]:
    return [(one.kind, one.severity, one.count, [example.id for example in one.examples]) for one in found]


@pytest.fixture
def in_process(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`harvester pipeline audit` of a scene."""
    command = audit_command(spark, monkeypatch)
    return lambda scene, *arguments: command(scene, "--bootstrap", scene.bootstrap, *arguments)


def without_python(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on executors have none."""
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nonexistent")


def test_clean_data_has_no_findings(
    scene: Scene,
    in_process: Callable[..., int],
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With offset holes: aborted records before all others, and markers of transactions.

    One record is in quarantine, so that its number is missing, and one still waits.
    """
    without_python(spark, monkeypatch)
    sent = scene.own(clean())
    poison = sent.pop(24)
    scene.deliver(sent, aborted=[replace(one, id=one.id + 900) for one in sent[:5]])
    scene.archive(sent)
    scene.quarantine(poison)
    scene.wait(replace(poison, id=41))
    tables, page = tmp_path / "audit", tmp_path / "audit.html"
    more = ("--to", str(tables), "--html", str(page), "--json")
    assert in_process(scene, "--topic", scene.topic, *more) == ExitCode.OK
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["holds"] is True
    assert report["found"] == []
    assert report["not_judged"] == ["1 records wait in the outbox: the verdict is not final"]
    wanted = {"ids": 39, "deliveries": 39, "archived": 39, "delivered": 39, "beyond": 0, "foreign": 0, "lost": 0}
    wanted |= {"quarantined": 1, "pending": 1, "numbers_given_up": 1, "numbers_open": 0}
    assert {name: report["figures"][name] for name in wanted} == wanted
    assert [(one["term"], one["records"], one["lanes"]) for one in report["terms"]] == [(1, 20, 2), (2, 19, 2)]
    assert report["lanes"] == {"0": 20, "1": 19}
    assert [one["p99_ms"] for one in report["latency"]] == [20.0, 20.0, 20.0]
    assert "records read" in said.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    written = spark.read.format("delta").load(str(tables / "findings"))
    assert written.schema.names == FINDINGS_TABLE.schema.names
    assert written.count() == 0
    [stored] = spark.read.format("delta").load(str(tables / "audits")).collect()
    assert (stored["holds"], json.loads(stored["report"])) == (True, report)


def damaged(sent: list[Sent]) -> list[Sent]:
    """40 is lost, 39 comes twice, 7 comes before 1 of its key, and lane 1 has left out a number before 31."""
    by_id = {one.id: one for one in sent if one.id != 40}
    order = [7, *range(2, 7), 1, *range(8, 40), 39]
    gap = dict.fromkeys(range(31, 40, 2), 1)
    return [replace(by_id[number], sequence=by_id[number].sequence + gap.get(number, 0)) for number in order]


def test_each_planted_defect_is_found_and_nothing_else(
    scene: Scene, in_process: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(inputs, "_IDS_A_SESSION", 5)  # so that several sessions read the history
    sent = scene.own(clean())
    scene.deliver(damaged(sent))
    scene.archive(sent)
    file = tmp_path / "audit.json"
    with poor_role(scene.dsn, *READ) as poor:
        more = ("--set", f"data_source={poor}", "--json-file", str(file))
        assert in_process(scene, "--topic", scene.topic, *more) == ExitCode.FAILED
    report = json.loads(file.read_text(encoding="utf-8"))
    found = [
        (one["kind"], one["severity"], one["count"], [(each["id"], each["detail"]) for each in one["examples"]])
        for one in report["found"]
    ]
    assert found == [
        ("lost", "violation", 1, [(40, "purged as delivered, but in none of the topics")]),
        ("delivered after a successor", "violation", 1, [(1, "delivered after id 7 of its key")]),
        ("gap in a lane", "violation", 1, [(None, "term 2, lane 1, producer 9: number 6 is missing")]),
        ("repeated", "suspect", 1, [(39, "delivered before")]),
    ]
    said = capsys.readouterr()
    answer = "The guarantees do not hold: 1 lost, 1 delivered after a successor, 1 gap in a lane."
    assert said.out.splitlines()[-1] == answer
    assert f"lost: id 40 of {scene.incarnation}, {scene.topic}" in said.out
    assert answer in said.err


def lake_of(spark: SparkSession, root: Path, sent: list[Sent]) -> str:
    return make_lake(spark, root, [one.row() for one in sent])


@long
def test_a_range_of_a_lake_without_a_history(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies before the range explains what is in it, and is not told itself."""
    sent = numbered(replace(one, partition=0) for one in clean())
    early = [sent[6], *sent[1:6], sent[0], *sent[7:14], sent[15]]  # 7 before 1, and 15 is missing
    late = [*sent[16:28], replace(sent[20], seconds=28.5), replace(sent[2], seconds=29), *sent[28:]]
    # A header may bear any number, which is no reason to end.
    far = Sent(1, None, 2**63 - 1, seconds=30, incarnation=UUID(int=9), created_us=-(2**63))
    root = lake_of(spark, tmp_path, [*early, *late, far, replace(far, id=2**63 - 1, lane=1)])
    without_python(spark, monkeypatch)
    monkeypatch.setattr(spark.sparkContext, "master", "spark://elsewhere:7077")  # where rows are kept in another way
    report = run(
        spark, AuditSettings(lake=root, since=at(18), until=at(35), margin=timedelta(seconds=16), serial_keys=False)
    )
    assert findings(report) == [
        ("repeated after a successor", "violation", 2, [21, 3]),
    ]
    assert report.topics == ("orders",)
    assert report.figures["deliveries"] == 21
    assert report.figures["numbers_edge"] == 2**63 - 1
    assert "lost: not judged without the database's history (--no-history)" in report.not_judged
    assert report.not_judged[-2:] == (
        "gaps before 2026-03-01 10:00:02 UTC: not judged, the topics do not go back further",
        "rows purged after 2026-03-01 09:59:40 UTC, and later gaps: not judged, the lake ends a minute later",
    )


@long  # test_the_history_says_what_is_lost has the rules, test_formats a lake with a loss
def test_a_loss_that_a_lake_was_allowed_to_go_on_without_is_accepted_as_far_as_it_has_room(
    scene: Scene, spark: SparkSession, tmp_path: Path
) -> None:
    sent = scene.own(replace(one, partition=0, lane=0, seconds=300 * one.seconds) for one in clean())
    gone, late = sent[24:28], sent[35]  # 25 to 28, and 36
    scene.archive(sent)
    rows = [one.row() | {"offset": one.id} for one in sent if one not in gone and one is not late]
    root = make_lake(spark, tmp_path, rows)

    def audited(*losses: tuple[int, int | None]) -> AuditReport:
        note(spark, root, scene.topic, *losses)
        return run(spark, settings(scene, topics=(), lake=root))

    lost, gap = ("lost", "violation", 1, [36]), ("gap in a lane", "violation", 1, [None])
    accepted = ("accepted loss", "accepted", 5, [25, 26, 27, 28, None])
    report = audited((25, 29))
    assert findings(report) == [lost, gap, accepted]
    assert report.figures["accepted"] == 5
    assert audited((25, 29), (36, None)).answer() == "No guarantee was broken; 7 accepted losses."


@long
def test_a_loss_has_no_room_for_more_than_it_had(spark: SparkSession, tmp_path: Path) -> None:
    """Offsets of less than what is missing there, those of another time, and both: their rooms do not add up."""
    sent = numbered(replace(one, partition=0, lane=0, seconds=300 * one.seconds) for one in clean())
    there = [one for one in sent if one.id not in (25, 26, 27, 28, 36)]
    root = make_lake(spark, tmp_path, [one.row() | {"offset": one.id} for one in there])
    past = history(
        spark,
        *({"id": one.id, "at": at(one.seconds + 0.1), "created_at": at(one.seconds - one.took_s)} for one in sent),
    )
    records = inputs.trimmed(inputs.from_lake(spark, root, None).bronze, None, None, "").localCheckpoint()
    marked = checks.marked(records).localCheckpoint()
    scope = checks.AuditScope(("orders",))
    found = checks.found(checks.archived(past, scope), marked).localCheckpoint()
    stretches = checks.number_blocks(marked)
    numbers = checks.numbers(stretches, marked, checks.given_up(past, records))
    last = checks.last_streams(checks.streams(stretches))
    gaps = checks.gaps(checks.holes(numbers), marked, last, None, None).localCheckpoint()

    def judged(*losses: tuple[int, int | None]) -> list[tuple[str, str, int, list[int | None]]]:
        note(spark, root, "orders", *losses)
        noted = inputs.lake_notes(spark, root, records, None).losses
        assert len(noted) == len(losses)
        missing = checks.lost(found, replace(scope, losses=noted))
        return listed(collect_findings(missing.unionByName(checks.open_gaps(gaps, Severity.VIOLATION, noted))))

    assert ("accepted loss", "accepted", 5, [25, 26, 27, 28, None]) in judged((25, 29))
    for others in ([(25, 28)], [(5, 10)], [(25, 28), (5, 10)]):
        assert judged(*others) == [
            ("lost", "violation", 5, [25, 26, 27, 28, 36]), ("gap in a lane", "violation", 2, [None, None]),
        ]  # fmt: skip


def note(spark: SparkSession, root: str, topic: str, *losses: tuple[int, int | None]) -> None:
    """The table `losses` has these offsets, and no others."""
    rows = spark.createDataFrame([(topic, 0, first, end, at(13_000)) for first, end in losses], LOSSES_TABLE.schema)
    rows.write.format("delta").mode("overwrite").save(f"{root}/losses")


@long  # test_which_batches_of_a_lake_are_whole decides which are judged every day
@pytest.mark.parametrize("whole", [20, 0])
def test_a_batch_that_is_half_written_is_not_judged(
    scene: Scene, spark: SparkSession, tmp_path: Path, whole: int
) -> None:
    """What one of its tables has, makes the other one's records seem lost, or their numbers missing."""
    given = [replace(one, partition=0, lane=0) for one in slowly(clean())]
    again = replace(given[9], seconds=90 * 30.5, term=2, producer=9)  # it has no key
    sent = scene.own([*given[:30], again, *given[30:]])
    scene.archive([*sent[:30], *sent[31:]])
    rest = [*sent[whole:], Sent(0, seconds=90 * 50, header=False, topic=scene.topic)]
    rows = [one.row() | {"offset": whole + number} for number, one in enumerate(rest)]

    def cut_off(missing: str) -> str:
        root = make_lake(spark, tmp_path / missing, *([[one.row() for one in sent[:whole]]] if whole else []))
        streaming.store(spark, f"{root}/checkpoint", streaming.Manifest("test", "lake", (scene.topic,), HEADER))

        def hit(place: str) -> None:
            if place == f"lake.{missing}":
                raise InterruptedError(place)

        batch = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {}, hit)
        with pytest.raises(InterruptedError):
            batch.write(bronze_columns(kafka_rows(spark, rows)), 1 if whole else 0)
        return root

    for missing in ("repeats", "silver"):
        root = cut_off(missing)
        assert spark.read.format("delta").load(f"{root}/rejects").count() == 1
        assert inputs.from_lake(spark, root, None).bronze.count() == whole
    report = run(spark, settings(scene, topics=(), lake=root))
    assert findings(report) == []
    # What was purged within the last minute, or later, is not judged.
    assert (report.figures["records"], report.figures["delivered"]) == (whole, max(0, whole - 1))


def slowly(sent: list[Sent]) -> list[Sent]:
    """A record in 90 s, so that the minute for the clocks hides none but the last one."""
    return [replace(one, seconds=90 * one.seconds) for one in sent]


@long  # test_the_history_says_what_is_lost has the rules
def test_what_was_sent_as_a_lake_ended_is_neither_lost_nor_a_gap(
    scene: Scene, spark: SparkSession, tmp_path: Path
) -> None:
    """38 came to another partition than 40, behind the end of the batch. The clock of the database is behind."""
    sent = scene.own(slowly(clean()))
    scene.archive([*sent[:37], replace(sent[37], seconds=3599.7), *sent[38:]])
    root = make_lake(spark, tmp_path, [one.row() for one in sent if one.id != 38])
    report = run(spark, settings(scene, topics=(), lake=root))
    assert findings(report) == []
    assert (report.figures["delivered"], report.figures["numbers_recent"]) == (39 - 1, 1)


@long
def test_what_a_lake_has_not_read_yet_is_only_suspect(
    scene: Scene, spark: SparkSession, tmp_path: Path, make_topic: MakeTopic
) -> None:
    sent, other = scene.own(slowly(clean())), make_topic(1, {"retention.ms": "-1"})
    scene.deliver(sent)
    scene.archive(sent)
    unread = [one.id for one in sent if one.partition == 2 and one.id > 20]
    root = make_lake(spark, tmp_path, [one.row() for one in sent if one.id not in unread])
    kafka = {"bootstrap.servers": scene.bootstrap}
    whole = topic_bounds(spark, kafka, [scene.topic]).end

    def audited(ends: dict[Place, int], *topics: str) -> tuple[dict[tuple[str, str], int], bool]:
        streaming.store(spark, f"{root}/checkpoint", streaming.Manifest("test", "lake", (scene.topic, *topics), HEADER))
        streaming.go_on(spark, f"{root}/checkpoint", Plan(0, ends))
        report = run(spark, settings(scene, topics=(), lake=root))
        told = [line for line in report.not_judged if "may not have read far enough" in line]
        return {(one.kind, one.severity): one.count for one in report.found}, bool(told)

    # What comes next after the number of 38 came in the last minute.
    lost, gap, holes = "lost", "gap in a lane", len(unread) - 1
    assert audited({**whole}) == ({(lost, "violation"): len(unread), (gap, "violation"): holes}, False)
    suspect = {(lost, "suspect"): len(unread), (gap, "suspect"): holes}
    assert audited({**whole, (scene.topic, 2): 7}) == (suspect, True)

    # A topic that was added a moment ago.
    added = Sent(101, seconds=300, topic=other, incarnation=scene.incarnation, lane=7)
    scene.deliver([added])
    scene.archive([added])
    found = {(lost, "violation"): len(unread), (lost, "suspect"): 1, (gap, "suspect"): holes}
    assert audited({**whole}, other) == (found, True)
    # Where the brokers do not answer, it is known by having no records.
    given, read = inputs.from_lake(spark, root, None), [(scene.topic, number) for number in range(3)]
    for asked in (kafka, {"bootstrap.servers": "127.0.0.1:1"}):
        assert inputs.behind(spark, asked, given, read, at(3600)) == {other}


def test_which_batches_of_a_lake_are_whole(spark: SparkSession, tmp_path: Path) -> None:
    where = str(tmp_path)
    assert half_written(spark, where) is None
    (tmp_path / "harvester.json").write_text("{}")
    assert half_written(spark, where) == batch_name(0)
    for name in ("commits", "ids"):
        (tmp_path / name).mkdir()
    (tmp_path / "commits" / "2").touch()
    assert half_written(spark, where) == batch_name(3)
    (tmp_path / "ids" / "3.json").write_text("{}")
    assert half_written(spark, where) == batch_name(4)
    # Two that were given up, the one after the other.
    (tmp_path / "ids" / "5.json").write_text(to_do_again(4))
    (tmp_path / "commits" / "5").touch()
    assert half_written(spark, where) == batch_name(4)
    (tmp_path / "ids" / "6.json").write_text("{}")
    assert half_written(spark, where) == batch_name(7)


@long  # test_order_and_repeats_are_judged_within_a_key_of_a_partition judges orders
def test_the_order_of_a_topic_that_was_made_anew_is_no_proof(scene: Scene, spark: SparkSession, tmp_path: Path) -> None:
    """Its offsets begin again, so those of the second log are below those of the first. 6 and 7 went with that one."""
    late = {number: 100.0 * number for number in range(11, 19)}
    sent = scene.own(Sent(number, seconds=late.get(number, number)) for number in (*range(1, 8), *late))
    old, new = sent[:5], sent[7:]
    new[2], new[3] = new[3], new[2]  # 14 before 13
    new[2], new[3] = replace(new[2], seconds=1300), replace(new[3], seconds=1400)
    scene.archive(sent)
    root = make_lake(spark, tmp_path, [one.row() for one in old], [one.row() for one in new])
    loss = spark.createDataFrame([(scene.topic, 0, 5, None, at(50))], LOSSES_TABLE.schema)
    loss.write.format("delta").mode("append").save(f"{root}/losses")
    report = run(spark, settings(scene, topics=(), lake=root))
    assert findings(report) == [
        ("delivered after a successor", "suspect", 1, [13]), ("accepted loss", "accepted", 3, [6, 7, None]),
    ]  # fmt: skip
    [line] = [one for one in report.not_judged if one.startswith("order: only suspect")]
    assert line.endswith(f"their offsets began again: {scene.topic}")
    # Of the second log alone it is.
    report = run(spark, settings(scene, topics=(), lake=root, since=at(110), margin=timedelta(seconds=10)))
    assert findings(report) == [("delivered after a successor", "violation", 1, [13])]


def test_what_the_brokers_say_of_topics(
    scene: Scene, spark: SparkSession, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted = make_topic(1, {"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    kafka = {"bootstrap.servers": scene.bootstrap}
    scene.deliver([*scene.own(clean()), replace(clean()[0], topic=compacted, partition=0)])
    admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4", "log_level": 3})
    for cut in admin.delete_records([TopicPartition(scene.topic, 0, 4), TopicPartition(scene.topic, 1, -1)]).values():
        cut.result(30)
    bounds = topic_bounds(spark, kafka, [scene.topic, compacted])
    assert bounds.compacted == (compacted,)
    assert bounds.truncated == ((scene.topic, 0), (scene.topic, 1))
    # 2, 5, … of partition 2: what is before 20 is left out; 0 and 1 begin behind what was removed.
    ranged = topic_bounds(spark, kafka, [scene.topic], at(20))
    assert {number: start for (_, number), start in ranged.start.items()} == {
        0: bounds.start[scene.topic, 0] + 2, 1: ranged.end[scene.topic, 1], 2: 6,
    }  # fmt: skip
    with scene.open_transaction():
        monkeypatch.setattr("harvester.pipeline.audit.inputs._OPEN_S", 0.1)
        told: list[str] = []
        with pytest.raises(BrokerUnavailable, match=r"an open transaction hides the end of .*\[0\]") as caught:
            topic_bounds(spark, kafka, [scene.topic], progress=told.append)
        assert caught.value.exit_code is ExitCode.UNAVAILABLE
        assert told == [f"waiting for the open transaction that hides the end of {scene.topic}[0]"]


def test_what_cannot_be_read_is_told_in_one_line(
    scene: Scene,
    spark: SparkSession,
    in_process: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_process(scene, "--topic", "no-such-topic", "--no-history") == ExitCode.INPUT
    assert capsys.readouterr().err.splitlines()[0].startswith("harvester: no topic no-such-topic at ")
    with pytest.raises(InputMissing, match="no table silver in "):
        run(spark, AuditSettings(lake=str(tmp_path)))
    spark.range(1).write.format("delta").save(str(tmp_path / "odd" / "silver"))
    with pytest.raises(TableMismatch, match="has a different schema: column day is missing"):
        run(spark, AuditSettings(lake=str(tmp_path / "odd")))
    with pytest.raises(DatabaseUnavailable):
        run(spark, settings(scene, dsn="host=127.0.0.1 port=1 dbname=none connect_timeout=2"))
    with (
        poor_role(scene.dsn, *READ[:3]) as poor,
        pytest.raises(SchemaError, match='this database user may not read "outbox_archive"'),
    ):
        run(spark, settings(scene, dsn=poor))
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE outbox_archive")
    assert in_process(scene, "--topic", scene.topic) == ExitCode.OK
    said = capsys.readouterr().out
    assert "not judged: lost: not judged without an archive" in said
    assert "not judged: order, repeats, gaps, latency: nothing was read" in said
    for wrong, where in (
        (("--lake", "x", "--topic", "y"), "--topic, --lake"),
        (("--topic", "y", "--from", "x"), "--from"),
    ):
        assert in_process(scene, *wrong) == ExitCode.USAGE
        assert where in capsys.readouterr().err

"""A key that is erased: nothing is left of it in a lake, in archive or quarantine, and the rest is as it was."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from harvester_cli.main import main
from pyarrow.parquet import ParquetFile

from harvester.claim_check.reference import HEADER as CLAIM_CHECK
from harvester.errors import ExitCode, HarvesterError
from harvester.origin import HEADER
from harvester.outbox.connection import connect
from harvester.pipeline import metrics, replay, streaming
from harvester.pipeline.audit.job import AuditSettings, run
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.lake.erase import Certificate, erase_rows, traces_of_other_jobs
from harvester.pipeline.lake.silver import from_ddl
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.replay_plan import Destination, ReplayRequest, Selection
from tests.support.audits import Scene
from tests.support.audits import Sent as Archived
from tests.support.databases import TABLE
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake, Oracle, make_lake
from tests.support.longs import long
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

KEY, NAME = b"customer-7", "Alice"
IN_BASE64 = base64.b64encode(KEY).decode()
URL = "file:///values/orders/10-" + hashlib.sha256(b"large").hexdigest()
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line with the Spark of this process: exit code, and what it says."""

    @contextmanager
    def shared(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    def call(*arguments: str) -> tuple[int, str, str]:
        given = ["harvester", "pipeline", "erase", "--set", "leader_group_id=test", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.setattr("harvester.pipeline.session.session", shared)
    return call


def value_of(name: str) -> bytes:
    return json.dumps({"who": name}).encode()


def told_of(root: Path, *texts: str) -> set[str]:
    """Those of the texts that any file below a directory has, whether the log still names it or not."""
    files = [path for path in root.rglob("*") if path.is_file()]
    content = "".join(file.read_bytes().decode("latin-1") for file in files)
    for file in files:
        if file.suffix == ".parquet":  # read alone: a table would leave out rows that are gone
            content += repr(ParquetFile(file, coerce_int96_timestamp_unit="us").read().to_pydict())
    return {text for text in texts if text in content}


@contextmanager
def largest_stage(spark: SparkSession) -> Iterator[list[int]]:
    """How many tasks the largest stage has had of all that this thread asks for; known afterwards."""
    context, found = spark.sparkContext, list[int]()
    context.setLocalProperty("spark.jobGroup.id", "counted")
    try:
        yield found
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup("counted")]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    found.append(max((stage.numTasks for stage in stages if stage is not None), default=0))


def counts(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        rows = [
            connection.execute(f"SELECT count(*) FROM outbox_{one}").fetchone() for one in ("archive", "quarantine")
        ]
    return [row[0] for row in rows if row is not None]


def test_an_archive_without_an_index_by_key_is_searched_for_as_long_as_that_takes(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(database, "", "orders")
    scene.archive([Archived(1, KEY), Archived(2, b"another")])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql"
            " AS 'BEGIN PERFORM pg_sleep(0.6); RETURN OLD; END'"
        )
        connection.execute("CREATE TRIGGER slow BEFORE DELETE ON outbox_archive FOR EACH ROW EXECUTE FUNCTION slowly()")
    monkeypatch.setitem(cast(Any, connect).__kwdefaults__, "silence_s", 0.3)
    assert erase_rows(database, TABLE, KEY, ()).archive == 1


def test_an_erased_key_is_in_no_file_any_more(spark: SparkSession, tmp_path: Path, command: Command) -> None:
    copied = (CLAIM_CHECK, URL.replace("10-", "2-").encode())  # from a record of another key, whose object stays
    theirs = [
        Sent(0, KEY, value_of(NAME)),
        Sent(3, KEY, value_of(NAME), more=(copied,)),
        Sent(4, KEY, URL.encode(), more=((CLAIM_CHECK, URL.encode()),)),
    ]
    ours = [Sent(number, b"customer-8", value_of("Bob")) for number in (1, 2, 5)]
    strange = Sent(0, KEY, value_of(NAME), headers=())
    root = tmp_path / "lake"
    make_lake(
        spark,
        root,
        map(Sent.row, [*ours[:2], *theirs[:2], theirs[0].again(1)]),
        map(Sent.row, [theirs[2], ours[2], strange]),
    )
    manifest = streaming.Manifest("test", "lake", ("orders",), HEADER)
    streaming.store(spark, f"{root}/checkpoint", manifest)
    assert told_of(root, NAME, KEY.decode()) == {NAME, KEY.decode()}
    with largest_stage(spark) as tasks:
        code, out, said = command("--lake", str(root), "--key", KEY.decode(), "--no-database")
    assert code == ExitCode.OK, said
    assert 0 < tasks[0] <= 16, "Spark's own vacuums would have 10,000 tasks"
    certificate = json.loads(out)
    assert certificate["key_sha256"] == hashlib.sha256(KEY).hexdigest()
    erased = {name: one["rows"] for name, one in certificate["tables"].items() if one["rows"]}
    assert erased == {"silver": 3, "repeats": 1, "rejects": 1}
    assert certificate["objects"] == [URL]
    assert all(certificate["tables"][name]["files_removed"] for name in erased)
    assert told_of(root, NAME, KEY.decode(), "Bob") == {"Bob"}
    store = open_store(spark, str(root))
    assert sorted(one["id"] for one in store.table("silver").collect()) == [1, 2, 5]
    batch = LakeBatch(store, f"{root}/checkpoint", "test", HEADER, {})
    batch.write(bronze_columns(kafka_rows(spark, [ours[0].again(3).row(), Sent(6).row() | {"offset": 9}])), 2)
    assert sorted(one["id"] for one in store.table("silver").collect()) == [1, 2, 5, 6]


@long  # the one above erases a key every day, from the tables that a lake itself fills
def test_an_erased_key_leaves_nothing_but_a_certificate(
    spark: SparkSession, servers: Servers, database: str, make_topic: MakeTopic, tmp_path: Path, command: Command
) -> None:
    topic, other, oracle = make_topic(1, KEPT), make_topic(1, KEPT), Oracle()
    scene, lake, writer = (
        Scene(database, servers.bootstrap, topic),
        Lake(spark, tmp_path / "lake", servers.bootstrap),
        Writer(servers.bootstrap),
    )
    payloads = {topic: from_ddl("who STRING"), other: from_ddl("who STRING")}
    theirs = [Sent(number, KEY, value_of(NAME), scene.incarnation) for number in (0, 3, 4)]
    ours = [Sent(number, b"customer-8", value_of("Bob"), scene.incarnation) for number in (1, 2, 5, 6, 7)]
    strange = Sent(0, KEY, value_of(NAME), headers=())
    bad = Sent(9, KEY, b'{"who": ' + NAME.encode(), scene.incarnation)
    elsewhere = Sent(8, KEY, value_of("Carol"), scene.incarnation)
    large = Sent(10, KEY, URL.encode(), scene.incarnation, more=((CLAIM_CHECK, URL.encode()),))
    ours[-1] = ours[-1].again(2)
    # The first one stays: a partition that begins later has lost its beginning to an audit.
    for batch in ([*ours[:3], *theirs[:2], theirs[0].again(1)], [theirs[2], *ours[3:], strange, bad, large]):
        oracle.take(writer.send(topic, batch))
        oracle.take(writer.send(other, [elsewhere] if batch[0] is ours[0] else []))
        lake.once(topic, other, payloads=payloads)
    with psycopg.connect(database, autocommit=True) as connection:
        for one in (*theirs, *ours, bad, large, elsewhere):
            connection.execute(
                "INSERT INTO outbox_archive (id, incarnation, purged_at, create_time, kafka_topic, kafka_key) VALUES"
                " (%s, %s, '2026-03-02T00:00:30Z', '2026-03-01Z', %s, %s)",
                (one.id, scene.incarnation, other if one is elsewhere else topic, one.key),
            )
        for number, key in ((20, KEY), (21, b"customer-8")):
            connection.execute(
                "INSERT INTO outbox_quarantine (id, incarnation, kafka_topic, kafka_key, error, attempts)"
                " VALUES (%s, %s, %s, %s, 'too large', 5)",
                (number, scene.incarnation, topic, key.decode()),
            )
        connection.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (30, %s, %s)", (topic, KEY.decode()))
    root, kafka = str(lake.root), {"bootstrap.servers": servers.bootstrap}
    metrics.run(spark, metrics.MetricsSettings(root))
    run(spark, AuditSettings(lake=root, kafka=kafka, to=root))
    request = ReplayRequest(Selection(keys=(KEY, b"customer-8")), Destination(topic=make_topic(1)))
    replayed = replay.begin(spark, root, request)
    replay.run(spark, replay.ReplaySettings(root, kafka), replayed, stop=lambda: True)
    assert told_of(lake.root, NAME, KEY.decode(), IN_BASE64) == {NAME, KEY.decode(), IN_BASE64}
    args = ("--lake", str(lake.root), "--set", f"data_source={database}")
    file = tmp_path / "certificate.json"
    with largest_stage(spark) as tasks:
        code, _, said = command(*args, "--key", KEY.decode(), "--topic", topic, "--certificate", str(file))
    assert code == ExitCode.OK, said
    assert 0 < tasks[0] <= 16, "Spark's own vacuums would have 10,000 tasks"
    assert "silver: 5 rows" in said
    certificate = json.loads(file.read_text(encoding="utf-8"))
    assert certificate["key_sha256"] == hashlib.sha256(KEY).hexdigest()
    assert certificate["topics"] == [topic]
    rows = {name: one["rows"] for name, one in certificate["tables"].items()}
    assert rows == {
        "silver": 5, "repeats": 1, "rejects": 3, "current": 1, f"json/{topic}": 3,
        "metrics": 2, "metrics_keys": 2, "findings": 1, "audits": 1,
    }  # fmt: skip
    assert certificate["replays"] == [replayed.id]
    assert certificate["objects"] == [URL]
    assert said.index(f"to be erased from the store: {URL}") < said.index("silver: ")
    assert all(one["versions"][0] == 0 < one["versions"][1] for one in certificate["tables"].values())
    assert all(one["files_removed"] for one in certificate["tables"].values())
    assert certificate["database"] == {"archive": 5, "quarantine": 1, "waiting": 1, "not_vacuumed": []}
    assert counts(database) == [6, 1]
    assert told_of(lake.root, NAME, "Carol", "Bob") == {"Carol", "Bob"}
    assert KEY.decode() not in file.read_text(encoding="utf-8")

    # The numbers that are missing now are no gaps, and the rest is as it was.
    oracle.bronze = [one for one in oracle.bronze if one.sent.key != KEY or one.topic == other]
    oracle.silver = {name: one for name, one in oracle.silver.items() if one in oracle.bronze}
    lake.assert_holds(oracle)
    report = run(spark, AuditSettings(lake=root, kafka=kafka, dsn=database))
    assert [one.kind for one in report.found] == []
    assert report.figures["delivered"] == len(ours) + 1

    # And it goes on.
    oracle.take(writer.send(topic, [replace(ours[0], id=11), ours[0].again(3)]))
    lake.once(topic, other, payloads=payloads)
    lake.assert_holds(oracle)


@long
def test_a_key_is_erased_from_all_topics_and_what_the_archive_lists_on_is_not_taken_for_lost(
    spark: SparkSession, servers: Servers, database: str, make_topic: MakeTopic, tmp_path: Path, command: Command
) -> None:
    """But no more of it than was erased. Repeated, it finds what has come since."""
    topic, other = make_topic(1, KEPT), make_topic(1, KEPT)
    lake, writer = Lake(spark, tmp_path / "lake", servers.bootstrap), Writer(servers.bootstrap)
    scene = Scene(database, servers.bootstrap, topic)
    sent = [Sent(0, b"a"), Sent(1, KEY), Sent(2, b"a"), Sent(3, KEY), Sent(4, b"a").again(2)]
    elsewhere = [Sent(number, KEY, value_of("Carol")) for number in (5, 6)]
    for rows in ((sent[:3], elsewhere[:1]), (sent[3:], elsewhere[1:])):
        for name, records in zip((topic, other), rows, strict=True):
            writer.send(name, [replace(one, incarnation=scene.incarnation) for one in records])
        lake.once(topic, other, payloads={other: from_ddl("who STRING")})
        code, out, said = command("--lake", str(lake.root), "--key", KEY.decode(), "--no-database")
        assert code == ExitCode.OK, said
        certificate = json.loads(out)
        assert {name for name, one in certificate["tables"].items() if one["rows"]} == {
            "silver", "current", f"json/{other}"
        }  # fmt: skip
        assert certificate["database"] is None
        assert told_of(lake.root, "Carol", KEY.decode(), KEY.hex().upper(), IN_BASE64) == set()

    def audited(*ids: int) -> list[tuple[str, list[int | None]]]:
        with psycopg.connect(database, autocommit=True) as connection:
            for number in ids:
                connection.execute(
                    "INSERT INTO outbox_archive (id, incarnation, purged_at, create_time, kafka_topic) VALUES"
                    " (%s, %s, '2026-03-02T00:00:30Z', '2026-03-01Z', %s)",
                    (number, scene.incarnation, topic),
                )
        report = run(spark, AuditSettings(lake=str(lake.root), dsn=database))
        return [(one.severity, [example.id for example in one.examples]) for one in report.found]

    assert audited(*range(5)) == [("accepted", [1, 3])]
    assert audited(7) == [("violation", [1, 3, 7])]


def test_what_other_jobs_have_of_a_key_is_found_in_all_topics_or_in_some() -> None:
    everywhere, some = traces_of_other_jobs(KEY, ""), traces_of_other_jobs(KEY, " AND topic IN ('a')")
    assert everywhere["metrics_keys"].where == f"key = X'{KEY.hex()}'"
    assert everywhere["metrics"].where == f"hottest_key = X'{KEY.hex()}'"
    assert everywhere.pop("audits") == some.pop("audits")
    assert {name: f"{trace.where} AND topic IN ('a')" for name, trace in everywhere.items()} == {
        name: trace.where for name, trace in some.items()
    }


def test_what_cannot_be_erased_is_refused_before_anything_is(
    spark: SparkSession,
    servers: Servers,
    database: str,
    make_topic: MakeTopic,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, lake, writer = (
        make_topic(1, KEPT),
        Lake(spark, tmp_path / "lake", servers.bootstrap),
        Writer(servers.bootstrap),
    )
    writer.send(topic, [Sent(1, KEY)])
    lake.once(topic)
    args = ("--lake", str(lake.root), "--key", KEY.decode())
    before = lake.versions()

    def refused(code: ExitCode, said: str, *arguments: str) -> None:
        found, _, lines = command(*arguments)
        assert found == code, lines
        assert said in lines

    refused(ExitCode.UNAVAILABLE, "127.0.0.1", *args, "--set", "data_source=host=127.0.0.1 port=1 connect_timeout=2")
    refused(ExitCode.INPUT, "no table silver", "--lake", str(tmp_path), "--key", "x", "--no-database")
    refused(ExitCode.USAGE, "either as text or as base64", "--lake", str(lake.root))
    refused(ExitCode.USAGE, "cannot be written", *args, "--no-database", "--certificate", str(tmp_path))
    elsewhere = ("--checkpoint", str(tmp_path / "none"), "--no-database")
    refused(ExitCode.CHECKPOINT, "there is no checkpoint of these tables", *args, *elsewhere)
    writer.send(topic, [Sent(2, KEY)])
    with monkeypatch.context() as patched:
        patched.setattr(LakeBatch, "write", lambda *_: 1 / 0)
        with suppress(HarvesterError):
            lake.once(topic)
    refused(ExitCode.CHECKPOINT, "was interrupted and will be repeated", *args, "--no-database")
    assert lake.versions() == before


def test_a_certificate_that_cannot_be_written_in_the_end_is_printed(
    spark: SparkSession, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "certificate.json"

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    def erased(*_: Any) -> Certificate:
        monkeypatch.setattr(Path, "write_text", full)
        return Certificate(datetime.now(UTC), "digest", (), "lake", {}, None, (), (URL,))

    monkeypatch.setattr("harvester.pipeline.lake.erase.erase", erased)
    code, out, said = command("--lake", "lake", "--key", "x", "--no-database", "--certificate", str(file))
    assert code == ExitCode.FAILED
    assert json.loads(out)["objects"] == [URL]
    assert "no space left" in said

"""`harvester doctor` on real servers: what is there, what is away, what is denied."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from harvester.config import Config
from harvester.delivery.progress_topic import ensure_progress_topic
from harvester.doctor import CheckLevel, CheckResult, DoctorReport, examine
from harvester.doctor.database import read_database
from harvester.doctor.facts import Pooling
from harvester.doctor.kafka import probe_clock, read_kafka
from tests.conftest import MakeTopic
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.outboxes import poor_role
from tests.support.pooler import transaction_pooler
from tests.support.servers import Servers
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

AWAY = "host=127.0.0.1 port=1 user=nobody dbname=none"
# What depends on how somebody else has set up the servers of the tests.
_OF_THE_SERVERS = {
    "database.durability",
    "kafka.brokers",
    "host.open_files",
    "host.shards",
    "database.connections",
    "vacuum.slot",
}


def config_of(servers: Servers, dsn: str, group: str, **given: Any) -> Config:
    kafka = {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"}
    settings = {"base_kafka_config": kafka, "leader_group_id": group, "data_source": dsn, **given}
    return Config(**settings)


def levels(report: DoctorReport) -> dict[str, CheckLevel]:
    """What is not ok, without what the servers bring along."""
    return {
        each.check: each.level
        for each in report.findings
        if each.level is not CheckLevel.OK and each.check not in _OF_THE_SERVERS
    }


def test_an_outbox_that_is_ready(servers: Servers, database: str, group: str, make_topic: MakeTopic) -> None:
    orders, gone = make_topic(2), f"missing-{uuid.uuid4().hex}"
    with psycopg.connect(database) as connection:
        for topic in (orders, gone):
            connection.execute("INSERT INTO outbox (kafka_topic) VALUES (%s)", (topic,))
    report = examine(config_of(servers, database, group), probe=True)
    found = {each.check: each for each in report.findings}
    for check in ("database.version", "database.pooler", "outbox.tables", "outbox.version", "vacuum.autovacuum",
                  "kafka.session_timeout", "kafka.group", "clock.database", "clock.kafka"):  # fmt: skip
        assert found[check].level is CheckLevel.OK, found[check]
    # The topic with one copy on one broker; the one that does not exist, or would be made by itself.
    assert set(levels(report)) <= {f"topic.{orders}", "topics.missing"}
    assert gone in found["topics.missing"].found


def test_the_probe_leaves_nothing_behind(servers: Servers, database: str, group: str) -> None:
    clock = probe_clock(config_of(servers, database, group))
    assert clock.uncertainty_s > 0
    admin = AdminClient({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"})

    def ours() -> bool:
        return any(name.startswith("harvester-doctor-") for name in admin.list_topics(timeout=30).topics)

    eventually(lambda: not ours(), what="the topic of the probe deleted")


def test_the_store_of_large_values_is_tried(servers: Servers, database: str, group: str, tmp_path: Path) -> None:
    def found(**given: Any) -> CheckResult:
        config = config_of(servers, database, group, oversize={"policy": "claim-check", "store": f"file://{tmp_path}"})
        return next(each for each in examine(config, **given).findings if each.check == "oversize.store")

    assert found().level is CheckLevel.SKIPPED
    assert list(tmp_path.iterdir()) == []
    assert found(probe=True).level is CheckLevel.OK
    assert found(probe=True).level is CheckLevel.OK  # it writes the same object again
    shutil.rmtree(tmp_path)
    away = found(probe=True)
    assert away.level is CheckLevel.PROBLEM
    assert "cannot be used" in str(away)


@pytest.mark.parametrize("option", ["security.protocol=SASL_SSL", "sasl.mechanism=PLAINN", "bogus=1"])
def test_what_the_kafka_client_refuses_is_a_finding(servers: Servers, database: str, group: str, option: str) -> None:
    name, _, value = option.partition("=")
    kafka = {"bootstrap.servers": servers.bootstrap, "security.protocol": "SASL_SSL", name: value}
    config = config_of(servers, database, group, base_kafka_config=kafka)
    found = {each.check: each for each in examine(config, probe=True).findings}
    for check in ("configuration", "kafka"):
        assert found[check].level is CheckLevel.PROBLEM
        assert "refuses" in found[check].found
    assert found["topics"].level is CheckLevel.SKIPPED
    assert found["database.version"].level is CheckLevel.OK


@pytest.mark.parametrize(
    ("given", "library", "named"),
    [
        ({"http": {"listen": "127.0.0.1:0"}}, "prometheus_client", "prometheus-client"),
        ({"tracing": {"enabled": True}}, "opentelemetry", "opentelemetry"),
        ({"oversize": {"policy": "claim-check", "store": "s3://bucket/prefix"}}, "boto3", "boto3"),
    ],
)
def test_a_library_that_start_would_miss_is_missed(
    servers: Servers, database: str, group: str, monkeypatch: pytest.MonkeyPatch, given: Any, library: str, named: str
) -> None:
    for name in list(sys.modules):
        if name == "harvester.telemetry.tracing" or name.split(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == library else find(name, *more))
    found = {each.check: each for each in examine(config_of(servers, database, group, **given)).findings}
    assert found["configuration"].level is CheckLevel.PROBLEM
    assert named in str(found["configuration"])


def test_an_archive_that_is_a_plain_table_is_a_problem(servers: Servers, database: str, group: str) -> None:
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE TABLE outbox_archive (id bigint)")
    found = {each.check: each for each in examine(config_of(servers, database, group, archive="rows")).findings}
    assert found["outbox.archive"].level is CheckLevel.PROBLEM


def test_one_server_that_is_away_does_not_hide_the_other(servers: Servers, database: str, group: str) -> None:
    without_database = levels(examine(config_of(servers, AWAY, group)))
    assert without_database["database"] is CheckLevel.PROBLEM
    assert without_database["outbox"] is CheckLevel.SKIPPED
    assert "kafka" not in without_database
    assert "topics" not in without_database
    kafka = {"bootstrap.servers": "127.0.0.1:1"}
    without_kafka = levels(examine(config_of(servers, database, group, base_kafka_config=kafka)))
    assert without_kafka["kafka"] is CheckLevel.PROBLEM
    assert without_kafka["topics"] is CheckLevel.SKIPPED
    assert "database" not in without_kafka
    assert "outbox.table" not in without_kafka


def test_the_command(scene: Scene) -> None:
    file = str(scene.config_file())
    done = run_cli("doctor", "-f", file, "--json", check=False)
    report = json.loads(done.stdout)
    problems = [each["check"] for each in report["findings"] if each["level"] == "problem"]
    assert set(problems) <= _OF_THE_SERVERS
    assert (report["ok"], done.returncode) == (not problems, 1 if problems else 0)
    broken = run_cli("doctor", "-f", file, "--set", "outbox_table=nowhere", check=False)
    assert broken.returncode == 1
    assert 'problem  outbox.table: there is no outbox table "nowhere"' in broken.stdout
    assert "do: run `harvester init`" in broken.stdout
    assert "Traceback" not in broken.stdout + broken.stderr


def test_a_role_that_may_do_little_is_told_what_it_lacks(servers: Servers, database: str, group: str) -> None:
    grant = "GRANT SELECT ON outbox, outbox_term, outbox_quarantine TO {role}"
    with poor_role(database, grant) as dsn:
        found = {each.check: each for each in examine(config_of(servers, dsn, group)).findings}
    assert found["outbox.tables"].level is CheckLevel.PROBLEM
    assert "DELETE" in str(found["outbox.tables"].advice)
    assert found["vacuum.sessions"].level is CheckLevel.SKIPPED


def test_a_role_that_may_do_nothing_is_no_traceback(servers: Servers, database: str, group: str) -> None:
    with poor_role(database) as dsn:
        found = {each.check: each for each in examine(config_of(servers, dsn, group)).findings}
    assert found["outbox.tables"].level is CheckLevel.PROBLEM
    assert found["database.topics"].level is CheckLevel.SKIPPED
    assert "permission denied" in found["database.topics"].found


def test_a_database_without_an_outbox(servers: Servers, empty_database: str, group: str) -> None:
    found = levels(examine(config_of(servers, empty_database, group)))
    assert found == {"outbox.table": CheckLevel.PROBLEM, "clock.kafka": CheckLevel.SKIPPED}


def test_what_holds_vacuum_back_is_seen(servers: Servers, database: str, group: str) -> None:
    config = config_of(servers, database, group)
    with (
        psycopg.connect(database, application_name="report") as reader,
        psycopg.connect(database, application_name="writer") as writer,
    ):
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1 FROM outbox")
        writer.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
        holders = read_database(config).holders
        reader.rollback()
        writer.rollback()
    assert holders is not None
    seen = {(holder.kind, holder.name.split(" (pid ")[0]) for holder in holders}
    assert seen >= {("transaction", "report"), ("writer", "writer")}
    assert all(holder.age_s is not None and holder.age_s >= 0 for holder in holders if holder.kind != "slot")


def test_a_role_that_does_not_see_all_takes_no_full_server_for_an_empty_one(
    servers: Servers, database: str, group: str
) -> None:
    grant = "GRANT SELECT ON outbox, outbox_term, outbox_quarantine TO {role}"
    with poor_role(database, grant) as dsn, ExitStack() as sessions:
        others = [sessions.enter_context(psycopg.connect(database)) for _ in range(4)]
        others[0].execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")  # since when is hidden
        found = read_database(config_of(servers, dsn, group))
        others[0].rollback()
    assert not found.sees_all
    assert found.connections is not None
    assert found.connections.role_used == 1
    assert found.connections.database_used >= 1 + len(others)
    assert found.connections.used >= found.connections.database_used
    assert found.holders is not None
    assert [holder for holder in found.holders if holder.kind == "writer"] == []


def test_storage_parameters_and_indexes_are_seen(servers: Servers, database: str, group: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = false)")
        connection.execute("CREATE INDEX by_leader ON outbox (leader_id)")
        connection.execute("ALTER SEQUENCE outbox_id_seq CACHE 20")
    found = {each.check: each for each in examine(config_of(servers, database, group, marking="table")).findings}
    assert found["vacuum.autovacuum"].level is CheckLevel.WARNING
    assert "by_leader" in found["outbox.indexes"].found
    assert "CACHE 20" in found["outbox.table"].found


def test_a_pooler_in_transaction_mode_is_told(servers: Servers, database: str, group: str) -> None:
    with transaction_pooler(database) as pooled:
        assert read_database(config_of(servers, pooled, group)).pooling is Pooling.TRANSACTION
    assert read_database(config_of(servers, database, group)).pooling is Pooling.NONE


def test_what_the_broker_says_of_topics(servers: Servers, database: str, group: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3, {"min.insync.replicas": "2", "max.message.bytes": "100000"})
    kafka = read_kafka(config_of(servers, database, group), [topic, "none-such"])
    assert set(kafka.topics) == {topic}
    found = kafka.topics[topic]
    assert len(found.partitions) == 3
    assert found.settings is not None
    assert (found.settings["min.insync.replicas"], found.settings["max.message.bytes"]) == ("2", "100000")
    assert found.operations is None or {"READ", "WRITE"} <= found.operations
    assert kafka.unread == {}
    assert kafka.group is not None
    assert kafka.group.members == 0


def test_a_progress_topic_that_was_made_anew(servers: Servers, database: str, group: str) -> None:
    config = config_of(servers, database, group, delivery="exactly-once")
    made = ensure_progress_topic(config.progress_topic, config.common_options(), 1)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE outbox_term SET delivery = 'exactly-once', progress_topic = %s", (made.id,))
        assert levels(examine(config)).get("topics.progress") is not CheckLevel.PROBLEM
        connection.execute("UPDATE outbox_term SET progress_topic = 'another'")
    for delivery in ("exactly-once", "at-least-once"):
        found = levels(examine(config_of(servers, database, group, delivery=delivery)))
        assert found["topics.progress"] is CheckLevel.PROBLEM


def test_how_evenly_keys_share_the_head_of_the_outbox(scene: Scene) -> None:
    assert read_database(scene.config()).skew is None
    scene.add((None, "1"), *(("hot", str(number)) for number in range(6)), *((f"k{n}", "1") for n in range(2)))
    skew = read_database(scene.config()).skew
    assert skew is not None
    assert (skew.rows, round(skew.keys, 6)) == (8, round(64 / 38, 6))

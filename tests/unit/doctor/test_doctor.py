"""The doctor's judges: facts in, findings out. Those of Kafka are in test_doctor_kafka.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from harvester_cli.doctor import lines_of

from harvester.config import Config
from harvester.doctor import CheckLevel, CheckResult, DoctorReport
from harvester.doctor.facts import Clock, Holder, HostFacts, Index, Pooling
from harvester.doctor.judge_database import judge_database, judge_vacuum, sessions_needed
from harvester.doctor.judge_host import judge_clock, judge_host
from harvester.doctor.judge_kafka import judge_kafka, judge_topics
from harvester.outbox.overview import KeySkew
from tests.support.doctor import (
    CATALOG,
    CONFIG,
    DATABASE,
    EXACTLY,
    KAFKA,
    OUTBOX,
    SEQUENCE,
    SESSIONS,
    SETTINGS,
    VACUUM,
    kafka_with,
    text_of,
    topic,
    worst,
)

# --- nothing is wrong


def test_nothing_to_find() -> None:
    findings = [
        *judge_host(HostFacts(4, 1024, "3.11", "librdkafka 2", "libpq 18"), CONFIG),
        *judge_database(DATABASE, CONFIG),
        *judge_vacuum(DATABASE, CONFIG),
        *judge_kafka(KAFKA, CONFIG),
        *judge_topics(KAFKA, CONFIG, ["orders"]),
    ]
    assert worst(findings) == {}
    report = DoctorReport(tuple(findings))
    assert report.ok
    assert report.as_json()["counts"]["problem"] == 0
    assert list(lines_of(report))[-1].plain == "all is well"


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    gone = replace(CATALOG, outbox=None, term=None, quarantine=None, sequence=None)
    bad = replace(
        DATABASE, catalog=gone, settings={}, pooling=Pooling.TRANSACTION, sees_all=False, schema_version=None,
        identity_known=False, holders=(Holder("slot", "s", None),), unread={"settings": "denied"},
    )  # fmt: skip
    found = [
        *judge_database(bad, EXACTLY),
        *judge_vacuum(bad, EXACTLY),
        *judge_kafka(replace(KAFKA, brokers=1, group=None, settings=None, unread={"group": "denied"}), EXACTLY),
        *judge_topics(kafka_with(topic("orders", replicas=1, leader=-1)), EXACTLY, ["orders", "none"]),
    ]
    assert {each.check for each in found if each.level is not CheckLevel.OK and not each.advice} == set()


# --- the machine


@pytest.mark.parametrize(("shards", "cores", "level"), [(8, 2, None), (9, 2, CheckLevel.WARNING), (4, 1, None)])
def test_more_than_four_shards_for_each_core(shards: int, cores: int, level: CheckLevel | None) -> None:
    config = Config(leader_group_id="g", limits={"shards": shards})
    assert worst(judge_host(HostFacts(cores, None, "", "", ""), config)).get("host.shards") is level


@pytest.mark.parametrize(("files", "level"), [(127, CheckLevel.WARNING), (128, None), (None, None)])
def test_open_files(files: int | None, level: CheckLevel | None) -> None:
    assert worst(judge_host(HostFacts(8, files, "", "", ""), CONFIG)).get("host.open_files") is level


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "level", "part"),
    [
        (0.0004, 0.001, CheckLevel.OK, "agrees with this machine's within 1.0 ms"),
        (-0.5, 0.001, CheckLevel.OK, "500.0 ms behind"),
        (2.0, 0.001, CheckLevel.WARNING, "2.0 s ahead of"),
        (2.0, 1.5, CheckLevel.OK, "2.0 s ahead of"),  # it may be half a second
    ],
)
def test_clocks(offset_s: float, uncertainty_s: float, level: CheckLevel, part: str) -> None:
    found = judge_clock("clock.x", "x's", Clock(offset_s, uncertainty_s), "it matters")
    assert found.level is level
    assert part in found.found


# --- the database


@pytest.mark.parametrize(
    ("change", "check", "level", "part"),
    [
        ({"version": 140001}, "database.version", CheckLevel.WARNING, "15 or newer"),
        ({"version": 120001}, "database.version", CheckLevel.PROBLEM, "too old"),
        ({"pooling": Pooling.TRANSACTION}, "database.pooler", CheckLevel.PROBLEM, "transaction"),
        ({"pooling": Pooling.SESSION}, "database.pooler", CheckLevel.WARNING, "session mode"),
        ({"settings": {**SETTINGS, "fsync": "off"}}, "database.durability", CheckLevel.PROBLEM, "fsync"),
        (
            {"settings": {**SETTINGS, "synchronous_commit": "off"}},
            "database.synchronous_commit",
            CheckLevel.WARNING,
            "off",
        ),
        ({"schema_version": 1}, "outbox.version", CheckLevel.PROBLEM, "harvester init"),
        ({"schema_version": 99}, "outbox.version", CheckLevel.PROBLEM, "newer harvester"),
        ({"schema_version": None}, "outbox.version", CheckLevel.PROBLEM, "no row"),
        ({"lease": False}, "outbox.leases", CheckLevel.WARNING, "init"),
        ({"archive": "missing"}, "outbox.archive", CheckLevel.PROBLEM, "init"),
        ({"archive": "plain"}, "outbox.archive", CheckLevel.PROBLEM, "not partitioned"),
        ({"archive": "denied"}, "outbox.archive", CheckLevel.PROBLEM, "GRANT INSERT"),
        ({"notices": False}, "outbox.notices", CheckLevel.PROBLEM, "grants"),
        ({"identity_known": False}, "database.identity", CheckLevel.WARNING, "GRANT EXECUTE"),
        ({"indexes": (Index("broken", False, ("id",)),)}, "outbox.indexes", CheckLevel.WARNING, "broken"),
        ({"unread": {"schema version": "denied"}}, "database.schema_version", CheckLevel.SKIPPED, "denied"),
    ],
)
def test_the_database(change: Mapping[str, Any], check: str, level: CheckLevel, part: str) -> None:
    found = list(judge_database(replace(DATABASE, **change), CONFIG))
    assert worst(found) == {check: level}
    assert part in text_of(found, check)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"outbox": None}, "harvester init"),
        ({"sequence": replace(SEQUENCE, cache=20)}, "CACHE 1)"),
        ({"sequence": replace(SEQUENCE, cycle=True)}, "NO CYCLE)"),
        ({"ordered_by_id": False}, "no unique index"),
        ({"outbox": replace(OUTBOX, persistence="u")}, "unlogged"),
        ({"encoding": "WIN1252"}, "the encoding WIN1252"),
    ],
)
def test_the_outbox(change: Mapping[str, Any], part: str) -> None:
    found = list(judge_database(replace(DATABASE, catalog=replace(CATALOG, **change)), CONFIG))
    assert worst(found) == {"outbox.table": CheckLevel.PROBLEM}
    assert part in text_of(found, "outbox.table")


def test_missing_privileges_are_told_as_grants() -> None:
    catalog = replace(CATALOG, outbox=replace(OUTBOX, lacks=("DELETE",)))
    found = list(judge_database(replace(DATABASE, catalog=catalog), CONFIG))
    assert worst(found) == {"outbox.tables": CheckLevel.PROBLEM}
    assert 'GRANT DELETE ON "outbox" TO relay' in text_of(found, "outbox.tables")


def test_an_index_with_leader_id_matters_only_where_marks_are_written() -> None:
    facts = replace(DATABASE, indexes=(Index("by_leader", True, ("leader_id", "id")),))
    assert worst(judge_database(facts, CONFIG)) == {}
    written = Config(leader_group_id="g", marking="table")
    assert worst(judge_database(facts, written)) == {"outbox.indexes": CheckLevel.WARNING}


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"used": 88}, "max_connections"),
        ({"role_limit": 11}, "the role's"),
        ({"database_limit": 11}, "the database's"),
    ],
)
def test_sessions(change: Mapping[str, int], limit: str) -> None:
    assert sessions_needed(CONFIG) == 10
    found = list(judge_database(replace(DATABASE, connections=replace(SESSIONS, **change)), CONFIG))
    assert worst(found) == {"database.connections": CheckLevel.WARNING}
    assert f"9 more sessions are free ({limit}" in text_of(found, "database.connections")


def test_a_failover_that_repeats_matters_to_exactly_once() -> None:
    facts = replace(DATABASE, standbys=1)
    assert worst(judge_database(facts, CONFIG)) == {}
    assert worst(judge_database(facts, EXACTLY)) == {"database.failover": CheckLevel.WARNING}
    synchronous = replace(facts, settings={**SETTINGS, "synchronous_standby_names": "*"})
    assert worst(judge_database(synchronous, EXACTLY)) == {}


# --- vacuum


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"settings": {**SETTINGS, "autovacuum": "off"}}, "vacuum.autovacuum"),
        ({"settings": {**SETTINGS, "track_counts": "off"}}, "vacuum.autovacuum"),
        ({"vacuum": replace(VACUUM, options={"autovacuum_enabled": "false"})}, "vacuum.autovacuum"),
        ({"vacuum": replace(VACUUM, dead=100_001, idle_s=None)}, "vacuum.dead_rows"),
        ({"vacuum": replace(VACUUM, dead=100_001, idle_s=601.0)}, "vacuum.dead_rows"),
        ({"holders": (Holder("transaction", "report", 301.0),)}, "vacuum.transaction"),
        ({"holders": (Holder("writer", "app", 301.0),)}, "vacuum.writer"),
        ({"holders": (Holder("prepared", "gid", 301.0),)}, "vacuum.prepared"),
        ({"holders": (Holder("slot", "old_standby (inactive)", None),)}, "vacuum.slot"),
    ],
)
def test_vacuum_is_held_back(change: Mapping[str, Any], check: str) -> None:
    assert worst(judge_vacuum(replace(DATABASE, **change), CONFIG)) == {check: CheckLevel.WARNING}


@pytest.mark.parametrize(
    "change",
    [
        {"vacuum": replace(VACUUM, dead=100_001, idle_s=599.0)},  # one minute's deletions at full speed
        {"vacuum": replace(VACUUM, dead=100_000, idle_s=None)},
        {"vacuum": replace(VACUUM, live=1_000_000.0, dead=2_000_000, idle_s=None)},  # below ten times 200,050
        {"holders": (Holder("transaction", "short", 299.0),)},
    ],
)
def test_vacuum_keeps_up(change: Mapping[str, Any]) -> None:
    assert worst(judge_vacuum(replace(DATABASE, **change), CONFIG)) == {}


def test_who_does_not_see_others_is_told() -> None:
    assert worst(judge_vacuum(replace(DATABASE, sees_all=False), CONFIG)) == {"vacuum.sessions": CheckLevel.SKIPPED}


# --- the report


def test_the_report_for_people_and_for_scripts() -> None:
    report = DoctorReport(
        (
            CheckResult("a", CheckLevel.PROBLEM, "broken [red]", "mend it"),
            CheckResult("b", CheckLevel.WARNING, "slow", "hurry"),
            CheckResult("c", CheckLevel.OK, "fine"),
        )
    )
    assert [line.plain for line in lines_of(report)] == [
        "problem  a: broken [red]",
        "         do: mend it",
        "warning  b: slow",
        "         do: hurry",
        "ok       c: fine",
        "",
        "1 problem, 1 warning",
    ]
    assert report.as_json() == {
        "ok": False,
        "counts": {"ok": 1, "skipped": 0, "warning": 1, "problem": 1},
        "findings": [
            {"check": "a", "level": "problem", "found": "broken [red]", "advice": "mend it"},
            {"check": "b", "level": "warning", "found": "slow", "advice": "hurry"},
            {"check": "c", "level": "ok", "found": "fine", "advice": None},
        ],
    }


@pytest.mark.parametrize(
    ("skew", "config", "level"),
    [
        (KeySkew(1_000, 1.0), CONFIG, CheckLevel.WARNING),
        (KeySkew(1_000, 39.0), CONFIG, CheckLevel.WARNING),
        (KeySkew(1_000, 40.0), CONFIG, CheckLevel.OK),
        (KeySkew(1_000, 1.0), EXACTLY, CheckLevel.OK),
        (KeySkew(499, 1.0), CONFIG, None),
        (None, CONFIG, None),
    ],
)
def test_a_backlog_of_few_keys_is_named_where_the_other_mode_would_help(
    skew: KeySkew | None, config: Config, level: CheckLevel | None
) -> None:
    found = [each for each in judge_database(replace(DATABASE, skew=skew), config) if each.check == "outbox.keys"]
    assert [each.level for each in found] == ([level] if level is not None else [])

"""Facts for the doctor's judges in which nothing is wrong, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harvester.config import Config
from harvester.doctor import CheckLevel, CheckResult
from harvester.doctor.facts import (
    Clock,
    Connections,
    DatabaseFacts,
    GroupFacts,
    Index,
    Kafka,
    PartitionFacts,
    Pooling,
    TopicFacts,
    Vacuum,
)
from harvester.outbox.catalog import Column, Facts, Relation, Sequence
from harvester.outbox.shape import QUARANTINE_COLUMNS, TERM_COLUMNS
from harvester.outbox.sql import ddl

CONFIG = Config(leader_group_id="billing")
EXACTLY = Config(leader_group_id="billing", delivery="exactly-once")


def column(name: str, type_: str, **given: Any) -> Column:
    return Column(**{"name": name, "type": type_, "max_length": None, "nullable": True, "identity": False,
                     "default": None, **given})  # fmt: skip


def relation(*columns: Column, lacks: tuple[str, ...] = ()) -> Relation:
    return Relation(
        oid=1, schema="public", kind="r", persistence="p", is_partition=False, has_children=False, row_security=False,
        lacks=lacks, columns={each.name: each for each in columns},
    )  # fmt: skip


OUTBOX = relation(
    column("id", "bigint", nullable=False, default="nextval('outbox_id_seq'::regclass)"),
    column("create_time", "timestamp with time zone"),
    *(column(f"kafka_{name}", "text") for name in ("topic", "key", "value")),
    *(column(f"kafka_header_{name}", "text[]") for name in ("keys", "values")),
    column("leader_id", "uuid"),
)
TERM = relation(*(column(name, "text") for name in TERM_COLUMNS))
QUARANTINE = relation(*(column(name, "text") for name in QUARANTINE_COLUMNS))
SEQUENCE = Sequence("public.outbox_id_seq", cache=1, increment=1, cycle=False, readable=True)
CATALOG = Facts(
    server_version=180004, user="relay", schema_exists=True, outbox=OUTBOX, term=TERM, quarantine=QUARANTINE,
    sequence=SEQUENCE, ordered_by_id=True, notifies=False,
)  # fmt: skip
SETTINGS = {
    "server_version": "18.4", "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on",
    "track_counts": "on", "autovacuum_vacuum_threshold": "50", "autovacuum_vacuum_scale_factor": "0.2",
    "synchronous_standby_names": "",
}  # fmt: skip
VACUUM = Vacuum(live=1000.0, dead=10, options={}, idle_s=30.0)
SESSIONS = Connections(
    used=10, most=100, reserved=3, role_limit=-1, role_used=2, database_limit=-1, database_used=2
)  # fmt: skip
DATABASE = DatabaseFacts(
    version=180004, settings=SETTINGS, pooling=Pooling.NONE, clock=Clock(0.0, 0.001), sees_all=True,
    identity_known=True, catalog=CATALOG, schema_version=ddl.schema_version(), lease=True, connections=SESSIONS,
    vacuum=VACUUM, holders=(), indexes=(Index("outbox_pkey", True, ("id",)),),
)  # fmt: skip

BROKER = {
    "group.min.session.timeout.ms": "6000", "group.max.session.timeout.ms": "1800000",
    "transaction.max.timeout.ms": "900000", "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2", "auto.create.topics.enable": "false",
}  # fmt: skip
ALL = frozenset({"READ", "WRITE", "DESCRIBE", "CREATE"})


def topic(
    name: str, *, replicas: int = 3, in_sync: int | None = None, leader: int = 1, partitions: int = 1,
    operations: frozenset[str] | None = ALL, **settings: str,
) -> TopicFacts:  # fmt: skip
    one = PartitionFacts(leader, tuple(range(replicas)), tuple(range(replicas if in_sync is None else in_sync)))
    given = {"min.insync.replicas": "2", **{key.replace("_", "."): value for key, value in settings.items()}}
    return TopicFacts(name, (one,) * partitions, given, operations)


KAFKA = Kafka(
    brokers=3,
    settings=BROKER,
    topics={"billing.neli": topic("billing.neli"), "orders": topic("orders", partitions=4)},
    group=GroupFacts("stable", 2, ALL),
    operations=ALL,
)


def worst(findings: Iterable[CheckResult]) -> dict[str, CheckLevel]:
    """What is not ok, by check; the worst of each."""
    order = list(CheckLevel)
    found: dict[str, CheckLevel] = {}
    for each in findings:
        if each.level is not CheckLevel.OK:
            found[each.check] = max(each.level, found.get(each.check, CheckLevel.OK), key=order.index)
    return found


def text_of(findings: Iterable[CheckResult], check: str) -> str:
    return " ".join(f"{each.found} | {each.advice}" for each in findings if each.check == check)


def kafka_with(*topics: TopicFacts, **given: Any) -> Kafka:
    return replace(KAFKA, topics={**KAFKA.topics, **{each.name: each for each in topics}}, **given)

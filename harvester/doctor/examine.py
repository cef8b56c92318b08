"""Collects what can be had, judges it, and goes on where a server is away.

This machine: cores, limits, versions, Java.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Sequence

from harvester.config import Config, check_clients
from harvester.doctor.database import read_database
from harvester.doctor.facts import (
    CheckResult,
    DatabaseFacts,
    DoctorReport,
    HostFacts,
    JavaFacts,
    Kafka,
    listed,
    ok,
    problem,
    skipped,
)
from harvester.doctor.judge_database import judge_database, judge_owner, judge_vacuum
from harvester.doctor.judge_host import judge_clock, judge_host, judge_java
from harvester.doctor.judge_kafka import judge_kafka, judge_topics, topics_of
from harvester.doctor.kafka import probe_clock, read_kafka
from harvester.errors import BrokerError, HarvesterError


def read_host() -> HostFacts:
    """What the harvester's processes would be given here."""
    import confluent_kafka
    import psycopg

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        cores=len(os.sched_getaffinity(0)),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        python=platform.python_version(),
        kafka_client=f"librdkafka {confluent_kafka.libversion()[0]}",
        postgres_client=f"libpq {_dotted(psycopg.pq.version())}",
    )


def read_java(commands: Sequence[str]) -> list[JavaFacts]:
    """For each of `stack` and `pipeline` the Java that it would use."""
    return [_java(command) for command in commands]


def _java(command: str) -> JavaFacts:
    from harvester.stack import java

    try:
        if command == "pipeline":
            from harvester.pipeline.session import NEWEST_JAVA, spark_version

            spark_version()  # raises where Spark is not installed
            return JavaFacts(command, java.find(newest=NEWEST_JAVA).major)
        return JavaFacts(command, java.find().major)
    except HarvesterError as error:
        return JavaFacts(command, None, error.message, error.hint)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version % 10000}"


Progress = Callable[[str], None]


def examine(
    config: Config, *, also: Sequence[str] = (), probe: bool = False, progress: Progress = lambda _: None
) -> DoctorReport:
    """All findings about this machine, the database and the cluster of `config`. Changes nothing without `probe`.

    `also`: commands (`stack`, `pipeline`) whose Java is looked for. `probe`: let the brokers stamp a record of a topic
    that is made for it and deleted again, to see their clock.
    """
    found = [_configuration(config), *judge_host(read_host(), config), *judge_java(read_java(also))]
    progress("looking at PostgreSQL")
    database, about_database = _database(config)
    found += about_database
    progress("looking at Kafka")
    in_rows = database.topics if database is not None else ()
    kafka, about_kafka = _kafka(config, in_rows)
    found += about_kafka
    if database is not None:
        found += judge_owner(database, kafka, config)
        matters = "latencies, and the age of the backlog, are told from both"
        found.append(judge_clock("clock.database", "PostgreSQL's", database.clock, matters))
    if kafka is not None:
        progress("looking at the brokers' clock" if probe else "")
        found.append(_broker_clock(config, probe=probe))
    return DoctorReport(tuple(found))


def _configuration(config: Config) -> CheckResult:
    problems = check_clients(config)
    if problems:
        text = f"the Kafka client refuses {listed([str(each) for each in problems])}"
        return problem("configuration", text, "correct it; `harvester config check` says the same")
    return ok("configuration", f"{config.delivery}, outbox {config.table}, group {config.leader_group_id}")


def _database(config: Config) -> tuple[DatabaseFacts | None, list[CheckResult]]:
    try:
        database = read_database(config)
    except HarvesterError as error:
        hint = error.hint or "look after the server, or correct data_source"
        return None, [
            problem("database", error.message, hint),
            skipped("outbox", "the outbox cannot be looked at without the database"),
        ]
    return database, [*judge_database(database, config), *judge_vacuum(database, config)]


def _kafka(config: Config, in_rows: Sequence[str]) -> tuple[Kafka | None, list[CheckResult]]:
    try:
        kafka = read_kafka(config, topics_of(config, in_rows))
    except HarvesterError as error:
        hint = error.hint or "see that the brokers run and that bootstrap.servers and the security options are right"
        return None, [
            problem("kafka", error.message, hint),
            skipped("topics", "topics cannot be looked at without Kafka"),
        ]
    return kafka, [*judge_kafka(kafka, config), *judge_topics(kafka, config, in_rows)]


def _broker_clock(config: Config, *, probe: bool) -> CheckResult:
    check = "clock.kafka"
    if not probe:
        return skipped(
            check, "the brokers' clock was not looked at: that takes a topic for a moment", "--probe does it"
        )
    try:
        clock = probe_clock(config)
    except BrokerError as error:
        return skipped(check, error.message, "the user needs to create and delete topics for it")
    return judge_clock(check, "the brokers'", clock, "retention, and times in consumers, go by it")

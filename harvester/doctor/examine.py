"""Examines this machine, PostgreSQL and Kafka: reads what it can and judges it, even without a server."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import confluent_kafka
import psycopg

from harvester.claim_check import StoreSettings
from harvester.claim_check.stores import open_store
from harvester.config import Config, check_clients
from harvester.doctor.database import read_database
from harvester.doctor.facts import CheckResult, DoctorReport, HostFacts, listed, ok, problem, skipped
from harvester.doctor.judge_database import judge_database, judge_owner, judge_vacuum
from harvester.doctor.judge_host import judge_clock, judge_host
from harvester.doctor.judge_kafka import judge_kafka, judge_topics, topics_of
from harvester.doctor.kafka import probe_clock, read_kafka
from harvester.errors import BrokerError, ConfigurationError, HarvesterError
from harvester.http import require_http
from harvester.telemetry import require_tracing

Progress = Callable[[str], None]
T = TypeVar("T")


def examine(config: Config, *, probe: bool = False, progress: Progress = lambda _: None) -> DoctorReport:
    """All findings about this machine, the database and the cluster of `config`. Changes nothing without `probe`.

    `probe`: let the brokers timestamp a record of a temporary topic, to read their clock; and write a small object,
    `doctor/probe`, to the store of large values.
    """
    found = [_configuration(config), *judge_host(read_host(), config)]

    def read(server: str, inside: str, reader: Callable[[], T], hint: str) -> T | None:
        try:
            return reader()
        except HarvesterError as error:
            found.append(problem(server, error.message, error.hint or hint))
            found.append(skipped(inside, f"cannot be examined without {server}"))
            return None

    progress("checking PostgreSQL")
    hint = "check that the server is running, or correct data_source"
    database = read("database", "outbox", lambda: read_database(config), hint)
    if database is not None:
        found += judge_database(database, config)
        found += judge_vacuum(database, config)
    progress("checking Kafka")
    in_rows = database.topics if database is not None else ()
    recorded = database.needed_progress(config.delivery) if database is not None else None
    hint = "check that the brokers are running and that bootstrap.servers and the security options are right"
    kafka = read("kafka", "topics", lambda: read_kafka(config, topics_of(config, in_rows, recorded)), hint)
    if kafka is not None:
        found += judge_kafka(kafka, config)
        found += judge_topics(kafka, config, in_rows, recorded)
    if database is not None:
        found += judge_owner(database, kafka, config)
        matters = "latencies and the age of the backlog are computed from both"
        found.append(judge_clock("clock.database", "PostgreSQL's", database.clock, matters))
    if config.oversize.store_settings is not None:
        progress("checking the store of large values" if probe else "")
        found.append(_store(config.oversize.store_settings, probe=probe))
    if kafka is not None:
        progress("checking the brokers' clock" if probe else "")
        found.append(_broker_clock(config, probe=probe))
    return DoctorReport(tuple(found))


def read_host() -> HostFacts:
    """The resources that the harvester's processes would have here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    libpq = psycopg.pq.version()
    return HostFacts(
        cores=len(os.sched_getaffinity(0)),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        python=platform.python_version(),
        kafka_client=f"librdkafka {confluent_kafka.libversion()[0]}",
        postgres_client=f"libpq {libpq // 10000}.{libpq % 10000}",
    )


def _configuration(config: Config) -> CheckResult:
    problems = check_clients(config)
    for check in _libraries(config):
        try:
            check()
        except ConfigurationError as error:
            return problem("configuration", error.message, error.hint or "correct it")
    if problems:
        text = f"the Kafka client refuses {listed([str(each) for each in problems])}"
        return problem("configuration", text, "correct it; `harvester config check` reports the same")
    return ok("configuration", f"{config.delivery}, outbox {config.table}, group {config.leader_group_id}")


def _libraries(config: Config) -> Iterator[Callable[[], object]]:
    """Checks, as `start` makes them, that what is configured is installed."""
    if config.http.listen != "off":
        yield require_http
    if config.tracing.enabled:
        yield require_tracing
    if config.oversize.policy == "claim-check" and config.oversize.store_settings is not None:
        yield partial(open_store, config.oversize.store_settings)


def _store(settings: StoreSettings, *, probe: bool) -> CheckResult:
    check, said = "oversize.store", b"put here by `harvester doctor --probe`\n"
    if not probe:
        return skipped(check, f"{settings.url} was not tested: that writes an object", "run doctor with --probe")
    try:
        store = open_store(settings)
        store.put("doctor/probe", said)
        got = store.get("doctor/probe")
    except HarvesterError as error:
        return problem(check, error.message, error.hint or "correct oversize.store")
    if got != said:
        return problem(
            check, f"{settings.url} returns a different object from the one written", "check what else writes there"
        )
    return ok(check, f"{settings.url} can be written and read")


def _broker_clock(config: Config, *, probe: bool) -> CheckResult:
    check = "clock.kafka"
    if not probe:
        return skipped(
            check, "the brokers' clock was not read: that requires a temporary topic", "run doctor with --probe"
        )
    try:
        clock = probe_clock(config)
    except BrokerError as error:
        return skipped(check, error.message, "allow this user to create and delete topics")
    return judge_clock(check, "the brokers'", clock, "retention and the times that consumers see depend on it")

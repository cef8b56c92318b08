"""A crash of PostgreSQL under writers that do not wait for their commits (P34).

The server may undo what it has not flushed, and give the ids out again. Nothing may have been published by then that is
undone, and nothing that is pending may touch the rows that have the ids now.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.harvesting import Embedded, Scene, wait_leads
from tests.support.hooks import Plan
from tests.support.marking import BOTH, wait_listed
from tests.support.private import Private, private
from tests.support.proxy import Proxy
from tests.support.servers import Servers
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

FLUSHING = "SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'background writer', 'checkpointer')"
ROWS = 60  # more than a sequence skips after a crash (32)
PATIENT: dict[str, Any] = {"session_timeout": "30s", "heartbeat_timeout": "10s", "drain_interval": "15s"}


@pytest.fixture
def postgres(servers: Servers) -> Iterator[Private]:
    with private(servers, "postgres") as server:
        yield server


@pytest.fixture
def scene(postgres: Private, tmp_path: Path) -> Iterator[Scene]:
    with postgres.scene(tmp_path) as made, ExitStack() as thawed:
        for (pid,) in made.db.execute(FLUSHING).fetchall():
            os.kill(pid, signal.SIGSTOP)  # so that nobody flushes but who has to
            thawed.callback(thaw, pid)
        yield made


def thaw(pid: int) -> None:
    with suppress(ProcessLookupError):  # crashed
        os.kill(pid, signal.SIGCONT)


def rows(name: str) -> list[tuple[str | None, str | None]]:
    return [(f"{name}-{number}", name) for number in range(ROWS)]


def crash(scene: Scene, postgres: Private) -> None:
    postgres.stop(kill=True)
    postgres.start()
    scene.db = psycopg.connect(scene.dsn, autocommit=True)


def hasty(scene: Scene) -> list[int]:
    """Rows whose writer does not wait for its commit."""
    with psycopg.connect(scene.dsn) as writer:
        writer.execute("SET synchronous_commit = off")
        return scene.add(*rows("hasty"), db=writer)


def listed(scene: Scene, running: Embedded, writer: psycopg.Connection[Any]) -> list[int]:
    """Ids of an open transaction that the harvester has seen; none if it has flushed them itself, with its bookmark."""
    writer.rollback()
    (before,) = one_row(writer, "SELECT pg_current_wal_insert_lsn()")
    ids = scene.add(*rows("undone"), db=writer)
    wait_listed(running)
    wait_listed(running)
    (is_flushed,) = one_row(writer, "SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", before)
    return [] if is_flushed else ids


def one_row(db: psycopg.Connection[Any], query: str, *values: Any) -> tuple[Any, ...]:
    row = db.execute(query, values).fetchone()
    assert row is not None
    return tuple(row)


def check(scene: Scene, old: list[int]) -> None:
    """The rows that were published stand in the outbox; new ones get other ids, and all of them arrive."""
    kept = scene.left()
    new = scene.add(*rows("new"))
    assert kept == old, f"{len(old) - len(kept)} published rows were undone"
    assert not set(new) & set(old)


def check_all_published(scene: Scene) -> None:
    published = scene.published()
    assert [key for key, _ in rows("new") if published.get(key) != ["new"]] == []
    assert [key for key, _ in rows("hasty") if "hasty" not in (published.get(key) or [])] == []


@BOTH
def test_what_was_published_survives_a_crash_of_the_server(scene: Scene, postgres: Private, marking: str) -> None:
    with Proxy(scene.bootstrap, kafka=True) as kafka:
        kafka.open()
        # A busy machine may bring the rows in several batches, and none is acknowledged.
        producer = {
            "bootstrap.servers": kafka.address, "linger.ms": "200", "max.in.flight.requests.per.connection": "5",
        }  # fmt: skip
        with scene.cli(marking=marking, producer_kafka_config=producer, **PATIENT) as running:
            wait_leads(running)
            scene.add(*rows("warm"))
            scene.wait_left()
            kafka.freeze(up=False)  # no acknowledgement comes back, so nothing is purged
            old = hasty(scene)
            eventually(lambda: len(scene.published()) == 2 * ROWS, what="all of them in the topic")
            crash(scene, postgres)
            check(scene, old)
            kafka.thaw()
            scene.wait_left()
            assert running.stop() == 0
    check_all_published(scene)


def test_what_was_committed_exactly_once_survives_a_crash_of_the_server(scene: Scene, postgres: Private) -> None:
    with scene.cli(delivery="exactly-once", shards=1, env=scene.plan.env, **PATIENT) as running, ExitStack() as block:
        wait_leads(running)
        scene.add(*rows("warm"))
        scene.wait_left()
        reached = block.enter_context(scene.plan.blocked("shard.committed"))
        old = hasty(scene)
        reached()  # Kafka has committed, the database has deleted nothing
        crash(scene, postgres)
        check(scene, old)
        block.close()
        scene.wait_left()
        assert running.stop() == 0
    check_all_published(scene)
    assert all(len(values) == 1 for values in scene.published().values())


def test_ids_that_a_crash_takes_back_are_not_taken_for_a_restart(scene: Scene, postgres: Private, plan: Plan) -> None:
    """Of a transaction that is open, the harvester has seen ids that the server gives out again."""
    with scene.embedded(delivery="exactly-once", shards=1, **PATIENT) as running, ExitStack() as block:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        reached = block.enter_context(plan.blocked("shard.committed"))
        old = hasty(scene)
        reached()  # Kafka has committed, the database has deleted nothing
        beside = psycopg.connect(scene.dsn)
        undone = eventually(lambda: listed(scene, running, beside), what="ids that are seen and not flushed")
        crash(scene, postgres)
        beside.close()
        with scene.writer() as other:
            other.execute("SELECT FROM outbox FOR UPDATE")  # what Kafka has committed is not purged yet
            assert scene.left() == old
            block.close()
            wait_listed(running)
            again = scene.add(*rows("new"))
            assert set(again) & set(undone), "the crash has undone no id"
            other.rollback()
        scene.wait_left()
    check_all_published(scene)
    assert all(len(values) == 1 for values in scene.published().values())

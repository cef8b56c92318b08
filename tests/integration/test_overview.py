"""What the database alone tells about a harvester."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester.errors import SchemaError
from harvester.outbox.overview import read_backlog, read_overview
from harvester.outbox.sql.ddl import schema_version
from harvester.outbox.tables import OutboxTable
from harvester.status import Backlog

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as opened:
        yield opened


def fill(connection: psycopg.Connection[Any], rows: int) -> None:
    connection.execute(
        "INSERT INTO outbox (create_time, kafka_topic) SELECT now() - make_interval(mins => %s - n), 't'"
        " FROM generate_series(0, %s - 1) AS n",
        (rows, rows),
    )


def test_a_fresh_outbox(connection: psycopg.Connection[Any]) -> None:
    overview = read_overview(connection, OUTBOX)
    assert (overview.term, overview.holder, overview.holder_name, overview.acquired_at) == (0, None, None, None)
    assert overview.backlog == Backlog(records=0, capped=False, oldest_age_s=None)
    assert (overview.quarantine.records, overview.quarantine.newest_error) == (0, None)
    assert (overview.schema_version, overview.delivery) == (schema_version(), "at-least-once")


def test_a_used_one(connection: psycopg.Connection[Any]) -> None:
    holder, now = uuid4(), datetime.now(UTC)
    connection.execute(
        "UPDATE outbox_term SET term = 7, holder = %s, holder_name = 'h1', acquired_at = %s", (holder, now)
    )
    fill(connection, 3)
    connection.execute(
        "INSERT INTO outbox_quarantine (id, incarnation, error, attempts, quarantined_at)"
        " SELECT n, gen_random_uuid(), 'error ' || n, 5, now() - make_interval(mins => n) FROM generate_series(1, 4) n"
    )
    overview = read_overview(connection, OUTBOX)
    assert (overview.term, overview.holder, overview.holder_name, overview.acquired_at) == (7, holder, "h1", now)
    assert (overview.backlog.records, overview.backlog.capped) == (3, False)
    assert overview.backlog.oldest_age_s == pytest.approx(180, abs=60)
    assert (overview.quarantine.records, overview.quarantine.newest_error) == (4, "error 1")


def test_counting_stops_at_its_bound(connection: psycopg.Connection[Any]) -> None:
    fill(connection, 10)
    counts = [read_backlog(connection, OUTBOX, bound=bound) for bound in (9, 10, 11)]
    assert [(count.records, count.capped) for count in counts] == [(9, True), (10, False), (10, False)]


@pytest.mark.parametrize(("keys", "advice"), [(1, True), (39, True), (40, False)])
def test_a_backlog_that_few_keys_carry_has_an_advice(
    connection: psycopg.Connection[Any], keys: int, advice: bool
) -> None:
    """At least once, a record of a key waits for the one before; exactly once it does not."""
    connection.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'key ' || n %% %s FROM generate_series(1, 1000) n",
        (keys,),
    )
    found = read_backlog(connection, OUTBOX).advice
    assert found == (
        f'few keys carry the backlog (as {keys} would): delivery = "exactly-once" is faster' if advice else None
    )
    connection.execute("UPDATE outbox_term SET delivery = 'exactly-once'")
    assert read_backlog(connection, OUTBOX).advice is None
    connection.execute("DELETE FROM outbox WHERE id > 499")
    connection.execute("UPDATE outbox_term SET delivery = 'at-least-once'")
    assert read_backlog(connection, OUTBOX).advice is None, "too short to tell"


def test_an_age_is_never_negative(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO outbox (create_time, kafka_topic) VALUES (now() + interval '1 hour', 't')")
    assert read_backlog(connection, OUTBOX).oldest_age_s == 0.0


def test_without_a_schema_there_is_nothing_to_see(empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection, pytest.raises(SchemaError, match="no outbox table"):
        read_overview(connection, OUTBOX)

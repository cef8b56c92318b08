"""The archive's days on a real server: made ahead, filled from the DEFAULT partition, dropped after retention."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from harvester.errors import DatabaseUnavailable, SchemaError
from harvester.outbox import archive, schema
from harvester.outbox.archive import DAYS_AHEAD, KeeperRun, check_archive, keep_archive
from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from tests.support.dead import ODD_NAME, Outbox
from tests.support.outboxes import poor_role

pytestmark = pytest.mark.servers

WEEK = timedelta(days=7)
LONGEST = "o" * 52


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


def partitions(outbox: Outbox) -> set[str]:
    """Of the archive, without the schema."""
    query = "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = $1::regclass"
    return {row["name"].rpartition(".")[2].strip('"') for row in outbox.run(query, outbox.table.archive)}


def where(outbox: Outbox) -> set[str]:
    """The partitions that hold rows."""
    query = f"SELECT DISTINCT tableoid::regclass::text AS name FROM {outbox.table.archive}"
    return {row["name"].rpartition(".")[2].strip('"') for row in outbox.run(query)}


def days(outbox: Outbox, first: int, last: int) -> set[str]:
    """Names of the days from today + first to today + last; the database's day."""
    today = outbox.run("SELECT (now() AT TIME ZONE 'UTC')::date AS day").fetchall()[0]["day"]
    return {f"outbox_archive_{today + timedelta(days=n):%Y%m%d}" for n in range(first, last + 1)}


def make_day(outbox: Outbox, ago: int) -> str:
    """A partition of the past."""
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=ago)
    name = f"outbox_archive_{start:%Y%m%d}"
    bounds = f"FROM ('{start.isoformat()}') TO ('{(start + timedelta(days=1)).isoformat()}')"
    outbox.run(f"CREATE TABLE {name} PARTITION OF outbox_archive FOR VALUES {bounds}")
    outbox.run(f"INSERT INTO {name} (id, purged_at) VALUES (1, $1)", start + timedelta(hours=1))
    return name


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati"])
def test_the_next_days_are_made_once(connection: psycopg.Connection[Any], zone: str) -> None:
    connection.execute(f"SET TimeZone = '{zone}'")
    outbox = Outbox.make(connection, archive=True)
    assert partitions(outbox) == {"outbox_archive_default"} | days(outbox, 0, DAYS_AHEAD)
    assert keep_archive(connection, outbox.table, WEEK) == KeeperRun()
    outbox.purge(*outbox.add("k"), archive="ids")
    assert where(outbox) == days(outbox, 0, 0)


def test_an_archive_that_is_published_without_a_replica_identity_is_kept(connection: psycopg.Connection[Any]) -> None:
    """With Debezium's default, FOR ALL TABLES, PostgreSQL refuses every DELETE from it, also one of nothing."""
    connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    outbox = Outbox.make(connection, archive=True)
    assert keep_archive(connection, outbox.table, WEEK) == KeeperRun()


def test_rows_of_a_missing_day_are_caught_and_brought_home(connection: psycopg.Connection[Any]) -> None:
    outbox = Outbox.make(connection, archive=True)
    [today] = days(outbox, 0, 0)
    connection.execute(f"DROP TABLE {today}")
    ids = outbox.add("a", "b")
    assert outbox.purge(*ids, archive="rows") == 2
    assert where(outbox) == {"outbox_archive_default"}
    before = outbox.rows(outbox.table.archive)
    kept = keep_archive(connection, outbox.table, WEEK)
    assert kept == KeeperRun(created=(f'"{today}"',))
    assert where(outbox) == {today}
    assert outbox.rows(outbox.table.archive) == before


def test_the_next_days_are_made_even_if_moving_the_rows_of_today_ends_the_session(
    connection: psycopg.Connection[Any], empty_database: str
) -> None:
    """As it may, when they are many: then nothing else of that run is done."""
    outbox = Outbox.make(connection, archive=True)
    for day in days(outbox, 0, DAYS_AHEAD):
        outbox.run(f"DROP TABLE {day}")
    outbox.run("INSERT INTO outbox_archive (id, purged_at) VALUES (1, now())")
    outbox.run("CREATE FUNCTION outage() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN"
               " PERFORM pg_terminate_backend(pg_backend_pid()); RETURN old; END'")  # fmt: skip
    outbox.run("CREATE TRIGGER outage BEFORE DELETE ON outbox_archive_default FOR EACH ROW EXECUTE FUNCTION outage()")
    with psycopg.connect(empty_database, autocommit=True) as other, pytest.raises(DatabaseUnavailable):
        keep_archive(other, outbox.table, WEEK)
    assert partitions(outbox) == {*days(outbox, 1, DAYS_AHEAD), "outbox_archive_default"}


def test_days_past_retention_are_dropped(connection: psycopg.Connection[Any]) -> None:
    outbox = Outbox.make(connection, archive=True)
    old, kept_day, yesterday = make_day(outbox, 9), make_day(outbox, 7), make_day(outbox, 1)
    outbox.run("INSERT INTO outbox_archive_default (id, purged_at) SELECT 5, now() - interval '20 days'")
    outbox.run("INSERT INTO outbox_archive_default (id, purged_at) SELECT 6, now() - interval '2 days'")
    assert keep_archive(connection, outbox.table, WEEK).dropped == (f"public.{old}",)
    assert {kept_day, yesterday} <= partitions(outbox)
    assert old not in partitions(outbox)
    assert outbox.ids("outbox_archive_default") == [6]
    assert keep_archive(connection, outbox.table, timedelta(microseconds=1)).dropped == (
        f"public.{kept_day}",
        f"public.{yesterday}",
    )


def test_a_locked_archive_is_a_problem_told_and_not_waited_out(
    connection: psycopg.Connection[Any], empty_database: str
) -> None:
    outbox = Outbox.make(connection, archive=True)
    old = make_day(outbox, 9)
    with psycopg.connect(empty_database) as reader:
        reader.execute("SELECT count(*) FROM outbox_archive")
        kept = keep_archive(connection, outbox.table, WEEK)
    assert kept.dropped == ()
    assert "lock timeout" in (kept.problem or "")
    assert keep_archive(connection, outbox.table, WEEK).dropped == (f"public.{old}",)


@pytest.mark.parametrize("name", [LONGEST, ODD_NAME])
def test_any_name_will_do(connection: psycopg.Connection[Any], name: str) -> None:
    outbox = Outbox.make(connection, name, archive=True)
    assert len(partitions(outbox)) == DAYS_AHEAD + 2
    assert outbox.purge(*outbox.add("k"), archive="rows") == 1
    assert len(where(outbox)) == 1
    assert keep_archive(connection, outbox.table, WEEK) == KeeperRun()
    check_archive(connection, outbox.table)


def test_two_outboxes_have_two_archives(connection: psycopg.Connection[Any]) -> None:
    names = (LONGEST, LONGEST[:-1] + "p")
    for outbox in [Outbox.make(connection, name, archive=True) for name in names]:
        assert len(partitions(outbox)) == DAYS_AHEAD + 2


def test_init_makes_the_archive_only_when_asked(connection: psycopg.Connection[Any]) -> None:
    table = OutboxTable.parse("outbox")
    init(connection, table)
    with pytest.raises(SchemaError, match="there is no archive") as missing:
        check_archive(connection, table)
    assert "harvester init" in (missing.value.hint or "")
    done = init(connection, table, archive=True)
    assert done[0] == 'created table "public"."outbox_archive"'
    assert len(done) == 1 + DAYS_AHEAD + 1
    assert init(connection, table, archive=True) == []
    check_archive(connection, table)
    connection.execute("DROP TABLE outbox_archive")
    connection.execute("CREATE TABLE outbox_archive (id int)")
    with pytest.raises(SchemaError, match="not partitioned"):
        init(connection, table, archive=True)


def test_the_script_for_psql_makes_the_same(connection: psycopg.Connection[Any]) -> None:
    table = OutboxTable.parse("outbox")
    script = schema.sql(table, archive=True)
    for _ in range(2):
        connection.execute(script)
    check_archive(connection, table)
    assert init(connection, table) == []
    assert archive.exists(connection, table)


def test_a_role_that_may_only_insert_keeps_purging(connection: psycopg.Connection[Any], empty_database: str) -> None:
    outbox = Outbox.make(connection, archive=True)
    connection.execute("".join(f"DROP TABLE {day};" for day in days(outbox, 0, DAYS_AHEAD)))
    grants = ("GRANT SELECT, DELETE ON outbox TO {role}", "GRANT SELECT ON outbox_term TO {role}")
    with poor_role(empty_database, *grants) as dsn, psycopg.connect(dsn, autocommit=True) as poor:
        with pytest.raises(SchemaError, match="may not write the archive") as refused:
            check_archive(poor, outbox.table)
        [_, grant] = (refused.value.hint or "").split(": ", 1)
        connection.execute(grant)
        check_archive(poor, outbox.table)
        records = outbox.add("k")
        assert Outbox(poor, outbox.table, outbox.shape).purge(*records, archive="rows") == 1
        kept = keep_archive(poor, outbox.table, WEEK)
        assert kept.created == kept.dropped == ()
        assert "permission denied" in (kept.problem or "") or "must be owner" in (kept.problem or "")
    assert where(outbox) == {"outbox_archive_default"}
    connection.execute("DROP TABLE outbox")

"""Taking leases: ids, generations, what is kept of a name, expiry, and a table that does not grow."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from harvester import Lease, LeaseError, LeaseExpired, LeaseFenced, SequenceGap, Stasher
from harvester.errors import SchemaError
from harvester.outbox import schema
from harvester.outbox.sql import ddl
from harvester.outbox.tables import OutboxTable
from tests.support.leasing import end, lease_row, record, values, wait_blocked
from tests.support.longs import some_of
from tests.support.outboxes import seed_ddl
from tests.support.roles import separate_roles
from tests.support.wait import eventually

pytestmark = pytest.mark.servers


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database) as opened:
        yield opened


def test_a_name_keeps_its_id_and_each_lease_has_the_next_generation(
    connection: psycopg.Connection[Any], database: str
) -> None:
    stasher = Stasher(lease_time=timedelta(hours=1))
    before = datetime.now(UTC)
    first = stasher.lease(connection, "reader")
    assert (first.generation, first.sequence, first.position, first.resumed) == (1, 0, None, False)
    assert first.expires_at is not None
    assert timedelta(minutes=59) < first.expires_at - before < timedelta(minutes=61)
    assert lease_row(database, "reader") is not None, "it is committed when it is returned"

    writer = stasher.leased(first)
    with connection.transaction():
        writer.stash(connection, record(1), position="offset 41")
        writer.stash(connection, record(2))
    second = stasher.lease(connection, "reader")
    assert (second.id, second.generation, second.sequence) == (first.id, 2, 2)
    assert (second.position, second.resumed, second.name) == ("offset 41", True, "reader")
    assert second.expires_at is not None
    assert second.expires_at > first.expires_at
    assert stasher.lease(connection, "another").id not in (first.id, None)


def test_several_names_at_once(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    names = ["c", "a", "b", "a"]
    leases = stasher.lease_many(connection, names)
    assert [lease.name for lease in leases] == ["c", "a", "b"], "in their order, each once"
    assert len({lease.id for lease in leases}) == 3
    assert [lease.generation for lease in stasher.lease_many(connection, ["a", "new"])] == [2, 1]
    assert stasher.lease_many(connection, []) == []


def test_a_writer_that_leases_its_name_again_after_the_end_repeats_nothing(
    connection: psycopg.Connection[Any], database: str
) -> None:
    """What LeaseExpired advises: go on behind what the new lease carries. The sweep of another writer comes between."""
    stasher, upstream = Stasher(), [str(number) for number in range(1, 134)]

    def copy(until: int) -> None:
        lease = stasher.lease(connection, "reader")
        writer = stasher.leased(lease)
        for number in range(int(lease.position or 0) + 1, until + 1):
            with writer.transaction(connection):
                writer.stash(connection, record(upstream[number - 1]), position=str(number))
            if number == 70:
                end(database, "reader")
                stasher.lease(connection, "another")

    with pytest.raises(LeaseExpired) as refused:
        copy(133)
    copy(133)
    assert values(database) == upstream
    assert refused.value.message.endswith("has expired; record 71 was not written")
    assert "continue after the position and sequence of the new lease" in (refused.value.hint or "")


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("seen", [False, True], ids=["deciding", "hopeful"])
def test_use_in_the_second_half_of_its_time_renews_a_lease(
    connection: psycopg.Connection[Any], database: str, seen: bool, many: bool
) -> None:
    """By the server's clock, in the writer's transaction, for as long as it was taken for."""
    stasher, minute = Stasher(lease_time=timedelta(minutes=1)), timedelta(minutes=1)
    lease = stasher.lease(connection, "reader")
    writer = stasher.leased(lease)

    def use() -> dict[str, Any]:
        if many:
            writer.stash_many(connection, [record(1), record(2)])
        else:
            writer.stash(connection, record(1))
        connection.commit()
        row = lease_row(database, "reader")
        assert row is not None
        return row

    def pass_by(seconds: float) -> None:
        shift = "UPDATE outbox_lease SET leased_at = leased_at - %(by)s, expires_at = expires_at - %(by)s"
        connection.execute(shift, {"by": timedelta(seconds=seconds)})
        connection.commit()

    if seen:
        assert use()["expires_at"] == lease.expires_at
    pass_by(25)
    assert lease.expires_at is not None
    assert use()["expires_at"] == lease.expires_at - timedelta(seconds=25), "not yet"
    pass_by(10)
    if seen:
        row = connection.execute("SELECT ctid FROM outbox_lease").fetchone()
        assert row is not None
        writer._course.at = row[0]
    renewed = use()
    assert renewed["expires_at"] - renewed["leased_at"] == minute
    assert renewed["expires_at"] > lease.expires_at - timedelta(seconds=10)
    pass_by(35)
    connection.execute("SELECT 1")
    writer.stash(connection, record("rolled back"))
    connection.rollback()
    row = lease_row(database, "reader")
    assert row is not None
    assert row["expires_at"] == renewed["expires_at"] - timedelta(seconds=35)


def test_a_lease_that_is_not_renewed_stays_within_its_page(connection: psycopg.Connection[Any]) -> None:
    """The end of a lease is indexed: an update that moved it each time would cost more with each record."""
    stasher = Stasher()
    writer = stasher.leased(stasher.lease(connection, "reader"))
    for number in range(20):
        writer.stash(connection, record(number))
    hot = "SELECT pg_stat_get_xact_tuples_hot_updated('outbox_lease'::regclass)"
    assert connection.execute(hot).fetchone() == (20,)


def test_who_is_refused_renews_nothing(connection: psycopg.Connection[Any], database: str) -> None:
    stasher = Stasher()
    lease = stasher.lease(connection, "reader")
    connection.execute("UPDATE outbox_lease SET leased_at = leased_at - interval '6 days', generation = 2")
    connection.execute("UPDATE outbox_lease SET expires_at = statement_timestamp() + interval '1 day'")
    connection.commit()
    before = lease_row(database, "reader")
    with pytest.raises(LeaseFenced):
        stasher.leased(lease).stash(connection, record(1))
    with pytest.raises(SequenceGap):
        stasher.leased(Lease(lease.id, 2, 4)).stash(connection, record(5))
    connection.commit()
    after = lease_row(database, "reader")
    assert before is not None
    assert after is not None
    assert (after["leased_at"], after["expires_at"]) == (before["leased_at"], before["expires_at"])


def test_nothing_is_accepted_after_the_end(connection: psycopg.Connection[Any], database: str) -> None:
    stasher = Stasher(lease_time=timedelta(minutes=1))
    writer = stasher.leased(stasher.lease(connection, "reader"))
    with connection.transaction():
        writer.stash(connection, record(1))
    end(database, "reader")
    with pytest.raises(LeaseExpired, match="has expired; record 2 was not written"):
        writer.stash(connection, record(2))
    writer.seek(0)
    with pytest.raises(LeaseExpired, match="record 1"):
        writer.stash(connection, record(1))  # a resend
    writer.seek(0)
    with pytest.raises(LeaseExpired, match="record 1"):
        writer.stash_many(connection, [record(1), record(2), record(3)])
    connection.commit()
    assert values(database) == ["1"]


def test_expiry_is_judged_while_a_transaction_is_open(connection: psycopg.Connection[Any], database: str) -> None:
    """now() would stand still at the transaction's start, where the lease was alive."""
    stasher = Stasher()
    writer = stasher.leased(stasher.lease(connection, "reader"))
    connection.execute("SELECT 1")
    end(database, "reader")
    with pytest.raises(LeaseExpired):
        writer.stash(connection, record(1))


@pytest.mark.parametrize("swept", [False, True])
def test_an_expired_lease_hands_on_what_was_saved(
    connection: psycopg.Connection[Any], database: str, swept: bool
) -> None:
    stasher = Stasher()
    old = stasher.lease(connection, "reader")
    writer = stasher.leased(old)
    with connection.transaction():
        writer.stash(connection, record(1), position="7")
    end(database, "reader")
    if swept:
        for _ in range(2):
            stasher.lease(connection, "another")
    new = stasher.lease(connection, "reader")
    assert (new.id, new.generation, new.sequence, new.position, new.resumed) == (old.id, 2, 1, "7", True)
    with pytest.raises(LeaseFenced):
        writer.stash(connection, record(2))
    assert stasher.leased(new).stash(connection, record(2)).sequence == 2


def test_an_expired_lease_under_which_nothing_was_saved_is_removed(
    connection: psycopg.Connection[Any], database: str
) -> None:
    stasher = Stasher()
    old = stasher.lease(connection, "reader")
    end(database, "reader")
    stasher.lease(connection, "another")
    assert lease_row(database, "reader") is None, "whoever takes a lease removes expired ones"
    with pytest.raises(LeaseExpired, match="does not exist") as refused:
        stasher.leased(old).stash(connection, record(1))
    assert "noted elsewhere" in (refused.value.hint or "")
    connection.rollback()
    assert stasher.lease(connection, "reader").id > old.id, "no id is given twice"


def test_what_is_put_away_is_no_work_for_the_next_sweep(connection: psycopg.Connection[Any], database: str) -> None:
    connection.execute(
        "INSERT INTO outbox_lease (name, sequence, leased_at, expires_at)"
        " SELECT 'r' || n, 1, now() - interval '2 days', now() - interval '1 day' FROM generate_series(1, 250) n"
    )
    connection.commit()
    counted = "SELECT count(*) FROM outbox_lease WHERE expires_at BETWEEN '2000-01-01' AND now()"
    left = []
    for _ in range(4):
        Stasher().lease(connection, "another")
        left.append(connection.execute(counted).fetchone())
        connection.commit()
    assert left == [(148,), (46,), (0,), (0,)]
    assert Stasher().lease(connection, "r7").sequence == 1


def test_a_configured_time_ends_by_itself(connection: psycopg.Connection[Any]) -> None:
    """Nobody waits here: a lease of no time has ended before anything can be stashed."""
    stasher = Stasher(lease_time=timedelta(0))
    lease = stasher.lease(connection, "reader")
    with pytest.raises(LeaseExpired):
        stasher.leased(lease).stash(connection, record(1))


def test_a_lease_is_taken_apart_from_the_callers_transaction(
    connection: psycopg.Connection[Any], database: str
) -> None:
    """Rolled back after it was given, its generation would be given again, to somebody else."""
    stasher = Stasher()
    with connection.transaction(), pytest.raises(LeaseError, match="in its own transaction"):
        stasher.lease(connection, "reader")
    with connection.pipeline(), pytest.raises(LeaseError, match="in its own transaction"):
        stasher.lease(connection, "reader")
    assert lease_row(database, "reader") is None


@pytest.mark.parametrize("setting", ["off", "local", "remote_write", "on", "remote_apply"])
def test_a_lease_waits_until_its_commit_is_durable(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    from harvester.outbox.sql import leases as lease_queries

    connection.execute(f"SET synchronous_commit = {setting}")
    connection.commit()
    connection.execute(lease_queries.WAIT_FOR_COMMIT)
    wanted = setting if setting.startswith(("on", "remote_a")) else "on"
    assert connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)
    connection.rollback()
    # … and it is asked for: without that statement the lease cannot be taken.
    monkeypatch.setattr(lease_queries, "WAIT_FOR_COMMIT", "SELECT 1 / 0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        Stasher().lease(connection, "reader")


@pytest.mark.parametrize("level", [None, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_lease_waits_for_the_transaction_of_the_one_before(
    connection: psycopg.Connection[Any], database: str, level: psycopg.IsolationLevel | None
) -> None:
    """Whatever the session's isolation is: the lease has a transaction of its own, and so one of its choice."""
    stasher = Stasher()
    old = stasher.leased(stasher.lease(connection, "reader"))
    old.stash(connection, record(1), position="1")  # and does not commit
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.isolation_level = level
        coming = pool.submit(stasher.lease, other, "reader")
        wait_blocked(database, other.info.backend_pid)
        connection.commit()
        new = coming.result(30)
    assert (new.generation, new.sequence, new.position) == (2, 1, "1")


def test_leases_of_one_name_at_once_have_generations_of_their_own(database: str) -> None:
    stasher, together = Stasher(), threading.Barrier(4)

    def take(_: int) -> list[Lease]:
        with psycopg.connect(database) as connection:
            together.wait(30)
            return [lease for n in range(25) for lease in stasher.lease_many(connection, ["b", "a"][:: (-1) ** n])]

    with ThreadPoolExecutor(4) as pool:
        leases = [lease for taken in pool.map(take, range(4)) for lease in taken]
    for name in "ab":
        ours = [lease for lease in leases if lease.name == name]
        assert sorted(lease.generation for lease in ours) == list(range(1, 101))
        assert len({lease.id for lease in ours}) == 1


def test_the_table_stays_as_it_is_over_many_leases(connection: psycopg.Connection[Any], database: str) -> None:
    stasher, batch, batches = Stasher(), 500, some_of(200)
    connection.autocommit = True
    # Vacuumed here, at fixed points: how much has gathered by then does not depend on when the server comes to it.
    connection.execute("ALTER TABLE outbox_lease SET (autovacuum_enabled = off)")
    said: list[str] = []
    connection.add_notice_handler(lambda notice: said.append(f"{notice.message_primary} {notice.message_detail}"))
    sizes: list[tuple[int, int]] = []
    identities = 0

    def is_clean() -> bool:
        """As autovacuum does once a fifth of a table has changed; the snapshot of one that analyses keeps dead rows.

        The TOAST table, which has no rows, is always clean.
        """
        said.clear()
        connection.execute("VACUUM (VERBOSE) outbox_lease")
        ours = [text for text in said if "pg_toast" not in text]
        return any(re.search("[, ]0 (are dead but not|dead row versions cannot)", text) for text in ours)

    for number in range(batches):
        names = [f"{number}-{n}" for n in range(batch)]
        leases = stasher.lease_many(connection, names)
        assert min(lease.id for lease in leases) > identities, "ids are not reused"
        identities = max(lease.id for lease in leases)
        end(database, *names)
        if number % 10 == 9:
            eventually(is_clean, what="a table without dead rows")
            row = connection.execute("SELECT count(*), pg_relation_size('outbox_lease') FROM outbox_lease")
            sizes.append(row.fetchone() or (0, 0))
    assert identities >= batches * batch
    assert {rows for rows, _ in sizes} == {batch}
    # Without indexes: how soon the server uses their emptied pages again depends on snapshots that others have. Without
    # removal it would be four times as much, and nightly ten times.
    assert sizes[-1][1] <= sizes[1][1] * 2


def test_a_writers_role_takes_and_uses_leases(empty_database: str) -> None:
    with separate_roles(empty_database) as roles, psycopg.connect(roles.writer) as writer:
        stasher = Stasher("billing.outbox")
        lease = stasher.lease(writer, "reader")
        leased = stasher.leased(lease)
        leased.stash(writer, record(1))
        leased.stash_many(writer, [record(2), record(3)], position="3")
        writer.commit()
        with psycopg.connect(roles.owner, autocommit=True) as owner:
            stasher.lease(writer, "unused")
            owner.execute("UPDATE billing.outbox_lease SET expires_at = now()")
            stasher.lease(writer, "another")
            left = owner.execute("SELECT name, isfinite(expires_at) FROM billing.outbox_lease ORDER BY name").fetchall()
            assert left == [("another", True), ("reader", False)]
        with psycopg.connect(roles.relay) as relay, pytest.raises(psycopg.errors.InsufficientPrivilege):
            stasher.lease(relay, "reader")


def test_without_the_table_init_is_named(database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("DROP TABLE outbox_lease")
        connection.commit()
        with pytest.raises(SchemaError, match='no table "outbox_lease"') as refused:
            Stasher().lease(connection, "reader")
        assert refused.value.hint == "run `harvester init`"
        assert schema.init(connection, OutboxTable.parse("outbox")) == ['created table "public"."outbox_lease"']
        connection.commit()
        assert Stasher().lease(connection, "reader").generation == 1


def test_version_3_brings_the_table_to_an_outbox_that_is_there(database: str) -> None:
    table = OutboxTable.parse("outbox")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DROP TABLE outbox_lease")
        connection.execute("UPDATE outbox_term SET schema_version = 2")
        assert schema.init(connection, table) == [
            f"migrated the schema from version 2 to {ddl.schema_version()}",
            'created table "public"."outbox_lease"',
        ]
        Stasher().lease(connection, "reader")
        connection.execute(schema.sql(table).encode())  # `init --print`, over what is there
        assert Stasher().lease(connection, "reader").generation == 2


@pytest.mark.parametrize("name", ['"O\'u""t % \\ {} %s box"', '"Ünder".outbox', f'"{"x" * 52}"'])
def test_nasty_names(empty_database: str, name: str) -> None:
    """Of tables and of leases; the table of the original guide, which has no column for a partition."""
    table = OutboxTable.parse(name)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        if table.schema is not None:
            connection.execute(f"CREATE SCHEMA {OutboxTable(None, table.schema).sql}")
        connection.execute(seed_ddl(table.sql).encode())
        schema.init(connection, table)
        stasher = Stasher(table)
        lease = stasher.lease(connection, "ü \" \\ % {} ' $1")
        writer = stasher.leased(lease)
        assert not writer.stash(connection, record(1), position="% $1 \\").repeated
        assert writer.stash(connection, record(2)).sequence == 2
        assert [stashed.sequence for stashed in writer.stash_many(connection, [record(3), record(4)])] == [3, 4]
        assert stasher.lease(connection, lease.name or "").position == "% $1 \\"

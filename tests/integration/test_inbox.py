"""The inbox on a real PostgreSQL: effects happen once, whoever repeats what, and whoever else owns the partition."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harvester.errors import InboxError, InboxUnavailable
from harvester.idempotence import Inbox, Novelty, table_sql
from tests.support.inbox import ONE, TWO, Forged, Make, Pool, stamped

pytestmark = pytest.mark.servers
pytest_plugins = ["tests.support.ledgers"]


def roll_back() -> None:
    raise psycopg.Rollback


def test_the_first_owner_reads_from_where_it_likes(make: Make) -> None:
    app = make()
    position = app.inbox.open("orders", 3)
    assert (position.topic, position.partition, position.offset) == ("orders", 3, None)
    assert app.row(3)[2] == position.generation


def test_effects_happen_once_and_in_order(make: Make) -> None:
    app = make()
    generation = app.inbox.open("orders", 0).generation
    messages = [Forged(at, stamped(at + 1)) for at in range(5)]
    assert app.take(*messages, *messages) == [0, 1, 2, 3, 4]
    assert app.effects() == ["0@0", "0@1", "0@2", "0@3", "0@4"]
    assert app.row() == (5, 5, generation)


def test_a_restart_goes_on_from_the_table(make: Make) -> None:
    old = make()
    old.inbox.open("orders", 0)
    old.take(*[Forged(at, stamped(at + 1)) for at in range(4)])

    new = make()
    assert new.inbox.open("orders", 0).offset == 4
    # The relay sends 2 again behind all that, and the consumer reads from the start all the same.
    assert new.take(Forged(1, stamped(2)), Forged(4, stamped(2)), Forged(5, stamped(5))) == [5]


def test_a_record_that_was_sent_again_is_recognised_by_its_id(make: Make) -> None:
    app = make()
    generation = app.inbox.open("orders", 0).generation
    with app.inbox.record(Forged(0, stamped(7))) as effect:
        assert effect.is_new
        assert effect.origin is not None
        assert effect.origin.id == 7
    with app.inbox.record(Forged(1, stamped(7, term=2))) as effect:
        assert effect.novelty is Novelty.SENT_AGAIN
    with app.inbox.record(Forged(0, stamped(7))) as effect:
        assert effect.novelty is Novelty.READ_AGAIN
        assert not effect.is_new
    assert app.row() == (2, 2, generation)  # a repeat moves the position, what was read again does not


def test_late_ids_are_new(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    assert app.take(*[Forged(at, stamped(record_id)) for at, record_id in enumerate([5, 9, 2, 5, 1, 9])]) == [
        0,
        1,
        2,
        4,
    ]


def test_equal_ids_of_a_new_incarnation_are_new(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    before = [Forged(at, stamped(at + 1, ONE, low_water=at + 1)) for at in range(3)]
    after = [Forged(at + 3, stamped(at + 1, TWO)) for at in range(3)]
    assert app.take(*before, *after) == [0, 1, 2, 3, 4, 5]


def test_records_without_an_origin_pass_by_their_offset(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    assert app.take(Forged(0), Forged(1, b"foreign"), Forged(1, b"foreign"), Forged(2)) == [0, 1, 2]


def test_a_newer_form_of_the_header_is_not_passed_by(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    with pytest.raises(InboxError, match="version 2") as caught:
        app.take(Forged(0, b"\xb5\x02" + stamped(1)[2:] + b"more"))
    assert caught.value.hint == "upgrade the consumers before the relay"
    assert app.row()[0] is None


def test_another_name_of_the_header(make: Make) -> None:
    app = make(header="other")
    app.inbox.open("orders", 0)
    assert app.take(Forged(0, stamped(1)), Forged(1, stamped(1))) == [0, 1]  # "other" holds nothing of ours


def test_a_low_water_keeps_the_row_small(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    app.take(*[Forged(at, stamped(2 * at, low_water=max(0, 2 * at - 8))) for at in range(60)])
    assert len(app.inbox.seen("orders", 0)) <= 6
    assert app.take(Forged(60, stamped(3))) == []  # below the low water: settled long ago


def test_without_a_low_water_the_lowest_ids_are_forgotten(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    app = make(max_intervals=5)
    app.inbox.open("orders", 0)
    app.take(*[Forged(at, stamped(2 * at)) for at in range(8)])
    assert [first for first, _ in app.inbox.seen("orders", 0).intervals(ONE)] == [6, 8, 10, 12, 14]
    assert "orders[0]: 1 intervals of seen ids forgotten" in caplog.text
    assert app.take(Forged(8, stamped(14)), Forged(9, stamped(0))) == [9]


def test_an_effect_that_fails_leaves_nothing(make: Make) -> None:
    app = make()
    generation = app.inbox.open("orders", 0).generation
    app.take(Forged(0, stamped(1)))
    with pytest.raises(psycopg.errors.DivisionByZero), app.inbox.record(Forged(1, stamped(2))) as effect:
        effect.cursor.execute("INSERT INTO effect (what) VALUES ((1 / 0)::text)")
    assert app.effects() == ["0@0"]
    assert app.row() == (1, 1, generation)
    assert app.take(Forged(1, stamped(2))) == [1]


def test_nobody_goes_on_behind_an_effect_that_failed(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    with pytest.raises(ValueError, match="oops"), app.inbox.record(Forged(0, stamped(1))):
        raise ValueError("oops")
    for _ in range(2):
        with pytest.raises(InboxError, match="orders\\[0\\]@0 was not committed, but now 1 was given"):
            app.take(Forged(1, stamped(2)))
    with app.inbox.record(Forged(0, stamped(1))):
        pass  # left out on purpose
    assert app.take(Forged(1, stamped(2))) == [1]

    with pytest.raises(ValueError, match="oops"), app.inbox.record(Forged(2, stamped(3))):
        raise ValueError("oops")
    assert app.take(Forged(1, stamped(2))) == []  # what is read again on the way there settles nothing
    with pytest.raises(InboxError, match="@2 was not committed"):
        app.take(Forged(3, stamped(4)))
    assert app.take(Forged(2, stamped(3)), Forged(3, stamped(4))) == [2, 3]


@pytest.mark.parametrize(
    ("bad", "said"),
    [(Forged(2, trouble="_PARTITION_EOF"), "reported an error"), (Forged(7, place=("orders", 1)), "is not open")],
)
def test_nobody_goes_on_behind_a_batch_that_was_refused(make: Make, bad: Forged, said: str) -> None:
    app = make()
    app.inbox.open("orders", 0)
    with pytest.raises(InboxError, match=said):
        app.take_batch([Forged(0), Forged(1), bad])
    with pytest.raises(InboxError, match=r"orders\[0\]@0 was not committed, but now 2 was given"):
        app.take(Forged(2))
    assert app.take(Forged(0)) == [0]
    with pytest.raises(InboxError, match=r"orders\[0\]@1 was not committed, but now 2 was given"):
        app.take(Forged(2))
    assert app.take(Forged(1), Forged(2)) == [1, 2]


def test_what_is_read_again_hides_no_effect_that_failed(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    app.take(Forged(0), Forged(1))
    with pytest.raises(ValueError, match="oops"), app.inbox.batch([Forged(0), Forged(2)]):
        raise ValueError("oops")
    for batch in ([Forged(3)], [Forged(1), Forged(3)]):
        with pytest.raises(InboxError, match="@2 was not committed, but now 3 was given"):
            app.take_batch(batch)
    app.take_batch([Forged(1), Forged(2), Forged(3)])
    assert app.effects() == ["0@0", "0@1", "0@2", "0@3"]


def test_a_block_that_rolls_back_did_nothing(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    with app.inbox.record(Forged(0, stamped(1))) as effect:
        effect.cursor.execute("INSERT INTO effect (what) VALUES ('half')")
        roll_back()
    assert app.effects() == []
    assert app.take(Forged(0, stamped(1))) == [0]


def test_a_batch_is_one_transaction_over_its_partitions(make: Make) -> None:
    app = make()
    first, second = (app.inbox.open("orders", partition).generation for partition in (0, 1))
    batch = [Forged(at, stamped(at * 2 + p, low_water=0), ("orders", p)) for at in range(3) for p in (1, 0)]
    app.take_batch([*batch, Forged(3, stamped(0), ("orders", 0))])
    assert app.effects() == ["1@0", "0@0", "1@1", "0@1", "1@2", "0@2"]
    assert (app.row(0), app.row(1)) == ((4, 1, first), (3, 1, second))

    with pytest.raises(ValueError, match="oops"), app.inbox.batch([Forged(3, None, ("orders", 1)), Forged(4)]):
        raise ValueError("oops")
    assert (app.row(0), app.row(1)) == ((4, 1, first), (3, 1, second))
    app.take_batch([Forged(4), Forged(3, None, ("orders", 1))])
    assert app.effects()[6:] == ["0@4", "1@3"]
    app.take_batch([])


def test_a_connection_in_a_transaction_is_refused(make: Make, empty_database: str) -> None:
    make()
    with psycopg.connect(empty_database) as connection:
        inbox = Inbox(connection, "group")
        inbox.open("orders", 0)  # one without autocommit will do
        with inbox.record(Forged(0, stamped(1))):
            pass
        connection.execute("SELECT 1")
        with pytest.raises(InboxError, match="already in a transaction"), inbox.record(Forged(1, stamped(2))):
            pass
        connection.rollback()
        with inbox.record(Forged(1, stamped(2))) as effect:
            assert effect.is_new


def test_what_cannot_be_taken(make: Make) -> None:
    app = make()
    with pytest.raises(InboxError, match=r"orders\[0\] is not open"):
        app.take(Forged(0))
    app.inbox.open("orders", 0)
    with pytest.raises(InboxError, match="reported an error"):
        app.take(Forged(0, trouble="_PARTITION_EOF"))
    app.db.execute("DELETE FROM harvester_inbox")
    with pytest.raises(InboxError, match="is gone"):
        app.take(Forged(0))
    app.inbox.close("orders", 0)
    with pytest.raises(InboxError, match="is not open"):
        app.take(Forged(0))


def test_groups_and_tables_are_apart(make: Make, empty_database: str) -> None:
    app = make()
    app.inbox.open("orders", 0)
    app.take(Forged(0, stamped(1)))
    with psycopg.connect(empty_database, autocommit=True) as connection:
        assert Inbox(connection, "another").open("orders", 0).offset is None
        connection.execute('CREATE SCHEMA "Sales"')
        elsewhere = Inbox(connection, "group", table="Sales.inbox%")
        elsewhere.create_table()
        elsewhere.create_table()
        assert elsewhere.open("orders", 0).offset is None
        with elsewhere.record(Forged(0, stamped(1))) as effect:
            assert effect.is_new


def test_who_may_only_use_the_table_finds_it_made(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as db:
        Inbox(db, "group", table="made").create_table()
        role = f"user_{db.info.dbname}"
        db.execute(f"CREATE ROLE {role}; GRANT SELECT, INSERT, UPDATE ON made TO {role}; SET ROLE {role}")
        try:
            inbox = Inbox(db, "group", table="made")
            inbox.create_table()
            assert inbox.open("orders", 0).offset is None
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                Inbox(db, "group", table="missing").create_table()
        finally:
            db.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_session_that_is_lost_is_no_fault_of_the_record(empty_database: str, when: str) -> None:
    """A pool has another one; a connection of the application's does not, and no try of the record changes that."""
    pool = Pool(empty_database)

    def end(session: psycopg.Connection[Any]) -> None:
        with psycopg.connect(empty_database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))

    def take(inbox: Inbox, session: psycopg.Connection[Any]) -> None:
        if when == "before":
            end(session)
        with inbox.record(Forged(0, stamped(1))) as effect:
            if when == "within":
                end(session)
            effect.cursor.execute("SELECT")

    pooled = Inbox(pool, "group")
    pooled.create_table()
    pooled.open("orders", 0)
    with pytest.raises(InboxUnavailable, match="the inbox has no connection: terminating connection") as caught:
        take(pooled, pool.session)
    assert isinstance(caught.value, psycopg.OperationalError)
    with pooled.record(Forged(0, stamped(1))) as effect:
        assert effect.is_new
    single = Inbox(pool.session, "group")
    single.open("orders", 0)
    with pytest.raises(InboxError, match="the inbox's connection is lost") as lost:
        take(single, pool.session)
    assert not isinstance(lost.value, InboxUnavailable)


def test_the_printed_statement_makes_the_table(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(table_sql().encode())
        connection.execute(table_sql().encode())
        Inbox(connection, "group").open("orders", 0)


def test_factories_of_the_application_do_not_matter(make: Make) -> None:
    app = make()
    app.db.row_factory = psycopg.rows.dict_row
    app.inbox.open("orders", 0)
    assert app.take(Forged(0, stamped(1)), Forged(1, stamped(1))) == [0]
    with app.inbox.record(Forged(2)) as effect:
        assert effect.cursor.execute("SELECT 1 AS one").fetchone() == {"one": 1}

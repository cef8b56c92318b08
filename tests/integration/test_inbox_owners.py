"""Owners of a partition: who may write, who is refused, and what a changed database does to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harvester.errors import CorruptSeenIds, InboxError, InboxFenced
from harvester.idempotence import Inbox
from tests.support.inbox import ONE, TWO, Forged, Make, stamped
from tests.support.wait import eventually

pytestmark = pytest.mark.servers
pytest_plugins = ["tests.support.ledgers"]


def test_a_zombie_is_refused_with_its_effect(make: Make) -> None:
    old, new = make(), make()
    first = old.inbox.open("orders", 0).generation
    old.take(Forged(0, stamped(1)))
    assert new.inbox.open("orders", 0).offset == 1
    with pytest.raises(InboxFenced) as caught:
        old.take(Forged(1, stamped(2)))
    assert (caught.value.ours, caught.value.theirs) == (first, first + 1)
    assert new.take(Forged(1, stamped(2))) == [1]
    assert new.effects() == ["0@0", "0@1"]


def test_a_zombie_in_the_middle_of_its_effect_commits_before_its_successor_opens(make: Make) -> None:
    old, new = make(), make()
    old.inbox.open("orders", 0)
    positions = []
    with old.inbox.record(Forged(0, stamped(1))) as effect:
        opening = threading.Thread(target=lambda: positions.append(new.inbox.open("orders", 0)))
        opening.start()
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with psycopg.connect(old.db.info.dsn, autocommit=True) as watching:
            eventually(lambda: watching.execute(query).fetchone() == (1,), what="the successor waits")
        effect.cursor.execute("INSERT INTO effect (what) VALUES ('old')")
    opening.join(10)
    assert positions[0].offset == 1
    assert new.take(Forged(0, stamped(1))) == []


def test_a_frozen_zombie_does_not_hold_its_successor_up(make: Make) -> None:
    old, new = make(idle_timeout_s=0.3), make()
    old.inbox.open("orders", 0)
    with pytest.raises(InboxError, match="idle-in-transaction timeout"), old.inbox.record(Forged(0, stamped(1))):
        assert new.inbox.open("orders", 0).offset is None  # waits until the server has ended the other session
    assert new.take(Forged(0, stamped(1))) == [0]
    assert new.effects() == ["0@0"]


def test_a_zombie_from_before_its_row_was_deleted_is_refused(make: Make) -> None:
    old, new = make(), make()
    old.inbox.open("orders", 0)
    old.take_batch([Forged(at, stamped(at + 1)) for at in range(10)])
    new.inbox.open("orders", 0)
    new.db.execute("DELETE FROM harvester_inbox; DELETE FROM effect")  # to consume again
    assert new.inbox.open("orders", 0).offset is None
    assert new.take(*[Forged(at, stamped(at + 1)) for at in range(5)]) == [0, 1, 2, 3, 4]
    with pytest.raises(InboxFenced):
        old.take(Forged(10, stamped(11)))
    assert new.take(*[Forged(at, stamped(at + 1)) for at in range(5, 11)]) == [5, 6, 7, 8, 9, 10]


def test_a_token_is_above_the_generations_that_owners_take_themselves(make: Make) -> None:
    plain, coordinated = make(), make()
    assert plain.inbox.open("orders", 0).generation < 0
    plain.take(Forged(0, stamped(1)))
    assert coordinated.inbox.open("orders", 0, generation=0).offset == 1
    with pytest.raises(InboxFenced):
        plain.take(Forged(1, stamped(2)))
    assert plain.inbox.open("orders", 0).generation == 1


def test_given_generations_only_rise(make: Make) -> None:
    old, new, late = make(), make(), make()
    old.inbox.open("orders", 0, generation=100)
    new.inbox.open("orders", 0, generation=250)
    with pytest.raises(InboxFenced) as caught:
        late.inbox.open("orders", 0, generation=100)
    assert (caught.value.ours, caught.value.theirs) == (100, 250)
    assert new.take(Forged(0, stamped(1))) == [0]
    assert new.inbox.open("orders", 0, generation=250).offset == 1  # the same owner, anew
    with pytest.raises(InboxFenced):
        old.take(Forged(1, stamped(2)))


@pytest.mark.parametrize("isolation", list(psycopg.IsolationLevel))
def test_a_copy_that_is_old_is_read_again(make: Make, isolation: psycopg.IsolationLevel) -> None:
    one, two = make(), make()
    for app in (one, two):
        app.inbox.open("orders", 0, generation=9)
        app.db.isolation_level = isolation
    messages = [Forged(at, stamped(at + 1)) for at in range(5)]
    assert one.take(*messages[:2]) == [0, 1]
    assert two.take(*messages[:3], Forged(9, stamped(1))) == [2]
    assert one.take(*messages, Forged(9, stamped(1)), Forged(10, stamped(4))) == [10]


def test_two_of_one_generation_do_each_effect_once(make: Make) -> None:
    one, two = make(), make()
    for app in (one, two):
        app.inbox.open("orders", 0, generation=9)
    messages = [Forged(at, stamped(at + 1)) for at in range(200)]
    threads = [threading.Thread(target=app.take, args=messages) for app in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert one.effects() == [f"0@{at}" for at in range(200)]


def test_a_commit_whose_end_is_unknown(make: Make, empty_database: str) -> None:
    """The session breaks, and the application makes another: what counts is in the table."""
    with psycopg.connect(empty_database, autocommit=True) as other:

        class Lending:
            """A pool of one, whose connection is replaced when it is broken."""

            def __init__(self) -> None:
                self.db = psycopg.connect(empty_database, autocommit=True)

            @contextmanager
            def connection(self) -> Iterator[psycopg.Connection[Any]]:
                if self.db.closed:
                    self.db = psycopg.connect(empty_database, autocommit=True)
                yield self.db

        pool = Lending()
        inbox = Inbox(pool, "group")
        inbox.create_table()
        inbox.open("orders", 0)
        with pytest.raises(psycopg.OperationalError), inbox.record(Forged(0, stamped(1))):
            other.execute("SELECT pg_terminate_backend(%s)", (pool.db.info.backend_pid,))
        with inbox.record(Forged(0, stamped(1))) as effect:
            assert effect.is_new
        with inbox.record(Forged(0, stamped(1))) as effect:
            assert not effect.is_new
        pool.db.close()


def test_a_damaged_row_is_not_taken_for_an_empty_one(make: Make) -> None:
    app = make()
    app.inbox.open("orders", 0)
    app.db.execute("UPDATE harvester_inbox SET seen = seen || 'x', version = version + 1")
    with pytest.raises(CorruptSeenIds):
        app.take(Forged(0, stamped(1)))
    with pytest.raises(CorruptSeenIds):
        make().inbox.open("orders", 0)


@pytest.mark.parametrize("broken", [False, True])
def test_nobody_goes_on_in_a_database_that_went_back(make: Make, broken: bool) -> None:
    app = make()
    app.inbox.open("orders", 0)
    app.take(Forged(0, stamped(1)))
    app.db.execute("CREATE TABLE backup AS SELECT * FROM harvester_inbox")
    app.take(Forged(1, stamped(2)))
    if broken:  # a restore ends sessions, so that the row is read again anyway
        with pytest.raises(ValueError, match="oops"), app.inbox.record(Forged(2)):
            raise ValueError("oops")
    app.db.execute("TRUNCATE harvester_inbox; INSERT INTO harvester_inbox SELECT * FROM backup; DELETE FROM effect")
    with pytest.raises(InboxError, match="went back from version 2 to 1"):
        app.take(Forged(2, stamped(3)))
    assert app.inbox.open("orders", 0).offset == 1
    assert app.take(Forged(1, stamped(2)), Forged(2, stamped(3))) == [1, 2]


def test_a_row_of_an_older_generation_went_back(make: Make) -> None:
    """Nobody has fenced us, and nobody will: to wait for the end of the claim would be to wait for ever."""
    app = make()
    app.inbox.open("orders", 0, generation=7)
    app.db.execute("UPDATE harvester_inbox SET generation = 3")
    with pytest.raises(InboxError, match="went back from generation 7 to 3") as refused:
        app.take(Forged(0))
    assert not isinstance(refused.value, InboxFenced)


def test_an_incarnation_is_forgotten_in_all_rows(make: Make) -> None:
    app = make()
    for partition in (0, 1, 2):
        app.inbox.open("orders", partition)
        app.take(Forged(0, stamped(partition, ONE if partition else TWO), ("orders", partition)))
    assert app.inbox.forget(ONE) == 2
    assert app.take(Forged(1, stamped(1, ONE), ("orders", 1)), Forged(1, stamped(0, TWO), ("orders", 0))) == [1]
    assert app.inbox.forget(UUID(int=99)) == 0

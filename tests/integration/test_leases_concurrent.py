"""Several at once under one lease, and writers that are killed: each record stands in the outbox once, in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester import LeasedStasher, LeaseFenced, SequenceGap, Stashed, Stasher
from tests.support.leasing import lease_row, record, values, wait_blocked
from tests.support.proxy import Proxy
from tests.support.wait import eventually
from tests.support.warm import PipedModule

pytestmark = pytest.mark.servers


class Two:
    """Two sessions with stashers of the same lease and generation; the first one's transaction is open."""

    def __init__(self, dsn: str, first: psycopg.Connection[Any], second: psycopg.Connection[Any]) -> None:
        self.dsn, self.first, self.second = dsn, first, second
        stasher = Stasher()
        lease = stasher.lease(first, "reader")
        self.a, self.b = stasher.leased(lease), stasher.leased(lease)
        self.pool = ThreadPoolExecutor(1)

    def meanwhile(self, writer: LeasedStasher, text: str) -> Future[Stashed]:
        """The second session stashes, and waits for the first."""
        coming = self.pool.submit(writer.stash, self.second, record(text))
        wait_blocked(self.dsn, self.second.info.backend_pid)
        return coming


@pytest.fixture
def two(database: str) -> Iterator[Two]:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        made = Two(database, first, second)
        with made.pool:
            yield made


def test_the_same_number_twice_at_once_is_written_once(two: Two) -> None:
    two.a.stash(two.first, record("one"))
    coming = two.meanwhile(two.b, "one")
    two.first.commit()
    assert coming.result(30) == Stashed(None, 1)
    two.second.commit()
    assert values(two.dsn) == ["one"]


def test_the_number_of_a_transaction_that_rolls_back_is_free(two: Two) -> None:
    two.a.stash(two.first, record("lost"))
    coming = two.meanwhile(two.b, "one")
    two.first.rollback()
    assert not coming.result(30).repeated
    two.second.commit()
    assert values(two.dsn) == ["one"]


def test_the_next_number_waits_for_the_one_before(two: Two) -> None:
    two.a.stash(two.first, record("one"))
    two.b.seek(1)
    coming = two.meanwhile(two.b, "two")
    two.first.commit()
    assert coming.result(30).sequence == 2
    two.second.commit()
    assert values(two.dsn) == ["one", "two"]


def test_the_next_number_is_a_gap_when_the_one_before_rolls_back(two: Two) -> None:
    two.a.stash(two.first, record("lost"))
    two.b.seek(1)
    coming = two.meanwhile(two.b, "two")
    two.first.rollback()
    with pytest.raises(SequenceGap, match="record 2 came where 1 is next"):
        coming.result(30)
    two.second.commit()
    assert values(two.dsn) == []


@pytest.mark.parametrize("commits", [True, False])
def test_the_hopeful_statement_waits_as_well(two: Two, commits: bool) -> None:
    """Both have seen the lease's row where it stands; and b's own record came through before: this is somebody else."""
    two.b.stash(two.second, record("one"))
    two.second.commit()
    two.a.seek(1)
    two.a.stash(two.first, record("two of a"))
    coming = two.meanwhile(two.b, "two of b")
    if commits:
        two.first.commit()
        with pytest.raises(LeaseFenced, match="another stasher uses the same generation"):
            coming.result(30)
    else:
        two.first.rollback()
        assert coming.result(30).sequence == 2
    two.second.commit()
    assert values(two.dsn) == ["one", "two of a" if commits else "two of b"]


def test_a_generation_that_rises_while_one_waits_fences_it(two: Two) -> None:
    lease = two.a.lease
    successor = Stasher().leased(lease.raised())
    successor.stash(two.first, record("one"))
    coming = two.meanwhile(two.b, "one")
    two.first.commit()
    with pytest.raises(LeaseFenced):
        coming.result(30)
    two.second.commit()
    assert values(two.dsn) == ["one"]


def test_many_who_take_the_lease_from_each_other(database: str) -> None:
    """Each goes on from what its lease says; whatever the interleaving, the numbers are written once and in order."""
    total, stasher, together = 60, Stasher(), threading.Barrier(4)

    def copy(seed: int) -> int:
        rng, written = random.Random(seed), 0
        with psycopg.connect(database) as connection:
            together.wait(30)
            while True:
                lease = stasher.lease(connection, "copy")
                writer = stasher.leased(lease)
                assert lease.sequence == int(lease.position or 0)
                for number in range(lease.sequence + 1, total + 1):
                    try:
                        with writer.transaction(connection) as transaction:
                            stashed = writer.stash(connection, record(number), position=str(number))
                            assert stashed.sequence == number
                            if rng.random() < 0.3:
                                raise psycopg.Rollback(transaction)
                            written += 1
                    except LeaseFenced:
                        break
                    if writer.sequence < number:
                        break  # rolled back: with a new lease
                else:
                    return written

    with ThreadPoolExecutor(4) as pool:
        written = sum(pool.map(copy, range(4)))
    assert values(database) == [str(n) for n in range(1, total + 1)]
    assert written == total


def test_writers_with_names_of_their_own_do_not_wait(database: str) -> None:
    stasher = Stasher()

    def write(name: str) -> list[int | None]:
        with psycopg.connect(database, autocommit=True) as connection:
            writer = stasher.leased(stasher.lease(connection, name))
            return [writer.stash(connection, record(f"{name}{n}")).id for n in range(100)]

    with psycopg.connect(database) as holder:
        held = stasher.leased(stasher.lease(holder, "held"))
        held.stash(holder, record("held"))  # its transaction stays open all the while
        with ThreadPoolExecutor(4) as pool:
            ids = list(pool.map(write, "abcd"))
    assert all(own == sorted(own, key=lambda row: row or 0) for own in ids)
    assert sorted(values(database)) == sorted([*(f"{name}{n}" for name in "abcd" for n in range(100)), "held"])


@pytest.mark.parametrize("mode", ["autocommit", "transaction", "batch"])
def test_a_writer_that_is_killed_before_its_answer_repeats_nothing(database: str, mode: str) -> None:
    """SIGKILL while an answer of the server is on its way: in autocommit that is between the commit and its reply."""
    parts, kills = conninfo_to_dict(database), 4
    with Proxy(f"{parts['host']}:{parts['port']}") as proxy:
        proxy.open()
        proxy.delay(down_s=0.002)
        through = make_conninfo(database, host="127.0.0.1", port=proxy.port, application_name="copy")
        for _ in range(kills):
            with _writer(through, mode, 1_000_000) as child:
                began = _sequence(database)
                eventually(partial(_beyond, database, began + 10), what="progress")
                proxy.freeze(up=False)
                eventually(proxy.holds_answer, what="an answer that does not arrive")
                eventually(partial(_waits_for_its_answer, database), what="a writer that waits", interval_s=0.05)
                child.kill()
                said, _ = child.communicate()
            proxy.thaw()
            ahead = _sequence(database) - int(said.split()[-1])
            assert ahead == {"autocommit": 1, "batch": 3}.get(mode, ahead), "it did not know of its last commit"
        last = _sequence(database) + 10
        with _writer(through, mode, last) as child:
            assert child.wait(60) == 0
    assert values(database) == [str(n) for n in range(1, last + 1)]
    row = lease_row(database, "copy")
    assert row is not None
    assert (row["generation"], row["sequence"], row["upstream_position"]) == (kills + 1, last, str(last))


@contextmanager
def _writer(dsn: str, mode: str, last: int) -> Iterator[PipedModule]:
    child = PipedModule("tests.support.lease_writer", dsn, mode, str(last))
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _sequence(dsn: str) -> int:
    row = lease_row(dsn, "copy")
    return row["sequence"] if row is not None else 0


def _beyond(dsn: str, sequence: int) -> bool:
    return _sequence(dsn) > sequence


def _waits_for_its_answer(dsn: str) -> bool:
    """The server has done all that it was asked for, and has nothing to do from one look to the next."""
    looks = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(2):
            looks.append(
                connection.execute(
                    "SELECT pid, state, state_change FROM pg_stat_activity WHERE application_name = 'copy'"
                ).fetchall()
            )
            connection.execute("SELECT pg_sleep(0.05)")
    return looks[0] == looks[1] and all(state.startswith("idle") for _, state, _ in looks[0])

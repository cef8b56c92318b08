"""P32, the harvesters' side: a bulk drain asks for the term, has it while its lease runs, and gives it back."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import psycopg
import pytest

from harvester import LeaderAcquired, LeaderFenced, State
from harvester.errors import DatabaseUnavailable, TermLost
from harvester.outbox.leader_session import MarkSession, TermRow, TermSession
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_loan import Borrower, Loan, Patience
from tests.support.harvesting import Embedded, Scene, causal
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]

OUTBOX = OutboxTable.parse("outbox")
LONG = Patience(release_s=60.0, expiry_s=0.0)


class Drain:
    """A borrower, and what it was told."""

    def __init__(self, scene: Scene, lease_s: float, patience: Patience) -> None:
        self.said: list[str] = []
        self.settled: list[TermRow] = []
        self.over = threading.Event()
        self.borrower = Borrower(
            scene.dsn, OUTBOX, "drain", timedelta(seconds=lease_s), patience, lambda row, *_: self.settled.append(row)
        )

    def take(self) -> Loan:
        loan = self.borrower.take(self.said.append, self.over.is_set)
        assert loan is not None
        return loan


@contextmanager
def drain(scene: Scene, lease_s: float = 60.0, patience: Patience = LONG) -> Iterator[Drain]:
    made = Drain(scene, lease_s, patience)
    with made.borrower:
        yield made


def suspended(running: Embedded) -> bool:
    return running.harvester.state is State.SUSPENDED


def term_row(scene: Scene, columns: str) -> tuple[Any, ...]:
    row = scene.db.execute(f"SELECT {columns} FROM outbox_term").fetchone()
    assert row is not None
    return tuple(row)


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_the_leader_finishes_lends_its_term_and_takes_it_again(scene: Scene, delivery: str) -> None:
    with scene.embedded(delivery=delivery) as running, drain(scene) as borrowing:
        running.wait_leading()
        scene.add(*((f"k{number % 3}", str(number // 3 + 1)) for number in range(30)))
        loan = borrowing.take()
        assert loan.term == 2
        eventually(lambda: suspended(running), what="the leader waits")
        assert not running.harvester.is_leader
        # What was marked is settled, the row is as the leader released it, and nothing moves under the loan.
        (row,) = borrowing.settled
        assert (row.holder, row.delivery) == (None, delivery)
        assert "drain" in running.wait_for(LeaderFenced).reason
        before = sum(map(len, scene.published().values()))
        (late,) = scene.add(("late", "1"))
        loan = borrowing.borrower.renew()
        assert late in scene.left()
        assert sum(map(len, scene.published().values())) == before

        borrowing.borrower.release()
        assert running.wait_for(LeaderAcquired, 2).term == loan.term + 1
        scene.wait_left()
        assert scene.published() == {**causal(["k0", "k1", "k2"], 10), "late": ["1"]}
        assert running.harvester.status().problem is None


def test_a_busy_leader_leaves_nothing_in_doubt(scene: Scene) -> None:
    """It keeps its trust while it finishes, so that its shards give up nothing; then it can release the term."""
    counted = itertools.count(1)
    done = threading.Event()

    def write() -> None:
        with scene.writer() as db:
            while not done.is_set():
                number = str(next(counted))
                scene.add(*((f"k{key}", number) for key in range(20)), db=db)
                db.commit()

    with scene.embedded() as running, drain(scene) as borrowing:
        running.wait_leading()
        writing = threading.Thread(target=write)
        writing.start()
        try:
            borrowing.take()
            assert borrowing.settled[0].holder is None
        finally:
            done.set()
            writing.join(30)
        borrowing.borrower.release()
        scene.wait_left()
    assert scene.published() == causal([f"k{key}" for key in range(20)], next(counted) - 1)


def test_a_lease_that_is_not_renewed_runs_out(scene: Scene) -> None:
    with scene.embedded() as running, ExitStack() as until_killed:
        running.wait_leading()
        borrowing = until_killed.enter_context(drain(scene, lease_s=3.0))
        borrowing.take()
        loan = borrowing.borrower.renew()
        until_killed.close()  # it says nothing more, and releases nothing
        running.wait_for(LeaderAcquired, 2)
        (acquired_at, kind, lease) = term_row(scene, "acquired_at, holder_kind, lease_until")
        assert acquired_at >= loan.until
        assert (kind, lease) == ("harvester", None)


def test_a_take_that_fails_can_be_given_up(scene: Scene) -> None:
    with drain(scene) as borrowing:
        with (
            mock.patch.object(TermSession, "renew_incarnation", side_effect=psycopg.errors.QueryCanceled),
            pytest.raises(DatabaseUnavailable),
        ):
            borrowing.take()
        assert term_row(scene, "term, lease_until IS NULL") == (1, False)
        borrowing.borrower.give_up()
        assert term_row(scene, "term, lease_until IS NULL") == (1, True)


def test_whoever_lost_the_term_is_told(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    with drain(scene, lease_s=0.001) as borrowing:
        loan = borrowing.take()
        harvester, holder = sessions(), uuid.uuid4()
        eventually(lambda: harvester.take_term(loan.term, 0, holder, "harvester") is not None, what="the lease is over")
        with pytest.raises(TermLost, match=f"term {loan.term} of this drain has ended"):
            borrowing.borrower.renew()
        borrowing.borrower.release()
        assert scene.holder() == "harvester"


def test_a_term_that_is_lent_or_wanted_is_not_taken(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    harvester = sessions()
    assert harvester.want_term("a drain", 60.0)
    assert harvester.read_term().lent_to == "a drain"
    assert not harvester.want_term("another drain", 60.0)
    assert harvester.borrow_term(0, 0, uuid.uuid4(), "another drain", 60.0) is None
    assert harvester.borrow_term(0, 0, uuid.uuid4(), "a drain", 60.0) is not None
    assert harvester.read_term().lent_to == "a drain"
    # Also by one that has read the row: the term is the same, only the lease has come since.
    assert harvester.take_term(1, 0, uuid.uuid4(), "harvester") is None
    scene.db.execute("UPDATE outbox_term SET lease_until = now() - interval '1 ms'")
    assert harvester.take_term(1, 0, uuid.uuid4(), "harvester") == 2


def test_a_leader_that_does_not_release_its_term_is_waited_out(scene: Scene) -> None:
    """What it had on the wire may arrive for S + H + D; meanwhile the lease is kept."""
    scene.db.execute("UPDATE outbox_term SET term = 7, holder = gen_random_uuid(), holder_name = 'dead'")
    with drain(scene, lease_s=1.0, patience=Patience(release_s=0.5, expiry_s=2.5)) as borrowing:
        loan = borrowing.take()
    assert loan.term == 8
    assert borrowing.said == [
        "the leader of term 7 is asked to finish, for 0 s",
        "term not released: what its leader sent may still arrive for 2 s",
    ]
    assert term_row(scene, "lease_until >= acquired_at + interval '3.5 s'") == (True,)


def test_drains_wait_for_each_other(scene: Scene) -> None:
    with drain(scene) as first, drain(scene) as second:
        first.take()
        taken: list[Loan] = []
        waiting = threading.Thread(target=lambda: taken.append(second.take()))
        waiting.start()
        eventually(lambda: second.said, what="the second one waits")
        assert "has borrowed the term" in second.said[0]
        assert not taken
        first.borrower.release()
        waiting.join(30)
        assert taken[0].term == 2


def test_a_drain_that_is_stopped_while_it_waits_asks_no_longer(scene: Scene) -> None:
    scene.db.execute("UPDATE outbox_term SET term = 7, holder = gen_random_uuid(), holder_name = 'busy'")
    with drain(scene) as borrowing:

        def stop() -> None:
            eventually(lambda: term_row(scene, "wanted_by")[0], what="it asks")
            borrowing.over.set()

        stopping = threading.Thread(target=stop)
        stopping.start()
        assert borrowing.borrower.take(borrowing.said.append, borrowing.over.is_set) is None
        stopping.join(30)
    assert term_row(scene, "term, wanted_by, wanted_until") == (7, None, None)


def test_one_that_gives_up_leaves_the_term_unreleased(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    """P24: whoever comes next need not wait for the lease, but may have to for what was sent."""
    with drain(scene) as borrowing:
        loan = borrowing.take()
        borrowing.borrower.give_up()
    row = sessions().read_term()
    assert (row.holder, row.kind, row.lent_to) == (loan.holder, "drain", None)


def test_a_suspended_harvester_stops(scene: Scene) -> None:
    with drain(scene) as borrowing:
        with scene.embedded() as running:
            running.wait_leading()
            loan = borrowing.take()
            eventually(lambda: suspended(running), what="the leader waits")
        assert running.harvester.state is State.STOPPED
        borrowing.borrower.renew()
        assert term_row(scene, "holder, wanted_by") == (loan.holder, None)


def test_a_drain_that_gives_up_while_it_waits_leaves_the_wait_to_the_next(scene: Scene) -> None:
    scene.db.execute("UPDATE outbox_term SET term = 7, holder = gen_random_uuid(), holder_name = 'dead'")
    with drain(scene, patience=Patience(release_s=0.2, expiry_s=60.0)) as first:

        def stop() -> None:
            eventually(lambda: len(first.said) == 2, what="it waits")
            first.over.set()

        stopping = threading.Thread(target=stop)
        stopping.start()
        assert first.borrower.take(first.said.append, first.over.is_set) is None
        stopping.join(30)
    with drain(scene, patience=Patience(release_s=0.2, expiry_s=1.0)) as second:
        second.take()
        assert second.said[-1] == "term not released: what its leader sent may still arrive for 1 s"
        second.borrower.give_up()
    with drain(scene) as third:  # the second one was through with it, and nothing of its own is on the wire
        third.take()
        assert third.said == []


def test_a_paused_leader_lends_its_term_and_waits_for_it_too(scene: Scene) -> None:
    """It marks nothing, and notices all the same that it is asked."""
    with scene.embedded() as running, drain(scene) as borrowing:
        running.wait_leading()
        running.harvester.pause()
        borrowing.take()
        assert borrowing.settled[0].holder is None
        running.harvester.resume()
        eventually(lambda: suspended(running), what="the leader waits")
        scene.add(("k", "1"))
        borrowing.borrower.release()
        scene.wait_left()
        assert scene.published() == {"k": ["1"]}


@pytest.mark.parametrize("release_s", [3.0, 0.0])
def test_a_leader_that_can_send_nothing_sends_nothing_beside_a_drain(
    scene: Scene, kafka: Proxy, release_s: float
) -> None:
    """It has no room, and so it marks nothing; its shard would go on with what it holds as soon as Kafka is back.

    Also if its term is taken before it has noticed that it is asked.
    """
    given = {"bootstrap.servers": kafka.address}
    with (
        scene.embedded(producer_kafka_config=given, shards=1, max_in_flight_records=4) as running,
        drain(scene, patience=Patience(release_s, expiry_s=0.0)) as borrowing,
    ):
        running.wait_leading()
        kafka.cut()
        scene.add(*((f"k{number}", "1") for number in range(4)))
        eventually(lambda: running.harvester.status().shards[0].retries >= 4, what="all of them are held")
        borrowing.take()
        eventually(lambda: suspended(running), what="the leader waits")
        kafka.open()
        borrowing.borrower.release()
        scene.wait_left()
    assert scene.published() == causal([f"k{number}" for number in range(4)], 1)

"""The term on a real server: compare and set (P8), the fence of marks (P6), purges without one (P2)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from harvester import FakeGroup, LeaderAcquired, LeaderFenced, State, failpoints
from harvester.errors import TermLost
from harvester.outbox.leader_session import MarkSession
from harvester.relay.core.messages import Mark, Marked, Report
from harvester.relay.marker import MarkReader
from tests.support.harvesting import Scene, causal
from tests.support.hooks import Plan
from tests.support.marking import BOTH, mark, marked
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]


def test_a_term_is_taken_only_from_the_one_that_was_read(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    first, second = sessions(), sessions()
    holders = [uuid.uuid4() for _ in range(4)]
    assert first.take_term(0, 0, holders[0], "first") == 1
    assert second.take_term(0, 0, holders[1], "second") is None
    assert scene.db.execute("SELECT term, holder, holder_name FROM outbox_term").fetchone() == (1, holders[0], "first")
    assert second.take_term(1, 40, holders[2], "second") == 41  # above all that was ever heard of in the group
    assert second.take_term(41, 7, holders[3], "second") == 42


def test_of_two_that_take_the_same_term_one_gets_it(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    rivals = [sessions(), sessions()]
    with scene.writer() as other, ThreadPoolExecutor(2) as pool:
        other.execute("SELECT FROM outbox_term FOR UPDATE")
        taking = [pool.submit(rival.take_term, 0, 0, uuid.uuid4(), "rival") for rival in rivals]
        eventually(lambda: scene.waiting_for_locks() == 2, what="both wait for the row")
        other.rollback()
        assert sorted([future.result(30) for future in taking], key=str) == [1, None]
    assert scene.term() == 1


def test_an_old_mark_that_waited_while_the_term_rose_takes_nothing(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    """P6: its snapshot is older than the new term, and it still sees it."""
    scene.add(("a", "1"), ("b", "1"))
    old, holder = sessions(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    with scene.writer() as other, ThreadPoolExecutor(1) as pool:
        other.execute("UPDATE outbox_term SET term = term + 1, holder = gen_random_uuid()")
        waiting: Future[Any] = pool.submit(mark, old, 1, holder)
        eventually(lambda: scene.waiting_for_locks() == 1, what="the mark waits")
        other.commit()
        with pytest.raises(TermLost):
            waiting.result(30)
    assert marked(scene) == []
    assert scene.term() == 2


def test_the_term_rises_only_after_a_mark_that_waits_for_a_row(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    """P6: the mark holds the term row shared, so whoever raises it comes after it and sees what it took."""
    (row, _) = scene.add(("a", "1"), ("b", "1"))
    old, new, holder, successor = sessions(), sessions(), uuid.uuid4(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    scene.db.execute("UPDATE outbox_term SET sessions = '[]'")  # else the take-over would end the mark instead
    with scene.writer() as other, ThreadPoolExecutor(2) as pool:
        other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (row,))
        marking = pool.submit(mark, old, 1, holder)
        eventually(lambda: scene.waiting_for_locks() == 1, what="the mark waits for the row")
        taking = pool.submit(new.take_term, 1, 0, successor, "new")
        eventually(lambda: scene.waiting_for_locks() == 2, what="the take-over waits for the term row")
        other.rollback()
        taken = marking.result(30)
        assert taking.result(30) == 2
    assert len(taken) == 2
    assert mark(new, 2, successor) == taken  # all of them, whatever the old leader wrote into them
    with pytest.raises(TermLost):
        mark(old, 1, holder)


@BOTH
def test_a_deposed_leader_reads_nothing_and_hears_of_it(
    scene: Scene, sessions: Callable[[], MarkSession], marking: str
) -> None:
    ids = scene.add(("a", "1"), ("b", "1"))
    old, holder = sessions(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    assert mark(old, 1, holder, marking) == ids
    scene.db.execute("UPDATE outbox_term SET term = 2, holder = gen_random_uuid()")
    with pytest.raises(TermLost):
        mark(old, 1, holder, marking)
    with pytest.raises(TermLost):
        old.fetch(term=1, holder=holder, ids=tuple(ids))


@BOTH
def test_an_empty_mark_tells_an_empty_table_from_a_lost_term(
    scene: Scene, sessions: Callable[[], MarkSession], marking: str
) -> None:
    """P8: else a late UPDATE of a loser stalls the rightful leader for ever on no rows."""
    old, holder = sessions(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    assert mark(old, 1, holder, marking) == []
    scene.db.execute("UPDATE outbox_term SET holder = gen_random_uuid()")
    with pytest.raises(TermLost):
        mark(old, 1, holder, marking)


@BOTH
def test_a_trusted_leader_whose_term_was_raised_by_another_takes_it_again(scene: Scene, marking: str) -> None:
    with scene.member(marking=marking) as running:
        first = running.wait_leading()
        scene.add(("a", "1"))
        scene.wait_left()
        scene.db.execute("UPDATE outbox_term SET term = term + 5, holder = gen_random_uuid(), holder_name = 'loser'")
        second = running.wait_for(LeaderAcquired, 2)
        assert second.term == first.term + 6
        assert second.leader_id != first.leader_id
        scene.add(("a", "2"))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired", "LeaderAcquired"]
        assert scene.db.execute("SELECT holder_name FROM outbox_term").fetchone() == ("test",)
    assert scene.published() == causal(("a",), 2)


def test_a_leader_without_trust_does_not_take_the_term_again(scene: Scene) -> None:
    group = FakeGroup(elected=True)
    with scene.embedded(group=group) as running:
        running.wait_leading()
        group.fence("a test")
        running.wait_for(LeaderFenced)
        scene.db.execute("UPDATE outbox_term SET term = 9, holder = gen_random_uuid()")
        scene.add(("a", "1"))
        assert running.harvester.leader_id is None
        assert running.harvester.state is State.FENCED
    assert scene.term() == 9
    assert len(scene.left()) == 1


def test_trust_that_ends_before_the_term_is_raised_leaves_it_alone(scene: Scene, plan: Plan) -> None:
    """P8: read, look whether we are trusted, and only then compare and set."""
    group = FakeGroup()
    with scene.embedded(group=group) as running:
        with plan.blocked("marker.term_read") as reached:
            electing = threading.Thread(target=group.elect)
            electing.start()
            reached()
            group.fence("a test")
        eventually(lambda: running.harvester.state is State.FENCED, what="fenced")
        electing.join(30)
        scene.add(("a", "1"))
        assert group.elect(60)
        scene.wait_left()
        assert running.wait_for(LeaderAcquired).term == 1
        assert running.leadership() == ["LeaderAcquired"]


def test_a_term_that_rises_between_reading_and_taking_it_is_read_again(scene: Scene, plan: Plan) -> None:
    group = FakeGroup()
    with scene.embedded(group=group) as running:
        with plan.blocked("marker.term_read") as reached:
            electing = threading.Thread(target=group.elect)
            electing.start()
            reached()
            scene.db.execute("UPDATE outbox_term SET term = 7, holder = gen_random_uuid()")
        electing.join(60)
        assert running.wait_for(LeaderAcquired).term == 8
    assert scene.term() == 8


def test_what_kafka_acknowledged_to_a_deposed_leader_is_purged(scene: Scene, plan: Plan) -> None:
    """P2: a purge is not fenced; the acknowledgement was real, whoever received it."""
    group = FakeGroup(elected=True)
    with scene.embedded(group=group) as running:
        running.wait_leading()
        with scene.writer() as other:
            with plan.blocked("marker.marked") as is_marked:
                (row,) = scene.add(("a", "1"))
                is_marked()
                other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (row,))
            eventually(lambda: scene.waiting_for_locks() == 1, what="the purge, after the acknowledgement")
            group.fence("a test")
            running.wait_for(LeaderFenced)
            scene.db.execute("UPDATE outbox_term SET term = 9, holder = gen_random_uuid()")
            assert scene.left() == [row]
            other.rollback()
            scene.wait_left()
    assert scene.published() == causal(("a",), 1)
    assert scene.term() == 9


def test_an_empty_mark_that_is_no_proof_passes_nothing(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    """P25: the term may be another's, which only a proof asks for. What was passed would count as settled for good."""
    session, holder, leader_id = sessions(), uuid.uuid4(), uuid.uuid4()
    assert session.take_term(0, 0, holder, "old") == 1
    said: list[Report] = []
    taker: Any = SimpleNamespace(taken=SimpleNamespace(holder=holder), ids_restarted=False)
    reader = MarkReader(session, taker, said.append, failpoints.load(), writes=False)

    def mark(number: int, *, is_proof: bool) -> Marked:
        reader.perform(Mark(number, 1, holder, leader_id, 100, is_proof=is_proof))
        return next(one for one in said if isinstance(one, Marked) and one.number == number)

    (first,) = scene.add(("a", "1"))
    assert [row[0] for row in mark(1, is_proof=False).rows] == [first]
    scene.add(("a", "2"))
    reader._list_holders()
    scene.db.execute("UPDATE outbox_term SET term = 2, holder = gen_random_uuid()")
    unproven = mark(2, is_proof=False)
    assert (unproven.rows, unproven.floor) == ([], first + 1)
    with pytest.raises(TermLost):
        mark(3, is_proof=True)


def test_a_lock_on_the_term_row_is_told(scene: Scene) -> None:
    with scene.writer() as other:
        other.execute("SELECT FROM outbox_term FOR UPDATE")
        with scene.embedded() as running:
            told = 'holds a lock on "outbox_term"'
            eventually(lambda: told in (running.harvester.status().problem or ""), what="a problem that is told")
            other.rollback()
            running.wait_leading()
            eventually(lambda: running.harvester.status().problem is None, what="the end of the problem")

"""P7: a leader that stands still keeps the locks of its database sessions; its successor ends them."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from harvester import State
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.sql import queries
from tests.support.harvesting import Scene, family_of, wait_leads
from tests.support.marking import BOTH, add_large, backends, freeze, mark, named
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]


def test_a_backend_that_hangs_with_its_locks_is_ended_before_the_term_rises(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    ids = add_large(scene)
    old, new, holder, successor = sessions(), sessions(), uuid.uuid4(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    hung = freeze(scene, old, 1, holder)
    term = new.take_term(1, 0, successor, "new")
    if term is None:  # a backend may take a moment to end
        term = new.take_term(1, 0, successor, "new")
    assert term == 2
    assert hung not in backends(scene)
    assert mark(new, 2, successor) == ids


def test_a_backend_that_hangs_since_the_first_look_is_ended_too(
    scene: Scene, sessions: Callable[[], MarkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named in the term row, and took its locks, between the successor's first look and its UPDATE."""
    add_large(scene)
    old, new, holder, successor = sessions(), sessions(), uuid.uuid4(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    scene.db.execute("UPDATE outbox_term SET sessions = '[]'")
    hung: list[int] = []
    real = queries.take_term

    def late(*args: Any) -> str:
        if not hung:
            old.register(1, holder, [])
            hung.append(freeze(scene, old, 1, holder))
        return real(*args)

    monkeypatch.setattr(queries, "take_term", late)
    assert new.take_term(1, 0, successor, "new") is None
    eventually(lambda: hung[0] not in backends(scene), what="the end of the backend")
    assert new.take_term(1, 0, successor, "new") == 2


def test_nobody_else_is_ended(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    """A pid that has been given to another session since is not the one that was named; nor are our own shards."""
    old, new, shard, stranger = sessions(), sessions(), sessions(), sessions()
    assert old.session is not None
    assert shard.session is not None
    assert stranger.session is not None
    reused = (stranger.session[0], "2020-01-01 00:00:00+00")
    assert old.take_term(0, 0, uuid.uuid4(), "old", [reused, shard.session]) == 1
    holder = uuid.uuid4()
    term = new.take_term(1, 0, holder, "new", [shard.session])
    assert term == 2
    eventually(lambda: old.session is not None and old.session[0] not in backends(scene), what="the end of the old one")
    assert {stranger.session[0], shard.session[0]} <= backends(scene)
    assert new.session is not None
    assert named(scene.db) == {new.session[0], shard.session[0]}
    assert new.take_term(2, 0, holder, "new", [shard.session]) == 3  # it does not end itself
    new.register(2, holder, [])  # of a term that is over
    assert named(scene.db) == {new.session[0], shard.session[0]}
    new.register(3, holder, [])
    assert named(scene.db) == {new.session[0]}


@BOTH
def test_the_term_row_names_all_sessions_of_the_leader_whatever_becomes_of_them(scene: Scene, marking: str) -> None:
    def of(kind: str) -> set[int]:
        query = """SELECT pid FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name LIKE %s"""
        return {row[0] for row in scene.db.execute(query, (kind,))}

    with scene.embedded(marking=marking, shards=3) as running:
        running.wait_leading()

        def complete() -> bool:
            shards, found = of("harvester test/%"), named(scene.db)
            # Besides them the marker's own: one more, which is alive.
            return len(shards) == 3 and shards <= found and len(found) == 4 and found <= backends(scene)

        eventually(complete, what="all sessions in the term row")
        before = of("harvester test/%")
        os.kill(running.pids()[1], signal.SIGKILL)
        eventually(lambda: len(of("harvester test/%") - before) == 1, what="the session of the new shard")
        eventually(complete, what="all sessions, that of the new shard among them")
        (victim,) = sorted(of("harvester test/%"))[:1]
        scene.db.execute("SELECT pg_terminate_backend(%s, 5000)", (victim,))
        for number in range(8):  # each shard finds out by its next purge
            scene.add((f"k{number}", "1"))
        scene.wait_left()
        eventually(
            lambda: victim not in named(scene.db) and complete(), what="all sessions, without the one that ended"
        )
        (marker_pid,) = named(scene.db) - of("harvester test/%")
        scene.db.execute("SELECT pg_terminate_backend(%s, 5000)", (marker_pid,))
        eventually(lambda: marker_pid not in named(scene.db) and complete(), what="all sessions, with a new marker's")


def test_a_leader_frozen_in_the_middle_of_a_mark_is_succeeded(scene: Scene) -> None:
    """Its backend hangs in a write with the locks of all that it marked, and of the term row."""
    quick: dict[str, Any] = {"heartbeat_timeout": "2s", "session_timeout": "7s", "drain_interval": "2s", "shards": 1}
    limits = {**quick, "marking": "table", "mark_query_records": 1000, "max_in_flight_records": 1000}
    large = {"producer_kafka_config": {"message.max.bytes": "1000000"}}
    with scene.cli(name="one", env=scene.plan.env, **limits, **large) as one:
        _, first_term = wait_leads(one)
        with scene.member(name="two", **limits, **large) as two, scene.writer() as other:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            with scene.plan.blocked("marker.mark") as reached:
                reached()
                ids = add_large(scene, 100, 400_000)  # half of them are more than sockets buffer
                # The first row: a first mark takes only some of them, and must not have sent any.
                other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (ids[0],))
            eventually(lambda: scene.waiting_for_locks() >= 1, what="the mark waits for the row")
            family = family_of(one.pid)
            for pid in family:
                os.kill(pid, signal.SIGSTOP)
            other.rollback()
            acquired = two.wait_leading()
            assert acquired.term > first_term
            scene.wait_left(timeout_s=60)
            for pid in reversed(family):  # a supervisor that thaws first kills its shards
                os.kill(pid, signal.SIGCONT)
            one.wait_for_line("fenced: ")
            assert one.stop() == 0
    times = {key: len(values) for key, values in scene.published().items()}
    assert times == {f"large{n}": 1 for n in range(1, 101)}, two.told()

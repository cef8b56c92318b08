"""Old statements and new terms, under load (P6, P7, P8): a mark that waits, or is half read, while its leader is frozen
and another takes over; a term that rises under a leader that works.

Only marks in the table hold locks on rows, and write; a mark in memory has no effect in the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.conftest import MakeTopic
from tests.support.audit import Audit
from tests.support.families import QUICK, Family, family, wait_members
from tests.support.harvesting import Scene, messages
from tests.support.wait import eventually
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

BIG: dict[str, Any] = {**QUICK, "marking": "table", "mark_query_records": 4000, "max_in_flight_records": 4000}
ROWS, BYTES = 1000, 15_000  # 15 MB: more than the sockets between a server and its client hold


@contextmanager
def mark_held_up(scene: Scene, leader: Family, topic: str, rows: int, size: int) -> Iterator[psycopg.Connection[Any]]:
    """Rows of this size, and a mark of the leader that waits for a lock on the first; yields who holds the lock."""
    insert = """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value)
                SELECT now(), %s, 'big-' || n, rpad(n || ':', %s, '.') FROM generate_series(1, %s) AS n RETURNING id"""
    with scene.writer() as other:
        with scene.plan.blocked("marker.mark") as reached:
            reached()
            first = min(row[0] for row in scene.db.execute(insert, (topic, size, rows)).fetchall())
            other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (first,))
        eventually(lambda: waits(scene, "harvester one", "Lock"), what="a mark that waits for the row")
        leader.freeze()
        yield other


def waits(scene: Scene, application: str, kind: str, event: str | None = None) -> bool:
    """Whether a session of this application waits for such an event."""
    query = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s
               AND state = 'active' AND wait_event_type = %s AND wait_event = coalesce(%s, wait_event)"""
    row = scene.db.execute(query, (application, kind, event)).fetchone()
    return row is not None and row[0] > 0


def test_a_zombie_in_the_middle_of_a_marks_result_holds_nobody_up(scene: Scene, make_topic: MakeTopic) -> None:
    """Its backend waits for its socket and keeps its row locks, which no timeout of the server ends (P7)."""
    topic, audit = make_topic(4), Audit(scene)
    with family(scene, "one", hooks=True, **BIG) as one:
        one.wait_leads()
        with family(scene, "two", **BIG) as two:
            wait_members(scene, 2)
            with writing(scene) as load:
                load.wait(300)
                with mark_held_up(scene, one, topic, ROWS, BYTES) as other:
                    other.rollback()
                eventually(lambda: waits(scene, "harvester one", "Client", "ClientWrite"), what="a full socket")
                two.wait_leads()
                taken_over = audit.last()
                load.wait(600)
                scene_topics_drained(scene, topic)
                one.thaw()
                one.running.wait_for_line("fenced: ")
                load.wait(300)
            verify(scene, load)
            found = {key: {len(value or "") for value in values} for key, values in scene.published(topic).items()}
            assert found == {f"big-{n}": {BYTES} for n in range(1, ROWS + 1)}
            assert audit.updates("harvester one", taken_over) == 0
            # A busy machine may fence the successor, which then leads again.
            assert scene.holder() == "two"
            assert len([text for text in messages(one.running) if text.startswith("leads as ")]) == 1
            two.stop()


def scene_topics_drained(scene: Scene, topic: str) -> None:
    """Until the rows for this topic are gone: the successor has had them."""

    def gone() -> bool:
        row = scene.db.execute("SELECT count(*) FROM outbox WHERE kafka_topic = %s", (topic,)).fetchone()
        return row == (0,)

    eventually(gone, 60, "the rows of the big mark published by the successor", interval_s=0.05)


def test_an_old_mark_that_waits_for_a_row_takes_nothing_after_the_term_rose(
    scene: Scene, make_topic: MakeTopic
) -> None:
    """The take-over does not wait for the row either: it ends the session that does (P6, P7)."""
    topic, audit = make_topic(4), Audit(scene)
    with family(scene, "one", hooks=True, **BIG) as one:
        _, first_term = one.wait_leads()
        with family(scene, "two", **BIG) as two:
            wait_members(scene, 2)
            with writing(scene) as load:
                load.wait(300)
                with mark_held_up(scene, one, topic, 10, 100) as other:
                    before = audit.last()
                    _, term = two.wait_leads()
                    assert term > first_term
                    assert not waits(scene, "harvester one", "Lock")
                    other.rollback()
                    load.wait(300)
                    one.thaw()
                one.running.wait_for_line("fenced: ")
                load.wait(300)
            verify(scene, load)
            assert audit.updates("harvester one", before) == 0
            assert scene.published(topic) == {f"big-{n}": [f"{n}:".ljust(100, ".")] for n in range(1, 11)}
            # A busy machine may fence the successor, which then leads again.
            assert scene.holder() == "two"
            assert len([text for text in messages(one.running) if text.startswith("leads as ")]) == 1
            two.stop()


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_a_leader_whose_term_is_raised_takes_it_again_and_repeats_nothing(scene: Scene, marking: str) -> None:
    """P8, under load: what is on the wire is awaited, what is queued is dropped, and marked again."""
    with family(scene, "one", marking=marking) as one:
        _, term = one.wait_leads()
        with writing(scene) as load:
            for _ in range(3):
                load.wait(200)
                with scene.writer() as other:
                    other.execute("UPDATE outbox_term SET term = term + 1, holder = gen_random_uuid()")
                    load.wait(30)  # a mark in the table waits for the term row meanwhile
                    other.commit()
                term += 2
                one.running.wait_for_line(rf"leads as \S+ under term {term}\b")
            load.wait(200)
        repeats = verify(scene, load)
        assert scene.term() == term
        one.stop()
    assert repeats == 0
    figure(f"repeats_term_taken_again_{marking}", repeats, "records")

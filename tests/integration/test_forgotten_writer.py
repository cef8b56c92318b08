"""P38: under a writing transaction that somebody forgot, the relay's work follows what is new.

No gap closes and no dead row can be vacuumed while it lasts. What is counted: the ranges that a mark looks at, and the
index entries that marks read. The periodic look at the whole table is put off beyond the tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from harvester.outbox import overview
from harvester.status import Backlog
from tests.support.harvesting import Embedded, Scene, causal
from tests.support.marking import BOTH, no_gaps, scan_of, wait_listed
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

FAR: dict[str, Any] = {"head_scan_interval": "10m", "shards": 1}
DEAD = 20_000


@pytest.fixture(autouse=True)
def only_marks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of the backlog reads past all dead rows too, from the moment somebody asks for a status."""
    monkeypatch.setattr(overview, "read_backlog", lambda *_: Backlog(records=0, capped=False, oldest_age_s=None))


@contextmanager
def forgotten(scene: Scene, key: str = "forgotten") -> Iterator[psycopg.Connection[Any]]:
    """A transaction with a row that it wrote in a subtransaction, and nothing to do."""
    with scene.writer() as db:
        db.execute("SELECT 1")  # so that the next one is a subtransaction
        with db.transaction():
            scene.add((key, "1"), db=db)
        yield db


def add_with_gaps(scene: Scene, rows: int) -> None:
    """Each row takes two ids, and has one."""
    scene.db.execute(
        """INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)
           SELECT %s, 'many' || n, (nextval('outbox_id_seq') * 0)::text FROM generate_series(1, %s) AS n""",
        (scene.topic, rows),
    )


def add_many(scene: Scene, rows: int) -> None:
    scene.db.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key) SELECT %s, 'many' || n %% 100 FROM generate_series(1, %s) AS n",
        (scene.topic, rows),
    )


def reads(scene: Scene) -> tuple[int, int]:
    """Scans of the outbox's primary key so far, and the index entries that they came to, dead ones included."""
    query = "SELECT idx_scan, idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_pkey'"
    row = scene.db.execute(query).fetchone()
    assert row is not None
    return row[0], row[1]


def wait_counted(scene: Scene) -> None:
    """A session counts what it did now and then, and when it ends."""
    eventually(lambda: not scene.sessions("harvester"), what="the end of all sessions")


def entries_read(scene: Scene, scans: int, since: tuple[int, int] | None = None) -> int:
    """How many index entries so many marks from now on come to, or a few more, of a harvester that is idle."""
    before = since or reads(scene)
    eventually(lambda: reads(scene)[0] >= before[0] + scans, 60, what="marks, as the server counts them")
    return reads(scene)[1] - before[1]


def wait_bookmark(running: Embedded, high: int) -> None:
    """Until a successor, after a stop in good order, may begin above this id."""
    low_water = running.harvester._life.parts.supervisor.machine.low_water  # type: ignore[union-attr]
    eventually(lambda: low_water.bookmark is not None and low_water.bookmark.high >= high, what="a bookmark")


@BOTH
def test_a_mark_looks_at_few_gaps_however_many_are_open(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, **FAR) as running, forgotten(scene) as db:
        running.wait_leading()
        add_with_gaps(scene, 3_000)
        scene.wait_left()
        assert not no_gaps(running)
        eventually(lambda: len(scan_of(running).ranges()) <= 20, what="a mark that looks at few gaps")
        db.commit()
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed")
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published()["forgotten"] == ["1"]
    assert len(scene.published()) == 3_001


@BOTH
def test_its_rows_come_before_those_that_follow_from_them(scene: Scene, marking: str) -> None:
    """However long no mark has looked at their gap: both are in one snapshot, and the later ones have higher ids."""
    with scene.embedded(marking=marking, **FAR) as running:
        running.wait_leading()
        for round_ in range(5):
            with forgotten(scene, f"k{round_}") as db:
                scene.add((f"other{round_}", "1"))
                scene.wait_left(*())
                eventually(lambda: not scan_of(running).ranges(), what="a gap that rests")
                db.commit()
                scene.add((f"k{round_}", "2"), (f"k{round_}", "3"))
                scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal([f"k{n}" for n in range(5)], 3) | causal([f"other{n}" for n in range(5)], 1)


@BOTH
def test_after_a_restart_nobody_reads_past_the_dead_rows(scene: Scene, marking: str) -> None:
    with forgotten(scene) as db:
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            add_many(scene, DEAD)
            scene.wait_left()
            wait_bookmark(running, 1 + DEAD)
        wait_counted(scene)
        before = reads(scene)
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            assert entries_read(scene, 20, before) < DEAD / 2
            scene.add(("after", "1"))
            scene.wait_left()
            db.commit()
            scene.wait_left()
            eventually(lambda: no_gaps(running), what="all gaps closed")
    published = scene.published()
    assert (published["forgotten"], published["after"], len(published)) == (["1"], ["1"], 102)


def test_a_bookmark_is_saved_by_a_mark_loop_that_is_busy_until_the_end(scene: Scene) -> None:
    with scene.embedded(**FAR) as running:
        running.wait_leading()
        scene.add(*(("k", str(number)) for number in range(10)))
        scene.wait_left()
        wait_bookmark(running, 10)
        marker = running.harvester._life.parts.supervisor.marker  # type: ignore[union-attr]
        with scene.writer() as db:
            db.execute("LOCK TABLE outbox")
            eventually(scene.waiting_for_locks, what="a mark that waits for the table")
            threading.Thread(target=running.harvester.stop).start()
            eventually(marker.ended.is_set, what="the end of the supervisor")
            db.rollback()
    assert scene.db.execute("SELECT closed_floor, holder FROM outbox_term").fetchone() == (10, None)


@BOTH
def test_without_a_bookmark_the_dead_rows_are_read_once(scene: Scene, marking: str) -> None:
    with forgotten(scene):
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            add_many(scene, DEAD)
            scene.wait_left()
        wait_counted(scene)
        scene.db.execute("UPDATE outbox_term SET closed_floor = NULL")
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            entries_read(scene, 5)
            assert entries_read(scene, 30) < DEAD / 2


@BOTH
def test_rows_that_commit_after_a_restart_below_the_bookmark_are_found(scene: Scene, marking: str) -> None:
    with scene.writer() as one, scene.writer() as two:
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            scene.add(("k", "1"), db=one)
            scene.add(("other", "1"))
            scene.add(("l", "1"), db=two)
            scene.add(("other", "2"))
            scene.wait_left()
            wait_bookmark(running, 4)
        one.commit()
        kept = scene.db.execute("SELECT closed_floor, open_ids FROM outbox_term").fetchone()
        assert kept is not None
        assert (kept[0], kept[1][-2:]) == (4, [3, 3])
        with scene.embedded(marking=marking, **FAR) as running:
            running.wait_leading()
            scene.wait_left()
            two.commit()
            scene.wait_left()
            eventually(lambda: no_gaps(running), what="all gaps closed")
    assert scene.published() == causal(("k", "l"), 1) | causal(("other",), 2)


@BOTH
def test_a_bookmark_of_other_ids_is_not_used(scene: Scene, marking: str) -> None:
    """The sequence was restarted while nobody led, and is further on than before by now."""
    with scene.embedded(marking=marking, **FAR) as running:
        running.wait_leading()
        scene.add(*(("k", str(number)) for number in range(1, 11)))
        scene.wait_left()
        wait_bookmark(running, 10)
    assert scene.db.execute("SELECT closed_floor FROM outbox_term").fetchone() == (10,)
    scene.db.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.add(*(("k", str(number)) for number in range(11, 23)))
    with scene.embedded(marking=marking, **FAR) as running:
        running.wait_leading()
        scene.wait_left()
    assert scene.published() == causal(("k",), 22)


@BOTH
def test_one_that_has_written_nothing_keeps_no_gap_open(scene: Scene, marking: str) -> None:
    """It holds the lock, and between two statements it has fetched no id for a row to come."""
    with scene.embedded(marking=marking, **FAR) as running, scene.writer() as db:
        running.wait_leading()
        db.execute("DELETE FROM outbox WHERE false")
        add_with_gaps(scene, 10)
        scene.wait_left()
        wait_listed(running)
        eventually(lambda: no_gaps(running), what="all gaps closed")
        scene.add(("late", "1"), db=db)
        scene.add(("other", "1"))
        scene.wait_left()
        for _ in range(3):
            wait_listed(running)
        db.commit()
        scene.wait_left()
    assert scene.published()["late"] == ["1"]


def test_a_bookmark_is_seldom_another_version_of_the_term_row(scene: Scene) -> None:
    """Under a forgotten writer each version stays, and every mark reads past them."""
    query = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox_term'"
    with scene.embedded(**FAR) as running:
        running.wait_leading()
        for number in range(3):
            scene.add(("k", str(number)))
            scene.wait_left()
            entries_read(scene, 20)
        row = scene.db.execute(query).fetchone()
    assert row is not None
    assert row[0] < 10

"""P35: ids mean rows only within their id space: one table, and one file of its sequence.

Acknowledgements are held back, so that purges, quarantines and gaps of the old space meet the rows of the new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from harvester import LeaderAcquired
from tests.support.harvesting import Scene
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

KEYS = 20
# Acknowledgements may take a while, and so may what waits for them.
PATIENT: dict[str, Any] = {"session_timeout": "30s", "drain_interval": "15s", "heartbeat_timeout": "10s"}

Change = Callable[[psycopg.Connection[Any]], None]


def truncate(db: psycopg.Connection[Any]) -> None:
    db.execute("TRUNCATE outbox RESTART IDENTITY")


def swap(db: psycopg.Connection[Any]) -> None:
    """Another table takes the name; its ids come from a sequence of its own, from 1 on."""
    with db.transaction():
        db.execute("ALTER TABLE outbox RENAME TO outbox_before")
        db.execute("CREATE TABLE outbox (LIKE outbox_before INCLUDING ALL)")
        db.execute("CREATE SEQUENCE outbox_second_seq OWNED BY outbox.id")
        db.execute("ALTER TABLE outbox ALTER id SET DEFAULT nextval('outbox_second_seq'::regclass)")


def swap_with_the_same_sequence(db: psycopg.Connection[Any]) -> None:
    """Another table takes the name, and its rows get the ids of the first one's again."""
    with db.transaction():
        db.execute("ALTER TABLE outbox RENAME TO outbox_before")
        db.execute("CREATE TABLE outbox (LIKE outbox_before INCLUDING ALL)")
        db.execute("SELECT setval('outbox_id_seq', 1, false)")


CHANGES = pytest.mark.parametrize(
    "change", [truncate, swap, swap_with_the_same_sequence], ids=["truncate", "swap", "swap-same-sequence"]
)


@pytest.fixture
def kafka(scene: Scene) -> Iterator[Proxy]:
    """A proxy in front of the broker."""
    with Proxy(scene.bootstrap, kafka=True) as proxy:
        proxy.open()
        yield proxy


def rows(name: str, count: int = KEYS) -> list[tuple[str | None, str | None]]:
    return [(f"{name}-{number}", name) for number in range(count)]


def incarnation(scene: Scene) -> Any:
    return scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()


@BOTH
@CHANGES
def test_what_is_acknowledged_late_purges_no_row_of_another_id_space(
    scene: Scene, kafka: Proxy, marking: str, change: Change
) -> None:
    producer = {"bootstrap.servers": kafka.address, "linger.ms": "50"}
    with scene.embedded(marking=marking, producer_kafka_config=producer, **PATIENT) as running:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        before = incarnation(scene)
        kafka.freeze(up=False)  # no acknowledgement comes back
        with scene.db.transaction():
            old = scene.add(*rows("old"))
        eventually(lambda: len(scene.published()) == 2 * KEYS, what="all of them in the topic")
        change(scene.db)
        with scene.db.transaction():
            new = scene.add(*rows("new", 2 * KEYS))
        assert set(new) > set(old), "no id was given out again: the test proves nothing"
        kafka.thaw()
        running.wait_for(LeaderAcquired, 2)
        scene.wait_left()
        published = scene.published()
        lost = [key for key, _ in rows("new", 2 * KEYS) if published.get(key) != ["new"]]
        assert not lost, f"{len(lost)} of {len(new)} were deleted and never published, or repeated"
        assert incarnation(scene) != before


def test_a_purge_that_waits_for_the_truncate_deletes_nothing_of_what_follows(scene: Scene, plan: Plan) -> None:
    """The DELETE is sent before the TRUNCATE commits, waits for its lock, and finds the ids given out again."""
    with scene.embedded(shards=1, **PATIENT) as running:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        scene.db.execute("ALTER SEQUENCE outbox_id_seq RESTART")
        running.wait_for(LeaderAcquired, 2)
        with plan.blocked("shard.reports") as reached:
            with scene.db.transaction():
                old = scene.add(*rows("old"))
            reached()
            with scene.writer() as other:
                other.execute("TRUNCATE outbox RESTART IDENTITY")
                threading.Timer(0.0, (plan.directory / "shard.reports.block").unlink).start()
                eventually(scene.waiting_for_locks, what="the purge that waits")
                assert scene.add(*rows("new"), db=other) == old
                other.commit()
            (plan.directory / "shard.reports.block").touch()  # the block expects to remove it
        scene.wait_left()
    published = scene.published()
    assert [key for key, _ in rows("new") if published.get(key) != ["new"]] == []


def test_a_quarantine_that_waits_for_the_truncate_takes_nothing_of_what_follows(scene: Scene, plan: Plan) -> None:
    plan.add(Fault("MSG_SIZE_TOO_LARGE", key="old-0", when="produce", times=1000))
    with scene.embedded(max_attempts=1, **PATIENT) as running:
        running.wait_leading()
        running.harvester.pause()
        old = scene.add(("old-0", "old"))
        with scene.writer() as other:
            other.execute("LOCK TABLE outbox IN SHARE MODE")
            running.harvester.resume()
            eventually(scene.waiting_for_locks, what="the quarantine that waits")
            other.execute("TRUNCATE outbox RESTART IDENTITY")
            assert scene.add(("new-0", "new"), db=other) == old
            eventually(scene.waiting_for_locks, what="the quarantine that waits, again")
            other.commit()
        scene.wait_left()
    assert scene.published().get("new-0") == ["new"]
    assert scene.quarantined() == {}


@BOTH
def test_gaps_wait_for_the_writers_of_the_table_that_bears_the_name_now(scene: Scene, marking: str) -> None:
    """Looked up for the table of before, nobody holds a lock, and the gap of a living writer closes."""
    with scene.embedded(marking=marking, head_scan_interval="1h", **PATIENT) as running:
        running.wait_leading()
        scene.add(("k", "0"))
        scene.wait_left()
        swap_with_the_same_sequence(scene.db)
        running.wait_for(LeaderAcquired, 2)
        with scene.writer() as slow:
            scene.add(("cause", "1"), db=slow)
            scene.add(("other", "1"))
            eventually(lambda: scene.published().get("other") == ["1"], what="the row above the gap")
            for number in range(5):  # each is a mark, and a list of who holds locks
                scene.add((f"more-{number}", "1"))
                eventually(lambda: len(scene.published()) == number + 3, what="the row, and so a mark")  # noqa: B023
            slow.commit()
        scene.wait_left()
    assert scene.published().get("cause") == ["1"]

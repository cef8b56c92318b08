"""Sessions that end, statements that are cancelled, wait too long, deadlock or fail for want of space, under load.

Nothing of it is the records' fault, and the acknowledgement of each arrives: nothing is repeated.
"""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from tests.support.harvesting import Scene, wait_leads
from tests.support.proxy import Proxy
from tests.support.wait import eventually
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

ROUNDS = 6
ROWS = 150  # between two blows
SHORT: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "4s", "drain_interval": "1500ms"}
both_ways = pytest.mark.parametrize("marking", ["memory", "table"])


@both_ways
@pytest.mark.parametrize("function", ["pg_terminate_backend", "pg_cancel_backend"])
def test_sessions_and_statements_end_at_any_moment(scene: Scene, function: str, marking: str) -> None:
    """A cancelled statement is what statement_timeout leaves; a terminated session is what an administrator does."""
    rng, struck = random.Random(7), 0
    with scene.cli(marking=marking) as running:
        wait_leads(running)
        with writing(scene) as load:
            for _ in range(ROUNDS):
                load.wait(ROWS)
                sessions = eventually(lambda: scene.sessions("harvester"), what="sessions")
                for pid in rng.sample(sessions, len(sessions) // 2 + 1):
                    struck += scene.db.execute(f"SELECT {function}(%s)", (pid,)).rowcount
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    assert struck >= ROUNDS
    figure(f"{function}_{marking}_repeats", repeats, "records")
    assert repeats == 0


@both_ways
def test_a_row_that_somebody_else_has_locked(scene: Scene, marking: str) -> None:
    """The mark (in the table) or the purge (in memory) runs into its timeout; it goes through when the lock is gone."""
    scene.add(("locked", "1:0:0:"), ("locked", "2:0:0:"))
    with scene.writer() as other:
        other.execute("SELECT FROM outbox WHERE kafka_key = 'locked' FOR UPDATE")
        with scene.cli(marking=marking, **SHORT) as running:
            wait_leads(running)
            with writing(scene, keys=20) as load:
                running.wait_for_line("statement timeout" if marking == "table" else "holds a lock on record")
                load.wait(ROWS)
                if marking == "memory":  # I7: it costs its own key only
                    goal = load.committed - ROWS // 3
                    eventually(lambda: len(scene.log()) > goal, what="records of other keys", interval_s=0.2)
                other.rollback()
                load.wait(ROWS)
            scene.db.execute("INSERT INTO written VALUES ('locked', 2)")
            repeats = verify(scene, load)
            assert running.stop() == 0
    figure(f"locked_row_{marking}_repeats", repeats, "records")
    assert repeats == 0


def test_a_deadlock_whose_victim_is_a_purge(scene: Scene, kafka: Proxy) -> None:
    """The purge locks ascending; whoever locks descending meets it. The server picks the one that waited longer."""
    limits: dict[str, Any] = {"session_timeout": "20s", "drain_interval": "10s"}  # acknowledgements may take 9.5 s
    # Below the lock_timeout of a purge, which would otherwise end the wait first.
    scene.db.execute(f"ALTER DATABASE {scene.db.info.dbname} SET deadlock_timeout = '200ms'")
    with scene.cli("--shards", "1", producer_kafka_config={"bootstrap.servers": kafka.address}, **limits) as running:
        wait_leads(running)
        with writing(scene) as load:
            load.wait(ROWS)
            for _ in range(5):
                kafka.freeze(up=False)  # what is sent stays in the outbox
                load.wait(ROWS)
                with scene.writer() as rude:
                    rude.execute("SET deadlock_timeout = '30s'")
                    ids = scene.left()
                    rude.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (ids[len(ids) // 4],))
                    kafka.thaw()
                    eventually(scene.waiting_for_locks, what="a purge that waits")
                    _lock_all(rude, ids[: len(ids) // 4])
                if "deadlock detected" in running.output:
                    break
            load.wait(ROWS)
        running.wait_for_line("deadlock detected")
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("deadlock_repeats", repeats, "records")
    assert repeats == 0


def _lock_all(rude: psycopg.Connection[Any], ids: list[int]) -> None:
    for record_id in reversed(ids):
        rude.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (record_id,))


@both_ways
def test_writes_that_the_server_refuses_for_a_while(scene: Scene, marking: str) -> None:
    """Disk full, deadlock, serialization failure, out of memory: of DELETE, and of UPDATE where marks write."""
    scene.db.execute("""
        CREATE TABLE trouble (code text);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE wanted text := (SELECT code FROM trouble);
        BEGIN
            IF wanted IS NOT NULL THEN
                RAISE EXCEPTION 'refused by the test with %', wanted USING ERRCODE = wanted;
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER refuse AFTER UPDATE OR DELETE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION refuse()""")
    with scene.cli(marking=marking) as running:
        wait_leads(running)
        with writing(scene) as load:
            for code in ("53100", "40P01", "40001", "53200"):
                load.wait(ROWS)
                scene.db.execute("INSERT INTO trouble VALUES (%s)", (code,))
                running.wait_for_line(f"refused by the test with {code}")
                load.wait(ROWS)
                scene.db.execute("DELETE FROM trouble")
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure(f"refused_writes_{marking}_repeats", repeats, "records")
    assert repeats == 0

"""P10: a harvester that reads on from where it was passes over no row, however late its id appears.

The periodic look at the whole table is put off beyond the test, but where it is what is tested.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harvester import LeaderAcquired
from tests.support.harvesting import Embedded, Scene, causal
from tests.support.marking import BOTH, no_gaps, scan_of, wait_listed
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

FAR: dict[str, Any] = {"head_scan_interval": "10m", "shards": 1}
EXPLICIT = "INSERT INTO outbox (id, kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s, %s)"


def pass_by(scene: Scene, running: Embedded, first: int, rounds: int = 3) -> int:
    """Publish rows above whatever gap there is, and let the scan look at it again and again.

    Returns the next free number.
    """
    for number in range(first, first + rounds):
        scene.add(("other", str(number)))
        scene.wait_left()
        wait_listed(running)
    return first + rounds


@BOTH
def test_rows_that_commit_late_are_found_below_what_was_read(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, **FAR) as running, scene.writer() as one, scene.writer() as two:
        running.wait_leading()
        scene.add(("k", "1"), db=one)
        scene.add(("l", "1"), ("l", "2"), db=two)
        number = pass_by(scene, running, 1)
        one.commit()
        scene.wait_left()
        scene.add(("k", "2"), db=one)
        number = pass_by(scene, running, number)
        two.commit()
        scene.wait_left()
        one.commit()
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed")
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("k", "l"), 2) | causal(("other",), number - 1)


@BOTH
def test_gaps_of_rolled_back_rows_close(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, **FAR) as running, scene.writer() as other:
        running.wait_leading()
        scene.add(*(("never", str(number)) for number in range(5)), db=other)
        number = pass_by(scene, running, 1)
        assert not no_gaps(running)
        other.rollback()
        eventually(lambda: no_gaps(running), what="all gaps closed")
    assert scene.published() == causal(("other",), number - 1)


@BOTH
def test_a_row_whose_trigger_is_slow_has_an_id_and_no_transaction_yet(scene: Scene, marking: str) -> None:
    """`nextval` takes no transaction id as a rule, so those alone would close its gap."""
    # The rule: it takes one when it writes a log record, one in 32 times and after a checkpoint. Here it never does.
    scene.db.execute("ALTER SEQUENCE outbox_id_seq SET UNLOGGED")
    scene.db.execute(
        """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN
               IF NEW.kafka_key = 'slow' THEN PERFORM pg_advisory_xact_lock(4711); END IF;
               RETURN NEW;
           END $$"""
    )
    scene.db.execute("CREATE TRIGGER slow BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION slow()")
    with (
        scene.embedded(marking=marking, **FAR) as running,
        scene.writer() as slow,
        ThreadPoolExecutor(1) as pool,
        scene.writer() as holder,  # closed first, so that nothing waits for it at the end of a test that fails
    ):
        running.wait_leading()
        number = pass_by(scene, running, 1)
        holder.execute("SELECT pg_advisory_xact_lock(4711)")
        inserting = pool.submit(scene.add, ("slow", "1"), db=slow)
        eventually(lambda: scene.waiting_for_locks() == 1, what="the trigger waits")
        xids = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND backend_xid IS NOT NULL"
        number = pass_by(scene, running, number)
        assert scene.db.execute(xids, (slow.info.backend_pid,)).fetchone() == (0,)
        holder.rollback()
        inserting.result(30)
        number = pass_by(scene, running, number)
        slow.commit()
        scene.wait_left()
    assert scene.published() == causal(("slow",), 1) | causal(("other",), number - 1)


@BOTH
def test_ids_written_by_hand_far_above_hide_nothing_below(scene: Scene, marking: str) -> None:
    """All ids between are still to be given out."""
    with scene.embedded(marking=marking, **FAR) as running:
        running.wait_leading()
        scene.add(("k", "1"))
        scene.db.execute(EXPLICIT, (10**12, scene.topic, "hand", "1"))
        scene.wait_left()
        eventually(lambda: scan_of(running).high == 10**12, what="the scan above it")
        number = pass_by(scene, running, 1, rounds=6)
        scene.add(("k", "2"))
        scene.db.execute(EXPLICIT, (10**12 + 7, scene.topic, "hand", "2"))
        scene.add(("k", "3"))
        scene.wait_left()
    assert scene.published() == causal(("k",), 3) | causal(("hand",), 2) | causal(("other",), number - 1)


@BOTH
def test_a_sequence_that_is_set_far_ahead(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, **FAR) as running, scene.writer() as late:
        running.wait_leading()
        scene.add(("k", "1"))
        scene.add(("late", "1"), db=late)
        scene.wait_left()
        scene.db.execute("SELECT setval('outbox_id_seq', 1000000000)")
        number = pass_by(scene, running, 1)
        late.commit()
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed, that of a thousand million ids among them")
        scene.add(("k", "2"))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("k",), 2) | causal(("late",), 1) | causal(("other",), number - 1)


@BOTH
def test_an_id_that_was_fetched_early_is_found_by_a_look_at_the_whole_table(
    scene: Scene, marking: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing in the database tells that it is still to come, so its gap closes."""
    row = scene.db.execute("SELECT nextval('outbox_id_seq')").fetchone()
    assert row is not None
    with (
        caplog.at_level(logging.WARNING, "harvester"),
        scene.embedded(marking=marking, head_scan_interval="500ms", shards=1) as running,
    ):
        running.wait_leading()
        scene.add(("k", "1"))
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed")
        with scene.db.transaction():
            scene.db.execute(EXPLICIT, (row[0], scene.topic, "early", "1"))
            scene.db.execute(EXPLICIT, (-5, scene.topic, "below", "1"))  # where no sequence gives ids
        scene.add(("k", "2"))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("k",), 2) | causal(("early", "below"), 1)
    assert "a look at the whole table found 2 rows" in caplog.text


@BOTH
def test_a_table_that_is_emptied_and_its_ids_begin_again(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, **FAR) as running:
        running.wait_leading()
        incarnation = scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()
        for number in range(1, 11):
            scene.add(("k", str(number)))
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed")
        scene.db.execute("TRUNCATE outbox RESTART IDENTITY")
        assert scene.add(("k", "11"), ("l", "1")) == [1, 2]
        scene.wait_left()
        running.wait_for(LeaderAcquired, 2)
        assert scene.db.execute("SELECT incarnation FROM outbox_term").fetchone() != incarnation
        scene.add(("k", "12"))
        scene.wait_left()
    assert scene.published() == causal(("k",), 12) | causal(("l",), 1)

"""P3 and P4: what a mark shows is compared with what is known by then, and no row is passed over."""

from __future__ import annotations

import threading
from typing import Any

from harvester.outbox.tables import OutboxTable
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from tests.support.harvesting import Scene, causal, wait_leads
from tests.support.hooks import Plan
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

TABLE = OutboxTable.parse("outbox")


@BOTH
def test_a_purge_that_commits_after_a_marks_snapshot_is_no_reason_to_send_again(
    scene: Scene, plan: Plan, marking: str
) -> None:
    """P3: after a remark the scan starts from the head and shows what is on the wire; it is settled meanwhile."""
    with scene.embedded(marking=marking, queue_timeout="1s", shards=1) as running, scene.writer() as other:
        running.wait_leading()
        with plan.blocked("marker.marked") as reached:
            with scene.db.transaction():
                (first, second) = scene.add(("a", "1"), ("a", "2"))
            reached()
            other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (first,))
        eventually(lambda: scene.waiting_for_locks() == 1, what="the purge, after the acknowledgement")
        with plan.blocked("marker.marked") as reached:
            running.wait_refreshed("queue timeout")
            reached()  # the new scan has read the table
            other.rollback()
            scene.wait_left(second)
            eventually(lambda: running.harvester.in_flight == 0, what="the settling")
        scene.wait_left()
    assert scene.published() == causal(("a",), 2)


@BOTH
def test_a_result_from_before_a_remark_is_discarded_whole(scene: Scene, plan: Plan, marking: str) -> None:
    """P4: its rows are found again by the marks after the remark, and sent once."""
    with scene.embedded(marking=marking, queue_timeout="1s", shards=1) as running, scene.writer() as other:
        running.wait_leading()
        with plan.blocked("marker.marked") as reached:
            with scene.db.transaction():
                (first, _) = scene.add(("a", "1"), ("a", "2"))
            reached()
            other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (first,))
        eventually(lambda: scene.waiting_for_locks() == 1, what="the purge, after the acknowledgement")
        with plan.blocked("marker.marked") as reached:
            scene.add(("b", "1"), ("b", "2"))
            reached()  # a mark of the old leader id has read some of them …
            running.wait_refreshed("queue timeout")
        other.rollback()
        scene.add(("b", "3"))
        scene.wait_left()
    assert scene.published() == causal(("a",), 2) | causal(("b",), 3)


@BOTH
def test_a_late_commit_and_its_successor_in_one_mark_are_sent_in_order(scene: Scene, plan: Plan, marking: str) -> None:
    """P4: id 1 commits late, then 5 of the same key; whoever asks for what is above 4 gets 5 without 1."""
    with scene.embedded(marking=marking, head_scan_interval="10m") as running, scene.writer() as late:
        running.wait_leading()
        (low,) = scene.add(("k", "1"), db=late)
        scene.add(*((f"other{number}", "1") for number in range(3)))
        scene.wait_left()
        with plan.blocked("marker.mark") as reached:
            reached()
            late.commit()
            (high,) = scene.add(("k", "2"))
            assert high > low + 3
        scene.wait_left()
    assert scene.published()["k"] == ["1", "2"]


@BOTH
def test_a_harvester_drains_what_several_writers_write(scene: Scene, marking: str) -> None:
    """Each record once and in order, while writers commit late, roll back, and write several rows at once."""
    load = Load(
        records=5000, topics=(scene.topic,), keys=50, writers=4, rows_per_transaction=3, late=0.1, rollbacks=0.1
    )
    limits: dict[str, Any] = {"marking": marking, "head_scan_interval": "10m"}
    with scene.cli(**limits) as running:
        wait_leads(running)
        pumping = threading.Thread(target=pump, args=(scene.dsn, TABLE, load))
        pumping.start()
        pumping.join(120)
        assert not pumping.is_alive()
        scene.wait_left(timeout_s=60)
        assert running.stop() == 0
        assert not any("marks again" in line or "a look at the whole table" in line for line in running.stderr)
    verdict = verify(scene.dsn, TABLE, scene.config().common_options()).verdict
    assert verdict.inserted == verdict.delivered == 5000
    assert (verdict.lost, verdict.duplicates, verdict.order_violations, verdict.unexpected) == (0, 0, 0, 0)
    assert verdict.findings == ()

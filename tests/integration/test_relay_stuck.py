"""What is stuck costs its own key only, where the bounds that all keys share are near (I7)."""

from __future__ import annotations

from tests.support.harvesting import Scene, causal
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

# Every second id is missing for good, as after rollbacks; in one transaction, so that nobody ever sees those rows.
_WITH_GAPS = """
    WITH added AS (
        INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
        SELECT now(), %(topic)s, 'stuck', n, '{}', '{}' FROM generate_series(1, %(rows)s) AS n RETURNING id)
    SELECT count(*) FROM added"""


def test_one_key_does_not_use_up_the_window(scene: Scene) -> None:
    """Its first row is locked by somebody, so its purge waits; as many rows as may be queued stand behind it."""
    with scene.writer() as other:
        ids = scene.add(*(("stuck", str(number)) for number in range(1, 101)))
        scene.add(("other", "1"))
        other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (ids[0],))
        with scene.embedded(max_in_flight_records=50, queue_timeout="5m"):
            eventually(lambda: "other" in scene.published(), what="the other key's record")
            assert scene.published()["stuck"] == ["1"]
            other.rollback()
            scene.wait_left()
    assert scene.published() == causal(("stuck",), 100) | causal(("other",), 1)


@BOTH
def test_rows_that_wait_between_many_gaps_do_not_keep_marks_from_going_on(
    scene: Scene, plan: Plan, marking: str
) -> None:
    """A writer stands still in its transaction, so no gap closes; rows of a stuck key wait between them.

    Gaps become too many and are joined; what lies between them is read again, and must not be all that is read.
    """
    plan.add(Fault("_MSG_TIMED_OUT", key="stuck", times=100_000))
    with scene.writer() as still:
        scene.add(("still", "1"), db=still)
        with scene.db.transaction():
            scene.db.execute(_WITH_GAPS, {"topic": scene.topic, "rows": 1200})
            scene.db.execute("DELETE FROM outbox WHERE id %% 2 = 0", ())
        scene.add(("other", "1"))
        with scene.embedded(marking=marking, head_scan_interval="10m"):
            eventually(lambda: "other" in scene.published(), what="the other key's record")
            still.rollback()
            plan.heal()
            eventually(lambda: scene.left() == [], 120.0, "an empty outbox")
    assert set(scene.published()) == {"stuck", "other"}

"""What a running harvester tells of one key."""

from __future__ import annotations

import pytest

from harvester.errors import HarvesterError
from harvester.neli.fake import FakeGroup
from tests.support.harvesting import Scene
from tests.support.hooks import Fault, Plan
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

REFUSED = "UNKNOWN_TOPIC_OR_PART"


def test_a_key_whose_first_record_is_tried_again(scene: Scene, plan: Plan) -> None:
    plan.add(Fault(REFUSED, key="stuck", times=1_000_000))
    with scene.embedded(max_attempts=1_000_000, retry_backoff="60s", retry_backoff_max="60s") as running:
        running.wait_leading()
        stuck = scene.add(("stuck", "1"), ("stuck", "2"), ("stuck", "3"))
        scene.add(("free", "1"))
        scene.wait_left(*stuck)

        def waits() -> bool:
            said = running.harvester.key("stuck")
            return said.retry_in_s is not None and (said.under_way, said.waiting) == (0, 3)

        eventually(waits, what="all three wait for the retry")
        said = running.harvester.key("stuck")
        assert said.retry_in_s is not None
        assert 0 < said.retry_in_s <= 60.0
        assert (said.leads, said.held, said.rows, said.capped) == (True, False, 3, False)
        assert said.oldest_id == stuck[0]
        assert said.oldest_age_s is not None
        assert (said.quarantined, said.newest_error, said.trouble) == (0, None, None)
        free = running.harvester.key("free")
        assert (free.under_way, free.waiting, free.retry_in_s, free.rows) == (0, 0, None, 0)
        plan.heal()


def test_a_key_with_a_record_in_quarantine(scene: Scene, plan: Plan) -> None:
    plan.add(Fault(REFUSED, key="bad", times=1))
    with scene.embedded(max_attempts=1) as running:
        running.wait_leading()
        scene.add(("bad", "1"), ("bad", "2"))
        scene.wait_left()
        said = running.harvester.key("bad")
    assert (said.rows, said.oldest_id, said.quarantined) == (0, None, 1)
    assert said.newest_error is not None
    assert REFUSED in said.newest_error


def test_a_standby_tells_what_the_database_does(scene: Scene) -> None:
    with scene.embedded(group=FakeGroup(elected=False)) as running:
        (row,) = scene.add(("k", "1"))
        said = running.harvester.key("k")
    assert (said.leads, said.rows, said.oldest_id) == (False, 1, row)


def test_what_the_database_cannot_tell(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        said = running.harvester.key("a\0b")
        assert said.rows is None
        assert said.trouble is not None
        assert "invalid byte sequence" in said.trouble
        with pytest.raises(HarvesterError, match="is not valid text"):
            running.harvester.key("\ud800")
        with scene.db.transaction():
            scene.db.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
            said = running.harvester.key("k")
    assert said.rows is None
    assert said.trouble == "no answer within 3 s: the outbox is large, or locked"

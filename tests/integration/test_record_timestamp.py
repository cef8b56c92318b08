"""`record_timestamp`: what a consumer sees as the time of a record, in both modes of delivery."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.support.harvesting import Scene

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

LONG_AGO = datetime(2020, 2, 29, 12, 34, 56, 789_123, tzinfo=UTC)
BEFORE_1970 = datetime(1969, 7, 20, 20, 17, tzinfo=UTC)


def add(scene: Scene, value: str, created: datetime) -> None:
    scene.db.execute(
        """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
           VALUES (%s, %s, 'k', %s, '{}', '{}')""",
        (created, scene.topic, value),
    )


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_create_time(scene: Scene, delivery: str) -> None:
    add(scene, "dated", LONG_AGO)
    add(scene, "before Kafka's first moment", BEFORE_1970)
    with scene.embedded(until_empty=True, delivery=delivery, record_timestamp="create_time") as running:
        assert running.harvester.wait(60)
    assert [record.created_ms for record in scene.log()] == [1_582_979_696_789, 1]
    assert scene.quarantined() == {}


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_when_it_was_produced(scene: Scene, delivery: str) -> None:
    add(scene, "dated", LONG_AGO)
    before = datetime.now(UTC).timestamp() * 1000
    with scene.embedded(until_empty=True, delivery=delivery) as running:
        assert running.harvester.wait(60)
    (record,) = scene.log()
    assert record.created_ms >= before - 1

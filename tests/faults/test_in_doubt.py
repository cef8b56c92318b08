"""P36: a record whose delivery timed out stays with its producer, since its bytes may still be in the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harvester.delivery.partitioner import shard_of
from tests.support.harvesting import Embedded, Scene
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

PRODUCE = 0  # the API key
# It waits for long, so that only the change of shards has it sent again.
PATIENT: dict[str, Any] = {"shards": 2, "retry_backoff": "30s", "retry_backoff_max": "30s"}


@pytest.fixture
def kafka(scene: Scene) -> Iterator[Proxy]:
    with Proxy(scene.bootstrap, kafka=True) as proxy:
        proxy.open()
        yield proxy


def key_that_moves(before: int, after: int) -> str:
    """Of a shard that stays when their number changes, but is not its shard any more."""
    return next(
        key
        for key in (f"key-{number}" for number in range(100))
        if shard_of(key.encode(), 0, before) != shard_of(key.encode(), 0, after)
        and shard_of(key.encode(), 0, before) < after
    )


def key_of_shard(shard: int, shards: int) -> str:
    return next(key for key in (f"key-{n}" for n in range(100)) if shard_of(key.encode(), 0, shards) == shard)


def time_out(scene: Scene, kafka: Proxy, running: Embedded, key: str) -> None:
    """The network keeps the request with the first record of the key, and its delivery times out."""
    scene.add(("warm", "0"), (key, "0"))
    scene.wait_left()
    kafka.keep(PRODUCE)
    scene.add((key, "x"))
    eventually(lambda: kafka.kept == 1, what="the request, held back")
    kafka.pass_on()
    eventually(lambda: sum(shard.retries for shard in running.harvester.status().shards) > 0, what="a timeout")


def options(kafka: Proxy) -> dict[str, str]:
    return {"bootstrap.servers": kafka.address, "delivery.timeout.ms": "1000"}


def test_a_change_of_shards_leaves_it_with_its_producer(scene: Scene, kafka: Proxy) -> None:
    key = key_that_moves(2, 3)
    with scene.embedded(producer_kafka_config=options(kafka), **PATIENT) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        assert running.harvester.scale(3, 20.0)
        running.wait_ready()
        scene.add((key, "y"))
        scene.wait_left()
        kafka.deliver()  # the bytes of the first attempt
        scene.add((key, "z"), ("warm", "1"))
        scene.wait_left()
    values = [value for value in scene.published()[key] if value is not None]
    assert sorted(values) == values, "the first record came again after its successor"


def test_shards_that_would_end_are_kept_while_they_have_one(scene: Scene, kafka: Proxy) -> None:
    key = key_of_shard(1, 2)
    with scene.embedded(producer_kafka_config=options(kafka), **PATIENT) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        assert running.harvester.scale(1, 20.0) is False
        scene.add((key, "y"))
        kafka.deliver()
        scene.wait_left()
        assert running.harvester.scale(1, 20.0)
    assert scene.published()[key][-1] == "y"


@pytest.mark.parametrize("operation", ["remark", "pause and resume"])
def test_what_drops_all_that_is_queued_leaves_it_with_its_producer(scene: Scene, kafka: Proxy, operation: str) -> None:
    """Read again together with many others, so that its key is worth another shard now."""
    key = key_that_moves(1, 2)
    with scene.embedded(producer_kafka_config=options(kafka), records_per_shard=4, **PATIENT) as running:
        running.wait_leading()
        scene.add(("warm", "0"), (key, "0"))
        scene.wait_left()
        kafka.keep(PRODUCE)
        scene.add((key, "x"))
        eventually(lambda: kafka.kept == 1, what="the request, held back")
        scene.add(*((f"other-{number}", "0") for number in range(16)))
        shards = running.harvester.status
        eventually(lambda: sum(shard.retries for shard in shards().shards) >= 17, what="every delivery timed out")
        kafka.pass_on()
        if operation == "remark":
            running.harvester.remark()
        else:
            assert running.harvester.pause()
            assert running.harvester.resume()
        scene.add((key, "y"))
        scene.wait_left()
        kafka.deliver()
        scene.add((key, "z"), ("warm", "1"))
        scene.wait_left()
    values = [value for value in scene.published()[key] if value is not None]
    assert sorted(values) == values, "the first record came again after its successor"

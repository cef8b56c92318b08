"""P36: a record whose delivery timed out stays with its producer, since its bytes may still be in the network."""

from __future__ import annotations

from typing import Any

from harvester.delivery.partitioner import shard_of
from tests.support.harvesting import Embedded, Scene
from tests.support.hooks import Plan, sender
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

PRODUCE = 0  # the API key
# It waits for long, so that only what the test does has it sent again.
PATIENT: dict[str, Any] = {"shards": 2, "retry_backoff": "30s", "retry_backoff_max": "30s"}
SETTLES_S = 90.0  # on a busy machine another delivery may time out, and wait as long
# One shard is in use until more than this is under way.
SPREADING: dict[str, Any] = {**PATIENT, "records_per_shard": 10}


def key_that_moves(before: int, after: int) -> str:
    """Of a shard that stays when their number changes, but is not its shard any more."""
    return next(
        key
        for key in (f"key-{number}" for number in range(100))
        if shard_of(key.encode(), 0, before) != shard_of(key.encode(), 0, after)
        and shard_of(key.encode(), 0, before) < after
    )


def keys_of_shard(shard: int, shards: int) -> list[str]:
    return [key for key in (f"key-{n}" for n in range(100)) if shard_of(key.encode(), 0, shards) == shard]


def time_out(scene: Scene, kafka: Proxy, running: Embedded, key: str) -> None:
    """The network keeps the request with the first record of the key, and its delivery times out."""

    def retries() -> int:
        return sum(shard.retries for shard in running.harvester.status().shards)

    scene.add(("warm", "0"), (key, "0"))
    scene.wait_left(timeout_s=SETTLES_S)
    before = retries()
    kafka.keep(PRODUCE)
    scene.add((key, "x"))
    eventually(lambda: kafka.kept == 1, what="the request, held back")
    kafka.pass_on()
    eventually(lambda: retries() > before, what="a timeout")


def options(kafka: Proxy) -> dict[str, str]:
    return {"bootstrap.servers": kafka.address, "delivery.timeout.ms": "2000"}


def arrive(kafka: Proxy) -> None:
    """The bytes of the first attempt reach the broker, which answers."""
    kafka.deliver()
    eventually(lambda: kafka.delivered, what="the broker's answer")


def assert_order(scene: Scene, key: str) -> None:
    values = [value for value in scene.published()[key] if value is not None]
    assert sorted(values) == values, "the first record came again after its successor"


def crowd(scene: Scene, key: str, others: list[str]) -> None:
    """The successor of the record in doubt, and so much with it in one mark that the second shard is put to use.

    All these keys belong there, also that of the record, which the first shard sent while it was the only one in use.
    So nothing but the record itself can tell brokers of the first producer's new epoch, and its old bytes are refused
    only if the same producer has sent it again.
    """
    with scene.db.transaction():
        scene.add(*((other, "0") for other in others), (key, "y"))


def assert_it_stayed(scene: Scene, key: str, others: list[str]) -> None:
    """Its shard sent it again; all that came with it but its successor is from the other one."""
    senders = {(record.key, record.value): sender(record.headers) for record in scene.log()}
    own = senders[b"warm", b"0"]
    assert senders[key.encode(), b"x"] == own
    assert own not in {senders[other.encode(), b"0"] for other in others}


def test_a_change_of_shards_leaves_it_with_its_producer(scene: Scene, kafka: Proxy) -> None:
    key = key_that_moves(2, 3)
    with scene.embedded(producer_kafka_config=options(kafka), **PATIENT) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        assert running.harvester.scale(3, 20.0)
        running.wait_ready()
        scene.add((key, "y"))
        scene.wait_left(timeout_s=SETTLES_S)
        arrive(kafka)
        scene.add((key, "z"), ("warm", "1"))
        scene.wait_left(timeout_s=SETTLES_S)
    assert_order(scene, key)


def test_shards_that_would_end_are_kept_while_they_have_one(scene: Scene, kafka: Proxy) -> None:
    key, *_ = keys_of_shard(1, 2)
    with scene.embedded(producer_kafka_config=options(kafka), **PATIENT) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        assert running.harvester.scale(1, 20.0) is False
        scene.add((key, "y"))
        kafka.deliver()
        scene.wait_left(timeout_s=SETTLES_S)
        assert running.harvester.scale(1, 20.0)
    assert scene.published()[key][-1] == "y"


def test_a_remark_leaves_it_with_its_producer(scene: Scene, kafka: Proxy, plan: Plan) -> None:
    plan.sign()
    key, *others = keys_of_shard(1, 2)
    with scene.embedded(producer_kafka_config=options(kafka), **SPREADING) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        with plan.blocked("marker.marked") as reached:
            crowd(scene, key, others)
            reached()  # what this mark has read is dropped, and read again together with the record in doubt
            running.harvester.remark()
            running.wait_refreshed("asked for")
        scene.wait_left(timeout_s=SETTLES_S)
        arrive(kafka)
    assert_order(scene, key)
    assert_it_stayed(scene, key, others)


def test_a_pause_leaves_it_with_its_producer(scene: Scene, kafka: Proxy, plan: Plan) -> None:
    plan.sign()
    key, *others = keys_of_shard(1, 2)
    with scene.embedded(producer_kafka_config=options(kafka), **SPREADING) as running:
        running.wait_leading()
        time_out(scene, kafka, running, key)
        assert running.harvester.pause()
        crowd(scene, key, others)
        assert running.harvester.resume()
        scene.wait_left(timeout_s=SETTLES_S)
        arrive(kafka)
    assert_order(scene, key)
    assert_it_stayed(scene, key, others)

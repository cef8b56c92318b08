"""As many shards as the load is worth: keys go from one to another, and keep their order."""

from __future__ import annotations

from tests.support.families import family, slice_of
from tests.support.harvesting import Scene
from tests.support.hooks import sender

pytest_plugins = ["tests.support.scenes"]


def test_keys_that_change_their_shard_keep_their_order(scene: Scene) -> None:
    """Both shards for a burst of all keys, one for a key at a time: the keys of the second one go back and forth."""
    scene.plan.sign()
    keys, count = [f"key-{number}" for number in range(12)], 0
    with family(scene, "one", hooks=True, records_per_shard=6) as one:
        one.wait_leads()
        for _ in range(3):
            with scene.db.transaction():
                for _ in range(30):
                    count += 1
                    scene.add(*((key, str(count)) for key in keys))
            scene.wait_left()
            for _ in range(3):
                count += 1
                for key in keys:
                    scene.add((key, str(count)))
                    scene.wait_left()
        one.stop()
    assert scene.published() == {key: [str(number) for number in range(1, count + 1)] for key in keys}
    senders: dict[str, set[int]] = {key: set() for key in keys}
    for record in scene.log():
        senders[(record.key or b"").decode()].add(sender(record.headers) or 0)
    assert {key: len(found) for key, found in senders.items()} == {key: 1 + slice_of(key) for key in keys}


def test_one_shard_is_enough_for_little(scene: Scene) -> None:
    scene.plan.sign()
    with family(scene, "one", hooks=True, records_per_shard=200) as one:
        one.wait_leads()
        for number in range(20):
            scene.add(*((f"key-{key}", str(number)) for key in range(10)))
            scene.wait_left()
        assert len({sender(record.headers) for record in scene.log()}) == 1
        one.stop()

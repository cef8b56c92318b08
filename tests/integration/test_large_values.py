"""Values that are too large for Kafka lie in a store, and their records refer to them: the relay, in both modes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from harvester import ClaimChecks, StoreSettings
from harvester.claim_check.reference import HEADER, read
from harvester.origin import decode, find
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.hooks import Plan
from tests.support.large_values import directory, s3
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]
__all__ = ["directory", "s3"]

MODES = pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
SMALL: dict[str, Any] = {"producer_kafka_config": {"message.max.bytes": "10000"}}


def large(number: int) -> str:
    return f"{number}:".ljust(20_000, "x")


def oversize(store: StoreSettings, **given: Any) -> dict[str, Any]:
    """Settings of a harvester that puts away what its producer would refuse."""
    return {
        **SMALL,
        "oversize": {
            "policy": "claim-check", "store": store.url, "s3_endpoint": store.endpoint, "s3_region": store.region,
            **given,
        },
    }  # fmt: skip


def values(scene: Scene, store: StoreSettings) -> dict[str | None, list[str]]:
    """What a consumer reads, by key and in the order of the log, with the values that were put away."""
    checks, found = ClaimChecks(store), dict[str | None, list[str]]()
    for record in scene.log():
        key = record.key.decode() if record.key is not None else None
        found.setdefault(key, []).append((checks.value(record.value, record.headers) or b"").decode())
    return found


def files(store: StoreSettings) -> list[str]:
    root = Path(store.url.removeprefix("file://"))
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@BOTH
@MODES
def test_large_values_are_put_away_and_keys_keep_their_order(
    scene: Scene, directory: StoreSettings, delivery: str, marking: str
) -> None:
    rows = [(f"k{n % 3}", large(n) if n % 2 else str(n)) for n in range(60)]
    unkeyed = large(100)
    with scene.embedded(delivery=delivery, marking=marking, **oversize(directory)) as running:
        scene.add(*rows, (None, unkeyed))
        scene.wait_left()
        stored = sum(shard.stored for shard in running.harvester.status().shards)
        eventually(lambda: sum(s.stored for s in running.harvester.status().shards) == 31, what=f"31, not {stored}")
    expected: dict[str | None, list[str]] = {None: [unkeyed]}
    for key, value in rows:
        expected.setdefault(key, []).append(value)
    assert values(scene, directory) == expected
    assert len(files(directory)) == 31
    assert scene.quarantined() == {}
    for record in scene.log():
        origin = decode(find(record.headers))
        assert origin is not None
        reference = read(record.value, record.headers)
        if reference is not None:
            assert reference.name.startswith(f"{scene.topic}/{origin.id}-")
            assert len(record.value or b"") < 1000


@MODES
def test_while_the_store_is_away_its_keys_wait_and_others_go_on(
    scene: Scene, directory: StoreSettings, delivery: str
) -> None:
    root = Path(directory.url.removeprefix("file://"))
    away = root.rename(root.with_name("away"))
    with scene.embedded(delivery=delivery, max_attempts=1, **oversize(directory)) as running:
        waiting = scene.add(("a", large(1)), ("a", "2"), ("b", large(3)), ("b", large(4)), (None, large(5)))
        scene.add(*((f"other{n}", str(n)) for n in range(50)))
        scene.wait_left(*waiting)
        eventually(lambda: sum(shard.retries for shard in running.harvester.status().shards) > 6, what="retries")
        assert scene.left() == waiting
        assert scene.quarantined() == {}
        away.rename(root)
        scene.wait_left()
    found = values(scene, directory)
    assert (found["a"], found["b"], found[None]) == ([large(1), "2"], [large(3), large(4)], [large(5)])
    assert len(found) == 53


@MODES
def test_a_shard_that_dies_between_store_and_kafka_leaves_one_object(
    scene: Scene, plan: Plan, directory: StoreSettings, delivery: str
) -> None:
    with scene.embedded(delivery=delivery, **oversize(directory)):
        with plan.blocked("shard.stored") as somebody_comes:
            scene.add(("a", large(1)), ("a", large(2)))
            somebody_comes()
            before = files(directory)
            assert len(before) == 1
            os.kill(int((plan.directory / "shard.stored.reached").read_text()), signal.SIGKILL)
        scene.wait_left()
    assert values(scene, directory) == {"a": [large(1), large(2)]}
    after = files(directory)
    assert set(before) < set(after)
    assert len(after) == 2


@MODES
def test_s3(scene: Scene, s3: StoreSettings, delivery: str) -> None:
    with scene.embedded(delivery=delivery, **oversize(s3)):
        scene.add(("a", large(1)), ("a", "2"), ("a", large(3)))
        scene.wait_left()
    assert values(scene, s3) == {"a": [large(1), "2", large(3)]}
    urls = [find(record.headers, HEADER) for record in scene.log()]
    assert (urls[0] or b"").startswith(f"s3://values/of/tests/{scene.topic}/".encode())


def test_what_is_not_above_the_setting_stays_in_its_record(scene: Scene, directory: StoreSettings) -> None:
    at_most, more = "x" * 4999, "x" * 5000  # with a key of one byte
    with scene.embedded(**oversize(directory, above=5000)):
        scene.add(("a", at_most), ("a", more))
        scene.wait_left()
    first, second = scene.log()
    assert (first.value or b"").decode() == at_most
    assert read(second.value, second.headers) is not None
    assert values(scene, directory) == {"a": [at_most, more]}


def test_a_record_from_quarantine_is_put_away_when_it_comes_back(scene: Scene, directory: StoreSettings) -> None:
    with scene.embedded(**SMALL):
        (refused,) = scene.add(("a", large(1)))
        eventually(lambda: "MSG_SIZE_TOO_LARGE" in scene.quarantined().get(refused, ""), what="a quarantine")
    config = str(scene.config_file(**oversize(directory)))
    run_cli("dead", "redrive", "-f", config, "--id", str(refused), "--order", "unknown-ok", "--yes")
    with scene.embedded(**oversize(directory)):
        scene.wait_left()
    assert values(scene, directory) == {"a": [large(1)]}

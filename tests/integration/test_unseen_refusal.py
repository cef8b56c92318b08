"""A broker refuses a producer's first request on a partition and takes the second (P45, KAFKA-15591).

It knows nothing of the producer yet and accepts any first sequence number, so the client infers from the second
acknowledgement that the first request, too, was appended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeTopic
from tests.support.harvesting import Scene
from tests.support.refusing import NOT_ENOUGH_REPLICAS, NOT_LEADER_OR_FOLLOWER, RefusingProxy
from tests.support.servers import Servers

REFUSALS = pytest.mark.parametrize(
    "error", [NOT_ENOUGH_REPLICAS, NOT_LEADER_OR_FOLLOWER], ids=["few replicas", "no leader"]
)


@pytest.fixture
def proxy(servers: Servers) -> Iterator[RefusingProxy]:
    with RefusingProxy(servers.bootstrap) as made:
        yield made


@pytest.fixture
def scene(
    servers: Servers, proxy: RefusingProxy, database: str, make_topic: MakeTopic, group: str, tmp_path: Path
) -> Iterator[Scene]:
    """A topic of one partition, reached through the proxy."""
    made = Scene(servers, database, make_topic(1), group, tmp_path)
    made.bootstrap = proxy.address
    try:
        yield made
    finally:
        made.db.close()


@REFUSALS
def test_a_first_request_that_is_refused_is_not_taken_for_delivered(
    scene: Scene, proxy: RefusingProxy, error: int
) -> None:
    with scene.embedded(shards=1) as running:
        running.wait_leading()
        refusal = proxy.refuse(scene.topic, error)
        scene.add(("first", "1"))
        assert refusal.caught.wait(30)
        scene.add(("second", "1"))
        assert refusal.overtaken.wait(30)
        scene.add(("first", "2"), ("second", "2"))
        scene.wait_left()
    assert scene.quarantined() == {}
    assert scene.published() == {"first": ["1", "2"], "second": ["1", "2"]}


def test_nothing_is_lost_when_the_answer_to_the_second_request_is_lost_too(scene: Scene, proxy: RefusingProxy) -> None:
    """The broker then refuses the first request for good, and the client gives up: the shard is replaced."""
    with scene.embedded(shards=1) as running:
        running.wait_leading()
        refusal = proxy.refuse(scene.topic, NOT_ENOUGH_REPLICAS, cut=True)
        scene.add(("first", "1"))
        assert refusal.caught.wait(30)
        scene.add(("second", "1"))
        assert refusal.overtaken.wait(30)
        scene.add(("first", "2"), ("second", "2"))
        scene.wait_left()
    assert scene.quarantined() == {}
    assert {key: list(dict.fromkeys(values)) for key, values in scene.published().items()} == {
        "first": ["1", "2"],
        "second": ["1", "2"],
    }


@REFUSALS
def test_in_a_transaction_a_first_request_that_is_refused_is_not_taken_for_delivered(
    scene: Scene, proxy: RefusingProxy, error: int
) -> None:
    with scene.embedded(shards=1, delivery="exactly-once") as running:
        running.wait_leading()
        refusal = proxy.refuse(scene.topic, error)
        scene.add(*((str(number), "x" * 600_000) for number in range(4)))  # more than one request takes
        assert refusal.caught.wait(30)
        assert refusal.overtaken.wait(30)
        scene.wait_left()
    assert scene.quarantined() == {}
    assert len(scene.published()) == 4

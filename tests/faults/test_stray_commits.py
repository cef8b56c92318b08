"""Requests that end a transaction and arrive late: in the next transaction, or after the lane was opened anew (P40).

The client's connection to the transaction's coordinator breaks while an EndTxn is under way. It sends it again by
itself and says nothing; the bytes of the first one are still in the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harvesting import Scene
from tests.support.kafka_proxy import END_TXN, INIT_PRODUCER_ID, PRODUCE, KafkaProxy, Request, Then, commits
from tests.support.longs import long
from tests.support.wait import eventually
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

ONCE: dict[str, Any] = {"delivery": "exactly-once", "shards": 1}
TURNS = 8


@pytest.fixture
def proxy(scene: Scene) -> Iterator[KafkaProxy]:
    """A way to Kafka; the load and the test go straight there."""
    with KafkaProxy(scene.bootstrap) as proxy:
        yield proxy


def through(proxy: KafkaProxy) -> dict[str, str]:
    return {"bootstrap.servers": proxy.address}


@pytest.mark.parametrize("then", [pytest.param("fin", marks=long), "rst"])
def test_an_old_commit_ends_no_later_transaction(scene: Scene, proxy: KafkaProxy, then: Then) -> None:
    """The next transaction's first records are with the broker, the others are held back, when the old bytes arrive."""
    with scene.embedded(base_kafka_config=through(proxy), **ONCE) as running:
        running.wait_leading()
        with writing(scene, rate=3_000, batch=20) as load:
            load.wait(1_000)
            for _ in range(TURNS):
                commit = proxy.catch(END_TXN, then=then, where=commits)
                commit.wait()
                again = proxy.seen[END_TXN]
                eventually(lambda again=again: proxy.seen[END_TXN] > again, what="the commit, sent again")  # type: ignore[misc]
                passed: list[Request] = []

                def is_second(request: Request, passed: list[Request] = passed) -> bool:
                    passed.append(request)
                    return len(passed) > 1

                rest = proxy.catch(PRODUCE, then="silence", where=is_second)
                rest.wait()
                commit.deliver()
                rest.deliver()
                load.wait(1_000)
        repeats = verify(scene, load)
    figure(f"kafka_stray_commits_{then}_repeats", repeats, "records")
    assert repeats == 0


def test_a_commit_that_was_held_back_ends_no_later_transaction(scene: Scene, proxy: KafkaProxy) -> None:
    """Nothing breaks, the request is only late: its connection goes on when the lane has long been opened anew."""
    with scene.embedded(base_kafka_config=through(proxy), **ONCE) as running:
        running.wait_leading()
        with writing(scene) as load:
            for _ in range(2):
                load.wait(200)
                opened = proxy.seen[INIT_PRODUCER_ID]
                commit = proxy.catch(END_TXN, then="silence", where=commits)
                commit.wait()
                eventually(lambda opened=opened: proxy.seen[INIT_PRODUCER_ID] > opened, what="another producer")  # type: ignore[misc]
                load.wait(200)
                commit.deliver()
                load.wait(200)
        assert verify(scene, load) == 0


def test_a_broker_that_answers_slowly_costs_no_lane(scene: Scene, proxy: KafkaProxy) -> None:
    """Each commit takes longer than the client waits before it sends a request again; it did not, and says so."""
    with scene.embedded(base_kafka_config=through(proxy), **ONCE) as running:
        running.wait_leading()
        with writing(scene) as load:
            load.wait(200)
            opened = proxy.seen[INIT_PRODUCER_ID]
            proxy.delay(0.3)
            load.wait(3_000)
        assert verify(scene, load) == 0
        assert proxy.seen[INIT_PRODUCER_ID] == opened

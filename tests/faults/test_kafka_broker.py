"""The broker stops, is killed, restarts, freezes; topics are deleted under the harvester. Under load.

The broker of this file creates no topics by itself, so that a deleted topic stays deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.consuming import read_topic
from tests.support.harvesting import Scene, wait_leads
from tests.support.longs import long
from tests.support.private import Private, private
from tests.support.servers import Servers
from tests.support.wait import eventually
from tests.support.writing import committed, drain, figure, longest_gap_ms, rows_by_key, verify, writing

pytest_plugins = ["tests.support.scenes"]

ROWS = 400
KEYS = 50
QUICK = {"reconnect.backoff.max.ms": "500"}  # else a client waits up to 10 s before it tries again
# A broker takes some seconds to come back: below this delivery timeout of 59 s.
PATIENT: dict[str, Any] = {"heartbeat_timeout": "10s", "session_timeout": "70s", "drain_interval": "60s"}


@pytest.fixture(scope="module")
def kafka(servers: Servers) -> Iterator[Private]:
    """Our own broker; PostgreSQL is the shared one."""
    with private(servers, "kafka", {"auto.create.topics.enable": "false"}) as server:
        yield server


@pytest.fixture
def scene(kafka: Private, tmp_path: Path) -> Iterator[Scene]:
    with kafka.scene(tmp_path) as made:
        yield made


@pytest.fixture
def admin(kafka: Private) -> AdminClient:
    return AdminClient(
        {"bootstrap.servers": kafka.servers.bootstrap, "broker.address.family": "v4", "log_level": 3, **QUICK}
    )


@pytest.mark.parametrize("kill", [pytest.param(False, id="stopped", marks=long), pytest.param(True, id="killed")])
def test_a_broker_that_ends_and_comes_back(scene: Scene, kafka: Private, kill: bool) -> None:
    """Shorter than the delivery timeout: whatever leadership does meanwhile, nothing is repeated."""
    with scene.cli(base_kafka_config=QUICK, **PATIENT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            kafka.stop(kill=kill)
            load.wait(ROWS)
            kafka.start()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    name = "broker_killed" if kill else "broker_stopped"
    figure(f"{name}_repeats", repeats, "records")
    figure(f"{name}_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats == 0


def test_a_broker_that_freezes_for_longer_than_every_timeout(scene: Scene, kafka: Private) -> None:
    """What it had received counts when it thaws, though the client has given it up: one repeat for each on the wire."""
    with scene.cli(base_kafka_config={**QUICK, "socket.timeout.ms": "3000"}) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            kafka.freeze()
            frozen_at = time.monotonic()
            try:
                running.wait_for_line("fenced")
                eventually(lambda: time.monotonic() - frozen_at > 7, what="the end of the session timeout of 6 s")
            finally:
                kafka.thaw()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("broker_frozen_repeats", repeats, "records")
    figure("broker_frozen_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats <= KEYS  # one of a key is on the wire


def test_the_leader_topic_is_deleted(scene: Scene, admin: AdminClient) -> None:
    """It is made again, and somebody leads; records have nothing to do with it."""
    with scene.cli(base_kafka_config={**QUICK, "topic.metadata.refresh.interval.ms": "1000"}) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            admin.delete_topics([f"{scene.group}.neli"])[f"{scene.group}.neli"].result(30)
            running.wait_for_line("fenced|leadership is revoked")
            eventually(lambda: running.output.count("leads as") >= 2, 30, "a leader again")
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("leader_topic_deleted_repeats", repeats, "records")
    figure("leader_topic_deleted_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats == 0


def test_the_target_topic_is_deleted_and_made_again_with_more_partitions(scene: Scene, admin: AdminClient) -> None:
    """What stood in the old topic is gone with it. From the first record of the new one on, each key is whole."""
    given = {**QUICK, "topic.metadata.refresh.interval.ms": "1000"}
    with scene.cli(base_kafka_config=given, max_attempts=1000) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            admin.delete_topics([scene.topic])[scene.topic].result(30)
            eventually(lambda: scene.topic not in admin.list_topics(timeout=10).topics, what="the topic gone")
            running.wait_for_line("UNKNOWN|_UNKNOWN_TOPIC")
            admin.create_topics([NewTopic(scene.topic, num_partitions=7)])[scene.topic].result(30)
            load.wait(2 * ROWS)
        drain(scene)
        assert scene.quarantined() == {}
        assert running.stop() == 0
    # A producer that knows the old number of partitions may use it for a moment, so a key can stand in two of the new
    # ones. Its records follow each other in time all the same: each is sent when its predecessor is acknowledged.
    log = sorted(scene.log(), key=lambda record: (record.created_ms, record.offset))
    assert len({record.partition for record in log}) == 7
    repeats = 0
    counts = committed(scene)
    for key, rows in rows_by_key(log).items():
        numbers = [row.seq for row in rows]
        # Nothing is lost between the first that the new topic has and the last that was written.
        assert list(dict.fromkeys(numbers)) == list(range(numbers[0], counts[key] + 1)), key
        assert numbers == sorted(numbers), f"a repeat after a successor: {key}"
        repeats += len(numbers) - len(set(numbers))
    figure("target_topic_recreated_repeats", repeats, "records")


def test_a_topic_that_nobody_creates(scene: Scene, kafka: Private, admin: AdminClient) -> None:
    """Its records go to quarantine when their attempts are used up; created in time, it takes them; others flow."""
    late = f"{scene.topic}-late"
    with scene.cli(base_kafka_config=QUICK, max_attempts=8, retry_backoff="200ms", retry_backoff_max="1s") as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            (never,) = scene.add(("never", "1"), topic=f"{scene.topic}-never")
            scene.add(("late", "1"), ("late", "2"), topic=late)
            running.wait_for_line("failed and will be retried: _UNKNOWN_TOPIC|UNKNOWN_TOPIC")
            admin.create_topics([NewTopic(late, num_partitions=1)])[late].result(30)
            eventually(lambda: scene.quarantined().keys() == {never}, 60, "the record in quarantine")
            load.wait(ROWS)
        repeats = verify(scene, load, quarantined=1)
        assert running.stop() == 0
    assert [record.value for record in read_topic(kafka.servers.bootstrap, late)] == [b"1", b"2"]
    figure("unknown_topic_repeats_of_others", repeats, "records")
    assert repeats == 0

"""The link to Kafka: cut, reset at random, stalled, half-open, slow."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from tests.support.consuming import Published
from tests.support.harvesting import Scene, wait_leads
from tests.support.proxy import Proxy
from tests.support.writing import figure, longest_gap_ms, verify, writing

pytest_plugins = ["tests.support.scenes"]

ROWS = 300
KEYS = 50
# Patient: outages up to 7 s are below the delivery timeout, up to 5 s cost no leadership.
PATIENT: dict[str, Any] = {"heartbeat_timeout": "5s", "session_timeout": "15s", "drain_interval": "8s"}


def through(kafka: Proxy) -> dict[str, str]:
    # Without these a client waits up to 10 s before it tries again.
    return {"bootstrap.servers": kafka.address, "reconnect.backoff.max.ms": "500"}


def test_cut_for_less_than_the_delivery_timeout(scene: Scene, kafka: Proxy) -> None:
    with scene.cli(base_kafka_config=through(kafka), **PATIENT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            for _ in range(3):
                load.wait(ROWS)
                kafka.cut(reset=True)
                load.wait(ROWS)
                kafka.open()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("kafka_link_cut_shorter_than_delivery_timeout_repeats", repeats, "records")
    assert repeats == 0


def test_stalled_for_less_than_the_delivery_timeout(scene: Scene, kafka: Proxy) -> None:
    """Nothing is lost on the way, it is only late: packets that are sent again."""
    with scene.cli(base_kafka_config=through(kafka), **PATIENT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            kafka.freeze()
            load.wait(2 * ROWS)
            kafka.thaw()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("kafka_link_stalled_repeats", repeats, "records")
    assert repeats == 0


def test_cut_until_leadership_is_lost(scene: Scene, kafka: Proxy) -> None:
    """What was on the wire at the cut has an unknown fate; nothing else may come twice."""
    with scene.cli(base_kafka_config=through(kafka)) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            kafka.cut(reset=True)
            running.wait_for_line("fenced")
            kafka.open()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("kafka_link_cut_longer_than_heartbeat_timeout_repeats", repeats, "records")
    figure("kafka_link_cut_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats <= KEYS  # one of a key is on the wire


def test_reset_at_random(scene: Scene, kafka: Proxy) -> None:
    """Producers, group member and heartbeats lose their connections in turn."""
    rng, resets = random.Random(12), 0
    with scene.cli(base_kafka_config=through(kafka), **PATIENT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            for _ in range(10):
                load.wait(rng.randint(30, 200))
                resets += kafka.reset(rng, share=0.4)
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    assert resets >= 10
    figure("kafka_link_reset_repeats", repeats, "records")
    assert repeats == 0


@pytest.mark.parametrize("up", [True, False], ids=["both", "answers"])
def test_half_open_for_longer_than_every_timeout(scene: Scene, kafka: Proxy, up: bool) -> None:
    """Connections that were open swallow everything, also after the network is back: only timeouts end them.

    With only the answers lost, everything arrives and no acknowledgement comes back: each attempt may be a repeat.
    """
    given = {**through(kafka), "socket.timeout.ms": "3000"}
    with scene.cli(base_kafka_config=given) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            kafka.deafen(up=up)
            running.wait_for_line("fenced")
            running.wait_for_line("does not answer|timed out|_MSG_TIMED_OUT")
            kafka.hear()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    name = "both_ways" if up else "answers"
    figure(f"kafka_link_half_open_{name}_repeats", repeats, "records")
    figure(f"kafka_link_half_open_{name}_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats <= KEYS  # one of a key is on the wire


def test_everything_slow_keeps_the_lead(scene: Scene, kafka: Proxy) -> None:
    """Half a second each way, for elections too."""
    kafka.delay(up_s=0.25, down_s=0.25)
    with scene.cli(base_kafka_config=through(kafka), **PATIENT) as running:
        wait_leads(running)
        with writing(scene, keys=400) as load:
            load.wait(4 * ROWS)
        repeats = verify(scene, load)
        assert "fenced" not in running.output
        assert "marks again" not in running.output
        assert running.stop() == 0
    figure("kafka_link_slow_repeats", repeats, "records")
    assert repeats == 0


def test_on_a_slow_way_a_leader_and_its_standby_come_back_after_a_cut(scene: Scene, kafka: Proxy) -> None:
    """A question that gives up sooner than its answer can come costs the client the connection it was asked on."""
    kafka.delay(up_s=0.25, down_s=0.25)
    given = {"base_kafka_config": through(kafka), **PATIENT}
    with scene.cli(name="one", **given) as leader:
        wait_leads(leader)
        with scene.cli(name="two", **given) as standby:
            standby.wait_for_line("joined group")
            kafka.cut(reset=True)
            for each in (leader, standby):
                each.wait_for_line("no broker can be reached")
            kafka.open()
            scene.add(("a", "1"))
            scene.wait_left()
            assert leader.stop() == 0
            wait_leads(standby)
            scene.add(("a", "2"))
            scene.wait_left()
            assert standby.stop() == 0
        for each in (leader, standby):
            assert "Timed out" not in each.output
    assert scene.published() == {"a": ["1", "2"]}


def test_acknowledgements_that_take_three_seconds(scene: Scene, kafka: Proxy) -> None:
    """No storm of remarks, everything once, beside the rate that one record of a key on the wire allows."""
    ack_s, keys, rounds = 3.0, 600, 4
    kafka.delay(down_s=ack_s)
    # The client leaves few requests unanswered, each of one partition: with the defaults the first of a burst go out
    # nearly empty, the rest waits for their answers, and the rate is half of this (docs/operations.md).
    given = {**through(kafka), "linger.ms": "100", "max.in.flight.requests.per.connection": "5"}
    # A record's time runs while its producer gets its id, too: two or three answers, and then its acknowledgement.
    limits = {**PATIENT, "session_timeout": "30s", "drain_interval": "20s"}
    with scene.cli(producer_kafka_config=given, **limits) as running:
        wait_leads(running)
        _add_round(scene, keys, 1)  # connections and metadata take their time, too: they are not measured
        scene.wait_left(timeout_s=120)
        with scene.db.transaction():
            for number in range(2, rounds + 1):
                _add_round(scene, keys, number)
        scene.wait_left(timeout_s=120)
        remarks = running.output.count("marks again")
        assert running.stop() == 0
    log = scene.log()
    rate = _rate_per_s(log, str(2), str(rounds), keys)
    figure("slow_acks_remarks", remarks, "remarks")
    figure("slow_acks_repeats", len(log) - keys * rounds, "records")
    figure("slow_acks_throughput", rate, "records/s")
    figure("slow_acks_throughput_bound", keys / ack_s, "records/s")
    expected = [str(number) for number in range(1, rounds + 1)]
    assert all(values == expected for values in scene.published().values())
    assert remarks == 0


def _add_round(scene: Scene, keys: int, number: int) -> None:
    """One record for each key."""
    scene.db.execute(
        """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,
                               kafka_header_values)
           SELECT now(), %s, 'key-' || n, %s, '{}', '{}' FROM generate_series(1, %s) AS n""",
        (scene.topic, str(number), keys),
    )


def _rate_per_s(log: list[Published], first: str, last: str, keys: int) -> float:
    """Records per second from the middle of one round to the middle of another, by when producers were given them."""
    first_ms, last_ms = (
        statistics.median(record.created_ms for record in log if record.value == value.encode())
        for value in (first, last)
    )
    return keys * (int(last) - int(first)) * 1000 / (last_ms - first_ms)

"""The link to PostgreSQL: cut, reset at random, broken in the middle of a mark's result, half-open, slow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.harvesting import Scene, wait_leads
from tests.support.proxy import Proxy
from tests.support.wait import eventually
from tests.support.writing import figure, longest_gap_ms, verify, writing

pytest_plugins = ["tests.support.scenes"]

KEYS = 50
ROWS = 300
SHORT: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "4s", "drain_interval": "1500ms"}
both_ways = pytest.mark.parametrize("marking", ["memory", "table"])


@pytest.fixture
def link(scene: Scene) -> Iterator[Proxy]:
    """The harvester's way to PostgreSQL, open; the load and the test go straight there."""
    parts = conninfo_to_dict(scene.dsn)
    with Proxy(f"{parts['host']}:{parts['port']}") as proxy:
        proxy.open()
        yield proxy


def through(scene: Scene, link: Proxy) -> str:
    return make_conninfo(scene.dsn, host="127.0.0.1", port=link.port)


@both_ways
def test_cut_and_healed(scene: Scene, link: Proxy, marking: str) -> None:
    with scene.cli(data_source=through(scene, link), marking=marking) as running:
        wait_leads(running)
        with writing(scene) as load:
            for _ in range(3):
                load.wait(ROWS)
                link.cut()
                load.wait(ROWS)
                link.open()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure(f"postgresql_link_cut_{marking}_repeats", repeats, "records")
    assert repeats == 0


@both_ways
@pytest.mark.parametrize("seed", [11])
def test_reset_at_random(scene: Scene, link: Proxy, seed: int, marking: str) -> None:
    rng, resets = random.Random(seed), 0
    with scene.cli(data_source=through(scene, link), marking=marking) as running:
        wait_leads(running)
        with writing(scene) as load:
            for _ in range(10):
                load.wait(rng.randint(30, 200))
                resets += link.reset(rng, share=0.4)
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    assert resets >= 10
    figure(f"postgresql_link_reset_{marking}_repeats", repeats, "records")
    assert repeats == 0


@both_ways
def test_broken_in_the_middle_of_a_marks_result(scene: Scene, link: Proxy, marking: str) -> None:
    """Rows may be marked in the table that the harvester never saw: they are found again, before their successors."""
    with writing(scene, value_bytes=400, rate=3000, batch=30) as backlog:
        backlog.wait(3000)  # marks are full
    with scene.cli(data_source=through(scene, link), marking=marking) as running:
        wait_leads(running)
        with writing(scene, value_bytes=400, seed=2) as load:
            eventually(lambda: len(scene.log()) > 100, 60, "the first records")
            trap = link.break_answer(after_bytes=20_000, times=4)  # rows before and behind it are on their way
            eventually(lambda: trap.sprung >= 4, 60, "four broken marks")
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure(f"mark_broken_in_the_middle_{marking}_repeats", repeats, "records")
    assert repeats == 0


def test_half_open(scene: Scene, link: Proxy) -> None:
    """Connections that were open swallow everything, also after the network is back: only timeouts end them."""
    with scene.cli(data_source=through(scene, link), **SHORT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            link.deafen()
            running.wait_for_line("the server (sent|said) nothing for|the mark loop has stalled")
            link.hear()
            load.wait(ROWS)
        repeats = verify(scene, load, timeout_s=60)
        assert running.stop() == 0
    figure("postgresql_link_half_open_repeats", repeats, "records")
    figure("postgresql_link_half_open_longest_gap", longest_gap_ms(scene.log()), "ms")
    # Out of reach for longer than a drain may take: what was acknowledged and not purged may come again (I8).
    assert repeats <= KEYS


def test_answers_vanish(scene: Scene, link: Proxy) -> None:
    """Half-open in one direction: statements arrive and take effect, and nobody hears of it."""
    with scene.cli(data_source=through(scene, link), marking="table", **SHORT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            link.deafen(up=False)
            running.wait_for_line("the server (sent|said) nothing for|the mark loop has stalled")
            link.hear()
            load.wait(ROWS)
        repeats = verify(scene, load, timeout_s=60)
        assert running.stop() == 0
    figure("postgresql_answers_vanish_repeats", repeats, "records")
    # Out of reach for longer than a drain may take: what was acknowledged and not purged may come again (I8).
    assert repeats <= KEYS


def test_slow(scene: Scene, link: Proxy) -> None:
    """A database far away: 100 ms for each round trip. Leadership stays, and the many keys make up for the wait."""
    link.delay(up_s=0.05, down_s=0.05)
    with scene.cli(data_source=through(scene, link)) as running:
        wait_leads(running)
        with writing(scene, keys=300) as load:
            load.wait(4 * ROWS)
        repeats = verify(scene, load)
        assert "fenced" not in running.output
        assert running.stop() == 0
    figure("postgresql_link_slow_repeats", repeats, "records")
    assert repeats == 0

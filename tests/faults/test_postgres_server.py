"""PostgreSQL stops, is killed, or freezes under load, and comes back with everything that was committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.harvesting import Scene, wait_leads
from tests.support.private import Private, private
from tests.support.servers import Servers
from tests.support.writing import figure, longest_gap_ms, verify, writing

pytest_plugins = ["tests.support.scenes"]

KEYS = 50
ROWS = 700  # before and after a fault: about a second of load
SHORT: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "4s", "drain_interval": "1500ms"}


@pytest.fixture(scope="module")
def postgres(servers: Servers) -> Iterator[Private]:
    """Our own PostgreSQL; Kafka is the shared one."""
    with private(servers, "postgres") as server:
        yield server


@pytest.fixture
def scene(postgres: Private, tmp_path: Path) -> Iterator[Scene]:
    with postgres.scene(tmp_path) as made:
        yield made


@pytest.mark.parametrize("kill", [False, True], ids=["restarted", "killed"])
def test_a_server_that_ends_and_comes_back(scene: Scene, postgres: Private, kill: bool) -> None:
    """Crash recovery brings back what was committed; what was acknowledged meanwhile is purged then, not repeated."""
    with scene.cli() as running:
        wait_leads(running)
        with writing(scene) as load:
            load.wait(ROWS)
            postgres.stop(kill=kill)
            running.wait_for_line("cannot reach PostgreSQL")
            postgres.start()
            scene.db = psycopg.connect(scene.dsn, autocommit=True)
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    name = "postgresql_killed" if kill else "postgresql_restarted"
    figure(f"{name}_repeats", repeats, "records")
    figure(f"{name}_rate", load.rate_per_s, "records/s")
    figure(f"{name}_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats == 0


def test_a_server_that_freezes_for_longer_than_every_timeout(scene: Scene, postgres: Private) -> None:
    """Connections stand and say nothing: not refused, not reset. A statement is given up; its fate is unknown."""
    with scene.cli(**SHORT) as running:
        wait_leads(running)
        with writing(scene, keys=KEYS) as load:
            load.wait(ROWS)
            postgres.freeze()
            try:
                running.wait_for_line("the server (sent|said) nothing for|the mark loop has stalled")
            finally:
                postgres.thaw()
            load.wait(ROWS)
        repeats = verify(scene, load)
        assert running.stop() == 0
    figure("postgresql_frozen_repeats", repeats, "records")
    figure("postgresql_frozen_longest_gap", longest_gap_ms(scene.log()), "ms")
    # Out of reach for longer than a drain may take: what was acknowledged and not purged may come again (I8).
    assert repeats <= KEYS

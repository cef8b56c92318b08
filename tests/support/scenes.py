"""Fixtures for tests of the whole relay: `pytest_plugins = ["tests.support.scenes"]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harvesting import Scene
from .hooks import Plan
from .proxy import Proxy
from .servers import Servers


@pytest.fixture
def scene(servers: Servers, database: str, topic: str, group: str, tmp_path: Path) -> Iterator[Scene]:
    """A fresh outbox, topic and group."""
    made = Scene(servers, database, topic, group, tmp_path)
    try:
        yield made
    finally:
        made.db.close()


@pytest.fixture
def kafka(scene: Scene) -> Iterator[Proxy]:
    """A way to Kafka for clients under test, open; the load and the test go straight there."""
    with Proxy(scene.bootstrap, kafka=True) as proxy:
        proxy.open()
        yield proxy


@pytest.fixture
def plan(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The scene's plan, followed by embedded harvesters."""
    for name, value in scene.plan.env.items():
        if name != "PYTHONPATH":  # a child of this process has its sys.path
            monkeypatch.setenv(name, value)
    return scene.plan

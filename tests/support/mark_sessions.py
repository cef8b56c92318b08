"""Fixture: leaders' database sessions. `pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from harvester.outbox.leader_session import MarkSession

from .harvesting import Scene
from .marking import TABLE


@pytest.fixture
def sessions(scene: Scene) -> Iterator[Callable[[], MarkSession]]:
    """Makes sessions as the mark loop has them."""
    made: list[MarkSession] = []

    def make() -> MarkSession:
        session = MarkSession(scene.dsn, TABLE, "test", 30.0)
        session.open()
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()

"""P10: a prepared transaction belongs to no session and still fills its gap when it commits.

It needs a server of its own: max_prepared_transactions is 0 by default and changes with a restart only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from harvester import stack
from harvester.outbox import schema
from harvester.outbox.tables import OutboxTable
from tests.support.databases import fresh_database
from tests.support.harvesting import Scene, causal
from tests.support.marking import BOTH, no_gaps, wait_listed
from tests.support.servers import FAST, Servers
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def preparing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The run's Kafka and a PostgreSQL that prepares transactions."""
    directory = tmp_path_factory.mktemp("preparing") / "stack"
    try:
        info = stack.up(directory, dataclasses.replace(FAST, bootstrap=servers.bootstrap))
        with psycopg.connect(info.dsn, autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET max_prepared_transactions = 4")
        stack.stop(directory, "postgres")
        info = stack.start(directory, "postgres")
        yield Servers(info.dsn, servers.bootstrap, given=True)
    finally:
        stack.down(directory, delete=True)


@pytest.fixture
def scene(preparing: Servers, topic: str, group: str, tmp_path: Path) -> Iterator[Scene]:
    """A fresh outbox on that server."""
    with fresh_database(preparing, "template0") as dsn:
        with psycopg.connect(dsn) as connection:
            schema.init(connection, OutboxTable.parse("outbox"))
        made = Scene(preparing, dsn, topic, group, tmp_path)
        try:
            yield made
        finally:
            made.db.close()


@BOTH
def test_rows_of_a_prepared_transaction_are_found_when_it_commits(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, head_scan_interval="10m", shards=1) as running:
        running.wait_leading()
        for name in ("kept", "dropped"):
            with psycopg.connect(scene.dsn, autocommit=True) as other:
                other.execute("BEGIN")
                scene.add((name, "1"), db=other)
                other.execute(f"PREPARE TRANSACTION '{name} of {scene.topic}'")
        # Their session is gone; what they have locked is not.
        for number in range(1, 6):
            scene.add(("k", str(number)))
            scene.wait_left()
            wait_listed(running)
        scene.db.execute(f"ROLLBACK PREPARED 'dropped of {scene.topic}'")
        scene.add(("k", "6"))
        scene.wait_left()
        scene.db.execute(f"COMMIT PREPARED 'kept of {scene.topic}'")
        scene.wait_left()
        eventually(lambda: no_gaps(running), what="all gaps closed")
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("k",), 6) | causal(("kept",), 1)

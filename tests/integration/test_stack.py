"""A stack of its own: the life of both servers, and what becomes of them when something goes wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from harvester import stack
from harvester.errors import StackError
from tests.support.servers import FAST, Servers


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not tmp_path: below pytest's, private to us, PostgreSQL's account would get a place elsewhere.
    with tempfile.TemporaryDirectory(prefix="harvester-stack-", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o755)
        yield Path(path) / "stack"
        stack.down(Path(path) / "stack", delete=True)


def test_the_life_of_a_stack(directory: Path) -> None:
    first = stack.up(directory, FAST)
    assert stack.up(directory) == first  # nothing to do: the same processes, whatever the options
    assert stack.status(directory).running
    with psycopg.connect(first.dsn) as connection:
        connection.execute("CREATE TABLE kept ()")
        assert connection.execute("SHOW fsync").fetchone() == ("off",)
    if first.socket_dir is not None:
        with psycopg.connect(first.dsn, host=str(first.socket_dir), hostaddr="") as local:
            assert local.info.host == str(first.socket_dir)
    client = AdminClient({"bootstrap.servers": first.bootstrap, "log_level": 0})
    client.create_topics([NewTopic("kept", num_partitions=3)])["kept"].result(timeout=30)

    # Crashes, both at once and one after the other started again: the address and the data stay.
    assert stack.stop(directory, "postgres", kill=True)
    assert stack.stop(directory, "kafka", kill=True)
    assert not stack.stop(directory, "kafka")
    assert {server.state for server in stack.status(directory).servers} == {"stopped"}
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(first.dsn, connect_timeout=5)
    stack.start(directory, "postgres")
    second = stack.start(directory, "kafka")
    assert (second.dsn, second.bootstrap) == (first.dsn, first.bootstrap)
    assert second.kafka_pid != first.kafka_pid
    with psycopg.connect(second.dsn) as connection:
        connection.execute("SELECT FROM kept")
    assert (
        len(
            AdminClient({"bootstrap.servers": second.bootstrap})
            .list_topics("kept", timeout=30)
            .topics["kept"]
            .partitions
        )
        == 3
    )
    assert second.kafka_log is not None
    assert "Kafka Server started" in second.kafka_log.read_text()  # the broker can be heard

    assert sorted(stack.down(directory)) == ["kafka", "postgres"]
    assert stack.down(directory, delete=True) == []
    assert not directory.exists()


def test_a_server_that_does_not_come_up_says_why(directory: Path, servers: Servers) -> None:
    options = replace(FAST, bootstrap=servers.bootstrap)
    info = stack.up(directory, options)
    stack.stop(directory, "postgres")
    assert info.postgres_log is not None
    (info.postgres_log.parent / "data" / "postgresql.auto.conf").write_text("nonsense = 1\n")
    with pytest.raises(StackError, match=r"(?s)exited during startup.*nonsense"):
        stack.up(directory, options)
    assert not stack.status(directory).running


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a server under another account")
def test_root_and_a_directory_that_only_root_can_enter(servers: Servers) -> None:
    with tempfile.TemporaryDirectory(prefix="harvester-private-") as private:
        directory = Path(private) / "stack"
        info = stack.up(directory, replace(FAST, bootstrap=servers.bootstrap))
        assert info.postgres_log is not None
        home = info.postgres_log.parent
        try:
            assert not home.is_relative_to(private)
            assert Path(private).stat().st_mode & 0o077 == 0  # nothing was opened up
            with psycopg.connect(info.dsn) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
        finally:
            stack.down(directory, delete=True)
        assert not home.exists()


def test_the_fixtures(database: str, empty_database: str, topic: str, servers: Servers) -> None:
    def outbox(dsn: str) -> object:
        with psycopg.connect(dsn) as connection:
            row = connection.execute("SELECT to_regclass('outbox')").fetchone()
            return row and row[0]

    assert outbox(database) == "outbox"
    assert outbox(empty_database) is None
    listed = AdminClient({"bootstrap.servers": servers.bootstrap}).list_topics(topic, timeout=30)
    assert len(listed.topics[topic].partitions) == 4

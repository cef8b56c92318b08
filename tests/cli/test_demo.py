"""`harvester demo`: the verdict, and that nothing is left behind, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from tests.support.cli import RunningCli, run_cli
from tests.support.families import wait_gone
from tests.support.harvesting import children, shards_of
from tests.support.servers import Servers
from tests.support.wait import eventually

KEYS = [
    "inserted",
    "delivered",
    "lost",
    "duplicates",
    "order_violations",
    "quarantined",
    "rate_per_s",
    "p50_ms",
    "p99_ms",
]
LOAD = ("--keys", "20", "--shards", "2")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the demo's directory will be; open to the account that PostgreSQL runs under."""
    directory = Path(tempfile.mkdtemp(prefix="test-demo-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def given(servers: Servers, temporary: Path) -> dict[str, str]:
    """The environment of a demo on the run's servers."""
    return {
        "HARVESTER_TEST_DSN": servers.dsn,
        "HARVESTER_TEST_BOOTSTRAP": servers.bootstrap,
        "TMPDIR": str(temporary),
    }


def name_of(running: RunningCli) -> str:
    return running.wait_for_line(r"creating database and topic (\S+)")[1]


def wait_for_pumping(running: RunningCli, servers: Servers, name: str) -> None:
    running.wait_for_line("pumping")
    with psycopg.connect(make_conninfo(servers.dsn, dbname=name), autocommit=True) as connection:
        eventually(
            lambda: connection.execute("SELECT to_regclass('outbox_pump') IS NOT NULL").fetchone() == (True,),
            what="the pump's side table",
        )
        eventually(
            lambda: connection.execute("SELECT FROM outbox_pump WHERE count > 0 LIMIT 1").fetchone() is not None,
            what="a pumped record",
        )


def check_clean(servers: Servers, name: str, temporary: Path) -> None:
    with psycopg.connect(servers.dsn, autocommit=True) as connection:
        assert connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).fetchone() is None
    admin = AdminClient({"bootstrap.servers": servers.bootstrap})
    eventually(
        lambda: not [topic for topic in admin.list_topics(timeout=10).topics if topic.startswith(name)],
        what="the demo's topics to be gone",
    )
    assert list(temporary.iterdir()) == []


def child_of(running: RunningCli) -> int:
    [child] = children(running.pid)
    return child


def test_the_verdict_is_the_last_line_and_given_servers_are_left_as_they_were(
    servers: Servers, given: dict[str, str], temporary: Path
) -> None:
    done = run_cli("demo", "--records", "300", *LOAD, "--json", env=given)

    verdict = json.loads(done.stdout.splitlines()[-1])
    assert list(verdict) == KEYS
    assert verdict["inserted"] == verdict["delivered"] == 300
    assert [verdict[name] for name in KEYS[2:6]] == [0, 0, 0, 0]
    assert verdict["p99_ms"] >= verdict["p50_ms"] > 0
    name = next(line.split()[-1] for line in done.stderr.splitlines() if line.startswith("creating"))
    check_clean(servers, name, temporary)


def test_a_lost_record_fails_the_demo(servers: Servers, given: dict[str, str], temporary: Path) -> None:
    with RunningCli("demo", "--seconds", "2", "--rate", "100", *LOAD, "--json", env=given) as running:
        name = name_of(running)
        wait_for_pumping(running, servers, name)
        with psycopg.connect(make_conninfo(servers.dsn, dbname=name), autocommit=True) as connection:
            # As if a record had been committed and then vanished.
            connection.execute("UPDATE outbox_pump SET count = count + 1 WHERE key = 'k-000000'")
        code = running.wait()

    assert code == 1
    verdict = json.loads(running.stdout[-1])
    assert verdict["lost"] == 1
    assert verdict["inserted"] == verdict["delivered"] + 1
    assert any("1 lost" in line for line in running.stderr)
    check_clean(servers, name, temporary)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(
    servers: Servers, given: dict[str, str], temporary: Path, number: signal.Signals
) -> None:
    with RunningCli("demo", *LOAD, "--json", env=given) as running:
        name = name_of(running)
        wait_for_pumping(running, servers, name)
        child = child_of(running)
        code = running.stop(number)

    assert code == 130
    assert not Path(f"/proc/{child}").exists()
    assert running.stdout == []
    assert "Traceback" not in running.output
    check_clean(servers, name, temporary)


def test_a_harvester_that_dies_fails_the_demo(servers: Servers, given: dict[str, str], temporary: Path) -> None:
    with RunningCli("demo", *LOAD, "--json", env=given) as running:
        name = name_of(running)
        wait_for_pumping(running, servers, name)
        supervisor = child_of(running)
        shards = shards_of(supervisor)
        for shard in shards:  # they would end by themselves, later or sooner
            os.kill(shard, signal.SIGSTOP)
        os.kill(supervisor, signal.SIGKILL)
        code = running.wait()

    assert code == 1
    assert len(shards) >= 2
    wait_gone(shards)  # they could create the topic again
    assert any("was killed by SIGKILL in the middle of the demo" in line for line in running.stderr)
    check_clean(servers, name, temporary)


@pytest.mark.usefixtures("servers")  # not for use: it has the broker's jars fetched outside this test's time
def test_with_servers_of_its_own(temporary: Path) -> None:
    without = {"HARVESTER_TEST_DSN": "", "HARVESTER_TEST_BOOTSTRAP": "", "TMPDIR": str(temporary)}

    done = run_cli("demo", "--seconds", "1", *LOAD, env=without)

    assert "Nothing is lost or out of order." in done.stdout
    assert "starting PostgreSQL" in done.stderr
    assert list(temporary.iterdir()) == []
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(temporary) in _read(path)] == []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

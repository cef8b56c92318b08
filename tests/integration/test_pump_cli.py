"""`harvester pump` and `harvester verify` as people and scripts run them."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.support.cli import RunningCli, run_cli
from tests.support.forging import publish, take

pytestmark = pytest.mark.servers


@pytest.fixture
def options(servers: Any, database: str) -> list[str]:
    return ["--set", f"data_source={database}", "--set", f"base_kafka_config.bootstrap.servers={servers.bootstrap}"]


def test_pump_then_verify_as_scripts_do(servers: Any, database: str, topic: str, options: list[str]) -> None:
    pumped = run_cli("pump", *options, "--records", "50", "--keys", "5", "--topic", topic, "--json")
    rows = take(database)
    publish(servers.bootstrap, rows)
    verified = run_cli("verify", *options, "--json")

    assert json.loads(pumped.stdout)["records"] == 50
    report = json.loads(verified.stdout)
    assert report.pop("sequences")["clashes"] == 0
    assert report | {"rate_per_s": 0, "p50_ms": 0, "p99_ms": 0} == {
        "inserted": 50,
        "delivered": 50,
        "lost": 0,
        "duplicates": 0,
        "order_violations": 0,
        "quarantined": 0,
        "rate_per_s": 0,
        "p50_ms": 0,
        "p99_ms": 0,
        "unexpected": 0,
        "pending": 0,
        "scattered": 0,
        "topics": [topic],
        "examples": [],
    }

    publish(servers.bootstrap, rows[-1:])
    repeated = run_cli("verify", *options)
    assert "Nothing is lost or out of order." in repeated.stdout
    strict = run_cli("verify", *options, "--strict", check=False)
    assert strict.returncode == 1
    assert "1 deliveries are repeats" in strict.stderr


def test_a_broken_guarantee_is_told_on_both_channels_and_by_the_exit_code(
    servers: Any, database: str, topic: str, options: list[str]
) -> None:
    run_cli("pump", *options, "--records", "20", "--keys", "1", "--topic", topic)
    rows = take(database)
    del rows[7]
    publish(servers.bootstrap, rows)

    done = run_cli("verify", *options, check=False)

    assert done.returncode == 1
    assert "k-000000 #8: lost" in done.stdout
    assert done.stderr.startswith("harvester: The guarantees do not hold: 1 lost.")
    assert "Traceback" not in done.stdout + done.stderr


def test_records_that_still_wait_make_the_verdict_preliminary(topic: str, options: list[str]) -> None:
    run_cli("pump", *options, "--records", "20", "--keys", "1", "--topic", topic)

    done = run_cli("verify", *options, check=False)

    assert done.returncode == 1
    assert "20 records still wait in the outbox" in done.stderr
    assert "--until-empty" in done.stderr


def test_wrong_figures_are_all_listed(options: list[str]) -> None:
    done = run_cli("pump", *options, "--size", "3", "--keys", "0", check=False)

    assert done.returncode == 78
    assert "--size" in done.stderr
    assert "--keys" in done.stderr


def test_ctrl_c_ends_the_pump_with_a_report(database: str, topic: str, options: list[str]) -> None:
    arguments = ["--records", "1000000", "--rate", "500", "--topic", topic, "--json"]
    with RunningCli("pump", *options, *arguments) as running:
        _wait_for_rows(database)
        code = running.stop(signal.SIGINT)
        output = running.stdout

    assert code == 130
    report = json.loads(output[-1])
    assert report["complete"] is False
    assert report["records"] == len(take(database))


def _wait_for_rows(database: str) -> None:
    import psycopg

    from tests.support.wait import eventually

    with psycopg.connect(database, autocommit=True) as connection:
        eventually(lambda: connection.execute("SELECT FROM outbox LIMIT 1").fetchone() is not None, what="a row")

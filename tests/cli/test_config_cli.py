"""`harvester config show` and `harvester config check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harvester_cli.config import app
from harvester_cli.options import LoggedOptions
from typer.testing import CliRunner

from harvester.config import Config
from harvester.errors import ConfigurationError
from tests.support.cli import COMMAND, cli_environment, run_cli

FILE = """
leader_group_id = "billing"
data_source = "host=db password='${DB_PASSWORD}'"
[base_kafka_config]
sasl.password = "hunter2"
[limits]
shards = 3
heartbeat_timeout = "6s"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    monkeypatch.delenv("HARVESTER_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return path


def test_show_prints_toml_with_origins_and_without_secrets(file: Path) -> None:
    result = CliRunner().invoke(app, ["show", "-f", str(file), "--set", "limits.send_buffer=7", "--log-level", "debug"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for line in (
        'leader_group_id = "billing"  # file',
        'leader_topic = "billing.neli"  # derived: leader_group_id + .neli',
        'data_source = "password=*** host=db"  # file',
        '"bootstrap.servers" = "localhost:9092"  # default',
        '"sasl.password" = "***"  # file',
        "shards = 3  # file",
        "send_buffer = 7  # --set",
        'session_timeout = "12s"  # derived: 2 x heartbeat_timeout, or 3s more than it',
        'level = "debug"  # --set',
        "# delivery_timeout = 5s",
    ):
        assert line in lines
    assert "hunter2" not in result.output
    assert set(tomllib.loads(result.output)) == set(Config.model_fields) - {"producer_kafka_config"}


def test_show_as_json(file: Path) -> None:
    result = CliRunner().invoke(app, ["show", "-f", str(file), "--json"])
    shown = json.loads(result.stdout)
    assert shown["source"] == str(file)
    assert set(shown["settings"]) == set(Config.model_fields)
    assert shown["settings"]["limits"]["heartbeat_timeout"] == "6s"
    assert shown["origins"]["limits.shards"] == "file"
    assert shown["in_effect"]["rebalance_timeout"] == "18s"
    assert shown["producer_options"]["acks"] == "all"
    assert "hunter2" not in result.output


def test_check_says_that_all_is_well(file: Path) -> None:
    result = CliRunner().invoke(app, ["check", "-f", str(file)])
    assert result.exit_code == 0
    assert str(file) in result.output


def test_check_lists_everything_as_json(file: Path) -> None:
    arguments = ["check", "-f", str(file), "--json", "--set", "limits.shards=0", "--set", "zzz=1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 78
    verdict = json.loads(result.stdout)
    assert verdict["ok"] is False
    assert [problem["path"] for problem in verdict["problems"]] == ["limits.shards", "zzz"]


def test_check_asks_the_kafka_client(file: Path) -> None:
    result = CliRunner().invoke(app, ["check", "-f", str(file), "--set", "producer_kafka_config.lingr.ms=1"])
    assert isinstance(result.exception, ConfigurationError)
    assert [problem.path for problem in result.exception.problems] == ['producer_kafka_config."lingr.ms"']


def test_check_lists_problems_of_every_kind_at_once(file: Path) -> None:
    """What the Kafka client refuses beside what the schema does, and each thing once."""
    given = (
        "limits.shards=0", "zzz=1", "delivery=never", "producer_kafka_config.lingr.ms=1",
        "base_kafka_config.socket.timeout.ms=soon", "producer_kafka_config.enable.idempotence=false",
    )  # fmt: skip
    result = CliRunner().invoke(app, ["check", "-f", str(file), *(part for text in given for part in ("--set", text))])
    assert isinstance(result.exception, ConfigurationError)
    paths = [problem.path for problem in result.exception.problems]
    assert sorted(paths) == sorted([
        "limits.shards", "zzz", "delivery", 'producer_kafka_config."lingr.ms"',
        'base_kafka_config."socket.timeout.ms"', 'producer_kafka_config."enable.idempotence"',
    ])  # fmt: skip


@pytest.mark.parametrize(
    "command",
    ["move", "verify", "claims", "consume --group g --topic t", "dead list --dead-letter-topic t"],
)
@pytest.mark.parametrize("option", ["security.protocol=SASL_SSL", "bogus=1"])
def test_what_the_kafka_client_refuses_ends_every_command_that_needs_it(command: str, option: str) -> None:
    done = run_cli(*command.split(), "--set", f"base_kafka_config.{option}", check=False)
    assert done.returncode == 78
    assert "1 configuration problem" in done.stderr
    assert "base_kafka_config" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rule_between_settings_hides_no_option(file: Path) -> None:
    given = ["--set", "limits.drain_interval=1ms", "--set", "producer_kafka_config.lingr.ms=1"]
    result = CliRunner().invoke(app, ["check", "-f", str(file), *given])
    assert isinstance(result.exception, ConfigurationError)
    paths = [problem.path for problem in result.exception.problems]
    assert 'producer_kafka_config."lingr.ms"' in paths
    assert any(path.startswith("limits.") for path in paths)


def test_other_commands_load_with_the_same_options(file: Path) -> None:
    config = LoggedOptions(file, ["limits.shards=2"], "trace").load()
    assert (config.limits.shards, config.logging.level) == (2, "trace")


def test_the_command_exits_with_78_and_no_traceback(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HARVESTER_CONFIG"}
    result = subprocess.run(
        [Path(sys.executable).with_name("harvester"), "config", "check", "--set", "limits.shards=0", "--set", "zzz=1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 78
    assert "limits.shards: 0 is out of range" in result.stderr
    assert "zzz: unknown setting" in result.stderr
    assert "Traceback" not in result.stderr


_GIVEN = ["--set", "leader_group_id=billing"]
_BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize(
    "command",
    [
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "check"],
        ["config", "check", "--json", "--set", "x.y=1"],
    ],
)
def test_a_reader_that_has_gone_is_no_failed_command(command: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*COMMAND, *command, *_GIVEN], env=cli_environment(_BUFFERED), stdout=writes, stderr=subprocess.PIPE,
        check=False,
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", [["config", "show"], ["config", "check"]])
def test_a_command_may_have_no_standard_output(command: list[str]) -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *command, *_GIVEN]
    done = subprocess.run(closing, env=cli_environment(_BUFFERED), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_said_without_a_traceback() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "config", "show", *_GIVEN], env=cli_environment(_BUFFERED), stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "harvester: standard output cannot be written: No space left on device\n"

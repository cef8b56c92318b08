"""`harvester stack`, as people and scripts use it; the servers are given ones, so none is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harvester.errors import ExitCode
from tests.support.cli import run_cli

DSN = "host=db.example dbname='out box' user=me"
BOOTSTRAP = "k1.example:9092,k2.example:9092"


def test_given_servers_are_recorded_and_printed_for_a_shell(tmp_path: Path) -> None:
    where = ("--directory", str(tmp_path / "stack"))
    up = json.loads(run_cli("stack", "up", *where, "--dsn", DSN, "--bootstrap", BOOTSTRAP, "--json").stdout)
    assert up["running"]
    assert up["postgres"] == {"state": "given", "address": DSN, "pid": None, "log": None}
    assert up["kafka"]["address"] == BOOTSTRAP

    exports = run_cli("stack", "env", *where).stdout
    shell = f'{exports}\nprintf "%s|%s" "$HARVESTER_TEST_DSN" "$HARVESTER_TEST_BOOTSTRAP"'
    evaluated = subprocess.run(["sh", "-euc", shell], capture_output=True, text=True, check=True)
    assert evaluated.stdout == f"{DSN}|{BOOTSTRAP}"

    assert "nothing was running" in run_cli("stack", "down", *where, "--delete").stdout
    assert not (tmp_path / "stack").exists()


def test_without_a_stack(tmp_path: Path) -> None:
    status = run_cli("stack", "status", "--json", env={"HARVESTER_STACK": str(tmp_path)}, check=False)
    assert status.returncode == ExitCode.FAILED
    assert json.loads(status.stdout)["running"] is False

    env = run_cli("stack", "env", env={"HARVESTER_STACK": str(tmp_path)}, check=False)
    assert env.returncode == ExitCode.UNAVAILABLE
    assert env.stdout == ""
    assert env.stderr.splitlines() == [
        f"harvester: the stack in {tmp_path} is not running",
        "hint: harvester stack up",
    ]

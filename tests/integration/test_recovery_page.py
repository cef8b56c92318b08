"""The steps of docs/recovery.md for a restored backup, and of docs/operations.md for going back after a migration."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester.stack import postgres
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.longs import long
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]
pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


def _drain(scene: Scene, config: Path) -> None:
    run_cli("start", "-f", str(config), "--dashboard", "off", "--until-empty")
    assert scene.left() == []


def _started(config: Path) -> bool:
    done = run_cli("start", "-f", str(config), "--dashboard", "off", "--until-empty", check=False)
    assert done.returncode in (0, 76), done.stderr
    return done.returncode == 0


def _rows(first: int, last: int) -> list[tuple[str, str]]:
    return [(f"key-{number % 3}", str(number)) for number in range(first, last)]


@long
@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_a_restored_backup_is_published_once_more_and_goes_on(scene: Scene, delivery: str) -> None:
    config = scene.config_file(delivery=delivery)
    name = str(conninfo_to_dict(scene.dsn)["dbname"])
    scene.add(*_rows(0, 6))
    _drain(scene, config)
    scene.add(*_rows(6, 18))
    scene.db.close()
    with psycopg.connect(make_conninfo(scene.dsn, dbname="postgres"), autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}-backup" TEMPLATE "{name}"'.encode())
        # Life goes on, and is lost.
        scene.db = psycopg.connect(scene.dsn, autocommit=True)
        _drain(scene, config)
        scene.add(*_rows(18, 24))
        _drain(scene, config)
        scene.db.close()
        admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
        admin.execute(f'ALTER DATABASE "{name}-backup" RENAME TO "{name}"'.encode())

    run_cli("init", "-f", str(config))
    scene.db = psycopg.connect(scene.dsn, autocommit=True)
    (seen,) = scene.db.execute("SELECT last_value FROM outbox_id_seq").fetchall()[0]
    scene.db.execute("SELECT setval('outbox_id_seq', %s)", (seen + 6,))
    scene.add(*_rows(100, 103))
    # Refused while the last heartbeat of the original could be a live member's.
    eventually(lambda: _started(config), 60, "the restored outbox has the group")
    assert scene.left() == []

    assert scene.quarantined() == {}
    for key, values in scene.published().items():
        number = int(str(key).removeprefix("key-"))
        of_key = [value for _key, value in [*_rows(0, 18), *_rows(18, 24)] if _key == key]
        again = [value for _key, value in [*_rows(6, 18), *_rows(100, 103)] if _key == key]
        assert values == [*of_key, *again], f"key {number}"


def test_tables_beside_the_outbox_go_back_and_nothing_is_lost(scene: Scene, tmp_path: Path) -> None:
    """Saved before a migration, restored after it; rows in the outbox stay."""
    programs = postgres.find_programs(None)
    if not (programs / "pg_dump").is_file():
        pytest.skip("no pg_dump beside the server's programs")
    config = scene.config_file()
    tables = ("outbox_term", "outbox_quarantine", "outbox_lease")
    scene.add(*_rows(0, 6))
    _drain(scene, config)
    saved = tmp_path / "saved.sql"
    _run(programs / "pg_dump", scene.dsn, *(f"--table={table}" for table in tables), "--file", str(saved))
    assert "outbox_id_seq" not in saved.read_text()
    scene.db.execute("UPDATE outbox_term SET schema_version = 99")  # as a newer version's init leaves it
    refused = run_cli("start", "-f", str(config), "--dashboard", "off", "--until-empty", check=False)
    assert refused.returncode == 65
    scene.add(*_rows(6, 18))
    for table in tables:
        scene.db.execute(f"DROP TABLE {table}".encode())
    _run(programs / "psql", scene.dsn, "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(saved))
    _drain(scene, config)
    assert scene.published() == {
        f"key-{key}": [value for _key, value in _rows(0, 18) if _key == f"key-{key}"] for key in range(3)
    }


def _run(program: Path, *arguments: str) -> None:
    import subprocess

    found = program if program.is_file() else shutil.which(program.name)
    assert found, program
    done = subprocess.run([str(found), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""`scripts/rolling-upgrade COMMIT [MODE ...]`: an older and this version in one group, while records are written.

Two older harvesters run, and four sessions write. A newer one refuses to start until `init` of the newer version has
migrated the tables under them; then the older ones give way one after the other, the one that stands by first, as
docs/operations.md tells users to do. An older one that would start now is refused. The newer leader is killed at last,
and the other one drains the outbox.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from harvester import stack
from harvester.outbox.ddl import schema_version
from scripts.version_smoke import _LOAD, Broken, Servers, Verdict, _command, _ended, _running, _toml, _until, judge

ROOT = Path(__file__).parents[1]
RECORDS = 40_000
REFUSED = 65
MODES = ("at-least-once", "exactly-once")


def older(commit: str, place: Path) -> Path:
    """An interpreter that finds the sources of a commit before those that are installed."""
    source, library = place / "older", place / "library"
    library.mkdir()
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", source, commit], check=True)
    for name, folder in (("harvester", "harvester"), ("harvester_cli", "cli")):
        (library / name).symlink_to(source / folder)
    program = place / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(library))} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def upgrade(old: Servers, new: Servers, delivery: str) -> Verdict:
    """On a database, a topic and a group of its own."""
    name = f"upgrade-{uuid.uuid4().hex[:8]}"
    config, earlier = new.place / f"{name}.toml", new.place / f"{name}-older.toml"
    config.write_text(_toml(new, name, delivery, "memory"))
    # What an older version need not know, and is the default.
    lines = config.read_text().replace('[control]\n"socket" = "off"\n', "").splitlines()
    earlier.write_text("\n".join(line for line in lines if line != 'delivery = "at-least-once"'))
    with psycopg.connect(new.dsn, autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"'.encode())
    kafka = AdminClient({"bootstrap.servers": new.bootstrap, "broker.address.family": "v4"})
    kafka.create_topics([NewTopic(name, 8, 1)])[name].result(30)
    with psycopg.connect(new.dsn, dbname=name, autocommit=True) as database:
        return _run(old, new, database, config, earlier, name, delivery)


def _run(
    old: Servers,
    new: Servers,
    database: psycopg.Connection[Any],
    config: Path,
    earlier: Path,
    topic: str,
    delivery: str,
) -> Verdict:
    def number(query: str) -> int:
        return int(database.execute(query.encode()).fetchall()[0][0])

    def term() -> int:
        return number("SELECT term FROM outbox_term")

    def gone() -> int:
        last = "SELECT coalesce(last_value, 0) FROM pg_sequences WHERE sequencename = 'outbox_id_seq'"
        return number(last) - number("SELECT count(*) FROM outbox")

    def version() -> int:
        return number("SELECT schema_version FROM outbox_term")

    def goes_on(of: Callable[[], int] = gone) -> Callable[[], bool]:
        before = of()
        return lambda: of() > before + 200

    _command(old, earlier, "init", "--notify")
    began = version()
    with ExitStack() as running:

        def start(servers: Servers) -> subprocess.Popen[bytes]:
            return running.enter_context(_running(servers, earlier if servers is old else config, "start"))

        first = start(old)
        _until(lambda: term() > 0, "the older version leads", first)
        second = start(old)
        pump = running.enter_context(
            _running(old, earlier, "pump", "--topic", topic, "--records", str(RECORDS), *_LOAD)
        )
        _until(goes_on(), "records flow", first, second, pump)
        migrates = began < schema_version()
        if migrates:
            _refused(new, config, "the newer version, before init")
        _command(new, config, "init", "--notify")
        if version() != schema_version():
            raise Broken(f"init left schema version {version()}")
        _until(goes_on(), "records flow after init", first, second, pump)
        _stopped(second, "the older one that stood by")
        third = start(new)
        _until(goes_on(), "records flow beside a newer member", first, third, pump)
        led = term()
        _stopped(first, "the older leader")
        _until(lambda: term() > led, "the newer version leads", third)
        if migrates:
            _refused(old, earlier, "the older version, after init")
        fourth = start(new)
        _until(goes_on(), "records flow in the newer version", third, fourth, pump)
        led, left = term(), max(0, RECORDS - gone())
        third.kill()
        third.wait()
        _until(lambda: term() > led, "the last one leads", fourth)
        _ended(pump, "the pump")
        _until(lambda: not number("SELECT count(*) FROM outbox"), "the outbox is empty", fourth)
        _stopped(fourth, "the last harvester")
    found = json.loads(_command(new, config, "verify", "--topic", topic, "--json", check=False))
    print(f"{delivery}: schema {began} to {version()}, {term()} terms, {left} records to come at SIGKILL", flush=True)
    return judge(found, RECORDS, left, delivery)


def _stopped(process: subprocess.Popen[bytes], what: str) -> None:
    process.send_signal(signal.SIGTERM)
    _ended(process, what)


def _refused(servers: Servers, config: Path, what: str) -> None:
    command: list[str | Path] = [servers.python, "-m", "harvester_cli", "start", "-f", config]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, cwd=servers.place)
    if done.returncode != REFUSED:
        raise Broken(f"{what} ended with exit code {done.returncode}, not {REFUSED}: {done.stderr.decode()[-300:]}")


def main() -> int:
    """Both modes."""
    with tempfile.TemporaryDirectory(prefix="upgrade-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        try:
            program = older(sys.argv[1], place)
            info = stack.up(place / "stack", stack.StackOptions(durable=False, kafka_heap_mb=512))
            new = Servers(info.dsn, info.bootstrap, "", "", Path(sys.executable), place)
            problems = []
            for delivery in sys.argv[2:] or MODES:
                try:
                    found = upgrade(replace(new, python=program), new, delivery)
                except Broken as error:
                    found = Verdict(problem=str(error))
                print(f"{delivery}: {found}", flush=True)
                problems.append(found.problem)
        finally:
            stack.down(place / "stack", delete=True)
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place / "older"], check=False)
    print("; ".join(filter(None, problems)) or "holds")
    return 1 if any(problems) else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    raise SystemExit(main())

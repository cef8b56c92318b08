"""One smoke of `scripts/versions`: the installed command under load, stopped in order, killed, and judged.

Everything that is tried runs as `harvester …` of the environment in question: init, start, pump and verify. While four
sessions write records of the same keys, a first harvester is stopped by SIGTERM; while they write again, a second one
is killed by SIGKILL, and a third one drains the outbox. `verify` compares what was committed with what Kafka holds.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

_WAIT_S = 120.0
_RATE_PER_S = 800
_LIMITS = {"shards": 2, "heartbeat_timeout": "2s", "session_timeout": "6s", "drain_interval": "3s"}
_LOAD = ("--keys", "40", "--writers", "4", "--late", "0.02", "--rollbacks", "0.02", "--rate", str(_RATE_PER_S))


@dataclass(frozen=True, slots=True)
class Servers:
    """Running servers, their versions, and the interpreter with the harvester to try."""

    dsn: str
    bootstrap: str
    postgres: str
    kafka: str
    python: Path
    place: Path

    @property
    def python_version(self) -> str:
        return self._say("import platform; print(platform.python_version())")

    def library(self, name: str) -> str:
        """The version that is installed for this interpreter."""
        return self._say(f"import importlib.metadata; print(importlib.metadata.version({name!r}))")

    def _say(self, program: str) -> str:
        done = subprocess.run([self.python, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found; `problem` is empty when all of it is as promised."""

    inserted: int = 0
    left: int = 0  # at SIGKILL
    lost: int = 0
    order: int = 0
    repeated: int = 0
    problem: str = ""


class Broken(Exception):
    """The smoke could not be carried through."""


def judge(found: dict[str, Any], records: int, left: int, delivery: str) -> Verdict:
    """Of verify's JSON; `left`: records that were still to be relayed at SIGKILL, written or not."""
    problems = [f"{name} {found[name]}" for name in ("lost", "order_violations", "quarantined", "unexpected", "pending")
                if found[name]]  # fmt: skip
    if found["inserted"] != records:
        problems.append(f"{found['inserted']} of {records} records were written")
    if delivery == "exactly-once" and found["duplicates"]:
        problems.append(f"{found['duplicates']} repeated")
    if not left:
        problems.append("it was killed when all was done")
    return Verdict(found["inserted"], left, found["lost"], found["order_violations"], found["duplicates"],
                   ", ".join(problems))  # fmt: skip


def smoke(servers: Servers, delivery: str, marking: str, records: int) -> Verdict:
    """On a database, a topic and a group of its own."""
    name = f"smoke-{uuid.uuid4().hex[:8]}"
    config = servers.place / f"{name}.toml"
    config.write_text(_toml(servers, name, delivery, marking))
    with psycopg.connect(servers.dsn, autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"'.encode())
    kafka = AdminClient({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"})
    kafka.create_topics([NewTopic(name, 8, 1)])[name].result(30)
    try:
        with psycopg.connect(servers.dsn, dbname=name, autocommit=True) as database:
            return _run(servers, database, config, name, delivery, records)
    except Broken as error:
        return Verdict(problem=f"{error}; log: {_log(config)}")


def _run(
    servers: Servers, database: psycopg.Connection[Any], config: Path, topic: str, delivery: str, records: int
) -> Verdict:
    _command(servers, config, "init", "--notify")

    def number(query: str) -> int:
        return int(database.execute(query.encode()).fetchall()[0][0])

    def gone() -> int:
        """So many ids were given out and stand in the table no more; a few are of rows that were rolled back."""
        last = "SELECT coalesce(last_value, 0) FROM pg_sequences WHERE sequencename = 'outbox_id_seq'"
        return number(last) - number("SELECT count(*) FROM outbox")

    def leads(led: int, process: subprocess.Popen[bytes]) -> None:
        _until(lambda: number("SELECT term FROM outbox_term") > led, f"term {led + 1} is taken", process)

    load = ("--topic", topic, "--records", str(records // 2), *_LOAD)
    with _running(servers, config, "start") as first:
        leads(0, first)
        with _running(servers, config, "pump", *load) as pump:
            _until(lambda: gone() >= records // 8, "some records are gone", first, pump)
            first.send_signal(signal.SIGTERM)
            _ended(first, "the harvester that was stopped")
            _ended(pump, "the pump")
    with _running(servers, config, "start") as second:
        leads(1, second)
        with _running(servers, config, "pump", "--append", *load) as pump:
            _until(lambda: gone() >= records // 2 + records // 8, "more records are gone", second, pump)
            second.kill()
            second.wait()
            to_come = max(0, records - gone())
            with _running(servers, config, "start") as third:
                _ended(pump, "the pump")
                leads(2, third)
                _until(lambda: not number("SELECT count(*) FROM outbox"), "the outbox is empty", third)
                third.send_signal(signal.SIGTERM)
                _ended(third, "the last harvester")
    found = _command(servers, config, "verify", "--topic", topic, "--json", check=False)
    try:
        return judge(json.loads(found), records, to_come, delivery)
    except (ValueError, KeyError) as error:
        raise Broken(f"verify gave no verdict: {found[-300:]}") from error


@contextmanager
def _running(servers: Servers, config: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with config.with_suffix(".log").open("ab") as log:
        command: list[str | Path] = [servers.python, "-m", "harvester_cli", *arguments, "-f", config]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=servers.place)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _command(servers: Servers, config: Path, *arguments: str, check: bool = True) -> str:
    command: list[str | Path] = [servers.python, "-m", "harvester_cli", *arguments, "-f", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S, cwd=servers.place)
    if check and done.returncode:
        raise Broken(f"{arguments[0]}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    said: str = done.stdout or done.stderr
    return said


def _until(condition: Callable[[], bool], what: str, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        for process in processes:
            if process.poll() not in (None, 0):
                raise Broken(f"a process ended with exit code {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise Broken(f"after {_WAIT_S:g} s it is not so that {what}")
        time.sleep(0.02)


def _ended(process: subprocess.Popen[bytes], what: str) -> None:
    try:
        code = process.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        raise Broken(f"{what} did not end within {_WAIT_S:g} s") from None
    if code:
        raise Broken(f"{what} ended with exit code {code}")


def _log(config: Path) -> str:
    file = config.with_suffix(".log")
    return file.read_text(errors="replace").strip()[-500:].replace("\n", " ").replace("|", "/") if file.exists() else ""


def _toml(servers: Servers, name: str, delivery: str, marking: str) -> str:
    settings = {
        "leader_group_id": name,
        "name": name,
        "data_source": psycopg.conninfo.make_conninfo(servers.dsn, dbname=name),
        "delivery": delivery,
        "marking": marking,
    }
    tables: dict[str, dict[str, object]] = {
        "base_kafka_config": {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"},
        "control": {"socket": "off"},
        "limits": dict(_LIMITS),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for table, inner in tables.items():
        lines += [f"[{table}]", *(f'"{key}" = {json.dumps(value)}' for key, value in inner.items())]
    return "\n".join(lines) + "\n"

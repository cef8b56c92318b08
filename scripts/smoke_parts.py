"""The parts of smoke tests of the installed command: processes, a separate outbox, and the verdict of `verify`.

Everything runs as `python -m harvester_cli …` of the interpreter under test, with one configuration file, beside
which its log is kept.
"""

from __future__ import annotations

import json
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
_LIMITS = {"shards": 2, "heartbeat_timeout": "2s", "session_timeout": "6s", "drain_interval": "3s"}
# Of `pump`: keys of several writers, some of which commit late or not at all.
LOAD = ("--keys", "40", "--writers", "4", "--late", "0.02", "--rollbacks", "0.02", "--rate", "800")


class Broken(Exception):
    """The smoke test could not be completed."""


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


@dataclass(frozen=True, slots=True)
class Outbox:
    """A database and a topic of one smoke, both of one name, and what the tables say."""

    name: str
    database: psycopg.Connection[Any]

    def term(self) -> int:
        """0 until somebody leads."""
        return self._number("SELECT term FROM outbox_term")

    def schema_version(self) -> int:
        return self._number("SELECT schema_version FROM outbox_term")

    def rows(self) -> int:
        return self._number("SELECT count(*) FROM outbox")

    def gone(self) -> int:
        """So many ids were given out and stand in the table no more; a few are of rows that were rolled back."""
        last = "SELECT coalesce(last_value, 0) FROM pg_sequences WHERE sequencename = 'outbox_id_seq'"
        return self._number(last) - self.rows()

    def _number(self, query: str) -> int:
        return int(self.database.execute(query.encode()).fetchall()[0][0])


@contextmanager
def outbox(servers: Servers, prefix: str) -> Iterator[Outbox]:
    """Made for this smoke; the tables are left to `init`."""
    name = f"{prefix}-{uuid.uuid4().hex[:8]}"
    with psycopg.connect(servers.dsn, autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"'.encode())
    kafka = AdminClient({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"})
    kafka.create_topics([NewTopic(name, 8, 1)])[name].result(30)
    with psycopg.connect(servers.dsn, dbname=name, autocommit=True) as database:
        yield Outbox(name, database)


def configuration(servers: Servers, name: str, *, control: bool = True, **settings: str) -> Path:
    """A file with these settings, of a group that is called like its database.

    Every version knows what it says, but for `control`: no socket, for one machine has harvesters of one name here.
    """
    settings = {
        "leader_group_id": name,
        "name": name,
        "data_source": psycopg.conninfo.make_conninfo(servers.dsn, dbname=name),
        **settings,
    }
    tables: dict[str, dict[str, object]] = {
        **({"control": {"socket": "off"}} if control else {}),
        "base_kafka_config": {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"},
        "limits": dict(_LIMITS),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for table, inner in tables.items():
        lines += [f"[{table}]", *(f'"{key}" = {json.dumps(value)}' for key, value in inner.items())]
    file = servers.place / f"{name}-{len(list(servers.place.glob('*.toml')))}.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


@contextmanager
def running(servers: Servers, config: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in the background; kills it at the end if it still runs."""
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            _command(servers, config, arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=servers.place
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def run(servers: Servers, config: Path, *arguments: str, ends: int | None = 0) -> str:
    """The output of a command; Broken unless it exits with this code (None: any)."""
    command = _command(servers, config, arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S, cwd=servers.place)
    if ends is not None and done.returncode != ends:
        said = done.stderr.strip()[-300:]
        raise Broken(f"{arguments[0]}: exit code {done.returncode}, not {ends}: {said}")
    return str(done.stdout or done.stderr)


def until(condition: Callable[[], bool], what: str, *processes: subprocess.Popen[bytes]) -> None:
    """Wait; Broken when time is up, or one of the processes fails."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        for process in processes:
            if process.poll() not in (None, 0):
                raise Broken(f"a process ended with exit code {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise Broken(f"after {_WAIT_S:g} s it is not so that {what}")
        time.sleep(0.02)


def ended(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait for its end; Broken unless it is a good one."""
    try:
        code = process.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        raise Broken(f"{what} did not end within {_WAIT_S:g} s") from None
    if code:
        raise Broken(f"{what} ended with exit code {code}")


def verified(servers: Servers, config: Path, topic: str, records: int, left: int, delivery: str) -> Verdict:
    """Compare what was committed with what Kafka holds."""
    said = run(servers, config, "verify", "--topic", topic, "--json", ends=None)
    try:
        return judge(json.loads(said), records, left, delivery)
    except (ValueError, KeyError) as error:
        raise Broken(f"verify gave no verdict: {said[-300:]}") from error


def judge(found: dict[str, Any], records: int, left: int, delivery: str) -> Verdict:
    """The verdict from verify's JSON; `left`: records still to be relayed at SIGKILL, written or not."""
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


def log_end(config: Path) -> str:
    """The end of what commands of this configuration have logged, in one line of a table."""
    file = config.with_suffix(".log")
    return file.read_text(errors="replace").strip()[-500:].replace("\n", " ").replace("|", "/") if file.exists() else ""


def _command(servers: Servers, config: Path, arguments: tuple[str, ...]) -> list[str | Path]:
    return [servers.python, "-m", "harvester_cli", *arguments, "-f", config]

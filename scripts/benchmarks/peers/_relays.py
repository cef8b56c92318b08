"""The three relays as processes on one outbox: ours, goharvest, Debezium. Everything that differs is here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from harvester.stack import java
from scripts.benchmarks._place import ROOT, Place
from scripts.benchmarks.peers import _tools

_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Peer:
    """`command` makes the command line of one process; `like` says what is not like for like.

    `deletes`: the outbox gets empty. A relay that does not delete reads the log of the database from where it joined,
    so it has to run before anything is inserted, and goes through its rounds in one process.
    """

    name: str
    command: Callable[[Place, str], Sequence[str]]
    deletes: bool
    like: str
    leader_topic: bool = False  # it does not make its own soon enough


@contextmanager
def process(peer: Peer, place: Place, name: str = "one") -> Iterator[subprocess.Popen[bytes]]:
    """One process of it, in a process group of its own; stopped at the end."""
    log = place.config.with_name(f"{place.name}-{name}.log")
    with log.open("w") as output:
        running = subprocess.Popen(
            list(peer.command(place, name)), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
            process_group=0,
        )  # fmt: skip
    try:
        yield running
    except SystemExit as error:
        raise SystemExit(f"{peer.name}: {error}\n{log.read_text()[-2000:]}") from error
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def ours(settings: Sequence[str], label: str) -> Peer:
    """The harvester with these settings."""

    def command(place: Place, name: str) -> Sequence[str]:
        extra = [part for setting in (f"name={name}", *settings) for part in ("--set", setting)]
        return [
            sys.executable, "-m", "harvester_cli", "start", "-f", str(place.config), "--dashboard", "off", *extra,
        ]  # fmt: skip

    return Peer(f"harvester_{label}", command, deletes=True, like="")


def goharvest(label: str, *limits: str) -> Peer:
    """goharvest with its defaults, or with (marked records per query, records in flight)."""
    program = _tools.goharvest()

    def command(place: Place, name: str) -> Sequence[str]:
        source = conninfo_to_dict(place.dsn)
        dsn = " ".join(f"{key}={value}" for key, value in source.items()) + " sslmode=disable"
        return [str(program), dsn, place.bootstrap, place.name, name, *limits]

    like = "one process with its threads; its client needs a broker of Kafka 3"
    return Peer(f"goharvest_{label}", command, deletes=True, leader_topic=True, like=like)


def debezium(label: str, poll_ms: int | None, linger_ms: int | None) -> Peer:
    """Debezium's EventRouter in a standalone Connect; None: as it comes."""
    classpath = f"{_tools.jars('debezium')}/*"
    runtime = java.find()

    def command(place: Place, name: str) -> Sequence[str]:
        worker, connector = _debezium_files(place, poll_ms, linger_ms)
        return [
            str(runtime.program), "-Xmx1g", "-cp", classpath,
            "org.apache.kafka.connect.cli.ConnectStandalone", str(worker), str(connector),
        ]  # fmt: skip

    like = "reads the write-ahead log: needs wal_level=logical and a slot; marks and deletes nothing; no header arrays"
    return Peer(f"debezium_{label}", command, deletes=False, like=like)


def _debezium_files(place: Place, poll_ms: int | None, linger_ms: int | None) -> tuple[Path, Path]:
    source = conninfo_to_dict(place.dsn)
    text = "org.apache.kafka.connect.storage.StringConverter"
    worker = {
        "bootstrap.servers": place.bootstrap,
        "key.converter": text,
        "value.converter": text,
        "offset.storage.file.filename": str(place.config.with_suffix(".offsets")),
        "offset.flush.interval.ms": "10000",
        "listeners": "http://127.0.0.1:0",
        "producer.acks": "all",
    }
    if linger_ms is not None:
        worker["producer.linger.ms"] = str(linger_ms)
    connector = {
        "name": place.name,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "plugin.name": "pgoutput",
        "database.hostname": str(source["host"]),
        "database.port": str(source.get("port", 5432)),
        "database.user": str(source["user"]),
        "database.password": str(source.get("password", "")),
        "database.dbname": str(source["dbname"]),
        "topic.prefix": place.name,
        "slot.name": place.name,
        "publication.autocreate.mode": "filtered",
        "table.include.list": "public.outbox",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        "transforms": "outbox",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.table.field.event.id": "id",
        "transforms.outbox.table.field.event.key": "kafka_key",
        "transforms.outbox.table.field.event.payload": "kafka_value",
        "transforms.outbox.route.by.field": "kafka_topic",
        "transforms.outbox.route.topic.replacement": "${routedByValue}",
    }
    if poll_ms is not None:
        connector["poll.interval.ms"] = str(poll_ms)
    return _write(place, "worker", worker), _write(place, "connector", connector)


def _write(place: Place, name: str, values: dict[str, str]) -> Path:
    path = place.config.with_suffix(f".{name}.properties")
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}={json.dumps(value)[1:-1]}\n" for key, value in values.items()))
    return path

"""The three relays as processes on one outbox: ours, goharvest, Debezium. Everything that differs is here."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from harvester.stack import java
from harvester.stack.stack import free_ports
from scripts.benchmarks._place import ROOT, Place
from scripts.benchmarks.peers import _tools

_STOP_S, _START_S = 30.0, 120.0


@dataclass(frozen=True, slots=True)
class Peer:
    """`command` makes the command line of one process; `like` says what is not like for like.

    `deletes`: the outbox gets empty. A relay that does not delete reads the log of the database from where it joined,
    so it has to run before anything is inserted, and goes through its rounds in one process.
    `one_at_a_time`: of a key, so that few keys are slow. `once`: it sends transactions. `begin`: called for a process
    that has just been started.
    """

    name: str
    command: Callable[[Place, str], Sequence[str]]
    deletes: bool
    like: str
    leader_topic: bool = False  # it does not make its own soon enough
    one_at_a_time: bool = True
    once: bool = False
    begin: Callable[[Place, str], None] = lambda place, name: None


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
        peer.begin(place, name)
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

    once = "delivery=exactly-once" in settings
    return Peer(f"harvester_{label}", command, deletes=True, like="", one_at_a_time=not once, once=once)


def goharvest(label: str, *limits: str) -> Peer:
    """goharvest with its defaults, or with (marked records per query, records in flight)."""
    program = _tools.goharvest()

    def command(place: Place, name: str) -> Sequence[str]:
        source = conninfo_to_dict(place.dsn)
        dsn = " ".join(f"{key}={value}" for key, value in source.items()) + " sslmode=disable"
        return [str(program), dsn, place.bootstrap, place.name, name, *limits]

    like = "one process with its threads; its client needs a broker of Kafka 3"
    return Peer(f"goharvest_{label}", command, deletes=True, leader_topic=True, like=like)


_DEBEZIUM = "reads the write-ahead log: needs wal_level=logical and a slot; marks and deletes nothing; no header arrays"


def debezium(label: str, poll_ms: int | None, linger_ms: int | None) -> Peer:
    """Debezium's EventRouter in a standalone Connect; None: as it comes."""

    def command(place: Place, name: str) -> Sequence[str]:
        worker = _worker(place, linger_ms) | {
            "offset.storage.file.filename": str(place.config.with_suffix(".offsets")),
            "listeners": "http://127.0.0.1:0",
        }
        connector = _write(place, "connector", {"name": place.name, **_connector(place, poll_ms)})
        return [*_connect("ConnectStandalone"), str(_write(place, "worker", worker)), str(connector)]

    return Peer(f"debezium_{label}", command, deletes=False, like=_DEBEZIUM, one_at_a_time=False)


def debezium_once(label: str, poll_ms: int | None, linger_ms: int | None) -> Peer:
    """The same in a distributed Connect of one process, which alone sends transactions: one for each poll."""

    def command(place: Place, name: str) -> Sequence[str]:
        [port] = free_ports(1, [])
        _port_file(place, name).write_text(str(port))
        worker = _worker(place, linger_ms) | {
            "group.id": place.name,
            "exactly.once.source.support": "enabled",
            "listeners": f"http://127.0.0.1:{port}",
        }
        for kept in ("config", "offset", "status"):
            worker[f"{kept}.storage.topic"] = f"{place.name}.{kept}"
            worker[f"{kept}.storage.replication.factor"] = "1"
        worker |= {"offset.storage.partitions": "1", "status.storage.partitions": "1"}
        return [*_connect("ConnectDistributed"), str(_write(place, f"worker-{name}", worker))]

    def begin(place: Place, name: str) -> None:
        port, where = int(_port_file(place, name).read_text()), f"/connectors/{place.name}"
        config = _connector(place, poll_ms) | {"exactly.once.support": "required"}
        deadline = time.monotonic() + _START_S
        # Who takes over finds the connector there. Workers that still find each other answer with errors.
        while (status := _ask(port, "GET", f"{where}/status")) != 200:
            if status == 404:
                _ask(port, "PUT", f"{where}/config", json.dumps(config))
            if time.monotonic() > deadline:
                raise SystemExit("Connect does not take the connector")
            time.sleep(0.2)

    like = f"{_DEBEZIUM}; Connect in distributed mode"
    return Peer(f"debezium_{label}", command, deletes=False, like=like, one_at_a_time=False, once=True, begin=begin)


def _connect(program: str) -> list[str]:
    classpath = f"{_tools.jars('debezium')}/*"
    return [str(java.find().program), "-Xmx1g", "-cp", classpath, f"org.apache.kafka.connect.cli.{program}"]


def _ask(port: int, method: str, path: str, body: str | None = None) -> int:
    """The status of Connect's answer; 0 if there is none yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except OSError:
        return 0
    finally:
        connection.close()
    if answer.status == 400:
        raise SystemExit(f"Connect refuses the connector: {text}")
    return answer.status


def _port_file(place: Place, name: str) -> Path:
    return place.config.with_suffix(f".{name}.port")


def _worker(place: Place, linger_ms: int | None) -> dict[str, str]:
    text = "org.apache.kafka.connect.storage.StringConverter"
    worker = {
        "bootstrap.servers": place.bootstrap,
        "key.converter": text,
        "value.converter": text,
        "offset.flush.interval.ms": "10000",
        "producer.acks": "all",
    }
    return worker if linger_ms is None else {**worker, "producer.linger.ms": str(linger_ms)}


def _connector(place: Place, poll_ms: int | None) -> dict[str, str]:
    source = conninfo_to_dict(place.dsn)
    connector = {
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
    return connector if poll_ms is None else {**connector, "poll.interval.ms": str(poll_ms)}


def _write(place: Place, name: str, values: dict[str, str]) -> Path:
    path = place.config.with_suffix(f".{name}.properties")
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}={json.dumps(value)[1:-1]}\n" for key, value in values.items()))
    return path

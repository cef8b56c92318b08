"""Runs the Apache Kafka broker of a stack: a single KRaft node that is broker and controller at once."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from harvester.errors import StackError
from harvester.stack.java import Java
from harvester.stack.processes import ProcessId, end, is_alive, run, spawn, tail

_LOGGING = """\
status = warn
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p %c{1}: %m%n
"""


def bootstrap(port: int) -> str:
    """The address for clients."""
    return f"127.0.0.1:{port}"


def properties(*, port: int, controller_port: int, logs: Path) -> dict[str, str]:
    """The broker's configuration."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(logs),
        "auto.create.topics.enable": "true",
        "num.partitions": "4",
        "default.replication.factor": "1",
        "min.insync.replicas": "1",
        # Internal topics on one node: one replica, and few partitions, since each costs time at start.
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        # A single member starts at once, and a dead one can be noticed in half a second.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "500",
        # After a kill, the new process waits until the old one's session has expired.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # The defaults reserve 128 MB of heap and 10 MB of mapped index for each of hundreds of partitions.
        "log.cleaner.dedupe.buffer.size": str(16 << 20),
        "log.index.size.max.bytes": str(1 << 20),
    }


def launch(
    home: Path, jars: Path, java: Java, *, port: int, controller_port: int, heap_mb: int, durable: bool
) -> ProcessId:
    """Format the storage if necessary, and start the broker; does not wait for it."""
    home.mkdir(exist_ok=True)
    logs = home / "data"
    settings = properties(port=port, controller_port=controller_port, logs=logs)
    file = _write_properties(home / "server.properties", settings)
    (home / "log4j2.properties").write_text(_LOGGING)
    if not (logs / "meta.properties").is_file():
        shutil.rmtree(logs, ignore_errors=True)
        _format(home, jars, java, settings, new_cluster())
    command = [
        *_java(home, jars, java),
        f"-Xms{min(heap_mb, 256)}m",
        f"-Xmx{heap_mb}m",
        # For tests on few cores: no collector threads, and only the fast compiler, which halves a start's CPU time.
        *(["-XX:+UseG1GC"] if durable else ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]),
        "kafka.Kafka",
        str(file),
    ]
    return spawn(command, log=log(home), env=_environment(), cwd=home, run_as=None)


def new_cluster() -> str:
    """The id for a new cluster."""
    return urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def log(home: Path) -> Path:
    """The broker's log file."""
    return home / "server.log"


def wait_ready(process: ProcessId, home: Path, port: int, deadline: float) -> None:
    """Return once the broker answers a metadata request that includes itself; StackError if it dies or takes too
    long.
    """
    # Checking the port first avoids the client's own (slower) retries and its log messages.
    while not _listens(port):
        _check(process, home, deadline)
        time.sleep(0.05)
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap(port),
            "broker.address.family": "v4",
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
        }
    )
    while True:
        try:
            if client.list_topics(timeout=2).brokers and is_alive(process):
                return
        except KafkaException:
            pass
        _check(process, home, deadline)
        time.sleep(0.05)


def halt(process: ProcessId, *, kill: bool) -> None:
    """Controlled shutdown, or a simulated crash."""
    end(process, [] if kill else [(signal.SIGTERM, 30.0)])


def _check(process: ProcessId, home: Path, deadline: float) -> None:
    if not is_alive(process):
        raise StackError(f"the Kafka broker exited during startup:\n{tail(log(home))}")
    if time.monotonic() > deadline:
        raise StackError(f"the Kafka broker does not answer:\n{tail(log(home))}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _java(home: Path, jars: Path, java: Java) -> list[str]:
    return [
        str(java.program),
        *("-cp", f"{jars}/*"),
        "-Djava.net.preferIPv4Stack=true",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={(home / 'log4j2.properties').as_uri()}",
    ]


def _environment() -> dict[str, str]:
    # JAVA_TOOL_OPTIONS and the like are omitted: they belong to the user's own programs.
    return {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}


def _write_properties(file: Path, settings: dict[str, str]) -> Path:
    file.touch(mode=0o600)
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return file


def _format(home: Path, jars: Path, java: Java, settings: dict[str, str], cluster: str) -> None:
    # Renamed into place: an interrupted start leaves nothing half-formatted. The tool writes no absolute paths.
    with tempfile.TemporaryDirectory(dir=home, prefix=".format-") as scratch:
        fresh = Path(scratch) / "data"
        file = _write_properties(Path(scratch) / "format.properties", {**settings, "log.dirs": str(fresh)})
        run(
            [
                *_java(home, jars, java),
                *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
                "kafka.tools.StorageTool",
                # With "=", because one id in 64 begins with a dash and would be taken for an option.
                *("format", f"--cluster-id={cluster}", "-c", str(file)),
            ],
            what="formatting the Kafka storage",
            timeout_s=120,
            env=_environment(),
        )
        fresh.rename(home / "data")

"""What every start of a broker would do again, done once: its classes are loaded, and its storage is formatted.

A broker that ends in order leaves an archive of its classes (JEP 350), which the later ones map. It is kept in the
cache beside the jars. Brokers of commands, and of the tests of the stack itself, start as a user's do, without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from harvester.stack import kafka
from harvester.stack.java import Java, cache_directory
from harvester.stack.stack import free_ports

_START_S = 90.0
_java, _format = kafka._java, kafka._format


@contextmanager
def prepared() -> Iterator[None]:
    """Brokers that are started meanwhile have it."""
    with mock.patch.multiple(kafka, _java=_java_with_classes, _format=_formatted):
        yield


def _java_with_classes(home: Path, jars: Path, java: Java) -> list[str]:
    return [*_java(home, jars, java), f"-XX:SharedArchiveFile={_made(jars, java) / 'classes.jsa'}"]


def _formatted(home: Path, jars: Path, java: Java, settings: Mapping[str, str], cluster: str) -> None:
    data = home / "data"
    data.mkdir()
    shutil.copy(_made(jars, java) / "bootstrap.checkpoint", data)
    directory = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    ids = {"cluster.id": cluster, "directory.id": directory, "node.id": settings["node.id"], "version": "1"}
    kafka._write_properties(data / "meta.properties", ids)


def _made(jars: Path, java: Java) -> Path:
    """The directory for this Java and these jars; the first who asks makes it."""
    program = java.program.resolve()
    of = f"{program} {program.stat().st_mtime_ns} {jars} {jars.stat().st_mtime_ns}"
    place = cache_directory() / f"classes-{hashlib.sha256(of.encode()).hexdigest()[:16]}"
    if not place.is_dir():
        with _alone(), tempfile.TemporaryDirectory(dir=place.parent, prefix=".classes-") as scratch:
            if not place.is_dir():
                _make(Path(scratch), jars, java).rename(place)
    return place


@contextmanager
def _alone() -> Iterator[None]:
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / ".classes.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(scratch: Path, jars: Path, java: Java) -> Path:
    """Starts a broker, and ends it in order."""
    result, home = scratch / "made", scratch / "broker"
    result.mkdir()
    port, controller_port = free_ports(2, [])

    def recording(home: Path, jars: Path, java: Java) -> list[str]:
        return [*_java(home, jars, java), f"-XX:ArchiveClassesAtExit={result / 'classes.jsa'}"]

    with mock.patch.multiple(kafka, _java=recording, _format=_format):
        process = kafka.launch(home, jars, java, port=port, controller_port=controller_port, heap_mb=300, durable=False)
        shutil.copy(home / "data" / "bootstrap.checkpoint", result)
        kafka.wait_ready(process, home, port, time.monotonic() + _START_S)
        _use(kafka.bootstrap(port))
        kafka.halt(process, kill=False)
    return result


def _use(bootstrap: str) -> None:
    """A transaction and a member of a group."""
    from confluent_kafka import Consumer, Producer

    options = {"bootstrap.servers": bootstrap, "broker.address.family": "v4", "log_level": 3}
    producer = Producer({**options, "transactional.id": "t"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("topic", b"value")
    producer.commit_transaction(30)
    consumer = Consumer({**options, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe(["topic"])
    assert consumer.poll(30) is not None
    consumer.commit(asynchronous=False)
    consumer.close()

"""The environment of one measurement: its own database with an outbox, topic and configuration.

The outbox is created once by `harvester init` and then cloned. All topics have 4 partitions and LogAppendTime, so that
a log shows when each record was appended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg.conninfo import make_conninfo

from scripts.benchmarks._scenario import Bench

ROOT = Path(__file__).parents[2]
PARTITIONS = 4
_templates: dict[tuple[str, bool], str] = {}
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class Place:
    """`name` is the database's, the topic's and the leader group's."""

    name: str
    dsn: str
    bootstrap: str
    config: Path
    admin_dsn: str

    def connect(self) -> psycopg.Connection[Any]:
        """A session of the benchmark's own, autocommit."""
        return psycopg.connect(self.dsn, autocommit=True, application_name="bench")


@contextmanager
def fresh(bench: Bench, *, notify: bool = False) -> Iterator[Place]:
    """An empty outbox and topic; `notify`: with the trigger that wakes the leader. Taken away at the end."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    template = _template(bench, notify=notify)
    with psycopg.connect(bench.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    make_topic(bench, name)
    place = Place(name, make_conninfo(bench.dsn, dbname=name), bench.bootstrap, bench.place / f"{name}.toml", bench.dsn)
    _write_config(place)
    try:
        yield place
    finally:
        place.config.unlink()
        with psycopg.connect(bench.dsn, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        remove_topics(bench, name, f"{name}.neli", group=name)


def make_topic(bench: Bench, name: str, partitions: int = PARTITIONS, **config: str) -> None:
    """A topic that keeps the time of append."""
    config = {"message.timestamp.type": "LogAppendTime"} | {key.replace("_", "."): v for key, v in config.items()}
    admin = _admin(bench)  # its futures end with it
    admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(30)


def remove_topics(bench: Bench, *names: str, group: str | None = None) -> None:
    """Best effort: what stays is in servers that are about to be thrown away."""
    admin = _admin(bench)
    removed = [*admin.delete_topics(list(names)).values()]
    if group is not None:
        removed += admin.delete_consumer_groups([group]).values()
    for future in removed:
        with suppress(KafkaException):
            future.result(30)


def drop_templates(bench: Bench) -> None:
    """At the end, for servers that were given."""
    for (dsn, _), name in list(_templates.items()):
        if dsn == bench.dsn:
            with psycopg.connect(bench.dsn, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            del _templates[dsn, _]


def harvester(*arguments: str) -> str:
    """Run a command of the harvester to its end; its standard output."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"harvester {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def command(*arguments: str) -> Sequence[str]:
    """The real command line."""
    return [sys.executable, "-m", "harvester_cli", *arguments]


def _template(bench: Bench, *, notify: bool) -> str:
    with _making:
        known = _templates.get((bench.dsn, notify))
        if known is not None:
            return known
        name = f"bench_template_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(bench.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        config = bench.place / f"{name}.toml"
        place = Place(name, make_conninfo(bench.dsn, dbname=name), bench.bootstrap, config, bench.dsn)
        _write_config(place)
        harvester("init", "-f", str(place.config), "--notify" if notify else "--no-notify")
        _templates[bench.dsn, notify] = name
        return name


def _write_config(place: Place) -> None:
    lines = [
        f"data_source = {json.dumps(place.dsn)}",
        f"leader_group_id = {json.dumps(place.name)}",
        f"name = {json.dumps(place.name)}",
        "[base_kafka_config]",
        f'"bootstrap.servers" = {json.dumps(place.bootstrap)}',
        '"broker.address.family" = "v4"',
    ]
    place.config.touch(mode=0o600)
    place.config.write_text("\n".join(lines).replace("$", "$$") + "\n")


def _admin(bench: Bench) -> AdminClient:
    return AdminClient({"bootstrap.servers": bench.bootstrap, "broker.address.family": "v4", "log_level": 0})

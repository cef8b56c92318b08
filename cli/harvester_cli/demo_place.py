"""Where the demo takes place: servers, a database with an outbox, a topic and a configuration, all its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.stack import StackInfo

DSN = "HARVESTER_TEST_DSN"
BOOTSTRAP = "HARVESTER_TEST_BOOTSTRAP"
PARTITIONS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Everything the demo uses. `config_path` is what `harvester start -f` reads; `own_servers`: started here."""

    directory: Path
    config_path: Path
    config: Config
    topic: str
    own_servers: bool


@contextmanager
def prepared(say: Callable[[str], None], *, keep: bool) -> Iterator[Place]:
    """Set everything up; take it away again at the end, however that comes, unless `keep`.

    HARVESTER_TEST_DSN and HARVESTER_TEST_BOOTSTRAP name servers of the user's own; in those only what was made
    here is removed. Raises StackError, DatabaseUnavailable, BrokerError.
    """
    import shutil
    import tempfile
    import uuid

    from harvester import stack

    name = f"harvester-demo-{uuid.uuid4().hex[:8]}"
    # Started by root, PostgreSQL runs under another account, which has to get into the directory.
    directory = Path(tempfile.mkdtemp(prefix="harvester-demo-"))
    directory.chmod(0o755)
    place: Place | None = None
    try:
        options = stack.StackOptions(dsn=os.environ.get(DSN) or None, bootstrap=os.environ.get(BOOTSTRAP) or None)
        info = stack.up(directory, options, progress=say)
        place = _describe(info, directory, name, own_servers=options.dsn is None and options.bootstrap is None)
        say(f"creating database and topic {name}")
        _create(info, place, name)
        yield place
    finally:
        with _unhurried():
            if keep:
                _explain(say, directory, place)
            else:
                say("cleaning up")
                if place is not None and not place.own_servers:
                    _remove(info, place, name)
                stack.down(directory, delete=True)
                shutil.rmtree(directory, ignore_errors=True)


def _describe(info: StackInfo, directory: Path, name: str, *, own_servers: bool) -> Place:
    import json

    from psycopg.conninfo import make_conninfo

    from harvester.config import load_config

    settings = {
        "name": "demo",
        "leader_group_id": name,
        "data_source": make_conninfo(info.dsn, dbname=name),
    }
    path = directory / "harvester.toml"
    path.touch(mode=0o600)  # the DSN may hold a password
    # A JSON string is a TOML string; $ begins a variable there.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["[base_kafka_config]", f'"bootstrap.servers" = {json.dumps(info.bootstrap)}']
    path.write_text("\n".join(lines).replace("$", "$$") + "\n")
    return Place(directory, path, load_config(path), topic=name, own_servers=own_servers)


def _create(info: StackInfo, place: Place, name: str) -> None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    from harvester.errors import BrokerError
    from harvester.outbox.connect import connect, database_errors
    from harvester.outbox.schema import init

    with connect(info.dsn, application_name="harvester demo") as connection, database_errors(f"create database {name}"):
        connection.execute(f'CREATE DATABASE "{name}"')
    with connect(place.config.dsn, application_name="harvester demo") as connection:
        init(connection, place.config.table, notify=True)
    # The broker's clock, read when a record is in the log, makes the latency that is measured end there.
    config = {"message.timestamp.type": "LogAppendTime"}
    try:
        admin = AdminClient(place.config.common_options())
        admin.create_topics([NewTopic(name, PARTITIONS, -1, config=config)])[name].result(30)
    except KafkaException as error:
        raise BrokerError(f"the topic {name} could not be created: {error.args[0]}") from error


def _remove(info: StackInfo, place: Place, name: str) -> None:
    """Best effort: what cannot be removed is harmless, and the verdict is worth more than a complaint."""
    from concurrent.futures import wait
    from contextlib import suppress

    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    from harvester.errors import HarvesterError
    from harvester.outbox.connect import connect, database_errors

    with (
        suppress(HarvesterError),
        connect(info.dsn, application_name="harvester demo") as connection,
        database_errors(f"drop database {name}"),
    ):
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
    with suppress(KafkaException):
        admin = AdminClient(place.config.common_options())
        removed = [
            *admin.delete_topics([name, place.config.leader_topic]).values(),
            *admin.delete_consumer_groups([name]).values(),
        ]
        wait(removed, timeout=30)


def _explain(say: Callable[[str], None], directory: Path, place: Place | None) -> None:
    if place is None:
        say(f"kept {directory}")
        return
    say(f"kept; look at it with: harvester verify -f {place.config_path}")
    if place.own_servers:
        say(f"remove it with: harvester stack down --delete -d {directory}")


@contextmanager
def _unhurried() -> Iterator[None]:
    """Signals wait until the clean-up is done: it is bounded, and half of it would leave servers behind."""
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A handler that does nothing, unlike SIG_IGN, is not inherited by programs started meanwhile.
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

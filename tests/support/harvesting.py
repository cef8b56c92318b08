"""A scene for tests of the whole relay: an outbox, a topic, a leader group, and harvesters in both forms.

The fixtures are in tests/support/scenes.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from harvester import Config, Event, FakeGroup, Harvester, LeaderAcquired, LeaderRefreshed, MeterRead
from harvester.neli.group import Group
from harvester.neli.member import KafkaGroup
from harvester.wiring import member_settings

from .cli import RunningCli
from .consuming import Published, by_key, read_topic
from .hooks import Plan
from .servers import Servers
from .wait import eventually
from .warm import warm_forkservers

E = TypeVar("E", bound=Event)

# Short, but with room for a machine that is busy with other tests.
LIMITS: Mapping[str, Any] = {
    "shards": 2,
    "records_per_shard": 0,  # tests know which shard a key is in; those of the spread set it
    "heartbeat_timeout": "2s",
    "session_timeout": "6s",
    "drain_interval": "3s",
    "io_error_backoff": "50ms",
    "retry_backoff": "20ms",
    "retry_backoff_max": "200ms",
}


class Scene:
    """An outbox and where its records go."""

    def __init__(self, servers: Servers, dsn: str, topic: str, group: str, directory: Path) -> None:
        self.bootstrap, self.dsn, self.topic, self.group = servers.bootstrap, dsn, topic, group
        self.directory = directory
        self.db: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self.plan = Plan(directory / "plan")

    def settings(self, **given: Any) -> dict[str, Any]:
        """Everything a configuration needs. Names of limits may stand beside the others; dicts are merged."""
        limits = dict(LIMITS)
        settings: dict[str, Any] = {
            "base_kafka_config": {"bootstrap.servers": self.bootstrap, "broker.address.family": "v4"},
            "producer_kafka_config": {},
            "leader_group_id": self.group,
            "data_source": self.dsn,
            "name": "test",
            "control": {"socket": "off"},  # tests run side by side, under one name
        }
        for name, value in given.items():
            if name in ("base_kafka_config", "producer_kafka_config", "control"):
                settings[name] = {**settings[name], **value}
            elif name in Config.model_fields:
                settings[name] = value
            else:
                limits[name] = value
        return {**settings, "limits": limits}

    def config(self, **given: Any) -> Config:
        return Config(**self.settings(**given))

    # -- the outbox

    def add(
        self, *rows: tuple[str | None, str | None], db: psycopg.Connection[Any] | None = None, topic: str | None = None
    ) -> list[int]:
        """Insert (key, value) pairs by one statement each; their ids."""
        query = """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value,
                                       kafka_header_keys, kafka_header_values)
                   VALUES (clock_timestamp(), %s, %s, %s, '{}', '{}') RETURNING id"""
        ids = []
        for key, value in rows:
            row = (db or self.db).execute(query, (topic or self.topic, key, value)).fetchone()
            assert row is not None
            ids.append(row[0])
        return ids

    @contextmanager
    def writer(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection with transactions of its own, rolled back at the end if it is still in one."""
        with psycopg.connect(self.dsn) as connection:
            yield connection
            connection.rollback()

    def left(self) -> list[int]:
        """Ids that stand in the outbox."""
        return [row[0] for row in self.db.execute("SELECT id FROM outbox ORDER BY id")]

    def wait_left(self, *ids: int, timeout_s: float = 90.0) -> None:
        """Wait until exactly these ids stand in the outbox."""
        expected = sorted(ids)
        try:
            eventually(lambda: self.left() == expected, timeout_s, f"only {expected} in the outbox")
        except AssertionError as error:
            raise AssertionError(f"{error}; in the outbox: {self.left()[:50]}") from None

    def term(self) -> int:
        row = self.db.execute("SELECT term FROM outbox_term").fetchone()
        assert row is not None
        return int(row[0])

    def holder(self) -> str | None:
        """The name of the harvester that the term row names."""
        row = self.db.execute("SELECT holder_name FROM outbox_term WHERE holder IS NOT NULL").fetchone()
        return row[0] if row is not None else None

    def quarantined(self) -> dict[int, str]:
        """Errors by id."""
        return dict(self.db.execute("SELECT id, error FROM outbox_quarantine").fetchall())

    def sessions(self, application: str) -> list[int]:
        """Backends of this database whose application name begins like this."""
        query = """SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"""
        return [row[0] for row in self.db.execute(query, (application + "%",))]

    def waiting_for_locks(self) -> int:
        """How many sessions of this database wait for a lock."""
        query = """SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'"""
        row = self.db.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    # -- the topic

    def log(self, topic: str | None = None) -> list[Published]:
        return read_topic(self.bootstrap, topic or self.topic)

    def published(self, topic: str | None = None) -> dict[str | None, list[str | None]]:
        """Values by key in the order of the log."""
        return by_key(self.log(topic))

    # -- harvesters

    @contextmanager
    def embedded(self, *, group: Group | None = None, until_empty: bool = False, **given: Any) -> Iterator[Embedded]:
        """A harvester in this process, which leads by itself unless a group is given; stopped at the end."""
        if group is None:
            group = FakeGroup(elected=True)
        running = Embedded(Harvester(self.config(**given), on_event=None, group=group, until_empty=until_empty))
        with running.run():
            yield running

    @contextmanager
    def member(self, **given: Any) -> Iterator[Embedded]:
        """The same as a member of the real group."""
        running = Embedded(Harvester(self.config(**given), on_event=None))
        with running.run():
            yield running

    @contextmanager
    def member_here(self, **given: Any) -> Iterator[Embedded]:
        """The same, with the place in the group in this process too, where a test can reach its client."""
        with self.embedded(group=KafkaGroup(member_settings(self.config(**given))), **given) as running:
            yield running

    def config_file(self, name: str = "test", **given: Any) -> Path:
        """The same configuration as a file."""
        path = self.directory / f"{name}.toml"
        path.write_text(_toml(self.settings(name=name, **given)))
        return path

    def cli(self, *args: str, name: str = "test", env: Mapping[str, str] | None = None, **given: Any) -> RunningCli:
        """`harvester start` in the background; to be used in a `with`."""
        return RunningCli("start", "-f", str(self.config_file(name, **given)), *args, env=env)


class Embedded:
    """A harvester object and what it said."""

    def __init__(self, harvester: Harvester) -> None:
        self.harvester = harvester
        self.events: list[Event] = []
        harvester._announcer.handler = self._on_event
        self.on_event: Any = None

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)

    @contextmanager
    def run(self) -> Iterator[None]:
        with warm_forkservers():
            self.harvester.start()
            failed = True
            try:
                yield
                failed = False
            finally:
                self.harvester.stop(force=failed)

    def of(self, kind: type[E]) -> list[E]:
        """Events of this kind so far."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    def told(self) -> list[Event]:
        """The events so far, without the meter's."""
        return [event for event in list(self.events) if not isinstance(event, MeterRead)]

    def leadership(self) -> list[str]:
        """The names of these."""
        return [type(event).__name__ for event in self.told()]

    def wait_for(self, kind: type[E], count: int = 1, timeout_s: float = 30.0) -> E:
        """The count-th event of this kind, now or later."""
        eventually(lambda: len(self.of(kind)) >= count, timeout_s, f"{kind.__name__} number {count}")
        return self.of(kind)[count - 1]

    def wait_refreshed(self, reason: str, timeout_s: float = 30.0) -> LeaderRefreshed:
        """The first remark whose reason holds this text."""

        def found() -> LeaderRefreshed | None:
            return next((event for event in self.of(LeaderRefreshed) if reason in event.reason), None)

        try:
            refreshed = eventually(found, timeout_s, f"a remark because of {reason!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; events: {self.events}") from None
        assert refreshed is not None
        return refreshed

    def wait_leading(self) -> LeaderAcquired:
        """Until it leads and all shards are ready."""
        event = self.wait_for(LeaderAcquired)
        self.wait_ready()
        return event

    def wait_ready(self) -> None:
        """Until all shards take records."""
        eventually(
            lambda: all(shard.state.value == "ready" for shard in self.harvester.status().shards), what="ready shards"
        )

    def pids(self) -> list[int]:
        """Of the shards."""
        return [shard.pid for shard in self.harvester.status().shards if shard.pid is not None]


def log_lines(running: RunningCli) -> list[dict[str, Any]]:
    """The log of a command as it was written so far."""
    return [json.loads(line) for line in list(running.stderr) if line.startswith("{")]


def messages(running: RunningCli) -> list[str]:
    """What the log says."""
    return [line["message"] for line in log_lines(running)]


_LEADS = re.compile(r"leads as (\S+) under term (\d+)")


def wait_leads(running: RunningCli) -> tuple[str, int]:
    """(leader id, term) of a command that has come to lead."""
    found = running.wait_for_line(_LEADS.pattern)
    return found[1].rstrip('"'), int(found[2])


def children(pid: int) -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def shards_of(pid: int) -> list[int]:
    """The shard processes of a supervisor."""
    return [child for child in _forked(pid) if _name_of(child) != "elector"]


def electors_of(pid: int) -> list[int]:
    """The process that holds its place in Kafka's group; none, or one."""
    return [child for child in _forked(pid) if _name_of(child) == "elector"]


def family_of(pid: int) -> list[int]:
    """All that freezes with its machine, the supervisor first."""
    return [pid, *_forked(pid)]


def kill_family(pid: int) -> None:
    """SIGKILL to all of them, as when a machine dies: nobody is left to leave the group."""
    for member in family_of(pid):
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _forked(pid: int) -> list[int]:
    return [child for server in forkservers_of(pid) for child in children(server)]


def forkservers_of(pid: int) -> list[int]:
    """The process of a supervisor that starts its shards; none, or one."""
    return [child for child in children(pid) if _name_of(child) == "forkserver"]


def causal(keys: Sequence[str], count: int) -> dict[str | None, list[str | None]]:
    """What a topic holds when each key has the values 1 … count."""
    return {key: [str(number) for number in range(1, count + 1)] for key in keys}


def _toml(table: Mapping[str, Any], prefix: str = "") -> str:
    plain = [f"{_quoted(name)} = {_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    nested = [
        f"[{prefix}{_quoted(name)}]\n{_toml(value, f'{prefix}{_quoted(name)}.')}"
        for name, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*plain, *nested]) + "\n"


def _quoted(name: str) -> str:
    return json.dumps(name) if "." in name else name


def _value(value: Any) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)

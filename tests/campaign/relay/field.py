"""The field of a campaign: a private stack, an outbox with audit triggers, topics, and harvesters behind proxies.

Each slot for a harvester has its own link to each server, so that one harvester can be cut off while the others are
not. Every process has a name of its own, also when it takes the place of another.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg.conninfo import make_conninfo

from harvester import stack
from harvester.outbox import schema
from harvester.outbox.tables import OutboxTable
from harvester.stack.processes import ProcessId, children_of, identify, is_alive, send
from harvester.stack.state import SERVERS
from tests.campaign.field import STARTS_WITHIN_S
from tests.campaign.field import Field as FieldBase
from tests.support.harvesting import Scene
from tests.support.proxy import Proxy
from tests.support.servers import FAST, Servers

from . import audit, logs
from .odd import IdleWriter
from .process import Process
from .setup import AT_LEAST_ONCE, Setup, first_setup

TABLE = OutboxTable.parse("outbox")
TOPICS = ("campaign-a", "campaign-b", "campaign-c")
_PARTITIONS = 3
_DATABASE = "campaign"
_RECORDS_PER_SHARD = 8  # few, so that keys go from shard to shard all the time


class Field(FieldBase[Process]):
    """The field of harvesters."""

    def __init__(
        self,
        directory: Path,
        *,
        delivery: str = AT_LEAST_ONCE,
        shards: int = 2,
        marking: str | None = None,
        limits: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(directory)
        self.stack = directory / "stack"
        self.delivery, self.shards = delivery, shards
        self.setups: dict[int, Setup] = {}  # of the next process in each place
        self.limits: dict[str, Any] = {
            "records_per_shard": _RECORDS_PER_SHARD,
            "restart_budget": 10_000,
            **(limits or {}),
        }
        self.extra: dict[str, Any] = {} if marking is None else {"marking": marking}
        self.links: dict[int, dict[str, Proxy]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Field:
        try:
            self._set_up()
        except BaseException:
            stack.down(self.stack, delete=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.ending = True
        for process in self.processes:
            with process.running:
                self.kill(process)
        for links in self.links.values():
            for link in links.values():
                link.__exit__(None, None, None)
        self.scene.db.close()
        self.signal_server("postgres", SIGCONT)
        self.signal_server("kafka", SIGCONT)
        stack.down(self.stack, delete=True)

    def _set_up(self) -> None:
        info = stack.up(self.stack, FAST)
        self.bootstrap = info.bootstrap
        with psycopg.connect(info.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}")
        self.dsn = make_conninfo(info.dsn, dbname=_DATABASE)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            schema.init(connection, TABLE)
            audit.install(connection)
        admin = AdminClient({"bootstrap.servers": info.bootstrap, "broker.address.family": "v4", "log_level": 0})
        made = admin.create_topics(
            [NewTopic(name, _PARTITIONS, 1, config={"message.timestamp.type": "LogAppendTime"}) for name in TOPICS]
        )
        for done in made.values():
            done.result(30)
        place = self.directory / "scene"
        place.mkdir()
        self.scene = Scene(Servers(info.dsn, info.bootstrap, given=False), self.dsn, TOPICS[0], "campaign", place)
        self.plan = self.scene.plan
        self.idle = IdleWriter(self.dsn)

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """A session of the campaign's own, past all proxies."""
        return psycopg.connect(self.dsn, autocommit=True, connect_timeout=5, application_name="campaign", **options)

    # -- harvesters

    def start(self, slot: int) -> Process:
        """A new harvester in this place."""
        with self._lock:
            links = self.links.get(slot)
            if links is None:
                links = self.links[slot] = self._links()
            setup = self.setups.setdefault(slot, first_setup(self.delivery, self.shards, slot))
            number = sum(process.slot == slot for process in self.processes) + 1
            name = f"h{slot}-{number}"
            running = self.scene.cli(
                "--dashboard",
                "off",
                name=name,
                env=self.plan.env,
                control={"socket": str(self.socket_of(name))},
                data_source=make_conninfo(self.dsn, host="127.0.0.1", port=links["postgres"].port),
                base_kafka_config={"bootstrap.servers": links["kafka"].address},
                delivery=setup.delivery,
                **{"shards": setup.shards, **self.limits},
                **self.extra,
            )
            identity = identify(running.pid)
            assert identity is not None, "an unreaped child keeps its entry"
            process = Process(name, slot, running, identity, setup, time.time())
            self.processes.append(process)
            return process

    def socket_of(self, name: str) -> Path:
        """The control socket of the process of this name."""
        return self.directory / f"{name}.sock"

    def _links(self) -> dict[str, Proxy]:
        port = psycopg.conninfo.conninfo_to_dict(self.dsn)["port"]
        links = {"postgres": Proxy(f"127.0.0.1:{port}"), "kafka": Proxy(self.bootstrap, kafka=True)}
        for link in links.values():
            link.open()
        return links

    def alive(self) -> list[Process]:
        """Harvesters that run, by name."""
        return sorted((process for process in self.processes if process.alive), key=lambda process: process.name)

    def leader(self) -> Process | None:
        """Who leads, by its own account; the highest term if several say so."""
        claims = [(logs.is_leading(process.log()), process) for process in self.alive()]
        leading = [(term, process) for term, process in claims if term is not None]
        return max(leading, key=lambda claim: claim[0])[1] if leading else None

    def pick(self, rng: random.Random) -> Process | None:
        """A harvester: in three of four cases the one that leads."""
        leader, alive = self.leader(), self.alive()
        if leader is not None and rng.random() < 0.75:
            return leader
        return rng.choice(alive) if alive else None

    def standby(self, rng: random.Random) -> Process | None:
        """A harvester that does not lead, while another one does."""
        leader = self.leader()
        others = [process for process in self.alive() if process is not leader]
        return rng.choice(others) if leader is not None and others else None

    def kill(self, process: Process, *, alone: bool = False) -> None:
        """SIGKILL to the supervisor, and (unless that is what is tested) to its shards and its elector."""
        family = process.family()
        process.asked = True
        if process.ended is None:
            process.ended = time.time()
        send(process.identity, SIGKILL)
        process.running.process.wait()
        if not alone:
            for member in family:
                send(member, SIGKILL)

    def stop(self, process: Process, timeout_s: float = 60.0) -> None:
        """SIGTERM, once: a second one would force it; whatever comes but exit code 0 is an accident."""
        with self._lock:
            stopping, process.asked = process.asked, True
        if stopping or not process.alive:
            return
        process.ended = time.time()
        process.running.process.send_signal(SIGTERM)
        try:
            code = process.running.wait(timeout_s)
        except AssertionError:
            self.accidents.append(f"{process.name} did not stop within {timeout_s:g} s")
            self.kill(process)
            return
        unheard = code == -SIGTERM and not process.log()  # it had not come to listen to signals yet
        if code not in (0, -SIGKILL) and not unheard:
            self.accidents.append(f"{process.name} stopped with code {code}: {process.last_words}")

    # -- servers

    def signal_server(self, name: stack.ServerName, number: Signals) -> None:
        """Signal a server's process and its children."""
        info = stack.status(self.stack)
        pid = next(server.pid for server in info.servers if server.name == name)
        identity = identify(pid) if pid is not None else None
        if identity is None:
            return
        # Parents first when they are to stand still, so that they make no more children.
        family = [identity, *children_of(identity)]
        for member in family if number is SIGSTOP else reversed(family):
            send(member, number)

    def heal(self) -> None:
        """Everything runs and every link is open; who was frozen goes on."""
        for server in SERVERS:
            self.signal_server(server, SIGCONT)
            stack.start(self.stack, server, timeout_s=STARTS_WITHIN_S)
        for process in self.alive():
            for member in (process.identity, *process.family()):
                send(member, SIGCONT)
        for links in self.links.values():
            for link in links.values():
                link.thaw()
                link.hear()
                link.name_brokers()
                link.delay()
        self.plan.heal()

    def are_gone(self, family: list[ProcessId], timeout_s: float) -> bool:
        """Wait until none of them runs."""
        deadline = time.monotonic() + timeout_s
        while any(map(is_alive, family)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

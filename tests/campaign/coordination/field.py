"""The field of a campaign: a broker, a topic, and consumers, each behind a proxy of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGUSR1
from typing import IO, Any

from confluent_kafka.admin import AdminClient, NewTopic

from harvester import stack
from harvester.coordination.settings import ConsumerSettings
from tests.campaign.field import Field as FieldBase
from tests.support.proxy import Proxy
from tests.support.servers import FAST
from tests.support.warm import Forked, start_module

from .history import Member, Span
from .notes import Reader

ROOT = Path(__file__).parents[3]
_ENDS_WITHIN_S = 30.0
_BORN_WITHIN_S = 60.0
_LOOK_S = 0.01
# A client waits up to 10 s before it connects again, and 60 s for an answer, unless it is told otherwise.
_CLIENT = {"log_level": 0}


@dataclass
class Process:
    """One life of a consumer. `asked`: we ended it."""

    name: str
    slot: int
    client_id: str | None
    process: subprocess.Popen[bytes] | Forked
    notes: Reader
    log: Path
    killed: float = math.inf
    asked: bool = False
    frozen: list[Span] = field(default_factory=list)
    still: bool = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.exit_code is None

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def note_end(self) -> bool:
        """It has ended by itself, as of now."""
        self.asked, self.killed = True, time.monotonic()
        return True

    @property
    def able(self) -> bool:
        """Whether it consumes."""
        return self.alive and not self.asked and not self.still and self.notes.born < math.inf

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """For the length of the block."""
        began, self.still = time.monotonic(), True
        self.process.send_signal(SIGSTOP)
        try:
            yield
        finally:
            self.frozen.append((began, time.monotonic()))
            self.process.send_signal(SIGCONT)
            self.still = False

    def member(self) -> Member:
        """What it did."""
        return self.notes.member(self.name, self.killed, self.frozen)


class Field(FieldBase[Process]):
    """The field of consumers. Without `bootstrap` it has a broker of its own, which can be stopped."""

    def __init__(
        self, directory: Path, bootstrap: str | None, *, partitions: int, settings: dict[str, Any], held_back_s: float
    ) -> None:
        super().__init__(directory)
        self.partitions, self._held_back_s = partitions, held_back_s
        self.stack = directory / "stack" if bootstrap is None else None
        self.bootstrap = bootstrap or ""
        name = uuid.uuid4().hex[:8]
        self.topic = f"campaign-{name}"
        self._settings = {
            "group": f"campaign-{name}",
            "topics": [self.topic],
            "coordination_topic": f"campaign-marshal-{name}",
            **settings,
        }
        self.links: dict[int, Proxy] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Field:
        try:
            if self.stack is not None:
                # No PostgreSQL is needed: one that is given is never started.
                self.bootstrap = stack.up(self.stack, replace(FAST, dsn="unused")).bootstrap
            admin = AdminClient({"bootstrap.servers": self.bootstrap, "broker.address.family": "v4", "log_level": 0})
            admin.create_topics([NewTopic(self.topic, self.partitions, 1)])[self.topic].result(30)
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.asked = True
            if process.alive:
                process.process.kill()
            process.process.wait()
        for link in self.links.values():
            link.__exit__(None, None, None)
        self._take_down()

    def _take_down(self) -> None:
        if self.stack is not None:
            stack.down(self.stack, delete=True)

    @property
    def settings(self) -> ConsumerSettings:
        """Of the group, past all proxies."""
        kafka = {"bootstrap.servers": self.bootstrap, "broker.address.family": "v4", "log_level": 0}
        return ConsumerSettings(**{**self._settings, "topics": (self.topic,), "kafka": kafka})

    # -- consumers

    def start(self, slot: int | None = None, client_id: str | None = None) -> Process:
        """A new consumer, in this place or in one of its own; it has begun to consume."""
        with self._lock:
            if slot is None:
                slot = 1 + max(self.links, default=0)
            if slot not in self.links:
                self.links[slot] = Proxy(self.bootstrap, kafka=True)
                self.links[slot].open()
            number = 1 + sum(process.slot == slot for process in self.processes)
            name = f"c{slot}-{number}"
            given = {
                **self._settings,
                "client_id": client_id or name,
                "kafka": {"bootstrap.servers": self.links[slot].address, "broker.address.family": "v4", **_CLIENT},
            }
            notes, log = self.directory / f"{name}.notes", self.directory / f"{name}.log"
            with log.open("wb") as output:
                what = json.dumps({"settings": given, "notes": str(notes), "held_back_s": self._held_back_s})
                popen = _start(["tests.campaign.coordination.member", what], output)
            process = Process(name, slot, client_id or name, popen, Reader(notes), log)
            self.processes.append(process)
        return process

    def wait_born(self, process: Process) -> None:
        """Until it consumes, or has failed to."""
        deadline = time.monotonic() + _BORN_WITHIN_S
        while process.alive and time.monotonic() < deadline:
            self.read()
            if process.notes.born < math.inf:
                return
            time.sleep(_LOOK_S)
        self.accidents.append(f"{process.name} did not begin: {process.last_words}")

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        process.asked = True
        process.process.kill()
        process.process.wait()
        process.killed = time.monotonic()

    def stop(self, process: Process) -> None:
        """SIGTERM; whatever comes but exit code 0 is an accident."""
        process.asked = True
        process.process.terminate()
        try:
            code = process.process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.accidents.append(f"{process.name} did not end within {_ENDS_WITHIN_S:g} s")
            process.process.send_signal(SIGUSR1)  # where it stands is in its log
            time.sleep(_LOOK_S)
            self.kill(process)
            return
        if code:
            self.accidents.append(f"{process.name} ended with code {code}: {process.last_words}")

    def able(self) -> list[Process]:
        """Those that consume, by name."""
        return sorted((process for process in self.processes if process.able), key=lambda each: each.name)

    def read(self) -> None:
        """What all have noted since."""
        with self._lock:
            for process in self.processes:
                process.notes.read()

    def shares(self) -> list[int] | None:
        """How many partitions each holds that can act, as of now; None while some are held by nobody, or by two."""
        self.read()
        able = self.able()
        held = [partition for process in able for partition in process.notes.claims]
        if len(held) != self.partitions or len(set(held)) != self.partitions:
            return None
        return sorted(len(process.notes.claims) for process in able)


def _start(args: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
    """In tests a fork, as the command line is; a campaign by scripts/coordination-faults starts fresh interpreters."""
    if "PYTEST_VERSION" in os.environ:
        return start_module(args, output.fileno())
    command = [sys.executable, "-m", *args]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

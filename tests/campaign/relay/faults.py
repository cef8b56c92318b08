"""How each kind of fault is done. Each returns what it struck, once healed; None: there was nothing to strike."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from signal import SIGCONT, SIGKILL, SIGSTOP

from harvester import stack
from harvester.stack.processes import ProcessId, send
from tests.campaign.field import Striker, alone
from tests.support.hooks import Fault as Injected

from . import aimed, logs, operating, schedule, sessions, switches
from .field import Field
from .history import Stuck
from .setup import EXACTLY_ONCE

# Shards see the end of their parent at once; what is on the wire may take the delivery timeout, and a purge.
_FAMILY_ENDS_WITHIN_S = 30.0
_READY_WITHIN_S = 20.0  # it may never be ready while a server is away


class RelayStriker(Striker):
    """Performs faults on a field of harvesters."""

    def __init__(self, field: Field, keys: int) -> None:
        super().__init__()
        self.field = field
        self.stuck: list[Stuck] = []
        self._keys = keys
        self._aiming = threading.Lock()
        self._numbers = itertools.count(1)

    def strike(self, kind: str, hold_s: float, rng: random.Random) -> str | None:
        what, _, rest = kind.partition(" ")
        match kind:
            case "kill shard" | "kill several shards":
                return self._kill_shards(rng, several="several" in kind)
            case "kill supervisor":
                return self._kill_supervisor(rng)
            case "kill process group":
                return self._kill_group(rng)
            case "freeze shard" | "freeze supervisor" | "freeze leader":
                return self._freeze(rest, hold_s, rng)
            case "leave":
                return self._leave(rng)
            case "join":
                return self._join(hold_s)
            case "rolling restart":
                return self._rolling_restart()
            case schedule.REPLACED:
                return self._replace_standby(rng)
            case "scale" | "pause" | "remark":
                return operating.operate(self.field, kind, hold_s, rng)
            case "stop kafka" | "kill kafka":
                return self.restart(self.field.stack, "kafka", hold_s, kill=what == "kill")
            case "restart postgres" | "kill postgres":
                return self.restart(self.field.stack, "postgres", hold_s, kill=what == "kill")
            case "freeze kafka":
                return self._freeze_server("kafka", hold_s)
            case "freeze postgres":
                return self._freeze_server("postgres", hold_s)
            case "terminate sessions":
                return sessions.terminate(self.field, rng)
            case "lock rows":
                return sessions.lock_rows(self.field, hold_s, rng)
            case "deadlock":
                return sessions.deadlock(self.field, hold_s)
            case "truncate" | "truncate and restart ids":
                return sessions.truncate(self.field, restart="restart" in kind)
            case "switch shards" | "switch mode" | "kill and switch mode":
                return switches.switch(self.field, kind, rng)
            case _ if aimed.is_aimed(kind):
                return self._aim(kind, hold_s, rng)
            case _ if what == "hold":
                return self._hold_back(schedule.HELD_BACK[kind], hold_s, rng)
            case "reset links":
                return self._reset(rng)
            case _ if rest.endswith("link"):
                return self._link(what, rest.split()[0], hold_s, rng)
            case _:
                return self._records_fail(kind, hold_s, rng)

    # -- processes

    def _kill_shards(self, rng: random.Random, *, several: bool) -> str | None:
        process = self.field.pick(rng)
        shards = process.shards() if process is not None else []
        if process is None or not shards:
            return None
        chosen = shards if several else [rng.choice(shards)]
        for shard in chosen:
            send(shard, SIGKILL)
        return f"{len(chosen)} of {process.name}"

    def _kill_supervisor(self, rng: random.Random) -> str | None:
        process = self.field.pick(rng)
        if process is None:
            return None
        family = process.family()
        self.field.kill(process, alone=True)
        self.field.start(process.slot)
        if not self.field.are_gone(family, _FAMILY_ENDS_WITHIN_S):
            self.field.accidents.append(f"processes of {process.name} outlived it by {_FAMILY_ENDS_WITHIN_S:g} s")
            for member in family:
                send(member, SIGKILL)
        return process.name

    def _kill_group(self, rng: random.Random) -> str | None:
        process = self.field.pick(rng)
        if process is None:
            return None
        self.field.kill(process)
        self.field.start(process.slot)
        return process.name

    def _freeze(self, what: str, hold_s: float, rng: random.Random) -> str | None:
        process = self.field.leader() if what == "leader" else self.field.pick(rng)
        if process is None:
            return None
        shards = process.shards()
        chosen: list[ProcessId] = [process.identity] if what != "shard" else []
        if what == "shard" and shards:
            chosen = [rng.choice(shards)]
        elif what == "leader":
            chosen += process.family()
        with process.standing_still(chosen):
            time.sleep(hold_s)
        return process.name

    def _leave(self, rng: random.Random) -> str | None:
        process = self.field.pick(rng)
        if process is None:
            return None
        self.field.stop(process)
        self.field.start(process.slot)
        return process.name

    def _join(self, hold_s: float) -> str:
        process = self.field.start(1 + max(each.slot for each in self.field.processes))
        time.sleep(hold_s)
        self.field.stop(process)
        return process.name

    def _rolling_restart(self) -> str:
        for process in self.field.alive():
            successor = self.field.start(process.slot)
            deadline = time.monotonic() + _READY_WITHIN_S
            while not logs.has_joined(successor.log()) and time.monotonic() < deadline:
                time.sleep(0.1)
            self.field.stop(process)
        return "all"

    def _replace_standby(self, rng: random.Random) -> str | None:
        process = self.field.standby(rng)
        if process is None:
            return None
        self.field.kill(process)
        self.field.start(process.slot)
        return process.name

    def _aim(self, kind: str, hold_s: float, rng: random.Random) -> str | None:
        with alone(self._aiming) as free:
            return aimed.strike(self.field, kind, hold_s, rng) if free else None

    # -- servers

    def _freeze_server(self, name: stack.ServerName, hold_s: float) -> str | None:
        with alone(self._servers[name]) as free:
            if not free:
                return None
            self.field.signal_server(name, SIGSTOP)
            try:
                time.sleep(hold_s)
            finally:
                self.field.signal_server(name, SIGCONT)
            return name

    # -- links

    def _link(self, what: str, server: str, hold_s: float, rng: random.Random) -> str | None:
        process = self.field.pick(rng)
        if process is None:
            return None
        return process.name if self.disturb(self.field.links[process.slot][server], what, hold_s, rng) else None

    def _hold_back(self, api: int, hold_s: float, rng: random.Random) -> str | None:
        """Keep requests of this kind; half-way the client loses its connections, and at the end they arrive.

        Not those of processes that have ended meanwhile: late repeats of these are a documented limit of at least once.
        """
        process = self.field.leader()
        if process is None:
            return None
        link = self.field.links[process.slot]["kafka"]
        with alone(self._links[link]) as free:
            if not free:
                return None
            link.keep(api, loses_dead=self.field.delivery != EXACTLY_ONCE)
            time.sleep(hold_s / 2)
            if rng.random() < 0.7:
                link.abandon(reset=rng.random() < 0.5)
            time.sleep(hold_s / 2)
            count = link.kept
            link.deliver()
            return f"{process.name} ({count} connections)"

    def _reset(self, rng: random.Random) -> str:
        count = sum(link.reset(rng) for links in self.field.links.values() for link in links.values())
        return f"{count} connections"

    # -- records

    def _records_fail(self, kind: str, hold_s: float, rng: random.Random) -> str:
        key = f"k-{rng.randrange(self._keys):06d}"
        match kind:
            case "failed deliveries":
                fault = Injected("_TRANSPORT", times=20)
            case "acknowledgements turned into failures":
                fault = Injected("_TIMED_OUT", when="ack", times=20)
            case "poison record":
                fault = Injected("MSG_SIZE_TOO_LARGE", key=key, when="produce", times=2)
            case "stuck key":
                fault = Injected("_TIMED_OUT", key=key, times=10_000)
            case "refused for a while":
                fault = Injected("_UNKNOWN_TOPIC", key=key, when="produce", times=3)
            case "unknown outcomes":
                fault = Injected("_TIMED_OUT", when=rng.choice(("commit", "committed")), times=5)
            case _:
                raise ValueError(f"there is no fault {kind!r}")
        began = time.time()
        with self._injected(fault):
            time.sleep(hold_s)
        if kind == "stuck key":
            self.stuck.append(Stuck(key, began, time.time()))
        return key if fault.key is not None else "any"

    @contextmanager
    def _injected(self, fault: Injected) -> Iterator[None]:
        """Into the plan that all producers follow, and out of it again; others may be in it too."""
        file = self.field.plan.directory / f"fault-{next(self._numbers)}.json"
        made = file.with_suffix(".new")
        made.write_text(json.dumps(asdict(fault)))
        made.rename(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

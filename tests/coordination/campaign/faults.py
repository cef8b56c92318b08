"""How each kind of fault is done. Each returns what it struck, once everything runs again; None: nothing to strike."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .field import Field, Process
from .schedule import Strike

_SEVERAL = 3


class Striker:
    """Performs faults on a field. Each call may run in a thread of its own; no consumer is struck by two at once."""

    def __init__(self, field: Field, consumers: int) -> None:
        self._field = field
        self._least, self._most = max(1, consumers - 2), consumers + 2
        self._struck: set[str] = set()
        self._lock, self._broker = threading.Lock(), threading.Lock()

    def strike(self, strike: Strike) -> str | None:
        """Do it, hold it, heal it."""
        rng = random.Random(strike.seed)
        if strike.broker:
            return self._restart(strike)
        if strike.kind == "join":
            return self._join()
        if strike.kind == "leave" and len(self._field.able()) <= self._least:
            return None
        count = _SEVERAL if strike.kind.endswith("several") else 1
        with self._chosen(rng, count) as targets:
            if not targets:
                return None
            self._hit(strike, targets, rng)
            return ", ".join(target.name for target in targets)

    def _hit(self, strike: Strike, targets: list[Process], rng: random.Random) -> None:
        field, target = self._field, targets[0]
        link = field.links[target.slot]
        match strike.kind:
            case "kill" | "kill several":
                for each in targets:
                    field.kill(each)
                self._replace(targets)
            case "kill and come back":
                field.kill(target)
                field.wait_born(field.start(target.slot, target.client_id))
            case "freeze" | "freeze several":
                with ExitStack() as still:
                    for each in targets:
                        still.enter_context(each.standing_still())
                    time.sleep(strike.hold_s)
            case "leave":
                field.stop(target)
            case "leave and come back":
                field.stop(target)
                field.wait_born(field.start(target.slot, target.client_id))
            case "reset connections":
                link.reset(rng, share=1.0)
            case "cut":
                link.cut(reset=rng.random() < 0.5)
                time.sleep(strike.hold_s)
                link.open()
            case "freeze link":
                link.freeze()
                time.sleep(strike.hold_s)
                link.thaw()
            case "half-open link":
                link.deafen()
                time.sleep(strike.hold_s)
                # Connections that lost something stay deaf: they are broken, as any network does it some day.
                link.hear()
                link.reset(rng, share=1.0)
            case _:
                raise ValueError(f"there is no fault {strike.kind!r}")

    def _replace(self, gone: list[Process]) -> None:
        started = [self._field.start(each.slot) for each in gone]
        for each in started:
            self._field.wait_born(each)

    def _join(self) -> str | None:
        if len(self._field.able()) >= self._most:
            return None
        process = self._field.start()
        self._field.wait_born(process)
        return process.name

    def _restart(self, strike: Strike) -> str | None:
        if not self._broker.acquire(blocking=False):
            return None
        try:
            self._field.stop_broker(kill=strike.kind.startswith("kill"))
            time.sleep(strike.hold_s)
            self._field.start_broker()
        finally:
            self._broker.release()
        return "the broker"

    @contextmanager
    def _chosen(self, rng: random.Random, count: int) -> Iterator[list[Process]]:
        """Consumers for one fault alone; none, if too few would be left."""
        with self._lock:
            free = [process for process in self._field.able() if process.name not in self._struck]
            chosen = rng.sample(free, count) if len(free) > count else []
            names = {process.name for process in chosen}
            self._struck |= names
        try:
            yield chosen
        finally:
            with self._lock:
                self._struck -= names

"""How each kind of fault is done. Each returns what it struck, once everything runs again; None: nothing to strike."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.campaign.field import Striker

from .field import Field, Process
from .schedule import KINDS

_SEVERAL = 3


class ConsumerStriker(Striker):
    """Performs faults on a field of consumers; no consumer is struck by two at once."""

    def __init__(self, field: Field, consumers: int) -> None:
        super().__init__()
        self._field = field
        self._least, self._most = max(1, consumers - 2), consumers + 2
        self._struck: set[str] = set()
        self._lock = threading.Lock()

    def strike(self, kind: str, hold_s: float, rng: random.Random) -> str | None:
        if KINDS[kind].broker:
            assert self._field.stack is not None
            struck = self.restart(self._field.stack, "kafka", hold_s, kill=kind.startswith("kill"))
            return None if struck is None else "the broker"
        if kind == "join":
            return self._join()
        if kind == "leave" and len(self._field.able()) <= self._least:
            return None
        with self._chosen(rng, _SEVERAL if kind.endswith("several") else 1) as targets:
            if not targets:
                return None
            self._hit(kind, hold_s, targets, rng)
            return ", ".join(target.name for target in targets)

    def _hit(self, kind: str, hold_s: float, targets: list[Process], rng: random.Random) -> None:
        field, target = self._field, targets[0]
        link = field.links[target.slot]
        match kind:
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
                    time.sleep(hold_s)
            case "leave":
                field.stop(target)
            case "leave and come back":
                field.stop(target)
                field.wait_born(field.start(target.slot, target.client_id))
            case "reset connections":
                link.reset(rng, share=1.0)
            case "cut" | "freeze link" | "half-open link":
                self.disturb(link, kind.removesuffix(" link"), hold_s, rng)
                if kind == "half-open link":
                    # Connections that lost something stay deaf: they are broken, as any network does it some day.
                    link.reset(rng, share=1.0)
            case _:
                raise ValueError(f"there is no fault {kind!r}")

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

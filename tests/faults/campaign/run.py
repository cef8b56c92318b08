"""One campaign from beginning to end: load, faults at their times, healing, draining, judging."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from dataclasses import field as attribute
from pathlib import Path
from typing import Any

import psycopg

from .faults import Striker
from .field import TOPICS, Field
from .history import Fault, History, Limits
from .judge import Judgement, judge
from .load import Pace, Writers
from .odd import OddWriter
from .recording import record
from .schedule import Planned, kinds_of, plan
from .setup import AT_LEAST_ONCE

_DRAINS_WITHIN_S = 120.0
_HEALS_WITHIN_S = 150.0
_LEADS_WITHIN_S = 90.0
_HEALED_LOAD_S = 3.0
_NAME = re.compile(r"h\d+-\d+")  # of a harvester's process


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to do. `kinds` None: all that belong to the mode."""

    seed: int
    seconds: float
    delivery: str = AT_LEAST_ONCE
    harvesters: int = 3
    shards: int = 2
    marking: str | None = None
    pace: Pace = attribute(default_factory=Pace)
    kinds: Collection[str] | None = None
    gap_s: float = 4.0
    limits: dict[str, Any] = attribute(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. `injected`: faults that struck, by kind; `logs`: by the process's name."""

    judgement: Judgement
    history: History
    injected: dict[str, int]
    seconds: float
    rate_per_s: float
    drained_s: float
    logs: dict[str, str]

    def summary(self) -> dict[str, Any]:
        """Figures for people and scripts."""
        judgement = self.judgement
        return {
            "committed": judgement.committed,
            "delivered": judgement.delivered,
            "rolled_back": judgement.rolled_back,
            "quarantined": judgement.quarantined,
            "lost": judgement.lost,
            "order_violations": judgement.order_violations,
            "repeats": judgement.repeats,
            "repeats_by": judgement.repeats_by,
            "leaderships": judgement.leaderships,
            "rate_per_s": round(self.rate_per_s, 1),
            "seconds": round(self.seconds, 1),
            "drained_s": round(self.drained_s, 1),
            "injected": self.injected,
            "violations": [str(violation) for violation in judgement.violations],
        }


def run(campaign: Campaign, directory: Path, say: Callable[[str], None] = print) -> Outcome:
    """Do it in this directory, which must be empty and reachable for the account of PostgreSQL."""
    limits = Limits(cap=int(campaign.limits.get("max_in_flight_records", 1000)))
    kinds = kinds_of(campaign.delivery) if campaign.kinds is None else campaign.kinds
    with Field(
        directory,
        delivery=campaign.delivery,
        shards=campaign.shards,
        marking=campaign.marking,
        limits=campaign.limits,
    ) as field:
        striker = Striker(field, campaign.pace.keys)
        for slot in range(1, campaign.harvesters + 1):
            field.start(slot)
        _until(lambda: field.leader() is not None, _LEADS_WITHIN_S, "no harvester came to lead")
        writers = Writers(field.dsn, TOPICS, campaign.pace, campaign.seed)
        odd, idle = OddWriter(field.dsn, TOPICS, campaign.seed), field.idle
        began = time.time()
        writers.start()
        odd.start()
        idle.start()
        say(
            f"{campaign.harvesters} harvesters with {campaign.shards} shards each, {campaign.delivery};"
            f" faults for {campaign.seconds:g} s"
        )
        faults = _Faults(field, striker, began, say).strike_all(
            plan(campaign.seed, campaign.seconds, kinds, gap_s=campaign.gap_s), campaign.seconds
        )
        field.heal()
        time.sleep(_HEALED_LOAD_S)
        idle.stop()
        odd.stop()
        writers.stop()
        seconds = time.time() - began
        drained_s = _drain(field)
        for process in field.alive():
            field.stop(process)
        field.ending = True
        field.bury()
        history = record(field, faults, striker.stuck, limits, writers.rolled_back)
        return Outcome(
            judgement=judge(history),
            history=history,
            injected=dict(sorted(Counter(fault.kind for fault in faults).items())),
            seconds=seconds,
            rate_per_s=len(history.committed) / seconds,
            drained_s=drained_s,
            logs={process.name: "\n".join(process.log()) for process in field.processes},
        )


class _Faults:
    """Strikes at the planned times, each fault on a thread of its own, and notes what was struck when."""

    def __init__(self, field: Field, striker: Striker, began: float, say: Callable[[str], None]) -> None:
        self._field, self._striker, self._began, self._say = field, striker, began, say
        self._done: list[Fault] = []

    def strike_all(self, planned: list[Planned], seconds: float) -> list[Fault]:
        threads = []
        for each in planned:
            self._wait_until(each.at_s)
            thread = threading.Thread(target=self._strike, args=(each,), name=each.kind, daemon=True)
            thread.start()
            threads.append(thread)
        self._wait_until(seconds)
        deadline = time.monotonic() + _HEALS_WITHIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._field.accidents.append(f"the campaign could not heal: {thread.name}")
        return self._done

    def _wait_until(self, at_s: float) -> None:
        while (left := self._began + at_s - time.time()) > 0:
            time.sleep(min(left, 0.2))
            self._field.bury()

    def _strike(self, planned: Planned) -> None:
        began = time.time()
        try:
            target = self._striker.strike(planned.kind, planned.hold_s, random.Random(planned.seed))
        except Exception as error:
            self._field.accidents.append(f"the campaign itself failed at {planned.kind!r}: {error!r}")
            return
        ended = time.time()
        at = f"{began - self._began:7.1f} s  {planned.kind}"
        if target is None:
            self._say(f"{at}: nothing to strike")
            return
        self._say(f"{at}: {target}" + (f", for {ended - began:.1f} s" if ended - began >= 0.05 else ""))
        names = frozenset(_NAME.findall(target))
        self._done.append(Fault(planned.kind, target, began, ended, planned.repeats, names))


def _drain(field: Field) -> float:
    """Wait until the outbox is empty; how long that took."""
    began = time.monotonic()

    def empty() -> bool:
        field.bury()
        try:
            with field.connect() as connection:
                return connection.execute("SELECT 1 FROM outbox LIMIT 1").fetchone() is None
        except psycopg.Error:
            return False

    try:
        _until(empty, _DRAINS_WITHIN_S, "")
    except TimeoutError:
        field.accidents.append(f"rows were left in the outbox {_DRAINS_WITHIN_S:g} s after everything was healed")
    return time.monotonic() - began


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:g} s")
        time.sleep(0.1)

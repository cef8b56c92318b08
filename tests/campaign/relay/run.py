"""The scenario of harvesters: load, faults at their times, healing, draining, judging."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from dataclasses import field as attribute
from pathlib import Path
from typing import Any

import psycopg

from harvester.config import Config
from tests.campaign import frame
from tests.campaign.frame import Command, Scenario
from tests.support.harvesting import LIMITS

from .faults import RelayStriker
from .field import TOPICS, Field
from .history import Fault, History, Limits
from .judge import Judgement, judge
from .load import Pace, Writers
from .odd import OddWriter
from .recording import record
from .schedule import KINDS, kinds_of, plan, repeats
from .setup import AT_LEAST_ONCE, DELIVERIES

_DRAINS_WITHIN_S = 120.0
_HEALS_WITHIN_S = 150.0
_LEADS_WITHIN_S = 90.0
_HEALED_LOAD_S = 3.0
_UNCLEAR_MARGIN_S = 2.5
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


@dataclass(frozen=True)
class Outcome(frame.Outcome):
    """What came of it."""

    judgement: Judgement
    history: History
    rate_per_s: float
    drained_s: float

    @property
    def verdict(self) -> Judgement:
        return self.judgement

    def summary(self) -> dict[str, Any]:
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
            "late_of_thawed": judgement.late_of_thawed,
            "rate_per_s": round(self.rate_per_s, 1),
            "seconds": round(self.seconds, 1),
            "drained_s": round(self.drained_s, 1),
            "injected": self.struck,
            "violations": [str(violation) for violation in judgement.violations],
        }


class Relay(Scenario[Field, Outcome]):
    """Harvesters under load, and another writer of odd rows."""

    def __init__(self, campaign: Campaign, field: Field, say: frame.Say) -> None:
        self._campaign, self._striker = campaign, RelayStriker(field, campaign.pace.keys)
        super().__init__(field, self._striker, say)
        self._seconds = self._drained_s = 0.0

    def begin(self) -> None:
        campaign, field = self._campaign, self.field
        for slot in range(1, campaign.harvesters + 1):
            field.start(slot)
        _until(lambda: field.leader() is not None, _LEADS_WITHIN_S, "no harvester came to lead")
        self._writers = Writers(field.dsn, TOPICS, campaign.pace, campaign.seed)
        self._odd = OddWriter(field.dsn, TOPICS, campaign.seed)
        self.began = self.now()
        self._writers.start()
        self._odd.start()
        field.idle.start()
        self.say(
            f"{campaign.harvesters} harvesters with {campaign.shards} shards each, {campaign.delivery};"
            f" faults for {campaign.seconds:g} s"
        )

    def strike(self) -> None:
        campaign = self._campaign
        kinds = kinds_of(campaign.delivery) if campaign.kinds is None else campaign.kinds
        threads = []
        for each in plan(campaign.seed, campaign.seconds, kinds, gap_s=campaign.gap_s):
            self._wait_until(each.at_s)
            threads += self.launch([each])
        self._wait_until(campaign.seconds)
        deadline = time.monotonic() + _HEALS_WITHIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.field.accidents.append(f"the campaign could not heal: {thread.name}")

    def _wait_until(self, at_s: float) -> None:
        while (left := self.began + at_s - self.now()) > 0:
            time.sleep(min(left, 0.2))
            self.field.bury()

    def settle(self) -> None:
        self.field.heal()
        time.sleep(_HEALED_LOAD_S)
        self.field.idle.stop()
        self._odd.stop()
        self._writers.stop()
        self._seconds = self.now() - self.began

    def drain(self) -> None:
        """Wait until the outbox is empty."""
        began = time.monotonic()

        def empty() -> bool:
            self.field.bury()
            try:
                with self.field.connect() as connection:
                    return connection.execute("SELECT 1 FROM outbox LIMIT 1").fetchone() is None
            except psycopg.Error:
                return False

        try:
            _until(empty, _DRAINS_WITHIN_S, "")
        except TimeoutError:
            self.field.accidents.append(
                f"rows were left in the outbox {_DRAINS_WITHIN_S:g} s after everything was healed"
            )
        self._drained_s = time.monotonic() - began

    def stop(self) -> None:
        for process in self.field.alive():
            self.field.stop(process)
        self.field.ending = True
        self.field.bury()

    def outcome(self) -> Outcome:
        given = self._campaign.limits
        delivery_timeout = Config(leader_group_id="any", limits={**LIMITS, **given}).delivery_timeout
        limits = Limits(
            cap=int(given.get("max_in_flight_records", 1000)),
            unclear_s=delivery_timeout.total_seconds() + _UNCLEAR_MARGIN_S,
        )
        faults = [
            Fault(
                each.strike.kind, each.target, each.began, each.ended, repeats(each.strike),
                frozenset(_NAME.findall(each.target)),
            )
            for each in self.struck
        ]  # fmt: skip
        history = record(self.field, faults, self._striker.stuck, limits, self._writers.rolled_back)
        return Outcome(
            struck=self.counts(),
            seconds=self._seconds,
            logs={process.name: "\n".join(process.log()) for process in self.field.processes},
            judgement=judge(history),
            history=history,
            rate_per_s=len(history.committed) / self._seconds,
            drained_s=self._drained_s,
        )


def run(campaign: Campaign, directory: Path, say: frame.Say = print) -> Outcome:
    """Do it in this directory, which must be empty and reachable for the account of PostgreSQL."""
    field = Field(
        directory,
        delivery=campaign.delivery,
        shards=campaign.shards,
        marking=campaign.marking,
        limits=campaign.limits,
    )
    return Relay(campaign, field, say).run()


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:g} s")
        time.sleep(0.1)


# -- the command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delivery", choices=DELIVERIES, default=AT_LEAST_ONCE, help="both: some in the one mode each")
    parser.add_argument("--harvesters", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rate", type=float, default=600.0, help="records per second")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--cap", type=int, default=1000, help="limits.max_in_flight_records")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds from one fault's end to the next")
    parser.add_argument("--set", action="append", default=[], metavar="LIMIT=VALUE", help="as under [limits]")
    parser.add_argument("--marking", choices=("memory", "table"), help="default: the harvester's own")


def _run(options: argparse.Namespace, kinds: frozenset[str], directory: Path, say: frame.Say) -> Outcome:
    campaign = Campaign(
        seed=options.seed,
        seconds=options.minutes * 60,
        delivery=options.delivery,
        harvesters=options.harvesters,
        shards=options.shards,
        marking=options.marking,
        pace=Pace(rate_per_s=options.rate, keys=options.keys),
        kinds=kinds,
        gap_s=options.gap,
        limits={"max_in_flight_records": options.cap, **dict(each.split("=", 1) for each in options.set)},
    )
    return run(campaign, directory, say)


COMMAND = Command(
    name="faults",
    description="""A random campaign of faults against harvesters under load, on servers of its own.

Prints each fault with its time, then what was written, delivered and repeated, and as its last line `held`, or
`broken: …` with the first broken invariant. The exit code is 0 or 1 accordingly. The same seed plans the same faults.
""",
    minutes=5.0,
    kinds=KINDS,
    add_options=_add_options,
    default_kinds=lambda options: kinds_of(options.delivery),
    run=_run,
)

"""One campaign from beginning to end: load, faults with time to recover in between, draining, judging."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from pathlib import Path
from typing import Any

from harvester.coordination.admin import Observer
from harvester.coordination.core.overview import rows
from tests.support.consuming import read_topic

from .faults import Striker
from .field import Field
from .history import Episode, History, Limits
from .judge import Judgement, judge
from .load import Load
from .schedule import KINDS, Strike, strikes

_LOOK_S = 0.02
_DRAINS_WITHIN_S = 60.0
_GIVES_UP_AFTER = 3.0  # times what is allowed
_QUIET_S = 1.0


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to do. `kinds` None: all, but for those of the broker where it is not our own; `limits`: the judge's.

    `held_back_intervals`: at least once, how late some records are committed.
    """

    seed: int
    seconds: float
    at_most_once: bool = False
    interval_s: float = 1.0
    consumers: int = 8
    partitions: int = 32
    records: int = 20_000
    batch_records: int = 20
    max_open_records: int = 60
    held_back_intervals: float = 4.0
    kinds: Collection[str] | None = None
    limits: Limits | None = None
    settings: Mapping[str, Any] = attribute(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. `struck`: faults by kind; `messages`: in the coordination topic; `load`: load averages of the
    machine, which tell what the times are worth; `logs`: what each consumer said
    and noted, and the coordination topic."""

    judgement: Judgement
    history: History
    struck: dict[str, int]
    seconds: float
    messages: int
    load: Sequence[float]
    logs: dict[str, str]

    def summary(self) -> dict[str, Any]:
        """Figures for people and scripts."""
        found = self.judgement
        limits = self.history.limits
        return {
            "records": found.records,
            "processed": found.processed,
            "never_processed": found.never,
            "repeats": found.repeats,
            "widest_repeat_s": round(found.widest_repeat_s, 2),
            "claims_that_processed": found.generations,
            "claimed_again_s": {"allowed": limits.claimed_s, **_spread(each.claimed_s for each in found.recoveries)},
            "fair_share_s": {"allowed": limits.fair_s, **_spread(each.fair_s for each in found.recoveries)},
            "messages_per_partition_minute": round(self.messages / self.history.partitions / self.seconds * 60, 1),
            "seconds": round(self.seconds, 1),
            "load_average": {"cores": os.cpu_count(), **_spread(self.load)},
            "struck": self.struck,
            "violations": list(found.violations),
        }


def run(
    campaign: Campaign, directory: Path, bootstrap: str | None = None, say: Callable[[str], None] = print
) -> Outcome:
    """Do it in this directory, which must be empty; without `bootstrap` on a broker of its own."""
    kinds = set(campaign.kinds or KINDS)
    if bootstrap is not None:
        kinds -= {name for name, kind in KINDS.items() if kind.broker}
    settings = {
        "heartbeat_interval_s": campaign.interval_s,
        "at_most_once": campaign.at_most_once,
        "batch_records": campaign.batch_records,
        "max_open_records": campaign.max_open_records,
        **campaign.settings,
    }
    held_back_s = campaign.held_back_intervals * campaign.interval_s
    with Field(
        directory, bootstrap, partitions=campaign.partitions, settings=settings, held_back_s=held_back_s
    ) as field:
        limits = replace(campaign.limits or Limits(campaign.interval_s), max_open_records=campaign.max_open_records)
        if held_back_s and not campaign.at_most_once:  # a hand-over waits an interval for what is open
            limits = replace(limits, fair_intervals=limits.fair_intervals + 1)
        began = time.monotonic()
        faults = _Faults(field, Striker(field, campaign.consumers), limits, began, say)
        faults.begin(campaign.consumers)
        load = Load(field.bootstrap, field.topic, campaign.partitions, campaign.records, campaign.seconds)
        load.start()
        faults.strike_until(time.monotonic() + campaign.seconds, strikes(campaign.seed, kinds, campaign.interval_s))
        field.accidents += load.finish()
        messages = _drain(field, load, at_most_once=campaign.at_most_once)
        faults.end()
        seconds = time.monotonic() - began
        enders = [threading.Thread(target=field.stop, args=(process,)) for process in field.able()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        field.read()
        history = History(
            campaign.at_most_once,
            campaign.partitions,
            frozenset(load.records),
            [process.member() for process in field.processes if process.notes.born < math.inf],
            limits,
            faults.episodes,
            field.accidents,
        )
        return Outcome(
            judge(history),
            history,
            dict(sorted(faults.struck.items())),
            seconds,
            messages,
            faults.load,
            {
                **{process.name: process.log.read_text(errors="replace") for process in field.processes},
                **{f"{process.name}-notes": process.notes.text for process in field.processes},
                "coordination": "\n".join(_coordination_log(field)),
            },
        )


class _Faults:
    """Strikes, and waits after each until all is well again, or it is late."""

    def __init__(
        self, field: Field, striker: Striker, limits: Limits, began: float, say: Callable[[str], None]
    ) -> None:
        self._field, self._striker, self._limits, self._began, self._say = field, striker, limits, began, say
        self._open: tuple[str, float, float, float] | None = None
        self.episodes: list[Episode] = []
        self.struck: Counter[str] = Counter()
        self.load: list[float] = []

    def begin(self, consumers: int) -> None:
        """All consumers at once: the first episode."""
        started = [self._field.start() for _ in range(consumers)]
        for process in started:
            self._field.wait_born(process)
        born = time.monotonic()
        self._open = (f"start of {consumers}", born, born, born)
        self._wait_well()

    def strike_until(self, deadline: float, planned: Any) -> None:
        """One after the other, until it is time."""
        for episode in itertools.takewhile(lambda _: time.monotonic() < deadline, planned):
            self.end()
            began = time.monotonic()
            hit = self._strike(episode)
            healed = time.monotonic()
            if not hit:
                continue
            broker = any(strike.broker for strike, _ in hit)
            what = " and ".join(f"{strike.kind} {target}" for strike, target in hit)
            self._open = (what, began, healed if broker else began, healed)
            self._wait_well()

    def end(self) -> None:
        """What was struck last is not looked at any longer."""
        self.load.append(os.getloadavg()[0])
        if self._open is not None:
            self.episodes.append(Episode(*self._open, until=time.monotonic()))
            self._open = None

    def _strike(self, episode: tuple[Strike, ...]) -> list[tuple[Strike, str]]:
        hit: list[tuple[Strike, str]] = []

        def perform(strike: Strike) -> None:
            began = time.monotonic()
            try:
                target = self._striker.strike(strike)
            except Exception as error:
                self._field.accidents.append(f"the campaign itself failed at {strike.kind!r}: {error!r}")
                return
            took_s = time.monotonic() - began
            held = f", for {took_s:.1f} s" if took_s >= 0.05 else ""
            self._say(f"{began - self._began:7.1f} s  {strike.kind}: {target or 'nothing to strike'}{held}")
            if target is not None:
                hit.append((strike, target))
                self.struck[strike.kind] += 1

        threads = [threading.Thread(target=perform, args=(strike,), name=strike.kind) for strike in episode]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return hit

    def _wait_well(self) -> None:
        """Until everything is held, and shared fairly; the judge will say when that was."""
        allowed_s = self._limits.claimed_s + self._limits.fair_s
        deadline = time.monotonic() + _GIVES_UP_AFTER * allowed_s
        while time.monotonic() < deadline:
            self._field.bury()
            shares = self._field.shares()
            if shares and shares[-1] - shares[0] <= 1:
                return
            time.sleep(_LOOK_S)
        self._say(f"{time.monotonic() - self._began:7.1f} s  not well again: {self._field.shares()}")


def _drain(field: Field, load: Load, *, at_most_once: bool) -> int:
    """Wait until everything written is processed, as far as it will be; the messages in the coordination topic."""
    deadline = time.monotonic() + _DRAINS_WITHIN_S
    with Observer(field.settings) as observer:

        def is_drained() -> bool:
            field.bury()
            field.read()
            observer.follow(_LOOK_S)
            bounds = observer.bounds([field.topic])
            found = rows(observer.worlds.values(), bounds, round(time.time() * 1000), field.settings.group)
            done = {(each.partition, each.offset) for process in field.processes for each in process.notes.processed}
            if not at_most_once and load.records - done:
                return False
            return all(row.lag == 0 for row in found)

        while not is_drained():
            if time.monotonic() > deadline:
                field.accidents.append(f"not everything was processed {_DRAINS_WITHIN_S:g} s after the last record")
                break
        _wait_quiet(field)
        return sum(world.next_offset for world in observer.worlds.values())


def _wait_quiet(field: Field) -> None:
    """At most once, a position is in the log before its records are processed."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        field.read()
        now = sum(len(process.notes.processed) for process in field.processes)
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(_LOOK_S)


def _coordination_log(field: Field) -> Iterator[str]:
    """Messages with the time of their append, on the clock of the notes, and their place in the log."""
    ahead_s = time.time() - time.monotonic()
    found = read_topic(field.bootstrap, field.settings.coordination_topic)
    for record in sorted(found, key=lambda record: (record.created_ms, record.partition, record.offset)):
        at_s = record.created_ms / 1000 - ahead_s
        yield f"{at_s:.3f} {record.partition}@{record.offset} {(record.value or b'').decode(errors='replace')}"


def _spread(values: Any) -> dict[str, Any]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {}
    return {"median": round(known[len(known) // 2], 2), "max": round(known[-1], 2), "of": len(known)}

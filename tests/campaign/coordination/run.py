"""The scenario of coordinated consumers: load, faults with time to recover in between, draining, judging."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from pathlib import Path
from typing import Any

from harvester.coordination.admin import Observer, rows
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.settings import ConsumerSettings
from tests.campaign import frame
from tests.campaign.frame import Command, Scenario
from tests.support.consuming import read_topic

from .faults import ConsumerStriker
from .field import Field
from .history import Episode, History, Limits, Record
from .judge import Judgement, judge
from .load import Load
from .member import is_poison
from .schedule import KINDS, strikes

_LOOK_S = 0.02
_DRAINS_WITHIN_S = 60.0
_GIVES_UP_AFTER = 3.0  # times what is allowed
_QUIET_S = 1.0
_HANDLING = {"on_error": "dead-letter", "attempts": 3, "backoff_s": 0.05}


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to do. `kinds` None: all, but for those of the broker where it is not our own; `limits`: the judge's.

    `held_back_intervals`: at least once, how late some records are committed. `workers`: more than one have handlers,
    which raise at times; what they never take becomes a dead letter.
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
    workers: int = 1
    kinds: Collection[str] | None = None
    limits: Limits | None = None
    settings: Mapping[str, Any] = attribute(default_factory=dict)


@dataclass(frozen=True)
class Outcome(frame.Outcome):
    """`messages`: in the coordination topic; `load`: load averages of the machine, which tell what the times are worth;
    `logs`: what each consumer said and noted, and the coordination topic.
    """

    judgement: Judgement
    history: History
    messages: int
    load: Sequence[float]

    @property
    def verdict(self) -> Judgement:
        return self.judgement

    def summary(self) -> dict[str, Any]:
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


class Coordination(Scenario[Field, Outcome]):
    """Consumers that share the partitions of a topic; after each fault it waits until all is well, or it is late."""

    clock = time.monotonic

    def __init__(
        self, campaign: Campaign, kinds: Collection[str], limits: Limits, field: Field, say: frame.Say
    ) -> None:
        super().__init__(field, ConsumerStriker(field, campaign.consumers), say)
        self._campaign, self._kinds, self._limits = campaign, kinds, limits
        self._episodes: list[Episode] = []
        self._open: tuple[str, float, float, float] | None = None  # the episode that is looked at
        self._load_averages: list[float] = []
        self._seconds, self._messages = 0.0, 0

    def begin(self) -> None:
        """All consumers at once: the first episode."""
        campaign, field = self._campaign, self.field
        self.say(
            f"{campaign.consumers} consumers, {campaign.partitions} partitions, {campaign.records} records,"
            f" {'at most once' if campaign.at_most_once else 'at least once'}, interval {campaign.interval_s:g} s,"
            f" seed {campaign.seed}; faults for {campaign.seconds:g} s"
        )
        started = [field.start() for _ in range(campaign.consumers)]
        for process in started:
            field.wait_born(process)
        born = self.now()
        self._open = (f"start of {campaign.consumers}", born, born, born)
        self._wait_well()
        self._load = Load(field.bootstrap, field.topic, campaign.partitions, campaign.records, campaign.seconds)
        self._load.start()

    def strike(self) -> None:
        deadline = self.now() + self._campaign.seconds
        planned = strikes(self._campaign.seed, self._kinds, self._campaign.interval_s)
        for episode in itertools.takewhile(lambda _: self.now() < deadline, planned):
            self._end_episode()
            began, before = self.now(), len(self.struck)
            for thread in self.launch(episode):
                thread.join()
            healed, hit = self.now(), self.struck[before:]
            if hit:
                broker = any(KINDS[each.strike.kind].broker for each in hit)
                what = " and ".join(f"{each.strike.kind} {each.target}" for each in hit)
                self._open = (what, began, healed if broker else began, healed)
                self._wait_well()

    def settle(self) -> None:
        self.field.accidents += self._load.finish()

    def drain(self) -> None:
        """Wait until everything written is processed, as far as it will be."""
        field = self.field
        deadline = self.now() + _DRAINS_WITHIN_S
        with Observer(field.settings) as observer:

            def is_drained() -> bool:
                field.bury()
                field.read()
                observer.follow(_LOOK_S)
                bounds = observer.bounds([field.topic])
                found = rows(observer.worlds.values(), bounds, round(time.time() * 1000), field.settings.group)
                if self._campaign.workers > 1:
                    done = {record for process in field.processes for _, record in process.notes.done}
                else:
                    done = {
                        (each.partition, each.offset) for process in field.processes for each in process.notes.processed
                    }
                if not self._campaign.at_most_once and self._load.records - done:
                    return False
                return all(row.lag == 0 for row in found)

            while not is_drained():
                if self.now() > deadline:
                    field.accidents.append(f"not everything was processed {_DRAINS_WITHIN_S:g} s after the last record")
                    break
            _wait_quiet(field)
            if self._campaign.workers > 1:
                field.accidents += self._missing_letters()
            self._messages = sum(world.next_offset for world in observer.worlds.values())
        self._end_episode()
        self._seconds = self.now() - self.began

    def stop(self) -> None:
        enders = [threading.Thread(target=self.field.stop, args=(process,)) for process in self.field.able()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self.field.read()

    def outcome(self) -> Outcome:
        field = self.field
        history = History(
            self._campaign.at_most_once,
            self._campaign.partitions,
            frozenset(self._load.records),
            [process.member() for process in field.processes if process.notes.born < math.inf],
            self._limits,
            self._episodes,
            self._handled_keys(),
            field.accidents,
        )
        return Outcome(
            struck=self.counts(),
            seconds=self._seconds,
            logs={
                **{process.name: process.log.read_text(errors="replace") for process in field.processes},
                **{f"{process.name}-notes": process.notes.text for process in field.processes},
                "coordination": "\n".join(_coordination_log(field)),
            },
            judgement=judge(history),
            history=history,
            messages=self._messages,
            load=self._load_averages,
        )

    # -- parts

    def _missing_letters(self) -> list[str]:
        settings = self.field.settings
        letters = {
            (each.partition, each.offset) for each in DeadLetterTopic(settings.dead_letters, settings.kafka).read()
        }
        missing = {record for record in self._load.records if is_poison(record[1])} - letters
        return [f"{len(missing)} records should be dead letters, {min(missing)} for one"] if missing else []

    def _handled_keys(self) -> dict[Record, int]:
        if self._campaign.workers == 1:
            return {}
        return {record: key for record, key in self._load.keys.items() if not is_poison(record[1])}

    def _end_episode(self) -> None:
        """What was struck last is not looked at any longer."""
        self._load_averages.append(os.getloadavg()[0])
        if self._open is not None:
            self._episodes.append(Episode(*self._open, until=self.now()))
            self._open = None

    def _wait_well(self) -> None:
        """Until everything is held, and shared fairly; the judge will say when that was."""
        allowed_s = self._limits.claimed_s + self._limits.fair_s
        deadline = self.now() + _GIVES_UP_AFTER * allowed_s
        while self.now() < deadline:
            self.field.bury()
            shares = self.field.shares()
            if shares and shares[-1] - shares[0] <= 1:
                return
            time.sleep(_LOOK_S)
        self.say(f"{self.now() - self.began:7.1f} s  not well again: {self.field.shares()}")


def run(campaign: Campaign, directory: Path, bootstrap: str | None = None, say: frame.Say = print) -> Outcome:
    """Do it in this directory, which must be empty; without `bootstrap` on a broker of its own."""
    kinds = set(campaign.kinds or KINDS)
    if bootstrap is not None:
        kinds -= {name for name, kind in KINDS.items() if kind.broker}
    settings = {
        "heartbeat_interval_s": campaign.interval_s,
        "at_most_once": campaign.at_most_once,
        "batch_records": campaign.batch_records,
        "max_open_records": campaign.max_open_records,
        **({} if campaign.workers == 1 else {"workers": campaign.workers, **_HANDLING}),
        **campaign.settings,
    }
    ConsumerSettings(kafka={}, group="group", topics=("topic",), **settings)  # else no consumer would begin, to the end
    held_back_s = campaign.held_back_intervals * campaign.interval_s
    field = Field(directory, bootstrap, partitions=campaign.partitions, settings=settings, held_back_s=held_back_s)
    limits = replace(campaign.limits or Limits(campaign.interval_s), max_open_records=campaign.max_open_records)
    if held_back_s and not campaign.at_most_once:  # a hand-over waits an interval for what is open
        limits = replace(limits, fair_intervals=limits.fair_intervals + 1)
    return Coordination(campaign, kinds, limits, field, say).run()


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


# -- the command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--amo", action="store_true", help="at most once (default: at least once)")
    parser.add_argument("--interval", type=float, default=1.0, help="HeartbeatInterval in seconds")
    parser.add_argument("--consumers", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=32)
    parser.add_argument("--records", type=int, default=20_000, help="evenly over the time")
    parser.add_argument("--batch", type=int, default=20, help="records that are claimed at once, at most once")
    parser.add_argument("--workers", type=int, default=1, help="more than 1: handlers in threads, which raise at times")
    parser.add_argument("--shed-at-once", type=int, help="the most that are given up in an interval (default: all)")


def _run(options: argparse.Namespace, kinds: frozenset[str], directory: Path, say: frame.Say) -> Outcome:
    campaign = Campaign(
        seed=options.seed,
        seconds=options.minutes * 60,
        at_most_once=options.amo,
        interval_s=options.interval,
        consumers=options.consumers,
        partitions=options.partitions,
        records=options.records,
        batch_records=options.batch,
        kinds=kinds,
        workers=options.workers,
        settings={} if options.shed_at_once is None else {"shed_at_once": options.shed_at_once},
    )
    return run(campaign, directory, None, say)


COMMAND = Command(
    name="coordination-faults",
    description="""Consumers that coordinate through Kafka alone, while faults strike them.

Prints each fault with its time, then what was processed and how soon all was well again, and as its last line `held`,
or `broken: …` with the first promise that was not kept. The exit code is 0 or 1 accordingly. The same seed plans the
same faults.
""",
    minutes=3.0,
    kinds=KINDS,
    add_options=_add_options,
    default_kinds=lambda _: KINDS,
    run=_run,
)

"""The frame of a campaign: faults from a seed, load, healing, draining, a judge, a report, an exit code."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from harvester.errors import ConfigurationError

from .field import Field, Striker
from .schedule import Strike

Say = Callable[[str], None]


class Verdict:
    """A judgement is one: its violations decide."""

    __slots__ = ()
    violations: tuple[object, ...]

    @property
    def held(self) -> bool:
        """Nothing was broken."""
        return not self.violations

    @property
    def sentence(self) -> str:
        """`held`, or `broken: …` with the first violation and how many more there are."""
        if self.held:
            return "held"
        more = len(self.violations) - 1
        return f"broken: {self.violations[0]}" + (f" (and {more} more)" if more else "")


@dataclass(frozen=True)
class Outcome(ABC):
    """What came of a campaign. `struck`: faults by kind; `logs`: by the process's name."""

    struck: dict[str, int]
    seconds: float
    logs: dict[str, str]

    @property
    @abstractmethod
    def verdict(self) -> Verdict:
        """The judgement."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Figures for people and scripts."""

    def report(self, seed: int, *, as_json: bool) -> None:
        """Print the figures, and the verdict as the last line."""
        if as_json:
            print(json.dumps({"seed": seed, **self.summary()}))
        else:
            for name, value in self.summary().items():
                text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
                print(f"{name}: {text}")
        print(self.verdict.sentence)

    def keep_logs(self, target: Path) -> None:
        """Into this directory, a file for each process."""
        target.mkdir(parents=True, exist_ok=True)
        for process, text in self.logs.items():
            (target / f"{process}.log").write_text(text)


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that struck, and when; on the scenario's clock."""

    strike: Strike
    target: str
    began: float
    ended: float


F = TypeVar("F", bound=Field[Any])
Result = TypeVar("Result", bound=Outcome)


class Scenario(ABC, Generic[F, Result]):
    """A campaign from beginning to end; the methods without a body are called in this order."""

    clock: ClassVar[Callable[[], float]] = time.time

    def __init__(self, field: F, striker: Striker, say: Say) -> None:
        self.field, self.striker, self.say = field, striker, say
        self.began = 0.0
        self.struck: list[Struck] = []

    @abstractmethod
    def begin(self) -> None:
        """Start the processes, and wait until all is well; start the load, or make it ready."""

    @abstractmethod
    def strike(self) -> None:
        """Strike, by `perform`, until it is time."""

    @abstractmethod
    def settle(self) -> None:
        """Heal everything, and end the load."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all that was written is through."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all processes in good order."""

    @abstractmethod
    def outcome(self) -> Result:
        """Judge what was recorded."""

    def run(self) -> Result:
        """Do it."""
        with self.field:
            self.began = self.now()
            self.begin()
            self.strike()
            self.settle()
            self.drain()
            self.stop()
            return self.outcome()

    def now(self) -> float:
        """On the clock of what is recorded."""
        return type(self).clock()

    def counts(self) -> dict[str, int]:
        """How many faults struck, by kind."""
        return dict(sorted(Counter(each.strike.kind for each in self.struck).items()))

    def perform(self, strike: Strike) -> Struck | None:
        """One fault, told in a line."""
        began = self.now()
        try:
            target = self.striker.strike(strike.kind, strike.hold_s, random.Random(strike.seed))
        except Exception as error:
            self.field.accidents.append(f"the campaign itself failed at {strike.kind!r}: {error!r}")
            return None
        ended = self.now()
        at = f"{began - self.began:7.1f} s  {strike.kind}"
        if target is None:
            self.say(f"{at}: nothing to strike")
            return None
        self.say(f"{at}: {target}" + (f", for {ended - began:.1f} s" if ended - began >= 0.05 else ""))
        self.struck.append(Struck(strike, target, began, ended))
        return self.struck[-1]

    def launch(self, strikes: Iterable[Strike]) -> list[threading.Thread]:
        """Each on a thread of its own; returns at once."""
        threads = [threading.Thread(target=self.perform, args=(each,), name=each.kind, daemon=True) for each in strikes]
        for thread in threads:
            thread.start()
        return threads


@dataclass(frozen=True, slots=True)
class Command:
    """A scenario on the command line. `run` is given the options, the kinds of faults chosen by --only and --without
    among `kinds` (None: neither was given), an empty directory and where to say what happens.
    """

    name: str
    description: str
    minutes: float
    kinds: Collection[str]
    add_options: Callable[[argparse.ArgumentParser], None]
    default_kinds: Callable[[argparse.Namespace], Collection[str]]
    run: Callable[[argparse.Namespace, frozenset[str], Path, Say], Outcome]


def main(command: Command, arguments: list[str]) -> NoReturn:
    """Run it; exit with 0 if it held, else with 1."""
    parser = argparse.ArgumentParser(prog=f"scripts/{command.name}", description=command.description)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=command.minutes)
    command.add_options(parser)
    kinds = sorted(command.kinds)
    parser.add_argument("--only", action="append", choices=kinds, help="kinds of faults (default: all that apply)")
    parser.add_argument("--without", action="append", choices=kinds, help="kinds of faults to leave out")
    kept_in = "keep all logs in this directory (default: only if broken, in a new one)"
    parser.add_argument("--logs", type=Path, help=kept_in)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and harvesters are stopped on the way out
    chosen = frozenset(options.only or command.default_kinds(options)) - frozenset(options.without or ())
    progress = sys.stderr if options.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix=f"harvester-{command.name}-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # started by root, servers run under another account
        try:
            outcome = command.run(options, chosen, directory, lambda text: print(text, file=progress, flush=True))
        except ConfigurationError as error:
            parser.error(str(error))
        kept: Path | None = options.logs
        if kept is None and not outcome.verdict.held:
            kept = Path(tempfile.mkdtemp(prefix=f"harvester-{command.name}-{options.seed}-"))
        if kept is not None:
            outcome.keep_logs(kept)
            for log in directory.glob("stack/*/*.log"):
                shutil.copy(log, kept / f"{log.parent.name}.log")
            print(f"logs: {kept}", file=sys.stderr, flush=True)
    outcome.report(options.seed, as_json=options.json)
    sys.exit(0 if outcome.verdict.held else 1)

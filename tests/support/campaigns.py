"""What campaigns share, whatever they strike: the verdict in a sentence, and how it is told on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol


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


class Outcome(Protocol):
    """What came of a campaign. `logs`: by the process's name."""

    @property
    def judgement(self) -> Verdict: ...
    @property
    def logs(self) -> Mapping[str, str]: ...
    def summary(self) -> dict[str, Any]: ...


def keep_logs(outcome: Outcome, target: Path | None) -> None:
    """Into this directory, a file for each process, if there is to be one."""
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    for process, text in outcome.logs.items():
        (target / f"{process}.log").write_text(text)


def end(outcome: Outcome, seed: int, *, as_json: bool) -> NoReturn:
    """Print the figures and the verdict, and exit with 0 if it held, else with 1."""
    if as_json:
        print(json.dumps({"seed": seed, **outcome.summary()}))
    else:
        for name, value in outcome.summary().items():
            print(f"{name}: {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    print(outcome.judgement.sentence)
    sys.exit(0 if outcome.judgement.held else 1)

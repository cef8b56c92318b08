"""What a check comes to: a finding, and the report of them all (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad it is. A warning costs speed, convenience or a margin; a problem stops the relay or risks records."""

    OK = "ok"
    SKIPPED = "skipped"
    """Was not looked at: nobody asked for it, a server is away, or the role may not see it."""
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is a stable name (`database.version`); `found` says what is, `advice` what to do about it."""

    check: str
    level: Level
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order in which a reader wants them: the machine, the database, Kafka, the clocks."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No problem. Warnings do not count."""
        return not self.of(Level.PROBLEM)

    def of(self, level: Level) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level is level]

    def as_json(self) -> dict[str, Any]:
        """A public interface."""
        return {
            "ok": self.ok,
            "counts": {level.value: len(self.of(level)) for level in Level},
            "findings": [
                {"check": each.check, "level": each.level.value, "found": each.found, "advice": each.advice}
                for each in self.findings
            ],
        }


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, found)


def skipped(check: str, found: str, advice: str | None = None) -> Finding:
    """Not looked at."""
    return Finding(check, Level.SKIPPED, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    """Works, at a price."""
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """Does not work, or records are at risk."""
    return Finding(check, Level.PROBLEM, found, advice)


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def age(seconds: float) -> str:
    """`3.2 h`; for people."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"

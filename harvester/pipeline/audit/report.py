"""What an audit says, as plain values: figures, findings by example, and what nobody could judge."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from harvester.pipeline.audit.schemas import Kind, Severity
from harvester.pipeline.audit.skew import Skew
from harvester.pipeline.audit.terms import Stream, Term

EXAMPLES = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Finding:
    """One example. `key` is text; bytes that are no UTF-8 stand in base64 behind `base64:`."""

    kind: Kind
    severity: Severity
    incarnation: str | None
    id: int | None
    topic: str | None
    partition: int | None
    offset: int | None
    key: str | None
    detail: str
    at: datetime | None

    def __str__(self) -> str:
        record = "" if self.id is None else f"id {self.id} of {self.incarnation}"
        key = "" if self.key is None else f"key {self.key!r}"
        place = "" if self.topic is None else self.topic
        place += "" if self.partition is None else f"[{self.partition}]"
        place += "" if self.offset is None else f"@{self.offset}"
        return f"{self.kind}: {', '.join(part for part in (record, key, place) if part)}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Found:
    """All findings of a kind and severity; `examples` are up to EXAMPLES of them, the earliest."""

    kind: Kind
    severity: Severity
    count: int
    examples: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Latency:
    """From the creation of a row to Kafka's timestamp, in ms. `hour` None: all hours; `topic` None: all topics."""

    topic: str | None
    hour: datetime | None
    records: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key and how much of all records it has."""

    key: str
    records: int
    share: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`figures` are the counts of docs/pipeline-audit.md by name. `not_judged`: what could not be proved, and why."""

    audited_at: datetime
    source: str
    topics: tuple[str, ...]
    since: datetime | None
    until: datetime | None
    figures: Mapping[str, int]
    found: tuple[Found, ...]
    not_judged: tuple[str, ...]
    latency: tuple[Latency, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    skew: Skew | None = None
    streams: tuple[Stream, ...] = ()
    terms: tuple[Term, ...] = field(default=())

    @property
    def holds(self) -> bool:
        """No violation was found, among what could be judged."""
        return not any(one.severity is Severity.VIOLATION for one in self.found)

    @property
    def lanes(self) -> dict[int, int]:
        """Records by lane, over all terms."""
        counts: dict[int, int] = {}
        for one in self.streams:
            counts[one.lane] = counts.get(one.lane, 0) + one.records
        return dict(sorted(counts.items()))

    def answer(self) -> str:
        """The verdict in one sentence."""
        broken = [f"{one.count:,} {one.kind}" for one in self.found if one.severity is Severity.VIOLATION]
        if broken:
            return f"The guarantees do not hold: {', '.join(broken)}."
        suspects = sum(one.count for one in self.found)
        if not self.figures.get("records"):
            return "Nothing was delivered, and nothing is known to be lost."
        return "Nothing broke a guarantee" + (f"; {suspects:,} findings are suspect." if suspects else ".")

    def to_json(self) -> str:
        """All of it; times in ISO 8601, UTC."""
        document = {"holds": self.holds, "answer": self.answer(), **asdict(self), "lanes": self.lanes}
        return json.dumps(document, default=_plain)


def instant(microseconds: int | None) -> datetime | None:
    """Microseconds since the epoch, UTC; the nearest that a datetime can hold."""
    if microseconds is None:
        return None
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return datetime(9999, 12, 31, tzinfo=UTC) if microseconds > 0 else datetime(1, 1, 1, tzinfo=UTC)


def key_text(raw: bytes | bytearray | None) -> str | None:
    """A key as people read it."""
    if raw is None:
        return None
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"


def grouped(rows: Iterable[tuple[Finding, int]]) -> tuple[Found, ...]:
    """Examples, each with the count of its kind and severity → findings: violations first, then as Kind has them."""
    collected: dict[tuple[Kind, Severity], tuple[int, list[Finding]]] = {}
    for finding, count in rows:
        collected.setdefault((finding.kind, finding.severity), (count, []))[1].append(finding)
    kinds, severities = list(Kind), list(Severity)
    order = sorted(collected, key=lambda named: (severities.index(named[1]), kinds.index(named[0])))
    return tuple(
        Found(kind, severity, collected[kind, severity][0], tuple(collected[kind, severity][1][:EXAMPLES]))
        for kind, severity in order
    )


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no place in a report")

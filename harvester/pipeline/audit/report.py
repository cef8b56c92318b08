"""An audit's report: figures, findings by example, and in words what they mean and what could not be judged."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from harvester.pipeline.audit.checks import ProducerStream, Term
from harvester.pipeline.audit.schemas import FindingKind, Severity
from harvester.pipeline.audit.skew import Skew

EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One example. `key` is text; bytes that are no UTF-8 stand in base64 behind `base64:`."""

    kind: FindingKind
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
class FindingGroup:
    """All findings of a kind and severity; `examples` are up to EXAMPLES of them, the earliest."""

    kind: FindingKind
    severity: Severity
    count: int
    examples: tuple[AuditFinding, ...]


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
    found: tuple[FindingGroup, ...]
    not_judged: tuple[str, ...]
    latency: tuple[Latency, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    skew: Skew | None = None
    streams: tuple[ProducerStream, ...] = ()
    terms: tuple[Term, ...] = field(default=())

    @property
    def holds(self) -> bool:
        """No violation was found, among what could be judged."""
        return not any(one.severity is Severity.VIOLATION for one in self.found)

    @property
    def lanes(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for one in self.streams:
            counts[one.lane] = counts.get(one.lane, 0) + one.records
        return dict(sorted(counts.items()))

    def answer(self) -> str:
        """The verdict in one sentence."""
        broken = [f"{one.count:,} {one.kind}" for one in self.found if one.severity is Severity.VIOLATION]
        if broken:
            return f"The guarantees do not hold: {', '.join(broken)}."
        if not self.figures.get("records"):
            return "Nothing was delivered, and nothing is known to be lost."
        suspects = sum(one.count for one in self.found if one.severity is Severity.SUSPECT)
        accepted = sum(one.count for one in self.found if one.severity is Severity.ACCEPTED)
        said = [f"{suspects:,} findings are suspect"] if suspects else []
        said += [f"{accepted:,} are accepted losses"] if accepted else []
        return f"{'; '.join(['Nothing broke a guarantee', *said])}."

    def to_json(self) -> str:
        """All of it; times in ISO 8601, UTC."""
        document = {"holds": self.holds, "answer": self.answer(), **asdict(self), "lanes": self.lanes}
        return json.dumps(document, default=datetime.isoformat)


def key_text(raw: bytes | bytearray | None) -> str | None:
    """A key as people read it."""
    if raw is None:
        return None
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"


def grouped(rows: Iterable[tuple[AuditFinding, int]]) -> tuple[FindingGroup, ...]:
    """Examples, each with the count of its kind and severity → findings: violations first, then as Kind has them."""
    collected: dict[tuple[FindingKind, Severity], tuple[int, list[AuditFinding]]] = {}
    for finding, count in rows:
        collected.setdefault((finding.kind, finding.severity), (count, []))[1].append(finding)
    kinds, severities = list(FindingKind), list(Severity)
    order = sorted(collected, key=lambda named: (severities.index(named[1]), kinds.index(named[0])))
    return tuple(
        FindingGroup(kind, severity, collected[kind, severity][0], tuple(collected[kind, severity][1][:EXAMPLES]))
        for kind, severity in order
    )


def not_judged(
    *,
    history: bool,
    archive: bool,
    archived: int,
    beyond: int,
    records: int,
    foreign: int,
    pending: int,
    other_topics: Collection[str],
    compacted: Collection[str],
    emptied: Collection[str],
    whole: datetime | None,
    latest: datetime | None,
    record_timestamps: bool,
    anew: Collection[str] = (),
    half_written: bool = False,
    behind: Collection[str] = (),
) -> tuple[str, ...]:
    """One line for each limit of an audit.

    `archived`: ids of the archive in range and topics; `beyond`: those not judged. `other_topics`: where the history
    says that records went besides the topics that were read. `whole`: since when the topics have everything; None: from
    their beginning. `latest`: up to when a lake surely has everything. `anew`: topics of which it may have two logs;
    `half_written`: its last batch may be, which its checkpoint would say; `behind`: topics that it may not have read so
    far.
    """
    said: list[str] = []
    if not history:
        said.append("lost: not judged without the database's history (--no-history)")
    elif not archive:
        said.append('lost: not judged without an archive (archive = "ids" of the configuration keeps one)')
    elif not archived:
        said.append("lost: not judged, the archive has nothing of these topics and this range")
    if beyond:
        said.append(
            f"lost: {beyond:,} ids of the archive are not judged: their rows are older than what the topics have"
        )
    if not records:
        said.append("order, repeats, gaps, latency: nothing was read")
    if foreign:
        said.append(f"{foreign:,} records have no sound header of the harvester: not judged")
    if other_topics:
        said.append(
            f"topics that were not read: {_few(other_topics)}; what is lost there is not judged, and gaps are only"
            " suspect"
        )
    if compacted:
        said.append(f"lost, gaps: only suspect where topics are compacted: {', '.join(sorted(compacted))}")
    if anew:
        said.append(
            "order: only suspect where a topic was deleted under the lake; made anew, its offsets begin again:"
            f" {_few(anew)}"
        )
    if half_written:
        said.append(
            "the lake has no checkpoint beside its tables, which would tell whether its last batch is whole: of a batch"
            " under way records seem lost (--checkpoint names it)"
        )
    if emptied:
        said.append(f"lost, gaps: only suspect where retention has emptied partitions: {', '.join(sorted(emptied))}")
    if whole is not None:
        said.append(f"gaps before {_time(whole)}: not judged, the topics do not go back further")
    if latest is not None:
        said.append(f"what was purged after {_time(latest)}, and gaps: not judged, the lake ends a minute later")
    if behind:
        said.append(f"lost, gaps: only suspect where the lake may not have read so far: {', '.join(sorted(behind))}")
    if pending:
        said.append(f"{pending:,} records wait in the outbox: the verdict is not final")
    if record_timestamps:
        said.append('latency: records bear the time of their rows (record_timestamp = "create_time")')
    return tuple(said)


def _few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


MEANINGS = {
    FindingKind.LOST: "The archive has them as acknowledged by Kafka and purged, and none of the topics has them.",
    FindingKind.REPEAT: "The same id was delivered again, with no later record of its key in between. At least once"
    " allows that after a crash; exactly once never does.",
    FindingKind.LATE_REPEAT: "The same id was delivered again after a later record of its key: a reader is set back.",
    FindingKind.SWAPPED: "First deliveries of a key with descending ids. Where writers of a key wait for each other, as"
    " they should, that is a broken order; where they do not, neither order is right.",
    FindingKind.GAP: "A lane numbers what it sends. These numbers were given out, and their records are not in the"
    " topics.",
    FindingKind.CLASH: "Two ids under one number of a lane: a reader of committed records must never see that.",
    FindingKind.UNEXPECTED: "Delivered, but in neither outbox, quarantine nor archive: published though rolled back,"
    " purged while the archive was off, or past the archive's retention.",
    FindingKind.ACCEPTED: "The lake was allowed to go on without what Kafka had no longer (`--accept-loss`), or a key"
    " was erased from it and not from the archive. These ids and numbers may have been among it.",
    FindingKind.SCATTERED: "Between partitions there is no order. It comes from adding or choosing partitions.",
}

HOLES = {
    "numbers_given_up": "given up: the quarantine, or a notice, names the record",
    "numbers_handed_over": "left to a successor: a later producer or term sent what was left",
    "numbers_open": "under way or lost: nothing explains them",
    "numbers_recent": "newer than the look at the outbox, or than what a lake surely has: probably under way",
    "numbers_edge": "at the edge of what was read: not judged",
}


def advice(skew: Skew, hot: Sequence[HotKey]) -> str:
    """How many shards the keys are worth, and which keys stand in the way."""
    said = f"{skew.records:,} records of {skew.keys:,} keys"
    said += f", {skew.keyless:,} without one. " if skew.keyless else ". "
    if not hot:
        return said + "Without keys any number of shards is loaded evenly."
    said += (
        f"The hottest key, {hot[0].key!r}, has {skew.hottest:.1%}: no number of shards carries more than"
        f" {skew.most:.1f} times what one does. "
    )
    carried = {load.shards: load.carried for load in skew.loads}
    said += (
        f"Advised: {skew.advised} shards, which carry {carried[skew.advised]:.1f} times one;"
        f" up to {max(carried)} carry {max(carried.values()):.1f} times. "
    )
    dominating = [one.key for one in hot if one.share >= 0.1]
    if dominating:
        said += f"Keys that dominate: {', '.join(repr(key) for key in dominating)}."
    else:
        said += "No key dominates."
    return said

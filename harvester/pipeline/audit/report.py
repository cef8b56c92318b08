"""The report of an audit: figures, findings with examples, their meaning in words, and what could not be judged."""

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
    """One example of a finding. `key` is text; bytes that are not UTF-8 are given as `base64:` and base64."""

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
    """All findings of a kind and severity; `examples`: the earliest ones, up to EXAMPLES."""

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
    """A key, its number of records, and its share of all records."""

    key: str
    records: int
    share: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`figures`: the counts of docs/pipeline-audit.md, by name. `not_judged`: what could not be judged, and why."""

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
        """Whether no violation was found, as far as could be judged."""
        return not any(one.severity is Severity.VIOLATION for one in self.found)

    @property
    def lanes(self) -> dict[int, int]:
        """The number of records by lane, ascending."""
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
        said = [f"{suspects:,} suspect findings"] if suspects else []
        said += [f"{accepted:,} accepted losses"] if accepted else []
        return f"{'; '.join(['No guarantee was broken', *said])}."

    def to_json(self) -> str:
        """The complete report as JSON; times in ISO 8601, UTC."""
        document = {"holds": self.holds, "answer": self.answer(), **asdict(self), "lanes": self.lanes}
        return json.dumps(document, default=datetime.isoformat)


def key_text(raw: bytes | bytearray | None) -> str | None:
    """A key as readable text."""
    if raw is None:
        return None
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"


def grouped(rows: Iterable[tuple[AuditFinding, int]]) -> tuple[FindingGroup, ...]:
    """Examples, each with the count of its kind and severity → groups, by severity, then in FindingKind's order."""
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
    """The limits of an audit, one line each.

    `archived`: archived ids in range and topics; `beyond`: those not judged. `other_topics`: topics of archived rows
    that were not read. `whole`: the time from which the topics are complete; None: from their beginning. `latest`: the
    time up to which a lake is certainly complete. `anew`: topics of which it may have two logs. `half_written`: its
    last batch may be incomplete, as only its checkpoint would tell. `behind`: topics that it may not have read up to
    that time.
    """
    said: list[str] = []
    if not history:
        said.append("lost: not judged without the database's history (--no-history)")
    elif not archive:
        said.append('lost: not judged without an archive (to keep one, set archive = "ids" in the configuration)')
    elif not archived:
        said.append("lost: not judged, the archive has nothing from these topics in this range")
    if beyond:
        said.append(
            f"lost: {beyond:,} ids of the archive are not judged: their rows are older than the topics' records"
        )
    if not records:
        said.append("order, repeats, gaps, latency: nothing was read")
    if foreign:
        said.append(f"{foreign:,} records have no valid header of the harvester: not judged")
    if other_topics:
        said.append(
            f"topics that were not read: {_few(other_topics)}; losses there are not judged, and gaps are only suspect"
        )
    if compacted:
        said.append(f"lost, gaps: only suspect in compacted topics: {', '.join(sorted(compacted))}")
    if anew:
        said.append(
            "order: only suspect in topics that were deleted and recreated during the lake's lifetime, because their"
            f" offsets began again: {_few(anew)}"
        )
    if half_written:
        said.append(
            "lost, gaps: may belong to an incomplete last batch of the lake, because no checkpoint was found next to"
            " its tables: specify it with --checkpoint"
        )
    if emptied:
        said.append(
            f"lost, gaps: only suspect in topics with partitions emptied by retention: {', '.join(sorted(emptied))}"
        )
    if whole is not None:
        said.append(f"gaps before {_time(whole)}: not judged, the topics do not go back further")
    if latest is not None:
        said.append(f"rows purged after {_time(latest)}, and later gaps: not judged, the lake ends a minute later")
    if behind:
        said.append(
            "lost, gaps: only suspect in topics that the lake may not have read far enough:"
            f" {', '.join(sorted(behind))}"
        )
    if pending:
        said.append(f"{pending:,} records wait in the outbox: the verdict is not final")
    if record_timestamps:
        said.append('latency: records have the creation times of their rows (record_timestamp = "create_time")')
    return tuple(said)


def _few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


MEANINGS = {
    FindingKind.LOST: "The archive says that Kafka acknowledged them and they were purged, but no topic has them.",
    FindingKind.REPEAT: "The same id was delivered again, with no later record of its key in between. At least once"
    " allows that after a crash; exactly once never does.",
    FindingKind.LATE_REPEAT: "The same id was delivered again after a later record of its key, which sets readers"
    " back.",
    FindingKind.SWAPPED: "First deliveries of a key with descending ids. If the writers of a key wait for each other,"
    " as they should, its order was broken; otherwise neither order is right.",
    FindingKind.GAP: "A lane numbers the records that it sends. These numbers were assigned, but their records are not"
    " in the topics.",
    FindingKind.CLASH: "Two ids have the same number of a lane, which a reader of committed records must never see.",
    FindingKind.UNEXPECTED: "Delivered, but not in the outbox, the quarantine or the archive: published although rolled"
    " back, purged while the archive was off, or older than the archive's retention.",
    FindingKind.ACCEPTED: "The lake was allowed to continue without records that Kafka no longer had"
    " (`--accept-loss`), or a key was erased from it but not from the archive. These ids and numbers may belong to such"
    " records.",
    FindingKind.CHANGED: "The lake has the record with another topic, key or value, or with other headers, than the"
    " archive.",
    FindingKind.SCATTERED: "There is no order between partitions. The cause: partitions were added, or chosen by rows.",
}

HOLES = {
    "numbers_given_up": "given up: the quarantine, or a notice, names the record",
    "numbers_handed_over": "left to a successor: a later producer or term sent the rest",
    "numbers_open": "under way or lost: nothing explains them",
    "numbers_recent": "newer than the snapshot of the outbox, or than the complete part of a lake: probably under way",
    "numbers_edge": "at the edge of what was read: not judged",
}


def advice(skew: Skew, hot: Sequence[HotKey]) -> str:
    """The advised number of shards, and the keys that limit it, in words."""
    said = f"{skew.records:,} records of {skew.keys:,} keys"
    said += f", {skew.keyless:,} without one. " if skew.keyless else ". "
    if not hot:
        return said + "Without keys any number of shards is loaded evenly."
    said += (
        f"The hottest key, {hot[0].key!r}, has {skew.hottest:.1%}: no number of shards can carry more than"
        f" {skew.most:.1f} times the load of one. "
    )
    carried = {load.shards: load.carried for load in skew.loads}
    said += (
        f"Advised: {skew.advised} shards, which carry {carried[skew.advised]:.1f} times the load of one;"
        f" up to {max(carried)} carry {max(carried.values()):.1f} times. "
    )
    dominating = [one.key for one in hot if one.share >= 0.1]
    if dominating:
        said += f"Keys that dominate: {', '.join(repr(key) for key in dominating)}."
    else:
        said += "No key dominates."
    return said

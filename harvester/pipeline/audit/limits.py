"""What an audit could not judge, and why, in words: nothing passes in silence. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the input. `archived`: ids of the archive in range and topics; `beyond`: those not judged.

    `other_topics`: where the history says that records went besides the topics that were read. `whole`: since when the
    topics have everything; None: from their beginning. `latest`: of a lake, the time of its last record.
    """

    history: bool
    archive: bool
    archived: int
    beyond: int
    records: int
    foreign: int
    pending: int
    other_topics: Collection[str]
    compacted: Collection[str]
    emptied: Collection[str]
    whole: datetime | None
    latest: datetime | None
    record_timestamps: bool


def not_judged(seen: Seen) -> tuple[str, ...]:
    """One line for each limit of this audit."""
    said: list[str] = []
    if not seen.history:
        said.append("lost: not judged without the database's history (--no-history)")
    elif not seen.archive:
        said.append('lost: not judged without an archive (archive = "ids" of the configuration keeps one)')
    elif not seen.archived:
        said.append("lost: not judged, the archive has nothing of these topics and this range")
    if seen.beyond:
        said.append(
            f"lost: {seen.beyond:,} ids of the archive are not judged: their rows are older than what the topics have"
        )
    if not seen.records:
        said.append("order, repeats, gaps, latency: nothing was read")
    if seen.foreign:
        said.append(f"{seen.foreign:,} records have no sound header of the harvester: not judged")
    if seen.other_topics:
        named = ", ".join(sorted(seen.other_topics)[:5]) + (", …" if len(seen.other_topics) > 5 else "")
        said.append(f"topics that were not read: {named}; what is lost there is not judged, and gaps are only suspect")
    if seen.compacted:
        said.append(f"lost, gaps: only suspect where topics are compacted: {', '.join(sorted(seen.compacted))}")
    if seen.emptied:
        said.append(
            f"lost, gaps: only suspect where retention has emptied partitions: {', '.join(sorted(seen.emptied))}"
        )
    if seen.whole is not None:
        said.append(f"gaps before {_time(seen.whole)}: not judged, the topics do not go back further")
    if seen.latest is not None:
        said.append(f"what was purged after {_time(seen.latest)}: not judged, the lake has nothing younger")
    if seen.pending:
        said.append(f"{seen.pending:,} records wait in the outbox: the verdict is not final")
    if seen.record_timestamps:
        said.append('latency: records bear the time of their rows (record_timestamp = "create_time")')
    return tuple(said)


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"

"""Verification as a whole: the truth from the database, the history from Kafka, the judge's verdict on both.

The order of the steps lets it be right while pump and harvester still run: first the truth (whatever is purged
there was acknowledged before), then the ends of the topics, their records, and last the counts again, because what
was committed in between may have been delivered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harvester.origin import HEADER
from harvester.outbox.connection import connect
from harvester.outbox.schema import inspect
from harvester.outbox.tables import OutboxTable
from harvester.verify.reader import Isolation, LogTimes, read
from harvester.verify.sequences import Sequenced, Sequences
from harvester.verify.truth import read_counts, read_truth
from harvester.verify.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A verdict with what was measured. `examples` are findings as text, with positions in the log.

    `sequenced` is what the records' headers alone tell; the verdict does not depend on it.
    """

    verdict: Verdict
    timing: LogTimes
    topics: tuple[str, ...]
    examples: tuple[str, ...]
    sequenced: Sequenced = field(default_factory=lambda: Sequences().judge())

    def summary(self) -> dict[str, int | float | None]:
        """The figures that scripts read; the order is that of the documentation."""
        verdict, timing = self.verdict, self.timing
        return {
            "inserted": verdict.inserted,
            "delivered": verdict.delivered,
            "lost": verdict.lost,
            "duplicates": verdict.duplicates,
            "order_violations": verdict.order_violations,
            "quarantined": verdict.quarantined,
            "rate_per_s": None if timing.rate_per_s is None else round(timing.rate_per_s, 1),
            "p50_ms": timing.p50_ms,
            "p99_ms": timing.p99_ms,
        }

    def details(self) -> dict[str, object]:
        """The summary and what `verify` tells beyond it."""
        verdict = self.verdict
        return {
            **self.summary(),
            "unexpected": verdict.unexpected,
            "pending": verdict.pending,
            "scattered": verdict.scattered,
            "topics": list(self.topics),
            "sequences": self.sequenced.details(),
            "examples": list(self.examples),
        }


def verify(
    dsn: str,
    table: OutboxTable,
    kafka_options: Mapping[str, Any],
    *,
    topics: Sequence[str] = (),
    isolation: Isolation = "read_committed",
    timeout_s: float = 30.0,
    header: str = HEADER,
    on_progress: Callable[[int], None] = lambda records: None,
) -> VerifyReport:
    """Compare an outbox that was filled by the pump with what Kafka holds.

    `topics` defaults to those the pump wrote to; `header` is the name of the relay's own. Raises SchemaError without
    a pump's side table, DatabaseUnavailable, BrokerUnavailable, BrokerError; never because of what it finds.
    """
    with connect(dsn, application_name="harvester verify") as connection:
        shape = inspect(connection, table)
        truth = read_truth(connection, table, shape)
        topics = tuple(topics) or truth.topics
        history = read(
            kafka_options, topics, isolation=isolation, timeout_s=timeout_s, header=header, on_progress=on_progress
        )
        known = read_counts(connection, table, shape)
    verdict = judge(
        truth.counts,
        history.deliveries(),
        truth.quarantined,
        pending=truth.pending,
        known=known,
        foreign=history.foreign_records + truth.foreign_rows,
        scattered=history.scattered(),
    )
    examples = []
    for finding in verdict.findings:
        places = history.where(finding.key, finding.seq) if finding.seq is not None else []
        examples.append(f"{finding}{' at ' if places else ''}{', '.join(places)}")
    examples += [*history.foreign, *(f"{row}: not from the pump, or rolled back" for row in truth.foreign)]
    return VerifyReport(
        verdict=verdict,
        timing=history.timing(),
        topics=tuple(topics),
        examples=tuple(examples),
        sequenced=history.sequences.judge(truth.given_up),
    )

"""Verifies a harvester: reads the truth from the database and the history from Kafka, and judges both.

The order of the steps makes the result right even while pump and harvester are still running: first the truth (whatever
is purged by then was acknowledged before), then the ends of the topics and their records, last the counts again,
because what was committed in between may have been delivered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harvester.claim_check import StoreSettings
from harvester.errors import SchemaError
from harvester.origin import HEADER, decode
from harvester.outbox.connection import Connection, connect, database_errors, fetch_row
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.verify.load import ROLLED_BACK, parse
from harvester.verify.pump import prefix_sql, side_table
from harvester.verify.reader import Isolation, LogTimes, read
from harvester.verify.sequences import Sequenced, Sequences, Stream
from harvester.verify.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A verdict with the measurements. `examples` are findings as text, with positions in the log.

    `sequenced` is what the records' headers alone show; the verdict does not depend on it.
    """

    verdict: Verdict
    timing: LogTimes
    topics: tuple[str, ...]
    examples: tuple[str, ...]
    sequenced: Sequenced = field(default_factory=lambda: Sequences().judge())

    def summary(self) -> dict[str, int | float | None]:
        """The values for scripts, in the order of the documentation."""
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
        """The summary and further results of `verify`."""
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
    claim_check: StoreSettings | None = None,
    on_progress: Callable[[int], None] = lambda records: None,
) -> VerifyReport:
    """Compare an outbox filled by the pump with the contents of Kafka.

    `topics` defaults to those the pump wrote to; `header` is the name of the relay's header; `claim_check`: the store
    for values too large for Kafka. Raises SchemaError without a pump's side table, DatabaseUnavailable,
    BrokerUnavailable, BrokerError, ClaimCheckError; never because of its findings.
    """
    with connect(dsn, application_name="harvester verify") as connection:
        shape = inspect(connection, table)
        truth = read_truth(connection, table, shape)
        topics = tuple(topics) or truth.topics
        history = read(
            kafka_options, topics, isolation=isolation, timeout_s=timeout_s, header=header, claim_check=claim_check,
            on_progress=on_progress,
        )  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class Truth:
    """One snapshot of the database. `pending` and `quarantined`: key -> numbers found there.

    `given_up`: streams and sequence numbers of quarantined records, for `sequences`. `foreign` lists a few rows of
    outbox and quarantine that are not the pump's, and `foreign_rows` is their number.
    """

    counts: Mapping[str, int]
    topics: tuple[str, ...]
    pending: Mapping[str, set[int]]
    quarantined: Mapping[str, set[int]]
    foreign_rows: int
    foreign: tuple[str, ...]
    given_up: tuple[tuple[Stream, int], ...] = ()


def read_truth(connection: Connection, table: OutboxTable, shape: OutboxShape) -> Truth:
    """Everything the judge needs from the database, in one snapshot; requires an autocommit connection.

    Raises SchemaError if no pump has written to this outbox.
    """
    side = side_table(table, shape)
    pending, quarantined = _Rows(), _Rows()
    with database_errors(f"read {side.sql}"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if fetch_row(connection, "SELECT to_regclass($1)", side.sql)[0] is None:
            raise SchemaError(
                f"there is no table {side.sql}: no pump has written to this outbox",
                hint="`harvester pump` writes records that can be verified",
            )
        rows = connection.execute(f"SELECT key, count, topic FROM {side.sql}").fetchall()
        for name, found in ((table.sql, pending), (table.quarantine, quarantined)):
            with connection.cursor(name="pumped") as cursor:
                cursor.itersize = 20_000
                cursor.execute(f"SELECT id, kafka_key, {prefix_sql(shape)} FROM {name}")
                for row in cursor:
                    found.add(name, *row)
        origins = connection.execute(f"SELECT origin FROM {table.quarantine} WHERE origin IS NOT NULL").fetchall()
    return Truth(
        counts={key: count for key, count, _ in rows},
        topics=tuple(sorted({topic for _, count, topic in rows if count})),
        pending=pending.numbers,
        quarantined=quarantined.numbers,
        foreign_rows=pending.foreign_rows + quarantined.foreign_rows,
        foreign=tuple((pending.foreign + quarantined.foreign)[:10]),
        given_up=tuple((Stream.of(origin), origin.sequence) for (raw,) in origins if (origin := decode(raw))),
    )


def read_counts(connection: Connection, table: OutboxTable, shape: OutboxShape) -> dict[str, int]:
    """Only the current counts."""
    side = side_table(table, shape)
    with database_errors(f"read {side.sql}"):
        return dict(connection.execute(f"SELECT key, count FROM {side.sql}").fetchall())


class _Rows:
    """The rows of one table, separated into the pump's and others."""

    def __init__(self) -> None:
        self.numbers: dict[str, set[int]] = {}
        self.foreign: list[str] = []
        self.foreign_rows = 0

    def add(self, table: str, row_id: int, key: str | bytes | None, prefix: str | bytes | None) -> None:
        pumped = parse(prefix.encode() if isinstance(prefix, str) else prefix)
        if pumped is None or key is None or pumped.kind == ROLLED_BACK:
            self.foreign_rows += 1
            if len(self.foreign) < 10:
                self.foreign.append(f"row {row_id} of {table}")
            return
        name = key.decode(errors="replace") if isinstance(key, bytes) else key
        self.numbers.setdefault(name, set()).add(pumped.seq)

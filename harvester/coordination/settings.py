"""The settings of a coordinated consumer, and its statistics. Pure data."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from harvester.claim_check.reference import StoreSettings
from harvester.coordination.core.claim import ClaimTiming
from harvester.coordination.core.record_queues import FailurePolicy, OnError, RecordOrder
from harvester.coordination.core.world import LogTiming
from harvester.errors import ConfigurationError, Problem

_LEAST_INTERVAL_S = 1.0  # a quarter of it must suffice for a heartbeat: threads, network, replicas
_LEAST_ANSWER_S = 2.0
LONGEST_ANSWER_MS = 300_000  # accepted by the client
_ATTEMPTS = 5
_TOPIC = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")
OutOfRangePolicy = Literal["earliest", "latest", "error"]
_RESETS: Mapping[str, OutOfRangePolicy] = {
    "earliest": "earliest", "smallest": "earliest", "beginning": "earliest", "error": "error",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Configures a coordinated consumer, from keyword arguments, a table (`from_table`), or options of a plain client
    (`from_kafka`).

    `kafka`: the client's options, for all connections. Without `client_id`, a random one is used.

    `batch_records`: at most once, the most records to claim at once. Smaller batches mean that fewer records are never
    processed if the consumer dies (the rest of one batch of a partition, and the next one), but more messages in the
    coordination topic: two per batch.

    `max_open_records`: at least once, how many records of a partition may be handed out from the first uncommitted one
    on. Beyond that the partition waits (`Blocked`). So a successor repeats no more than these, and the last interval's
    work.

    The following apply to `run` and similar methods, which give records to a handler. `on_error`: what to do with a
    record on which the handler has raised `attempts` times (5; 1 with `stop`). `retry`: try it forever; `dead-letter`:
    write it to `dead_letter_topic` (`GROUP.dead-letters`); `skip`: count it as processed; `stop`: close the consumer
    and raise the error. The delay between tries is `backoff_s`, doubled each time up to `longest_backoff_s`.

    `order`: which records keep their order, even while one of them is retried: those of a `key` (records without one
    have none), of a `partition`, or `none`. `workers`: how many records are handled at once, in threads; only one at a
    time of those whose order is kept.

    `claim_check`: the store for values too large for Kafka, as StoreSettings or a table of its fields. Records are
    handed out with their values; if a value is not available, that is a failure of the handler, and without a handler
    raises ClaimCheckError.

    `out_of_range`: where to continue if retention has removed the next record. `shed_at_once`: the most partitions
    given up per interval to clients that have fewer; None: all of them.
    """

    kafka: Mapping[str, Any] = field(repr=False)  # may hold passwords
    group: str
    topics: Sequence[str]
    client_id: str | None = None
    coordination_topic: str = "__marshal"
    coordination_partitions: int = 8
    heartbeat_interval_s: float = 5.0
    at_most_once: bool = False
    batch_records: int = 2000
    max_open_records: int = 100_000
    on_error: OnError = "stop"
    attempts: int | None = None
    backoff_s: float = 0.5
    longest_backoff_s: float = 60.0
    dead_letter_topic: str | None = None
    order: RecordOrder = "key"
    workers: int = 1
    claim_check: StoreSettings | Mapping[str, str] | None = None
    out_of_range: OutOfRangePolicy = "error"
    greedy: bool = True
    whole_topics: bool = False
    max_claims: int | None = None
    shed_at_once: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError with all problems."""
        topics: Any = self.topics
        object.__setattr__(self, "topics", (topics,) if isinstance(topics, str) else tuple(topics))
        problems = [
            Problem(name, f"is {value!r}", f"{least:g} or more")
            for name, value, least in (
                ("coordination_partitions", self.coordination_partitions, 1),
                ("heartbeat_interval_s", self.heartbeat_interval_s, _LEAST_INTERVAL_S),
                ("batch_records", self.batch_records, 1),
                ("max_open_records", self.max_open_records, 1),
                ("attempts", self.attempts, 1),
                ("backoff_s", self.backoff_s, 0),
                ("longest_backoff_s", self.longest_backoff_s, 0),
                ("workers", self.workers, 1),
                ("max_claims", self.max_claims, 1),
                ("shed_at_once", self.shed_at_once, 1),
            )
            if value is not None and not (isinstance(value, int | float) and value >= least)
        ]
        for name, word, words in (
            ("out_of_range", self.out_of_range, get_args(OutOfRangePolicy)),
            ("on_error", self.on_error, get_args(OnError)),
            ("order", self.order, get_args(RecordOrder)),
        ):
            if word not in words:
                problems.append(Problem(name, f"is {word!r}", ", ".join(words)))
        if "on_commit" in self.kafka:  # the client's producers would refuse it as an unknown property
            problems.append(Problem("on_commit", "is not called: progress is committed in the coordination topic"))
        if self.on_error == "retry" and self.attempts is not None:
            problems.append(Problem("attempts", "has no meaning with on_error = 'retry', which retries forever"))
        if self.at_most_once and (self.on_error == "retry" or (self.attempts or 1) > 1):
            problems.append(Problem("on_error", "retries records, which at-most-once must not", "attempts = 1"))
        if self.at_most_once and self.workers > 1:
            problems.append(
                Problem("workers", f"is {self.workers}, but at most once records are handled one at a time", "1")
            )
        if problems:
            raise ConfigurationError(problems)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ConsumerSettings:
        """From a TOML table as read by `tomllib`; the names are those of the keyword arguments.

        Raises ConfigurationError with all problems.
        """
        known = {each.name for each in fields(cls)}
        problems = [_unknown(name, known) for name in table if name not in known]
        problems += [Problem(name, "is missing") for name in ("kafka", "group", "topics") if name not in table]
        if problems:
            raise ConfigurationError(problems)
        return cls(**table)

    @classmethod
    def from_kafka(cls, options: Mapping[str, Any], topics: Sequence[str], **given: Any) -> ConsumerSettings:
        """From the options of a plain `confluent_kafka.Consumer`; `given` are settings that it does not have.

        `group.id` is the group, and `auto.offset.reset` determines `out_of_range`. Offsets are never committed
        automatically, whatever `enable.auto.commit` is, and `on_commit` is refused. Raises ConfigurationError.
        """
        kafka = dict(options)
        given.setdefault("group", kafka.pop("group.id", ""))
        reset = kafka.pop("auto.offset.reset", None)
        if reset is not None and "out_of_range" not in given:
            if reset not in _RESETS:
                raise ConfigurationError([
                    Problem(
                        "auto.offset.reset", f"is {reset!r}, but a new group begins with the first existing record",
                        "earliest or error, or the setting out_of_range",
                    )
                ])  # fmt: skip
            given["out_of_range"] = _RESETS[reset]
        return cls(kafka=kafka, topics=tuple(topics), **given)

    def check_subscription(self) -> None:
        """Check what only a consumer needs; raises ConfigurationError."""
        problems = []
        if not self.group:
            problems.append(Problem("group", "is empty"))
        if not self.topics:
            problems.append(Problem("topics", "are empty"))
        if self.on_error == "dead-letter" and self.dead_letters in self.topics:
            problems.append(Problem("topics", f"include the dead-letter topic {self.dead_letters!r}"))
        if self.on_error == "dead-letter" and not _TOPIC.fullmatch(self.dead_letters):
            text = f"is {self.dead_letters!r}, which is not a Kafka topic name (unset, it is group + '.dead-letters')"
            problems.append(Problem("dead_letter_topic", text, "1 to 249 of A-Z a-z 0-9 . _ -"))
        if self.coordination_topic in self.topics:
            problems.append(Problem("topics", f"include the coordination topic {self.coordination_topic!r}"))
        if problems:
            raise ConfigurationError(problems)

    @property
    def failure_policy(self) -> FailurePolicy:
        """What happens to records that a handler cannot process."""
        few = 1 if self.on_error == "stop" or self.at_most_once else _ATTEMPTS
        attempts = None if self.on_error == "retry" else self.attempts or few
        return FailurePolicy(self.on_error, attempts, self.backoff_s, self.longest_backoff_s)

    @property
    def dead_letters(self) -> str:
        """The name of the dead-letter topic."""
        return self.dead_letter_topic or f"{self.group}.dead-letters"

    @property
    def connection(self) -> dict[str, Any]:
        """The clients' options for records and offsets. A dead connection is noticed soon: with the client's default of
        a minute, partitions would stay claimed while nobody reads them.
        """
        answer_s = max(_LEAST_ANSWER_S, 2 * self.heartbeat_interval_s)
        return {
            "socket.timeout.ms": min(LONGEST_ANSWER_MS, round(answer_s * 1000)),
            "reconnect.backoff.max.ms": 1000,
            **self.kafka,
        }

    @property
    def timing(self) -> LogTiming:
        """The log's timing. Brokers' clocks may differ by a quarter of an interval."""
        interval_ms = round(self.heartbeat_interval_s * 1000)
        return LogTiming(interval_ms, interval_ms // 4)

    @property
    def tail_ms(self) -> int:
        """How much of the log's end gives certainty of every place: more than 2 intervals and the brokers' clock
        difference.
        """
        return 3 * self.timing.interval_ms + 2 * self.timing.clock_step_ms

    @property
    def pace(self) -> ClaimTiming:
        """The claims' timing. The margin allows for the brokers' clock difference, and as much again for ours."""
        return ClaimTiming(self.heartbeat_interval_s, margin_s=self.heartbeat_interval_s / 2)


def _unknown(name: str, known: set[str]) -> Problem:
    close = get_close_matches(name, known, n=1)
    return Problem(name, "is not a setting of a consumer", f"{close[0]}?" if close else None)


@dataclass(frozen=True, slots=True)
class Open:
    """The number of records handed out since the first uncommitted one, which is at `offset` and was handed out `age_s`
    ago.
    """

    records: int
    offset: int
    age_s: float


PROCESSING_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class Durations:
    """The number of calls by duration, in the buckets of `PROCESSING_BOUNDS_S`."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(PROCESSING_BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, took_s: float) -> None:
        self.counts[bisect_left(PROCESSING_BOUNDS_S, took_s)] += 1
        self.total_s += took_s


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the consumer began. They only grow, so the difference of two gives a rate.

    `batches`: at most once, those that became ours. `claims_won` and `claims_missed`: ClaimingPartition messages by
    outcome; one that asks for a share is missed intentionally. `releases`: claims given up in an orderly way; `losses`:
    the others. `written`: records for the coordination topic by kind; a `Heartbeats` counts once for several
    heartbeats; `written_bytes`: their values; `unwritten`: messages that did not arrive, or may not have. `failures`:
    how often a handler raised; `retries`: how often that led to another try; `given_up`: records settled by `on_error`,
    and `dead_letters`, how many of them are in that topic; `parked`: keys that now wait for a retry. `processing`:
    handler calls by duration, up to each of `PROCESSING_BOUNDS_S` and longer; `processing_s`: their total.
    """

    records: int
    batches: int
    claims_won: int
    claims_missed: int
    releases: int
    losses: int
    written: Mapping[str, int]
    written_bytes: int
    unwritten: int
    failures: int = 0
    given_up: int = 0
    parked: int = 0
    retries: int = 0
    dead_letters: int = 0
    processing: tuple[int, ...] = ()
    processing_s: float = 0.0

"""The settings of a coordinated consumer, and its figures. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from harvester.coordination.core.claim import ClaimTiming
from harvester.coordination.core.world import LogTiming
from harvester.errors import ConfigurationError, Problem

_LEAST_INTERVAL_S = 1.0  # a heartbeat has a quarter of it for its way: threads, network, replicas
_LEAST_ANSWER_S = 2.0
OutOfRangePolicy = Literal["earliest", "latest", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """`kafka`: options of the client, for all connections. Without `client_id` a random one is used.

    `batch_records`: the most that are claimed at once, at most once. The smaller, the fewer are never processed when
    the consumer dies (the rest of one batch of a partition, and the next one), and the more is written to the
    coordination topic: two messages a batch.

    `max_open_records`: at least once, how many records of a partition may be handed out from the first one on that is
    not committed. The partition waits then (`Blocked`). So a successor repeats no more than these, and the last
    interval's work.

    `out_of_range`: where to go on when retention has removed the record that comes next.
    `shed_at_once`: the most partitions that are given up in one interval for those who have fewer; None: all of them.
    """

    kafka: Mapping[str, Any] = field(repr=False)  # they hold passwords
    group: str
    topics: tuple[str, ...]
    client_id: str | None = None
    coordination_topic: str = "__marshal"
    coordination_partitions: int = 8
    heartbeat_interval_s: float = 5.0
    at_most_once: bool = False
    batch_records: int = 2000
    max_open_records: int = 10_000
    out_of_range: OutOfRangePolicy = "error"
    greedy: bool = True
    whole_topics: bool = False
    max_claims: int | None = None
    shed_at_once: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError with everything that is wrong."""
        problems = [
            Problem(name, f"is {value!r}", f"{least:g} or more")
            for name, value, least in (
                ("coordination_partitions", self.coordination_partitions, 1),
                ("heartbeat_interval_s", self.heartbeat_interval_s, _LEAST_INTERVAL_S),
                ("batch_records", self.batch_records, 1),
                ("max_open_records", self.max_open_records, 1),
                ("max_claims", self.max_claims, 1),
                ("shed_at_once", self.shed_at_once, 1),
            )
            if value is not None and not value >= least
        ]
        if self.out_of_range not in get_args(OutOfRangePolicy):
            problems.append(Problem("out_of_range", f"is {self.out_of_range!r}", ", ".join(get_args(OutOfRangePolicy))))
        if problems:
            raise ConfigurationError(problems)

    def check_subscription(self) -> None:
        """What only a consumer needs; raises ConfigurationError."""
        problems = []
        if not self.group:
            problems.append(Problem("group", "is empty"))
        if not self.topics:
            problems.append(Problem("topics", "are none"))
        if self.coordination_topic in self.topics:
            problems.append(Problem("topics", f"name the coordination topic {self.coordination_topic!r}"))
        if problems:
            raise ConfigurationError(problems)

    @property
    def connection(self) -> dict[str, Any]:
        """Options of clients for records and offsets. A dead connection is noticed soon: with the client's own minute,
        partitions would stay claimed that nobody reads.
        """
        answer_s = max(_LEAST_ANSWER_S, 2 * self.heartbeat_interval_s)
        return {"socket.timeout.ms": round(answer_s * 1000), "reconnect.backoff.max.ms": 1000, **self.kafka}

    @property
    def timing(self) -> LogTiming:
        """Of the log. Brokers' clocks may differ by a quarter of an interval."""
        interval_ms = round(self.heartbeat_interval_s * 1000)
        return LogTiming(interval_ms, interval_ms // 4)

    @property
    def tail_ms(self) -> int:
        """How much of the log's end makes certain of every place: more than 2 intervals and the brokers' clocks."""
        return 3 * self.timing.interval_ms + 2 * self.timing.clock_step_ms

    @property
    def pace(self) -> ClaimTiming:
        """Of the claims. The margin has room for the brokers' clocks, and as much again for ours."""
        return ClaimTiming(self.heartbeat_interval_s, margin_s=self.heartbeat_interval_s / 2)


@dataclass(frozen=True, slots=True)
class Open:
    """Records that were handed out from the first one on that is not committed, at `offset`, `age_s` ago."""

    records: int
    offset: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the consumer began. They only grow, so a rate is the difference of two.

    `batches`: at most once, those that became ours. `claims_won` and `claims_missed`: ClaimingPartition messages by
    their outcome; one that asks for a share is missed on purpose. `releases`: claims given up in good order; `losses`:
    the others. `written`: messages for the coordination topic by kind; `written_bytes`: their values; `unwritten`: how
    many did not arrive, or may not have.
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

"""Events that a harvester reports to its host.

Events are delivered one at a time, in order, on a separate thread. A handler's exception is logged and otherwise
ignored. A slow handler delays only later events, never the relay. `LeaderRevoked` is the exception: the rebalance that
hands leadership to another process continues only when its handler has returned, or when Kafka's time limit for it has
passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class LeaderAcquired:
    """This process leads: work that only one process may do can start."""

    leader_id: UUID
    term: int


@dataclass(frozen=True, slots=True)
class LeaderRefreshed:
    """A remark: same process, same term, new leader id. Informational."""

    leader_id: UUID
    term: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderRevoked:
    """The group takes leadership away gracefully; the rebalance waits until the handler returns."""


@dataclass(frozen=True, slots=True)
class LeaderFenced:
    """Trust expired: another leader may already exist. Stop at once; nothing waits for the handler."""

    reason: str


@dataclass(frozen=True, slots=True)
class MeterRead:
    """Throughput of acknowledged records; emitted at most every `min_metrics_interval`, and only on acks."""

    name: str
    start: float  # UNIX time in seconds at which the meter began
    total_count: int
    total_rate_per_s: float
    interval_count: int
    interval_rate_per_s: float


Event = LeaderAcquired | LeaderRefreshed | LeaderRevoked | LeaderFenced | MeterRead
EventHandler = Callable[[Event], None]

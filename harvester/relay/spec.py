"""All that a shard process is told at birth. Values only; it goes to a new process as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harvester.delivery.lane import LaneSettings
from harvester.outbox.purge_session import Rules
from harvester.relay.attempts import Policy


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """See the module's text."""

    index: int
    name: str
    parent_pid: int
    dsn: str = field(repr=False)  # secrets: who prints the local variables of a traceback must not print these
    outbox: str
    producer_options: dict[str, Any] = field(repr=False)
    policy: Policy
    rules: Rules
    io_error_backoff_s: float
    linger_at_end_s: float  # how long the end may take: delivery timeout and purge margin
    header: str  # the name of the header that says where a record comes from; "" is none
    lanes: LaneSettings | None = field(default=None, repr=False)  # in exactly-once mode
    transaction_records: int = 0
    tracing: bool = False  # continue traces that the headers of rows carry
    reserved: frozenset[str] = frozenset()  # topics of the harvester's own: no record goes there
    dated: bool = False  # a record's timestamp is its row's create_time

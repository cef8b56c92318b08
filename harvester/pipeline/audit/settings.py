"""What is to be audited, and by which rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from harvester.origin import HEADER
from harvester.outbox.tables import OutboxTable

MARGIN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Either `topics`, with `kafka` as Kafka's Java client names its options, or a `lake`.

    `since` ≤ … < `until` is the range; `margin` is how far before it reading begins. `dsn` None: without a history.
    `serial_keys`: writers of a key wait for each other, so that ids of a key out of order are a violation. `once`:
    nothing may be delivered twice. `to`: where the tables of findings are.
    """

    topics: tuple[str, ...] = ()
    lake: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
    header: str = HEADER
    dsn: str | None = None
    table: OutboxTable = field(default_factory=lambda: OutboxTable(None, "outbox"))
    since: datetime | None = None
    until: datetime | None = None
    margin: timedelta = MARGIN
    serial_keys: bool = True
    once: bool = False
    notice_topic: str = ""
    record_timestamps: bool = False
    to: str | None = None

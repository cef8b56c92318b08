"""The columns that the audit's frames have, and the words for what it finds."""

from __future__ import annotations

from enum import StrEnum

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)

from harvester.pipeline.schemas import PLACE, Table, struct


class FindingKind(StrEnum):
    """What a finding is about."""

    LOST = "lost"
    REPEAT = "repeated"
    LATE_REPEAT = "repeated after a successor"
    SWAPPED = "delivered after a successor"
    GAP = "gap in a lane"
    CLASH = "number of several ids"
    UNEXPECTED = "not in the history"
    SCATTERED = "key in several partitions"


class Severity(StrEnum):
    """`violation`: a guarantee did not hold. `suspect`: it may have, for a reason that nothing here can tell."""

    VIOLATION = "violation"
    SUSPECT = "suspect"


class RecordSource(StrEnum):
    """Where the history names a record."""

    OUTBOX = "outbox"
    QUARANTINE = "quarantine"
    ARCHIVE = "archive"


STREAM = ("incarnation", "term", "lane", "producer")
"""The scope of a sequence (`harvester.verify.sequences`)."""


_STREAM = (
    ("incarnation", StringType()),
    ("term", LongType()),
    ("lane", LongType()),
    ("producer", LongType()),
)

RECORDS = struct(
    *PLACE,
    ("key", BinaryType()),
    *_STREAM,
    ("id", LongType()),
    ("sequence", LongType()),
    ("created_us", LongType()),
    ("problem", StringType()),
    ("inside", BooleanType()),
    ("notice", BinaryType()),
)
"""What was read: schemas.BRONZE without contents. `inside`: in the range; `notice`: the origin that a notice names."""

MARKED = struct(
    *PLACE,
    ("key", BinaryType()),
    *_STREAM,
    ("id", LongType()),
    ("sequence", LongType()),
    ("created_us", LongType()),
    ("inside", BooleanType()),
    ("first", BooleanType()),
    ("after", LongType()),
)
"""Records with an origin. `first`: the first delivery of its id; `after`: a higher id of its key that came before."""

HISTORY = struct(
    ("source", StringType()),
    ("incarnation", StringType()),
    ("id", LongType()),
    ("topic", StringType()),
    ("partition", IntegerType()),
    ("key", BinaryType()),
    ("created_at", TimestampType()),
    ("at", TimestampType()),
    ("origin", BinaryType()),
)
"""What the database knows. `at`: when it was purged or quarantined."""

GIVEN_UP = struct(*_STREAM, ("sequence", LongType()))
"""Numbers that belong to records in quarantine."""

_FINDING = (
    ("kind", StringType()),
    ("severity", StringType()),
    ("incarnation", StringType()),
    ("id", LongType()),
    ("topic", StringType()),
    ("partition", IntegerType()),
    ("offset", LongType()),
    ("key", BinaryType()),
    ("detail", StringType()),
    ("at", TimestampType()),
)
FINDINGS = struct(*_FINDING)
"""One row a finding; `at` is Kafka's time of the record, or that of its purge."""

FINDINGS_TABLE = Table("findings", struct(("audited_at", TimestampType()), *_FINDING))
AUDITS_TABLE = Table(
    "audits", struct(("audited_at", TimestampType()), ("holds", BooleanType()), ("report", StringType()))
)

"""The columns of the audit's frames and tables, and the names of its findings."""

from __future__ import annotations

from enum import StrEnum

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StructField

from harvester.pipeline.schemas import PLACE, Table, struct


class FindingKind(StrEnum):
    """The kind of a finding. `MEANINGS` in `report` explains each. Only incremental audits find CHANGED."""

    LOST = "lost"
    REPEAT = "repeated"
    LATE_REPEAT = "repeated after a successor"
    SWAPPED = "delivered after a successor"
    GAP = "gap in a lane"
    CLASH = "number of several ids"
    UNEXPECTED = "not in the history"
    SCATTERED = "key in several partitions"
    ACCEPTED = "accepted loss"
    CHANGED = "not as archived"


class Severity(StrEnum):
    """`violation`: a guarantee was broken. `suspect`: it may have been; the audit cannot decide.

    `accepted`: a user let the lake continue without the records, or erased them.
    """

    VIOLATION = "violation"
    SUSPECT = "suspect"
    ACCEPTED = "accepted"


class AuditVerdict(StrEnum):
    """The result of comparing silver with the archive; each word is worse than the one before."""

    EQUAL = "equal"
    EXPLAINED = "explained"
    SUSPECT = "suspect"
    BROKEN = "broken"


class RecordSource(StrEnum):
    """The table in which the history lists a record."""

    OUTBOX = "outbox"
    QUARANTINE = "quarantine"
    ARCHIVE = "archive"


STREAM = ("incarnation", "term", "lane", "producer")
"""The scope of a sequence (`harvester.verify.sequences`)."""

_STREAM = "incarnation string, term bigint, lane bigint, producer bigint"
_RECORD = f"{PLACE}, key binary, {_STREAM}, id bigint, sequence bigint, created_us bigint"
_FINDING = (
    "kind string, severity string, incarnation string, id bigint, topic string, partition int, offset bigint,"
    " key binary, detail string, at timestamp"
)

RECORDS = struct(_RECORD, "problem string, inside boolean, notice binary")
"""The records read: schemas.BRONZE without contents. `inside`: in the range; `notice`: the origin in a notice."""

MARKED = struct(_RECORD, "inside boolean, first boolean, after bigint")
"""Records with an origin. `first`: the first delivery of its id; `after`: a higher id of its key that came earlier."""

HISTORY = struct(
    "source string, incarnation string, id bigint, topic string, partition int, key binary, created_at timestamp,"
    " at timestamp, origin binary"
)
"""The rows in the database. `at`: when it was purged or quarantined."""

HISTORY_BLOCKS = struct(
    "source string, incarnation string, topic string, block bigint, rows bigint, ids bigint, first_at timestamp,"
    " last_at timestamp, origins string"
)
"""The rows in the database by block of ids. `ids`: a bit for each; `first_at`, `last_at`: of `at`.

`origins`: of quarantined rows, in hex, with spaces between.
"""

BLOCKS = struct(
    "incarnation string, block bigint, known bigint, archived bigint, rows bigint, pending int, reread boolean,"
    " examined boolean"
)
"""Records and history by block of ids. `known`, `archived`: the bits of what the history, or the archive, lists.

`rows`: of the archive, those in the range; `pending`: of the outbox, those without a record.
"""

GIVEN_UP = struct(_STREAM, "sequence bigint")
"""The numbers of records that were given up or erased."""

_AT = struct("timestamp timestamp, topic string, partition int, offset bigint, id bigint, inside boolean")
NUMBERS = struct(_STREAM, "first bigint, last bigint, ids int", StructField("at", _AT))
"""Numbers of a stream. `ids`: how many ids have each; 0: it was given up. `at`: the latest record of a single one."""

FINDINGS = struct(_FINDING)
"""A row for each finding. `at`: Kafka's time of the record; for a lost one, the time of its purge."""


def finding(
    rows: DataFrame, kind: Column | FindingKind, severity: Column | Severity, detail: Column | str, **other: Column
) -> DataFrame:
    """Rows → FINDINGS. Columns not given in `other` are taken from the rows, or NULL if these lack them."""
    given = {"kind": kind, "severity": severity, "detail": detail, **other}
    found = []
    for field in FINDINGS:
        known = F.col(field.name) if field.name in rows.columns else F.lit(None)
        value = given.get(field.name, known)
        found.append((F.lit(str(value)) if isinstance(value, str) else value).cast(field.dataType).alias(field.name))
    return rows.select(*found)


FINDINGS_TABLE = Table("findings", struct("audited_at timestamp", _FINDING))
AUDITS_TABLE = Table("audits", struct("audited_at timestamp, holds boolean, report string"))
PROOFS_TABLE = Table(
    "proofs",
    struct(
        "incarnation string, from_id bigint, to_id bigint, topics string, buckets bigint, unequal bigint,"
        " records bigint, with_contents bigint, verdict string, proved_at timestamp"
    ),
)
"""A row for each range of ids that an incremental audit compared, `to_id` excluded. `topics`: separated by commas."""

"""What was read, partition by partition, and since when the topics are whole. Pure but for the one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.report import instant
from harvester.pipeline.audit.schemas import RECORDS
from harvester.pipeline.audit.topic_bounds import Place, TopicBounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Partition:
    """The records of a partition: how many, how many of them without an origin, the place and time of the first."""

    records: int
    foreign: int
    first_offset: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Read:
    """Everything that was read, also beside the range."""

    places: Mapping[Place, Partition]

    @property
    def records(self) -> int:
        """All of them."""
        return sum(one.records for one in self.places.values())

    @property
    def foreign(self) -> int:
        """Those without an origin."""
        return sum(one.foreign for one in self.places.values())

    @property
    def latest(self) -> datetime | None:
        """The time of the last record."""
        return max((one.last_at for one in self.places.values()), default=None)


def read_so_far(records: DataFrame) -> Read:
    """RECORDS → what they are, by one action."""
    assert {"topic", "partition", "offset", "timestamp", "problem"} <= set(RECORDS.names)
    at = F.unix_micros("timestamp")
    rows = records.groupBy("topic", "partition").agg(
        F.count(F.lit(1)).alias("records"),
        F.count("problem").alias("foreign"),
        F.min("offset").alias("first"),
        F.min_by(at, "offset").alias("first_at"),
        F.max(at).alias("last_at"),
    )
    found = {}
    for row in rows.collect():
        first_at, last_at = instant(row["first_at"]), instant(row["last_at"])
        assert first_at is not None
        assert last_at is not None
        found[row["topic"], row["partition"]] = Partition(
            row["records"], row["foreign"], row["first"], first_at, last_at
        )
    return Read(found)


def whole_since(
    bounds: TopicBounds | None, read: Read, since: datetime | None
) -> tuple[datetime | None, tuple[Place, ...]]:
    """Since when every partition has all its records, None for ever, and the partitions of which that is unknown.

    `since`: where reading began. A partition whose beginning was removed is whole from its first record on; one that
    was emptied may have lost anything. Of a lake (`bounds` None) a partition that does not begin with offset 0 may
    have had a beginning that nobody read.
    """
    if bounds is None:
        cut = [place for place, one in read.places.items() if one.first_offset > 0 and since is None]
    else:
        cut = list(bounds.truncated)
    begins = [read.places[place].first_at for place in cut if place in read.places]
    # Not by offsets: the marker of a transaction may be left.
    emptied = tuple(place for place in cut if place not in read.places)
    return max([*begins, *([] if since is None else [since])], default=None), emptied

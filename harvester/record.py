"""The record: a row of the outbox, as writers pass it and as shards publish it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A record to be stashed by a writer. `value=None` is a tombstone; `key=None` gives up any order among records.

    Order is kept per key, across topics. `headers` are pairs in order; a name may occur more than once.
    """

    topic: str
    key: str | None
    value: str | bytes | None = None
    headers: Headers = ()
    partition: int | None = None  # needs the column kafka_partition


class KafkaRecord(NamedTuple):
    """A decoded row, ready to be produced. `created_us` is microseconds since the UNIX epoch (server clock).

    A tuple because one is made for every record: a frozen dataclass costs several times as much.
    """

    id: int
    key: bytes | None
    topic: str
    value: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int  # -1: chosen by the partitioner
    created_us: int
    xmin: int = 0  # the transaction that wrote the row as it was read; 0: not known


class ReadRow(Protocol):
    """A row as it was read from the outbox, whatever became of it."""

    @property
    def id(self) -> int: ...
    @property
    def xmin(self) -> int: ...
    @property
    def created_us(self) -> int: ...


_LOW_BITS = 0xFFFF_FFFF
_SECOND_US = 1_000_000
_LATEST_US = 1 << 53  # in the year 2255: what lies behind stands for no moment (`infinity`)


@dataclass(frozen=True, slots=True)
class RowVersions:
    """Which rows a purge may delete, column by column: those that were read, and no others that have their ids (P50).

    A row is told by the transaction that wrote it, its `xmin`: two rows that have the same id one after the other were
    never written by one transaction, since it has ended before its row is read. VACUUM, VACUUM FULL and CLUSTER keep
    it. An UPDATE does not, nor do the forms of ALTER TABLE and the tools that write a table anew; then the time at
    which a record was created tells whether it is still the same one.

    `ids` ascend. `xmins`: empty where they are not known, and any row with the id is meant. `created_us`: create_time
    in microseconds since the UNIX epoch, of which the low 32 bits are compared. `sums`, over the rows' contents, tell
    them on another server, where no xmin does (P49); they are made for exactly-once delivery alone.
    """

    ids: Sequence[int]
    xmins: Sequence[int] = ()
    created_us: Sequence[int] = ()
    sums: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Sequence[ReadRow], sums: Sequence[int] = ()) -> RowVersions:
        """Of rows as they were read, which ascend."""
        return cls([row.id for row in rows], [row.xmin for row in rows], [row.created_us for row in rows], sums)

    def without(self, ids: Container[int]) -> RowVersions:
        """The others."""
        kept = [index for index, record_id in enumerate(self.ids) if record_id not in ids]
        columns = (self.ids, self.xmins, self.created_us, self.sums)
        return RowVersions(*([column[index] for index in kept] if column else () for column in columns))

    def compare(self, found: Mapping[int, tuple[int, int]]) -> tuple[RowVersions, list[int]]:
        """Tell the rows that stand under these ids now, by id: (xmin, created_us).

        Returns those that are the same records, as they are now, and the ids of those that are others. A time on a
        whole second proves nothing: whoever gives all records the same one does not take it from a clock.
        """
        same: list[tuple[int, int, int]] = []
        others: list[int] = []
        for record_id, xmin, created_us in zip(self.ids, self.xmins, self.created_us, strict=True):
            if record_id not in found:
                continue
            xmin_now, now_us = found[record_id]
            if xmin_now == xmin or (_is_a_moment(now_us) and (now_us ^ created_us) & _LOW_BITS == 0):
                same.append((record_id, xmin_now, now_us))
            else:
                others.append(record_id)
        return RowVersions(*map(list, zip(*same, strict=True))) if same else RowVersions(()), others


def _is_a_moment(created_us: int) -> bool:
    return 0 < created_us < _LATEST_US and created_us % _SECOND_US != 0

"""The record: a row of the outbox, as passed by writers and published by shards."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A record to be stashed by a writer. `value=None` is a tombstone; `key=None` means that no order is kept.

    Order is kept per key, across topics. `headers` are pairs in order; a name may occur more than once.
    """

    topic: str
    key: str | None
    value: str | bytes | None = None
    headers: Headers = ()
    partition: int | None = None  # requires the column kafka_partition


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
    xmin: int = 0  # the transaction that wrote the row as read; 0: unknown


class ReadRow(Protocol):
    """A row as read from the outbox, whatever its state."""

    @property
    def id(self) -> int: ...
    @property
    def xmin(self) -> int: ...
    @property
    def created_us(self) -> int: ...


LOW_BITS = 0xFFFF_FFFF  # of a creation time: what is kept of it and compared
_SECOND_US = 1_000_000
LATEST_US = 1 << 53  # in the year 2255: later values are not real times (`infinity`)


@dataclass(frozen=True, slots=True)
class RowVersions:
    """Which rows a purge may delete, column by column: those that were read, and no others that have their ids (P50).

    A row is identified by the transaction that wrote it, its `xmin`: two rows that successively have the same id were
    never written by one transaction, since a transaction has ended before its row is read. VACUUM, VACUUM FULL and
    CLUSTER preserve it. An UPDATE does not, nor do those forms of ALTER TABLE and those tools that rewrite a table;
    then the record's creation time shows whether it is still the same one.

    `ids` ascend. `xmins`: empty if unknown, in which case any row with the id is meant. `created_us`: create_time in
    microseconds since the UNIX epoch; only the low 32 bits are compared. `sums`, over the rows' contents, identify
    them on another server, where xmins are meaningless (P49); they are only computed for exactly-once delivery.
    """

    ids: Sequence[int]
    xmins: Sequence[int] = ()
    created_us: Sequence[int] = ()
    sums: Sequence[int] = ()

    def without(self, ids: Container[int]) -> RowVersions:
        """The others."""
        kept = [index for index, record_id in enumerate(self.ids) if record_id not in ids]
        columns = (self.ids, self.xmins, self.created_us, self.sums)
        return RowVersions(*([column[index] for index in kept] if column else () for column in columns))

    def compare(self, found: Mapping[int, tuple[int, int]]) -> tuple[RowVersions, list[int]]:
        """Compare with the rows that have these ids now, by id: (xmin, created_us).

        Returns those that are the same records, in their current version, and the ids of those that are not. A time on
        a whole second proves nothing: a writer that gives all records the same time does not take it from a clock.
        """
        same: list[tuple[int, int, int]] = []
        others: list[int] = []
        for record_id, xmin, created_us in zip(self.ids, self.xmins, self.created_us, strict=True):
            if record_id not in found:
                continue
            xmin_now, now_us = found[record_id]
            if xmin_now == xmin or (_is_a_moment(now_us) and (now_us ^ created_us) & LOW_BITS == 0):
                same.append((record_id, xmin_now, now_us))
            else:
                others.append(record_id)
        return RowVersions(*map(list, zip(*same, strict=True))) if same else RowVersions(()), others


def _is_a_moment(created_us: int) -> bool:
    return 0 < created_us < LATEST_US and created_us % _SECOND_US != 0

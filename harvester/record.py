"""The record: a row of the outbox, as writers pass it and as shards publish it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

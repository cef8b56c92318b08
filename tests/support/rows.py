"""Rows as `COPY … (FORMAT BINARY)` sends them, built by hand, and what a shard makes of a single one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from uuid import UUID

from harvester.delivery.decode import NO_PARTITION, Broken, decode, row_versions
from harvester.delivery.progress import NamedRows, Progress
from harvester.record import KafkaRecord, RowVersions

ONE = UUID(int=1)
TEXT_OID = 25
VARCHAR_OID = 1043


def field(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def array(
    elements: Sequence[bytes | None],
    dimensions: int = 1,
    *,
    oid: int = TEXT_OID,
    lower: int = 1,
    has_nulls: bool | None = None,
) -> bytes:
    """text[] as the server sends it; the elements lie in the last of the dimensions.

    `oid` is the elements' type, `lower` the lower bounds. `has_nulls` can say so of an array without any: the server's
    own flag only means that there is room to mark them.
    """
    flag = None in elements if has_nulls is None else has_nulls
    if not elements:
        return struct.pack(">iii", 0, flag, oid)
    sizes = [1] * (dimensions - 1) + [len(elements)]
    head = struct.pack(">iii", dimensions, flag, oid)
    return head + b"".join(struct.pack(">ii", size, lower) for size in sizes) + b"".join(map(field, elements))


def row(
    *,
    record_id: int = 7,
    topic: bytes | None = b"topic",
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    names: bytes | None = None,
    values: bytes | None = None,
    created: int = 0,
    partition: int | None = None,
    xmin: int = 0,
) -> bytes:
    """A row; `names` and `values` are the arrays of its headers."""
    moment = struct.pack(">q", created)
    number = struct.pack(">q", NO_PARTITION if partition is None else partition)
    columns = (struct.pack(">I", xmin), struct.pack(">q", record_id), key, moment, number, topic, names, values, value)
    return struct.pack(">h", 9) + b"".join(map(field, columns))


def versions(rows: Sequence[bytes]) -> RowVersions:
    """How progress names these rows."""
    sums: list[int] = []
    return row_versions(decode(b"".join(rows), sums), sums)


def progress_of(rows: Sequence[bytes], term: int = 1, incarnation: UUID = ONE) -> Progress:
    """A record that names these rows."""
    found = versions(rows)
    return Progress(term, incarnation, tuple(found.ids), found.xmins, found.created_us, tuple(found.sums))


def decode_one(raw: bytes) -> KafkaRecord:
    """The record that these bytes are, and nothing else."""
    found = decode(raw)
    assert len(found) == 1, found
    assert isinstance(found[0], KafkaRecord), found
    return found[0]


def broken_one(raw: bytes) -> Broken:
    """The row that these bytes are, which can be no record."""
    found = decode(raw)
    assert len(found) == 1, found
    assert isinstance(found[0], Broken), found
    return found[0]


def ids_of(named: Sequence[NamedRows]) -> list[int]:
    """The ids that a progress record names."""
    return [record_id for part in named for record_id in part.ids]

"""A lane's progress record: ids that Kafka has committed and the database may not have deleted yet. Pure.

Each transaction of a lane ends with such a record on the lane's own partition of the progress topic, so that a
successor that reads it knows every committed record (rules P19, P22). It is cumulative: ids of earlier transactions
remain until their DELETE is known to have committed, so the last record of a partition is sufficient.

The value, in network byte order: version (1), element width (1), term (8), incarnation of the outbox (16), number of
ids (4), the first id (8), then each id's distance from the previous one, in `width` bytes.

An id identifies a row only as long as it cannot have been given to another one. So a header, which older versions of
the harvester ignore, identifies the rows, in 12 bytes each: the xmins of all ids (4 each), then the low 32 bits of
their creation times in microseconds (4 each), then the CRC-32 of everything the server sent of each row except the xmin
(4 each: id, key, creation time, partition, topic, headers, value).

On the same server, a successor deletes only the rows that were published, by xmin and time (P50, `RowVersions`). On
another server, where xmins are meaningless, a row whose time and CRC match those recorded for its id is the committed
row (P49). Two rows created at different times agree in both once in 2^64 cases, two created at the same time once in
2^32.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple
from uuid import UUID

from harvester.delivery.decode import decode as decode_rows
from harvester.delivery.decode import row_versions
from harvester.errors import WireError
from harvester.record import LOW_BITS, RowVersions

_VERSION = 1
_HEAD = struct.Struct(">BBq16sIq")
_NARROW, _WIDE = 4, 8
_VERSION_BYTES = 12
_CODES = {_NARROW: "I", _WIDE: "Q"}
VERSIONS = "versions"  # name of the header
_NOT_OURS = "it was written by a newer harvester, or the progress topic is used for something else"

LEAST_RECORD_BYTES = 4096  # which the topic must accept: hundreds of ids
_OVERHEAD_BYTES = 256  # of a batch of one record: its headers, key and fixed fields


LANES_OF_A_SHARD = 2  # they take turns: Kafka ends a transaction of one while the other's is filled (ADR 25)


def lanes_of(shard: int) -> range:
    """The numbers of a shard's own lanes, independent of the number of shards."""
    return range(shard * LANES_OF_A_SHARD, (shard + 1) * LANES_OF_A_SHARD)


def lanes_to_fence(shard: int, shards: int, lanes: int) -> list[int]:
    """The lanes that one of `shards` shards opens: first those of shards that no longer exist, then its own.

    Together the shards open every lane once.
    """
    owners = range(shard + shards, -(-lanes // LANES_OF_A_SHARD), shards)
    others = [number for owner in owners for number in lanes_of(owner) if number < lanes]
    return [*others, *lanes_of(shard)]


@dataclass(frozen=True, slots=True)
class Progress:
    """`ids` ascend. An id is valid only together with the incarnation, or with the row's creation time and sum.

    `xmins`, `created_us` and `sums`: see `RowVersions`; empty if unknown.
    """

    term: int
    incarnation: UUID
    ids: Sequence[int] = ()
    xmins: Sequence[int] = ()
    created_us: Sequence[int] = ()
    sums: Sequence[int] = ()

    @property
    def rows(self) -> RowVersions:
        return RowVersions(self.ids, self.xmins, self.created_us, self.sums)


class NamedRows(NamedTuple):
    """Rows in the form in which progress records name them, made by `name`.

    The records of a transaction are named until they are purged, by several progress records in a row, and brought into
    this form once.
    """

    ids: Sequence[int]
    steps: array[int]  # each id's distance from the previous one, from the second id on; wide only if need be
    versions: tuple[array[int], ...]  # columns of the header; none if the versions are unknown


class EncodedProgress(NamedTuple):
    """A progress record; `versions` is the value of its header, empty if it has none."""

    value: bytes
    versions: bytes = b""


def most_ids(record_bytes: int) -> int:
    """How many ids fit into one record if a batch may have this many bytes; 0 bytes hold none."""
    return max(0, record_bytes - _OVERHEAD_BYTES) // (_WIDE + _VERSION_BYTES)


def same_rows(progress: Progress, rows: Iterable[tuple[int, bytes | None, bytes]]) -> RowVersions:
    """The given current rows that are the ones recorded in `progress`; a row is (id, key, bytes)."""
    versions = zip(progress.created_us, progress.sums, strict=True)
    named = {
        record_id: (us & LOW_BITS, row_sum) for record_id, (us, row_sum) in zip(progress.ids, versions, strict=False)
    }
    sums: list[int] = []
    records = decode_rows(b"".join([raw for _, _, raw in rows]), sums)
    found = zip(records, sums, strict=True)
    return row_versions([row for row, row_sum in found if named.get(row.id) == (row.created_us & LOW_BITS, row_sum)])


def name(rows: RowVersions) -> NamedRows:
    """Bring rows into the form of a progress record; raises ValueError if their ids do not ascend."""
    steps = list(map(sub, rows.ids[1:], rows.ids[:-1]))
    if steps and min(steps) <= 0:
        raise ValueError("ids must ascend")
    named = array(_CODES[_WIDE if steps and max(steps) > LOW_BITS else _NARROW], steps)
    if not rows.xmins:
        return NamedRows(rows.ids, named, ())
    times = array("I", [created_us & LOW_BITS for created_us in rows.created_us])
    return NamedRows(rows.ids, named, (array("I", rows.xmins), times, array("I", rows.sums)))


def encode(progress: Progress) -> EncodedProgress:
    """Encode the record; raises ValueError if ids do not ascend."""
    return encode_named(progress.term, progress.incarnation, [name(progress.rows)] if progress.ids else [])


def encode_named(term: int, incarnation: UUID, parts: Sequence[NamedRows]) -> EncodedProgress:
    """The same for rows in several parts, each with at least one; the parts ascend as well."""
    gaps = [after.ids[0] - before.ids[-1] for before, after in pairwise(parts)]
    if gaps and min(gaps) <= 0:
        raise ValueError("ids must ascend")
    is_narrow = max(gaps, default=0) <= LOW_BITS and all(part.steps.typecode == _CODES[_NARROW] for part in parts)
    width = _NARROW if is_narrow else _WIDE
    steps = array(_CODES[width])
    for gap, part in zip((0, *gaps), parts, strict=False):
        if gap:
            steps.append(gap)
        steps += array(steps.typecode, part.steps)
    ids = sum(len(part.ids) for part in parts)
    first = parts[0].ids[0] if parts else 0
    value = _HEAD.pack(_VERSION, width, term, incarnation.bytes, ids, first) + _swapped(steps).tobytes()
    versions = array("I")
    for columns in zip(*(part.versions for part in parts), strict=True):
        for column in columns:
            versions += column
    return EncodedProgress(value, _swapped(versions).tobytes())


def decode(value: bytes, versions: bytes | None = None) -> Progress:
    """Decode a record's value, and its versions header if it has one; raises WireError for anything else."""
    try:
        version, width, term, incarnation, count, first = _HEAD.unpack_from(value)
    except struct.error as error:
        raise WireError(f"{len(value)} bytes are not a progress record", hint=_NOT_OURS) from error
    steps = max(0, count - 1)
    if version != _VERSION or width not in _CODES or len(value) != _HEAD.size + steps * width:
        raise WireError(
            f"a progress record of version {version} with {len(value)} bytes cannot be read",
            hint=_NOT_OURS,
        )
    distances = array(_CODES[width])
    distances.frombytes(value[_HEAD.size :])
    ids = tuple(accumulate(_swapped(distances), initial=first)) if count else ()
    if steps and (not all(distances) or ids[-1] >= 1 << 63):
        text = f"a progress record has ids that no outbox can have: {ids[:3]} … {ids[-1]}"
        raise WireError(text, hint=_NOT_OURS)
    if not versions:
        return Progress(term, UUID(bytes=incarnation), ids)
    if len(versions) != count * _VERSION_BYTES:
        raise WireError(f"a progress record of {count} ids has {len(versions)} bytes of versions", hint=_NOT_OURS)
    words = array("I")
    words.frombytes(versions)
    columns = tuple(_swapped(words))
    return Progress(
        term, UUID(bytes=incarnation), ids, columns[:count], columns[count : 2 * count], columns[2 * count :]
    )


def _swapped(numbers: array[int]) -> array[int]:
    """Converted between this machine's byte order and the network's."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers

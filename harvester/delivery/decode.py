"""From the bytes of a row to the record that goes to Kafka. Pure.

The input is tuples of `COPY … (FORMAT BINARY)` with the columns of `harvester.outbox.sql.queries`, in their order:
xmin, id, kafka_key, create_time, kafka_partition, kafka_topic, kafka_header_keys, kafka_header_values, kafka_value.
The first two and those after the key are never NULL (the query ensures that), so they are at fixed offsets; what
identifies a row on any server follows the xmin; topic and header names rarely change and are adjacent, so that both are
cached in one look-up. A shard does this for every record: the code is written for speed, not for beauty.

A row that is not a valid record (unequal header arrays, a NULL element, an impossible topic) is Broken: it goes to
quarantine with the reason, and the others continue. So does a row on which this code fails unexpectedly.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, NoReturn
from zlib import crc32

from harvester.errors import UndecodableRecord, WireError
from harvester.record import KafkaRecord, ReadRow, RowVersions

_HEAD = Struct(">hiIiqi")  # fields, xmin and id, each after its length, length of key
NO_PARTITION = -(2**63)  # the query's value for a row without one
_MIDDLE = Struct(">iqiqi")  # create_time and partition, each after its length, length of topic
_FIELDS_SUM = crc32((9).to_bytes(2, "big"))  # of a tuple's first bytes, the number of its fields
_INT = Struct(">i")
_ARRAY = Struct(">iii")  # dimensions, has NULLs, element type
_DIMENSION = Struct(">ii")  # elements, lower bound
_TEXT_OID = 25
_ONE_TEXT = Struct(">iiiii").pack(1, 0, _TEXT_OID, 1, 1)  # one dimension of one element, which is not NULL
_ONE_TEXT_BYTES = len(_ONE_TEXT) + _INT.size
_POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01 in microseconds since 1970-01-01
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")
_EMPTY: list[tuple[str, bytes]] = []

_new = tuple.__new__  # KafkaRecord(…) would call through another function


class Broken(NamedTuple):
    """A row that is not a valid record, and why."""

    id: int
    key: bytes | None
    reason: str
    xmin: int = 0
    created_us: int = 0


Decoded = KafkaRecord | Broken


class Oversize(NamedTuple):
    """A record too large for Kafka: its value must be stored before it can be published."""

    id: int
    key: bytes | None
    record: KafkaRecord

    @property
    def xmin(self) -> int:
        return self.record.xmin

    @property
    def created_us(self) -> int:
        return self.record.created_us


def row_versions(rows: Sequence[ReadRow], sums: Sequence[int] = ()) -> RowVersions:
    """Of rows as decoded, in ascending order."""
    return RowVersions([row.id for row in rows], [row.xmin for row in rows], [row.created_us for row in rows], sums)


def set_apart(records: list[Decoded], above: int) -> list[Decoded | Oversize]:
    """Records whose key, value and headers exceed `above` bytes become Oversize; the others are returned unchanged."""
    return [
        Oversize(record.id, record.key, record)
        if isinstance(record, KafkaRecord) and record.value and size_of(record) > above
        else record
        for record in records
    ]


def size_of(record: KafkaRecord) -> int:
    """The number of bytes in key, value and headers."""
    headers = sum(len(name.encode()) + len(value) for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def decode(data: bytes, sums: list[int] | None = None) -> list[Decoded]:
    """The rows in `data`, which follow each other; raises WireError if it does not consist of rows.

    `sums` receives the CRC-32 of each row's bytes, without its xmin.
    """
    found: list[Decoded] = []
    at, end, decoded = 0, len(data), b""  # `decoded`: the last address; rows that follow each other often share it
    unpack_head, unpack_middle, length = _HEAD.unpack_from, _MIDDLE.unpack_from, _INT.unpack_from
    try:
        while at < end:
            _, _, xmin, _, record_id, size = unpack_head(data, at)
            key = headers = value = None
            begin, at = at + 10, at + 26  # the end of the xmin, _HEAD.size; constants are cheaper than attributes
            if size >= 0:
                key = data[at : at + size]
                at += size
            _, created_us, _, partition, size = unpack_middle(data, at)
            address_at = at + 24  # of the topic's length; _MIDDLE includes it
            at += 28 + size if size > 0 else 28
            (size,) = length(data, at)
            at += 4 + size if size > 0 else 4
            address = data[address_at:at]
            (size,) = length(data, at)
            at += 4
            if size >= 0:
                headers = data[at : at + size]
                at += size
            (size,) = length(data, at)
            at += 4
            if size >= 0:
                value = data[at : at + size]
                at += size
            if sums is not None:
                sums.append(crc32(data[begin:at] if size < 1024 else memoryview(data)[begin:at], _FIELDS_SUM))
            try:
                if address != decoded:
                    topic, names = _address(address)
                    decoded = address
                if partition < 0:
                    partition = -1 if partition == NO_PARTITION else _refuse_partition(partition)
                if len(names) == 1 and headers is not None and headers.startswith(_ONE_TEXT):
                    pairs = [(names[0], headers[_ONE_TEXT_BYTES:])]
                else:
                    pairs = _headers(names, headers)
            except Exception as error:  # noqa: BLE001 - no row may end the shard (P33)
                found.append(Broken(record_id, key, _reason(error), xmin, created_us + _POSTGRES_EPOCH_US))
                continue
            fields = (record_id, key, topic, value, pairs, partition, created_us + _POSTGRES_EPOCH_US, xmin)
            found.append(_new(KafkaRecord, fields))
    except struct.error as error:
        raise WireError(f"{end} bytes are not whole rows: one is cut off at {at}") from error
    if at != end:
        raise WireError(f"{end} bytes are not whole rows: the last one is cut off")
    return found


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, UndecodableRecord) else f"it cannot be decoded: {error!r}"


def _refuse_partition(number: int) -> NoReturn:
    raise UndecodableRecord(f"invalid partition {number}")


@lru_cache(maxsize=4096)
def _address(raw: bytes) -> tuple[str, tuple[str, ...]]:
    """Topic and header names, from both columns with their lengths. Writers use few of them, so they are cached."""
    (size,) = _INT.unpack_from(raw)
    at = 4 + max(size, 0)
    topic = raw[4:at].decode("utf-8", "replace")
    if not _TOPIC.match(topic) or topic in {".", ".."}:
        raise UndecodableRecord(f"invalid topic name {topic[:60]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")
    (size,) = _INT.unpack_from(raw, at)
    return topic, _header_names(raw[at + 4 :] if size >= 0 else None)


def _header_names(array: bytes | None) -> tuple[str, ...]:
    try:
        return tuple(name.decode() for name in _elements(array, "kafka_header_keys"))
    except UnicodeDecodeError as error:  # a database without an encoding (SQL_ASCII) can hold any bytes
        raise UndecodableRecord(f"kafka_header_keys has an element that is not UTF-8: {error}") from error


def _headers(names: tuple[str, ...], values: bytes | None) -> list[tuple[str, bytes]]:
    value_list = _elements(values, "kafka_header_values")
    if len(names) != len(value_list):
        raise UndecodableRecord(f"{len(names)} header keys but {len(value_list)} header values")
    return list(zip(names, value_list, strict=True)) if names else _EMPTY


def _elements(array: bytes | None, column: str) -> list[bytes]:
    """The elements of a one-dimensional text[] in binary form."""
    if array is None:
        return []
    dimensions, _, _ = _ARRAY.unpack_from(array)
    if dimensions == 0:
        return []
    if dimensions != 1:
        raise UndecodableRecord(f"{column} has {dimensions} dimensions; one is allowed")
    count, _ = _DIMENSION.unpack_from(array, _ARRAY.size)
    at = _ARRAY.size + _DIMENSION.size
    elements: list[bytes] = []
    for _ in range(count):
        (size,) = _INT.unpack_from(array, at)
        at += 4
        if size < 0:
            raise UndecodableRecord(f"{column} has a NULL element")
        elements.append(array[at : at + size])
        at += size
    return elements

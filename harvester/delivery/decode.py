"""From the bytes of a row to the record that goes to Kafka. Pure.

Input is one tuple of `COPY … (FORMAT BINARY)` with the columns id, kafka_key, kafka_topic, kafka_value,
kafka_header_keys, kafka_header_values, create_time, kafka_partition, in this order (`harvester.outbox.queries`).
A row that can be no record (unequal header arrays, a NULL element, an impossible topic) raises UndecodableRecord;
it goes to quarantine with that message, and the others flow.
"""

from __future__ import annotations

import re
from functools import lru_cache
from struct import Struct

from harvester.errors import UndecodableRecord
from harvester.record import KafkaRecord

ROW_HEAD = Struct(">hiqi")  # fields, length of id, id, length of key
_INT = Struct(">i")
_LONG = Struct(">q")
_ARRAY = Struct(">iii")  # dimensions, has NULLs, element type
_DIMENSION = Struct(">ii")  # elements, lower bound
_POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01 in microseconds since 1970-01-01
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")

_FIELDS_AFTER_ID = 7
_EMPTY: list[tuple[str, bytes]] = []


def decode(raw: bytes) -> KafkaRecord:
    """The record in a row; raises UndecodableRecord with the reason."""
    length = _INT.unpack_from
    _, _, record_id, size = ROW_HEAD.unpack_from(raw)
    at = ROW_HEAD.size
    fields: list[bytes | None] = []
    for _ in range(_FIELDS_AFTER_ID):  # the hottest loop of a shard: no call per field but the one for its length
        if size < 0:
            fields.append(None)
        else:
            fields.append(raw[at : at + size])
            at += size
        if len(fields) < _FIELDS_AFTER_ID:
            (size,) = length(raw, at)
            at += 4
    key, topic, value, names, values, created, partition = fields
    created_us = _LONG.unpack(created)[0] + _POSTGRES_EPOCH_US if created else 0
    number = _INT.unpack(partition)[0] if partition else -1
    if partition and number < 0:
        raise UndecodableRecord(f"invalid partition {number}")
    return KafkaRecord(record_id, _topic(topic), key, value, _headers(names, values), number, created_us)


@lru_cache(maxsize=4096)
def _topic(name: bytes | None) -> str:
    topic = (name or b"").decode("utf-8", "replace")
    if not _TOPIC.match(topic) or topic in {".", ".."}:
        raise UndecodableRecord(f"invalid topic name {topic[:60]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")
    return topic


def _headers(names: bytes | None, values: bytes | None) -> list[tuple[str, bytes]]:
    name_list = _header_names(names)
    value_list = _elements(values, "kafka_header_values")
    if len(name_list) != len(value_list):
        raise UndecodableRecord(f"{len(name_list)} header keys but {len(value_list)} header values")
    return list(zip(name_list, value_list, strict=True)) if name_list else _EMPTY


@lru_cache(maxsize=4096)
def _header_names(array: bytes | None) -> tuple[str, ...]:
    """Writers use few sets of header names: remembered by the array's bytes."""
    try:
        return tuple(name.decode() for name in _elements(array, "kafka_header_keys"))
    except UnicodeDecodeError as error:  # a database without an encoding (SQL_ASCII) holds any bytes
        raise UndecodableRecord(f"kafka_header_keys has an element that is not UTF-8: {error}") from error


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

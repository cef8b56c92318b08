"""Kafka's partitioning hash, and the choice of a record's shard based on it. Pure.

Java's default partitioner, and librdkafka's `murmur2_random`, which shards use, put a record with a key on partition
`murmur2(key) % partitions`, ignoring the sign bit. The shard is chosen by the same hash, so that shards and partitions
coincide as far as their numbers have a common divisor: with 8 shards and 4 partitions, each shard has the keys of one
partition. What a shard sends at a time is then a single batch instead of one per partition, and an unavailable
partition holds up only its own shards. Records without a key have no order among themselves; they are spread by id.
"""

from __future__ import annotations

from functools import lru_cache
from struct import unpack_from

_M = 0x5BD1E995
_SEED = 0x9747B28C
_WORD = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


def murmur2(key: bytes) -> int:
    """The hash of a key, 0 to 2³¹ - 1."""
    size = len(key)
    words = size >> 2
    h = _SEED ^ size
    for word in unpack_from(f"<{words}I", key):
        k = word * _M & _WORD
        h = h * _M & _WORD ^ (k ^ k >> 24) * _M & _WORD
    if size & 3:
        h = (h ^ int.from_bytes(key[words << 2 :], "little")) * _M & _WORD
    h = (h ^ h >> 13) * _M & _WORD
    return (h ^ h >> 15) & _POSITIVE


_hash = lru_cache(maxsize=1 << 16)(murmur2)


def shard_of(key: bytes | None, record_id: int, shards: int) -> int:
    """The index (0-based) of this record's shard among `shards`."""
    if key is None:
        return record_id % shards
    return _hash(key) % shards

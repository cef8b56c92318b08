"""The hash by which Kafka's producers choose a partition. Pure.

Java's default partitioner, and librdkafka's `murmur2_random`, which shards use, put a record with a key on partition
`murmur2(key) % partitions`, the sign bit left out (Kafka, `Utils.murmur2`, `Utils.toPositive`).
"""

from __future__ import annotations

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

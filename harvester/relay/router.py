"""Which shard a record belongs to: a pure function of its key's bytes.

The hash is the first four bytes of SHA-256 over the key: the same in every process and every version. Records without a
key have no order among themselves; they are spread by id.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256


def shard_of(key: bytes | None, record_id: int, shards: int) -> int:
    """The index (0-based) of the shard that owns this record while there are `shards` of them."""
    if key is None:
        return record_id % shards
    return _hash(key) % shards


@lru_cache(maxsize=1 << 16)
def _hash(key: bytes) -> int:
    return int.from_bytes(sha256(key).digest()[:4], "big")

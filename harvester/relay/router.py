"""Which shard a record belongs to: a pure function of its key's bytes.

The hash is the one that chooses the partition, so that shards and partitions go together as far as their numbers have
a common divisor: with 8 shards and 4 partitions each shard has the keys of one partition. What a shard sends at a time
is then one batch and not one for every partition, for the broker a fraction of the work; and a partition that is away
holds up its own shards. It is the same in every process and every version. Records without a key have no order among
themselves; they are spread by id.
"""

from __future__ import annotations

from functools import lru_cache

from harvester.delivery.partitioner import murmur2

_hash = lru_cache(maxsize=1 << 16)(murmur2)


def shard_of(key: bytes | None, record_id: int, shards: int) -> int:
    """The index (0-based) of the shard that owns this record while there are `shards` of them."""
    if key is None:
        return record_id % shards
    return _hash(key) % shards

"""The router; that its hash is the one of Kafka's producers is tested with tests/unit/delivery/test_partitioner.py."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.partitioner import murmur2, shard_of

COUNTS = st.integers(1, 256)


@given(st.none() | st.binary(), st.integers(1, 2**63 - 1), COUNTS)
def test_every_record_has_a_shard(key: bytes | None, record_id: int, shards: int) -> None:
    assert 0 <= shard_of(key, record_id, shards) < shards


@given(st.binary(), st.integers(1), st.integers(1), COUNTS)
def test_a_key_has_one_shard(key: bytes, some_id: int, other_id: int, shards: int) -> None:
    assert shard_of(key, some_id, shards) == shard_of(key, other_id, shards)


def test_keys_and_ids_spread() -> None:
    keys = Counter(shard_of(f"key-{n}".encode(), 0, 8) for n in range(8000))
    ids = Counter(shard_of(None, n, 8) for n in range(8000))
    assert set(ids.values()) == {1000}
    assert len(keys) == 8
    assert min(keys.values()) > 850


def test_shards_and_partitions_go_together() -> None:
    """With a common divisor a shard has the keys of some partitions only."""
    for shards, partitions, together in ((8, 4, 1), (4, 8, 2), (6, 4, 2), (8, 1, 1)):
        of: dict[int, set[int]] = {}
        for key in (f"key-{n}".encode() for n in range(2000)):
            of.setdefault(shard_of(key, 0, shards), set()).add(murmur2(key) % partitions)
        assert {len(found) for found in of.values()} == {together}

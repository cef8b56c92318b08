"""The router alone; that SQL computes the same is tested in tests/integration/test_relay_sql.py."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from harvester.relay.router import shard_of

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


def test_it_stays_what_it_was() -> None:
    """The digests begin with e3b0c442, ca978112 and a8100ae6."""
    assert [shard_of(key, 0, 1000) for key in (b"", b"a", b"\xff")] == [610, 610, 654]

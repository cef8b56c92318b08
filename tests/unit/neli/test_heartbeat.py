"""Heartbeats on the leader topic, and whatever else stands there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.neli.heartbeat import VERSION, MemberHeartbeat, decode, encode

TEXTS = st.text(max_size=100)
TERMS = st.integers(0, 2**63 - 1)
HEARTBEATS = st.builds(
    MemberHeartbeat, st.uuids(), TEXTS, st.integers(0, 2**63), TEXTS, TEXTS, st.none() | st.uuids(), st.none() | TERMS
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("v", "member", "name", "n", "outbox", "outbox_name", "leader", "term")
A_HEARTBEAT: dict[str, Any] = {
    "v": VERSION,
    "member": "00000000-0000-0000-0000-000000000001",
    "name": "a",
    "n": 1,
    "outbox": "o",
    "outbox_name": "outbox",
    "leader": None,
    "term": None,
}


@given(HEARTBEATS)
def test_a_heartbeat_survives(heartbeat: MemberHeartbeat) -> None:
    assert decode(encode(heartbeat)) == heartbeat


@given(st.none() | st.binary(max_size=200))
def test_junk_is_ignored(data: bytes | None) -> None:
    assert decode(data) is None


@given(JSON)
def test_other_json_is_ignored(value: Any) -> None:
    assert decode(json.dumps(value).encode()) is None


@given(st.sampled_from(FIELDS), JSON)
def test_a_wrong_field_never_raises(field: str, value: Any) -> None:
    found = decode(json.dumps(A_HEARTBEAT | {field: value}).encode())
    assert found is None or isinstance(found.number, int)


@given(st.sampled_from(FIELDS))
def test_a_missing_field_makes_it_none(field: str) -> None:
    assert decode(json.dumps(A_HEARTBEAT).encode()) is not None
    assert decode(json.dumps({key: value for key, value in A_HEARTBEAT.items() if key != field}).encode()) is None


@pytest.mark.parametrize("term", [-1, 2**63, True, 1.0, "1"])
def test_impossible_terms(term: Any) -> None:
    assert decode(json.dumps(A_HEARTBEAT | {"term": term}).encode()) is None


def test_another_version_is_ignored() -> None:
    assert decode(json.dumps(A_HEARTBEAT | {"v": VERSION + 1}).encode()) is None


def test_nested_without_end() -> None:
    assert decode(b"[" * 16_000) is None


def test_far_too_long() -> None:
    assert decode(json.dumps(A_HEARTBEAT | {"name": "x" * 20_000}).encode()) is None

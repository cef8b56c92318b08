"""Whatever stands in the leader topic is a heartbeat with fields of the right types, or nothing."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from harvester.neli.heartbeat import VERSION, MemberHeartbeat, decode

TEXTS = st.text(st.characters(codec=None), max_size=8)  # halves of surrogate pairs too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
GOOD: dict[str, Any] = {
    "v": VERSION,
    "member": str(UUID(int=1)),
    "name": "a",
    "n": 1,
    "outbox": "o",
    "outbox_name": "outbox",
    "leader": None,
    "term": None,
}


@given(st.dictionaries(st.sampled_from([*GOOD, "more"]), TEXTS | st.integers() | JSON, max_size=3))
def test_fields_have_the_right_types(wrong: dict[str, Any]) -> None:
    body = GOOD | wrong
    heartbeat = decode(json.dumps(body).encode())
    if heartbeat is not None:
        assert is_well_typed(heartbeat)
        read = (heartbeat.name, heartbeat.number, heartbeat.outbox, heartbeat.outbox_name, heartbeat.term)
        assert read == (body["name"], body["n"], body["outbox"], body["outbox_name"], body["term"])


@given(st.binary(max_size=80), st.integers(0, 200), st.integers(0, 8))
def test_a_damaged_heartbeat(junk: bytes, at: int, length: int) -> None:
    good = json.dumps(GOOD).encode()
    assert decode(good) is not None
    heartbeat = decode(good[:at] + junk + good[at + length :])
    if heartbeat is not None:
        assert is_well_typed(heartbeat)


def is_well_typed(heartbeat: MemberHeartbeat) -> bool:
    texts = (heartbeat.name, heartbeat.outbox, heartbeat.outbox_name)
    assert all(type(text) is str and text.encode() is not None for text in texts)
    assert type(heartbeat.member) is UUID
    assert type(heartbeat.number) is int
    assert heartbeat.leader_id is None or type(heartbeat.leader_id) is UUID
    return heartbeat.term is None or (type(heartbeat.term) is int and 0 <= heartbeat.term < 2**63)

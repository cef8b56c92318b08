"""A member's heartbeat on the leader topic, and its bytes. Pure.

Compact JSON with a version, so that the topic is human-readable. `outbox` identifies what the sender serves: two
outboxes in one group would take turns leading and starve each other, so a member refuses to continue when it reads a
live heartbeat of another outbox. Bytes that are not a heartbeat (another tool, a newer version) are ignored, never
fatal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

VERSION = 1
LEAST_MESSAGE_BYTES = 20_000  # for the topic's max.message.bytes, which includes the overhead around a heartbeat
_MAX_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class MemberHeartbeat:
    """One heartbeat. `member` is unique to one membership of a process, `name` is for people."""

    member: UUID
    name: str
    number: int  # counts this member's heartbeats
    outbox: str  # identity: server, database and outbox_id of the term row
    outbox_name: str
    leader_id: UUID | None
    term: int | None


def encode(heartbeat: MemberHeartbeat) -> bytes:
    body: dict[str, Any] = {
        "v": VERSION,
        "member": str(heartbeat.member),
        "name": heartbeat.name,
        "n": heartbeat.number,
        "outbox": heartbeat.outbox,
        "outbox_name": heartbeat.outbox_name,
        "leader": str(heartbeat.leader_id) if heartbeat.leader_id else None,
        "term": heartbeat.term,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes | None) -> MemberHeartbeat | None:
    """The heartbeat, or None if the bytes are not one."""
    if not data or len(data) > _MAX_BYTES:
        return None
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or body.get("v") != VERSION:
            return None
        leader, term = body["leader"], body["term"]
        if term is not None and (not isinstance(term, int) or isinstance(term, bool) or not 0 <= term < 2**63):
            return None
        number = body["n"]
        if not isinstance(number, int) or isinstance(number, bool):
            return None
        return MemberHeartbeat(
            member=UUID(body["member"]),
            name=_text(body["name"]),
            number=number,
            outbox=_text(body["outbox"]),
            outbox_name=_text(body["outbox_name"]),
            leader_id=UUID(leader) if leader is not None else None,
            term=term,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _text(value: object) -> str:
    """A printable string; nothing else must be taken for the name of an outbox."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    value.encode()  # UnicodeEncodeError for a lone surrogate
    return value

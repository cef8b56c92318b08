"""Idempotence for writers and consumers: high-water marks, leases, seen ids, the inbox.

For consumers: `SeenIds` (pure) recognises records by the origin in their header, `harvester.origin`; `Inbox` stores it
in PostgreSQL together with the consumed offset and the application's effect. docs/consumers.md explains both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvester.errors import CorruptSeenIds, InboxError, InboxFenced, InboxUnavailable
    from harvester.idempotence.inbox import AsyncInbox, Inbox, table_sql
    from harvester.idempotence.partition import Batch, Effect, Novelty, Position
    from harvester.idempotence.seen import SeenIds
    from harvester.origin import Origin

# Loaded on first use: seen ids alone need no database driver.
_HOMES = {
    "AsyncInbox": "harvester.idempotence.inbox",
    "Batch": "harvester.idempotence.partition",
    "CorruptSeenIds": "harvester.errors",
    "Effect": "harvester.idempotence.partition",
    "Inbox": "harvester.idempotence.inbox",
    "InboxError": "harvester.errors",
    "InboxFenced": "harvester.errors",
    "InboxUnavailable": "harvester.errors",
    "Origin": "harvester.origin",
    "Position": "harvester.idempotence.partition",
    "SeenIds": "harvester.idempotence.seen",
    "Novelty": "harvester.idempotence.partition",
    "table_sql": "harvester.idempotence.inbox",
}

__all__ = [
    "AsyncInbox",
    "Batch",
    "CorruptSeenIds",
    "Effect",
    "Inbox",
    "InboxError",
    "InboxFenced",
    "InboxUnavailable",
    "Novelty",
    "Origin",
    "Position",
    "SeenIds",
    "table_sql",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)

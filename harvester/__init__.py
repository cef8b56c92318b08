"""Relays a transactional outbox from PostgreSQL to Kafka: loses nothing, keeps the order of each key."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvester.claim_check import ClaimChecks, StoreSettings
    from harvester.config import Config, Limits, load_config
    from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
    from harvester.coordination.consumer import CoordinatedConsumer
    from harvester.coordination.settings import ConsumerSettings
    from harvester.errors import (
        ClaimCheckError,
        ConfigurationError,
        HarvesterError,
        LeaseError,
        LeaseExpired,
        LeaseFenced,
        LeaseUnknown,
        SequenceGap,
    )
    from harvester.events import (
        Event,
        LeaderAcquired,
        LeaderFenced,
        LeaderRefreshed,
        LeaderRevoked,
        MeterRead,
    )
    from harvester.harvester import Harvester
    from harvester.idempotence.inbox import AsyncInbox, Inbox
    from harvester.neli.fake import FakeGroup
    from harvester.outbox.async_stasher import AsyncLeasedStasher, AsyncStasher
    from harvester.outbox.leases import Lease, Stashed
    from harvester.outbox.stasher import LeasedStasher, Stasher
    from harvester.record import OutboxRecord
    from harvester.status import State, Status

# Loaded on first use: writers who only stash need no Kafka client, and `harvester --help` needs nothing at all.
_HOMES = {
    "claim_check": ("ClaimChecks", "StoreSettings"),
    "config": ("Config", "Limits", "load_config"),
    "coordination.async_consumer": ("AsyncCoordinatedConsumer",),
    "coordination.consumer": ("CoordinatedConsumer",),
    "coordination.settings": ("ConsumerSettings",),
    "errors": (
        "ClaimCheckError", "ConfigurationError", "HarvesterError", "LeaseError", "LeaseExpired", "LeaseFenced",
        "LeaseUnknown", "SequenceGap",
    ),
    "events": ("Event", "LeaderAcquired", "LeaderFenced", "LeaderRefreshed", "LeaderRevoked", "MeterRead"),
    "harvester": ("Harvester",),
    "idempotence.inbox": ("AsyncInbox", "Inbox"),
    "neli.fake": ("FakeGroup",),
    "outbox.async_stasher": ("AsyncLeasedStasher", "AsyncStasher"),
    "outbox.leases": ("Lease", "Stashed"),
    "outbox.stasher": ("LeasedStasher", "Stasher"),
    "record": ("OutboxRecord",),
    "status": ("State", "Status"),
}  # fmt: skip

__all__ = [
    "AsyncCoordinatedConsumer",
    "AsyncInbox",
    "AsyncLeasedStasher",
    "AsyncStasher",
    "ClaimCheckError",
    "ClaimChecks",
    "Config",
    "ConfigurationError",
    "ConsumerSettings",
    "CoordinatedConsumer",
    "Event",
    "FakeGroup",
    "Harvester",
    "HarvesterError",
    "Inbox",
    "LeaderAcquired",
    "LeaderFenced",
    "LeaderRefreshed",
    "LeaderRevoked",
    "Lease",
    "LeaseError",
    "LeaseExpired",
    "LeaseFenced",
    "LeaseUnknown",
    "LeasedStasher",
    "Limits",
    "MeterRead",
    "OutboxRecord",
    "SequenceGap",
    "Stashed",
    "Stasher",
    "State",
    "Status",
    "StoreSettings",
    "load_config",
]


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"harvester.{home}"), name)

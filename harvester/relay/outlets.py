"""Where the decisions of a shard go, in either mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harvester.outbox.purge_session import Poison
from harvester.relay.frames import Frame


@dataclass(frozen=True, slots=True)
class Outlets:
    """All are quick and safe from any thread."""

    send: Callable[[Frame], None]  # to the supervisor
    purge: Callable[[Sequence[int]], None]
    quarantine: Callable[[Poison], None]
    wake: Callable[[], None]  # the main thread, because a retry was scheduled
    fatal: Callable[[str], None]  # the producer is unusable: end the process
    trusted: Callable[[], bool]

"""Members of the same group that serve another outbox: found before joining, and refused.

A standby hears nothing, and would wait for ever for a leadership that belongs to another outbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from harvester.clock import clock_s
from harvester.errors import ForeignOutbox
from harvester.neli.group import Identity
from harvester.neli.heartbeat import Heartbeat, decode

TAIL_RECORDS = 64
OFFSET_TAIL_BASE = -2000  # librdkafka: RD_KAFKA_OFFSET_TAIL(n) is this minus n
_LOOK_S = 10.0  # a first connection may be slow; one that works has read the last records in an instant


def refuse_stranger(heartbeat: Heartbeat, message: Any, group: str, identity: Identity, live_s: float) -> None:
    """Raise ForeignOutbox when a live member, this heartbeat's, serves another outbox."""
    if heartbeat.outbox == identity.outbox:
        return
    if time.time() - message.timestamp()[1] / 1000 < live_s:
        raise ForeignOutbox(group=group, member=heartbeat.name, theirs=heartbeat.outbox_name, ours=identity.outbox_name)


def look_for_strangers(
    topic: str, options: Mapping[str, Any], poll_s: float, refuse: Callable[[Heartbeat, Any], None],
    ended: Callable[[], bool],
) -> None:  # fmt: skip
    """Show what was said last in the leader topic to `refuse`; gives up after a moment."""
    reader = Consumer({**options, "enable.partition.eof": "true"})
    try:
        reader.assign([TopicPartition(topic, 0, OFFSET_TAIL_BASE - TAIL_RECORDS)])
        deadline = clock_s() + _LOOK_S
        while clock_s() < deadline and not ended():
            message = reader.poll(poll_s)
            if message is None:
                continue
            if message.error() is not None:
                return  # the end, or nothing to be had: the group itself will tell
            heartbeat = decode(message.value())
            if heartbeat is not None:
                refuse(heartbeat, message)
    finally:
        reader.close()

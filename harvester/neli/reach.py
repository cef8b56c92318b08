"""Whether Kafka answers this member, whether the group counts it in, and whether anyone leads it.

`Reaching` and `Membership` read the client's own statistics: the states of its connections, of the one to the group
coordinator and of its membership. A standby without a partition receives no callback when it loses either, so nothing
else would reveal it. Nor does anything reveal that the leader has died before its session expires: `Pulse` checks
whether the leader topic still grows. `Stranded` detects from a client's statistics that it will never reach a broker
again.

None of them sends a request on the member's own client that the client could not wait for: librdkafka closes a
connection on which a request has timed out. Over a path slower than our timeouts, each request would cost the member
the connection to its coordinator, and it would never join.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from harvester.bounds import SILENT
from harvester.clock import clock_s
from harvester.neli.election import ElectionTiming
from harvester.neli.group import Missing

STATISTICS_MS = 500
ASKING = {**SILENT, "metadata.max.age.ms": "3000"}
"""For the pulse's client, which would otherwise remember for a quarter of an hour that a partition has no leader."""
_STRANDED_S = 2.0  # a client may briefly have no broker
_NO_BROKERS = frozenset({"logical", "internal"})  # an alias for a group's coordinator; the client itself
_JOINING = frozenset({"wait-join", "wait-sync"})
_ANSWER_S = 10.0
_SPEC: Any = OffsetSpec  # its functions are untyped


class Reaching:
    """Reports that no broker can be reached, until one is connected again. Pure."""

    def __init__(self, trouble: Callable[[str | None], None]) -> None:
        self._trouble = trouble
        self.is_lost = False

    def heard(self, error: KafkaError) -> None:
        """Process an error from the client's error callback."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.is_lost = True
            self._trouble("Kafka: no broker can be reached")

    def read(self, statistics: Mapping[str, Any]) -> None:
        """Process a statistics report of the client (librdkafka's STATISTICS.md)."""
        if self.is_lost and any(broker["state"] == "UP" for broker in statistics["brokers"].values()):
            self.is_lost = False
            self._trouble(None)


class Stranded:
    """Detects that a client has dropped its last broker, so that its owner must replace it (P48). Pure.

    Only for a client that is polled continuously, since unserved reports fill the memory, and that has little to do: a
    client that reports takes a lock for each record. Once stranded (`is_so`), a client stays so.
    """

    def __init__(self) -> None:
        self._since_us: int | None = None  # by the client's clock
        self.is_so = False

    def read(self, statistics: Mapping[str, Any]) -> None:
        """Process a statistics report of the client (librdkafka's STATISTICS.md)."""
        now_us = statistics["ts"]
        if any(broker["source"] not in _NO_BROKERS for broker in statistics["brokers"].values()):
            self._since_us = None
        elif self._since_us is None:
            self._since_us = now_us
        elif now_us - self._since_us >= _STRANDED_S * 1e6:
            self.is_so = True


class Membership:
    """A consumer's membership of the group according to its statistics. Pure.

    Written by the member's thread, readable by any.
    """

    def __init__(self, group: str, session_s: float) -> None:
        self._group, self._session_s = group, session_s
        self._coordinator = self._membership = ""
        self._steady_at: float | None = None  # when it was last seen in the group, with no rebalance under way
        self._joining_at: float | None = None  # since when the group has not answered its request to join

    def read(self, statistics: Mapping[str, Any], now: float) -> None:
        """Process a report of the client; ignored if it contains no group."""
        group = statistics.get("cgrp")
        if group is None:
            return
        self._coordinator, self._membership = group["state"], group["join_state"]
        if self._coordinator != "up":
            self._steady_at = None
        elif self._membership == "steady":
            self._steady_at = now
        if self._coordinator != "up" or self._membership not in _JOINING:
            self._joining_at = None
        elif self._joining_at is None:
            self._joining_at = now

    def missing(self, now: float) -> Missing | None:
        """Why this is not a member; None if it is. A rebalance may take as long as a dead member's session."""
        if self._steady_at is not None and (self._membership == "steady" or now - self._steady_at < self._session_s):
            return None
        if self._joining_at is not None:
            left_s = max(0.0, self._joining_at + self._session_s - now)
            return Missing(f"joins group {self._group}, which waits for members that do not answer", left_s)
        if self._coordinator in ("", "up"):
            return Missing(f"has not joined group {self._group} yet")
        return Missing(f"the coordinator of group {self._group} does not answer")


class Pulse:
    """Whether heartbeats arrive in the leader topic: its end moves with each. A standby reads none of them.

    Written by the member's thread, readable by any; pure except for `look`, which uses a client of its own.
    """

    def __init__(self, topic: str, group: str, session_s: float, timing: ElectionTiming) -> None:
        self._topic, self._group, self._timing = topic, group, timing
        # A dead leader died before its next heartbeat was due. The group learns of its end with a heartbeat.
        self._ends_s = timing.heartbeat_interval_s + session_s + timing.missed_heartbeats_s
        self._look_at = -math.inf
        self._asked: Future[Any] | None = None
        self._end: int | None = None
        self._heard_at: float | None = None  # when the end was first seen where it is now

    def look(self, admin: Any) -> bool:
        """To be called at every turn of a standby; asks once per heartbeat interval, without waiting for the answer.

        False if the client got no answer from a broker: use another client next time.
        """
        now = clock_s()
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            error: Any = asked.exception()  # raised, it would keep the client alive through its traceback
            if error is None:
                self.seen(asked.result().offset, now)
            else:
                self.forget()
                if not (isinstance(error, KafkaException) and error.args[0].code() > 0):
                    return False
        if now < self._look_at:
            return True
        self._look_at = now + self._timing.heartbeat_interval_s
        if self._asked is None:
            place = TopicPartition(self._topic, 0)
            self._asked = admin.list_offsets({place: _SPEC.latest()}, request_timeout=_ANSWER_S)[place]
        else:
            self.forget()  # Kafka does not answer, which says nothing about the leader
        return True

    def seen(self, end: int, now: float) -> None:
        """The partition's end was read."""
        if end != self._end:
            self._end, self._heard_at = end, now

    def forget(self) -> None:
        """The end is unknown."""
        self._end = self._heard_at = None

    def missing(self, now: float) -> Missing | None:
        """The leader has been silent for longer than it is trusted; None while one is heard, or if that is unknown."""
        heard_at = self._heard_at
        if heard_at is None or now - heard_at < self._timing.heartbeat_timeout_s:
            return None
        left_s = max(0.0, heard_at + self._ends_s - now)
        return Missing(f"the leader is silent; group {self._group} waits for its session to end", left_s, True)

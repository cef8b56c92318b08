"""A leader's second proof: offset commits accepted by the group coordinator, showing that it still counts us in.

A commit is accepted even during a rebalance that we have not answered. What announces the rebalance is the client's own
heartbeat to the group, whose answer we do not see; it travels on the same connection as the commits, in order, and one
commit is under way at a time. So when commit k is accepted, every group heartbeat sent before commit k − 1 was sent has
been answered. If one of them had met a rebalance, the client would have sent its JoinGroup at most `rejoin_delay`
later. A commit j sent after that is queued behind the JoinGroup, and is accepted under the old generation only if there
was none. Group heartbeats are sent at most `missed_heartbeats` apart; therefore

    sent(j) >= answered(k) + rejoin_delay   =>   rebalance began > sent(k − 1) - missed_heartbeats

Until there are such commits, the assignment takes their place: the group was stable when it sent it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from harvester.clock import clock_s
from harvester.neli.election import ElectionTiming


class Stability:
    """The latest moment before which no unanswered rebalance can have begun. Pure."""

    def __init__(self, timing: ElectionTiming, now: float) -> None:
        """Partition 0 was assigned `now`."""
        self._missed_s, self._delay_s = timing.missed_heartbeats_s, timing.rejoin_delay_s
        self._known = now - self._missed_s
        self._accepted: deque[tuple[float, float]] = deque()  # answered at, stable at
        self._last_sent_at = now

    def at(self, now: float) -> float:
        """For a commit sent `now`: if it is accepted, any rebalance that we have not answered began after this."""
        while self._accepted and self._accepted[0][0] + self._delay_s <= now:
            self._known = max(self._known, self._accepted.popleft()[1])
        return self._known

    def accepted(self, sent_at: float, now: float) -> None:
        """A commit was accepted."""
        self._accepted.append((now, self._last_sent_at - self._missed_s))
        self._last_sent_at = sent_at


class Commits:
    """One member's commits, for partition 0 of the leader topic. `position`: what is committed; None until known.

    Each commit carries its number as metadata, which identifies its answer. For the member's thread.
    """

    def __init__(self, topic: str, timing: ElectionTiming) -> None:
        self._topic, self._timing = topic, timing
        self._interval_s = timing.heartbeat_interval_s / 2
        self._stability = Stability(timing, clock_s())
        self._number = 0
        self._under_way: tuple[int, float, float] | None = None  # number, sent at, stable at
        self._next_at = 0.0
        self.position: int | None = None

    def begin(self) -> None:
        """Partition 0 is assigned, perhaps to a new client; earlier requests are forgotten."""
        self._under_way = None
        self._stability = Stability(self._timing, clock_s())

    def ask(self, consumer: Any) -> None:
        """Commit without waiting for the answer; does nothing soon after the last commit, or before it was answered."""
        now = clock_s()
        if self.position is None or self._under_way is not None or now < self._next_at:
            return
        self._next_at = now + self._interval_s
        self._number += 1
        self._under_way = self._number, now, self._stability.at(now)
        offset = TopicPartition(self._topic, 0, self.position, metadata=str(self._number))
        try:
            consumer.commit(offsets=[offset], asynchronous=True)
        except KafkaException:
            self._under_way = None

    def answered(self, error: KafkaError | None, partitions: Any) -> Iterator[tuple[float, float]]:
        """Process the client's answer: if it is a success, yields when it was sent and since when the group was
        stable.
        """
        for partition in partitions or ():
            if self._under_way is None or int(partition.metadata or 0) != self._under_way[0]:
                continue
            (_, sent_at, stable_at), self._under_way = self._under_way, None
            if error is None and partition.error is None:
                self._stability.accepted(sent_at, clock_s())
                yield sent_at, stable_at

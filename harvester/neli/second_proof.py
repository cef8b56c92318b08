"""The second proof of a leader: offset commits that the group's coordinator accepts, so that it still counts us in.

A commit is accepted during a rebalance that we have not answered, too. What tells us of the rebalance is the
client's own heartbeat to the group, whose answer nobody shows us; it travels on the connection of the commits, in
order, and one commit is under way at a time. So when commit k is accepted, every group heartbeat sent before commit
k − 1 was sent is answered. One that had met a rebalance would have made the client send its JoinGroup, `rejoin_delay`
later at most. A commit j sent after that stands behind the JoinGroup, and is accepted under the old generation only if
there was none. Group heartbeats are sent at most `missed_heartbeats` apart; therefore

    sent(j) >= answered(k) + rejoin_delay   =>   rebalance began > sent(k − 1) - missed_heartbeats

Before there are such commits, the assignment stands for them: the group was stable when it sent us that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from harvester.clock import clock_s
from harvester.neli.election import ElectionTiming


class Stability:
    """Since when at least no rebalance is under way that commits do not tell. Pure."""

    def __init__(self, timing: ElectionTiming, now: float) -> None:
        """Partition 0 was assigned `now`."""
        self._missed_s, self._delay_s = timing.missed_heartbeats_s, timing.rejoin_delay_s
        self._known = now - self._missed_s
        self._accepted: deque[tuple[float, float]] = deque()  # answered at, what that one shows
        self._last_sent_at = now

    def at(self, now: float) -> float:
        """For a commit that is sent `now`: if it is accepted, no rebalance that we have not answered began before."""
        while self._accepted and self._accepted[0][0] + self._delay_s <= now:
            self._known = max(self._known, self._accepted.popleft()[1])
        return self._known

    def accepted(self, sent_at: float, now: float) -> None:
        """A commit was answered well."""
        self._accepted.append((now, self._last_sent_at - self._missed_s))
        self._last_sent_at = sent_at


class Commits:
    """Of one member, for partition 0 of the leader topic. `position`: what is committed; None until it is known.

    Each commit carries its number as metadata, by which its answer is known. For the member's thread.
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
        """Partition 0 is assigned, perhaps to a client that is new; what was asked before is forgotten."""
        self._under_way = None
        self._stability = Stability(self._timing, clock_s())

    def ask(self, consumer: Any) -> None:
        """Commit, without waiting for it; does nothing soon after the last time, or before the last was answered."""
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
        """The client's answer: of one that was accepted, when it was asked for and since when the group was stable."""
        for partition in partitions or ():
            if self._under_way is None or int(partition.metadata or 0) != self._under_way[0]:
                continue
            (_, sent_at, stable_at), self._under_way = self._under_way, None
            if error is None and partition.error is None:
                self._stability.accepted(sent_at, clock_s())
                yield sent_at, stable_at

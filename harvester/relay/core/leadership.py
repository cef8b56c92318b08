"""The state of one leadership: identity, limits, doubt, replies to a remark, hand-over. Pure.

- `Tenure`: the leader id, the term, and the database on which the term was taken.
- `RelaySettings`: the limits, in records and seconds, from the configuration.
- `Doubt`: whether something that was given up may still arrive in Kafka; while it may, no term is released (P24).
- `RemarkReplies`: which shards have yet to reply to the last remark, and which are stuck. A shard that does not reply,
  or is silent while it has records to settle, is killed; the fate of its ids is then unknown, which a remark resolves.
  A new process replaces it (P15). In exactly-once mode a reply may take any time as long as the shard shows signs of
  life.
- `HandOver`: whether a leader that cannot reach its database or take the term should let another harvester try (P14).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from harvester.delivery.progress import LANES_OF_A_SHARD
from harvester.relay.core.dispatcher import ShardFlows
from harvester.relay.core.frames import Remark
from harvester.relay.core.ledger import InFlightBounds, Ledger
from harvester.relay.core.messages import Kill, ReleaseTerm


class Tenure:
    """Leader id, term and database of a leadership. The known database outlives it. One thread only."""

    def __init__(self) -> None:
        self.holder: UUID | None = None  # the holder that the term row names or will name
        self.leader_id: UUID | None = None  # rows are marked under it: the holder, until the first remark
        self.asked = False  # whether the term was asked for
        self.told: int | None = None  # the term that shards were told; it becomes ours when all have replied
        self.term: int | None = None
        self.announced = False  # the leadership was announced; stays true while the term is taken again
        self.lost = 0  # terms in a row, to another holder, while the group trusted this process (P37)
        self.told_at = -math.inf
        self.lanes = 0  # how many exist in exactly-once mode; set before the first term is taken
        self._server: str | None = None
        self._incarnation: str | None = None

    def begin(self, holder: UUID) -> None:
        """A leadership begins under this holder, without a term yet."""
        self.holder = self.leader_id = holder
        self.term = self.told = None
        self.asked = False

    def end(self) -> None:
        self.term = self.told = self.holder = self.leader_id = None
        self.announced = False
        self.lost = 0

    def lose(self, now: float, brief_s: float) -> None:
        """Another holder has taken the term. If ours was held for longer than `brief_s`, the count of losses starts
        over.
        """
        if self.told is not None:
            self.lost = self.lost + 1 if now - self.told_at < brief_s else 1

    def tell(self, term: int, server: str | None, now: float) -> bool:
        """The term was taken on this server. Returns whether it is known to be a different server from the last one."""
        self.told_at = now
        changed = self._server is not None and server is not None and server != self._server
        self.told, self._server = term, server or self._server
        return changed

    def is_new(self, incarnation: UUID | None) -> bool:
        """Remember the outbox's incarnation; returns whether its ids may differ from those known so far."""
        before, self._incarnation = self._incarnation, str(incarnation) if incarnation is not None else None
        return self._incarnation is None or self._incarnation != before

    def remark(self, epoch: int, shards: int) -> Remark:
        """The frame for the shards. `shards`: how many have lanes to fence; 0 outside exactly-once mode."""
        if self.told is None:
            return Remark(epoch, None, None)
        lanes = max(self.lanes, LANES_OF_A_SHARD * shards) if shards else 0
        return Remark(epoch, self.told, str(self.holder), self._server, self._incarnation, lanes, shards)


class Doubt:
    """Whether something that was given up may still arrive in Kafka. One thread only."""

    def __init__(self, expiry_s: float, *, fences: bool) -> None:
        """`expiry_s`: how long it may take to arrive; `fences`: the next leader fences the lanes, so it cannot."""
        self._expiry_s, self._fences = expiry_s, fences
        self._arose_at = -math.inf
        self._to_release: tuple[int, UUID] | None = None  # the term of a drain, while all of it can still be settled

    def arise(self, now: float) -> None:
        """Something of this term, or of the previous one, may be on its way to Kafka although nothing waits for it."""
        if not self._fences:
            self._arose_at = now
            self.keep_term()

    def keep_term(self) -> None:
        """Something was forgotten that failed on the wire and may still arrive: the drain's term is not released."""
        self._to_release = None

    def drain(self, term: int | None, holder: UUID | None, now: float) -> None:
        """This term is being given up; it is released once all of it is settled, unless something is in doubt then."""
        in_doubt = now - self._arose_at < self._expiry_s
        self._to_release = (term, holder) if term is not None and holder is not None and not in_doubt else None

    def release(self) -> list[ReleaseTerm]:
        """The drain is over and everything is settled."""
        return [ReleaseTerm(*self._to_release)] if self._to_release is not None else []


class RemarkReplies:
    """Which shards have yet to reply to the last remark. One thread only."""

    def __init__(self, settings: RelaySettings) -> None:
        self._answer_timeout_s, self._silence_timeout_s = settings.answer_timeout_s, settings.silence_timeout_s
        self._is_patient = settings.exactly_once
        self.awaited: set[int] = set()
        self._deadline = 0.0

    def begin(self, shards: Iterable[int], now: float) -> None:
        """These shards were sent a remark, or will be when they are ready; no other reply is awaited."""
        self.awaited = set(shards)
        self._deadline = now + self._answer_timeout_s

    def include(self, shard: int, now: float) -> None:
        """This shard was sent the remark as well, just now."""
        self.awaited.add(shard)
        self._deadline = now + self._answer_timeout_s

    def forgive(self, lost_s: float) -> None:
        """The supervisor did not run for this long."""
        self._deadline += lost_s

    def stuck(self, shards: ShardFlows, ledger: Ledger, now: float) -> list[Kill]:
        kills: list[Kill] = []
        for index, shard in enumerate(shards):
            if not shard.ready:
                continue
            silent_s = now - shard.heard_at
            patient = self._is_patient and silent_s < self._answer_timeout_s
            if index in self.awaited and now >= self._deadline and not patient:
                kills.append(Kill(index, "it did not answer a remark"))
            elif ledger.unsettled_of(index) and silent_s >= self._silence_timeout_s:
                kills.append(Kill(index, f"it was silent for {silent_s:.1f} s"))
        return kills


@dataclass(slots=True)
class HandOver:
    """Whether a leader that cannot reach its database, or take the term, should let another harvester try (P14).

    After handing over, it waits twice as long before the next time, so that a database that is down for everyone does
    not make leadership bounce between harvesters. Reaching the database, or taking the term, resets the wait.
    """

    first_s: float
    longest_s: float
    _wait_s: float = 0.0
    _handed_s: float = 0.0  # how long the database had been unreachable at the last hand-over

    def due(self, unreachable_s: float) -> bool:
        """Whether to hand over now, after this long without the database (0: it is reachable)."""
        if unreachable_s < self._handed_s:  # it was reached in between
            self._wait_s = self._handed_s = 0.0
        wait_s = max(self._wait_s, self.first_s)
        if unreachable_s <= 0 or unreachable_s - self._handed_s < wait_s:
            return False
        self._wait_s, self._handed_s = min(self.longest_s, wait_s * 2), unreachable_s
        return True


_ENOUGH_UNSETTLED = 10_000


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits in records and seconds. Only `shards` changes while the relay runs (P17)."""

    shards: int
    max_in_flight_records: int
    max_unsettled_records: int  # including those that wait in shards behind another of their key
    mark_query_records: int
    send_buffer: int
    max_queued_per_key: int
    records_per_shard: int
    most_shards: int  # used at a time, unless `records_per_shard` is 0
    answer_timeout_s: float
    silence_timeout_s: float
    look_interval_s: float = 60.0
    exactly_once: bool = False
    expiry_s: float = 22.0  # S + H + D: by then, what a dead shard had on the wire has arrived or never will

    @property
    def bounds(self) -> InFlightBounds:
        """The ledger's limits. In exactly-once mode rows are limited, not keys: nothing waits for another record of its
        key.
        """
        most = self.max_in_flight_records
        if self.exactly_once:
            return InFlightBounds(most, most, most)
        return InFlightBounds(most, self.max_unsettled_records, self.max_queued_per_key)


def max_unsettled(in_flight: int) -> int:
    """How many records may be unsettled with this in-flight limit: enough to find that many keys among them."""
    return max(2 * in_flight, min(6 * in_flight, _ENOUGH_UNSETTLED))

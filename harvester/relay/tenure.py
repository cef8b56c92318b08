"""One leadership's identity: its leader id, its term, and the database that the term was taken on. Pure."""

from __future__ import annotations

import math
from uuid import UUID

from harvester.relay.frames import Remark


class Tenure:
    """See the module's text. What is known of the database outlives a leadership. One thread only."""

    def __init__(self) -> None:
        self.holder: UUID | None = None  # whom the term row names, or is to name
        self.leader_id: UUID | None = None  # that rows are marked under: the holder, until the first remark
        self.asked = False  # whether the term was asked for
        self.told: int | None = None  # the term that shards are told; it becomes ours when all have answered
        self.term: int | None = None
        self.lost = 0  # terms in a row, to another holder, while the group trusted this process (P37)
        self.told_at = -math.inf
        self.lanes = 0  # that exist, in exactly-once mode; set before the first term is taken
        self._server: str | None = None
        self._incarnation: str | None = None

    def begin(self, holder: UUID) -> None:
        """A leadership begins, under this name and without a term."""
        self.holder = self.leader_id = holder
        self.term = self.told = None
        self.asked = False

    def end(self) -> None:
        """Nobody leads here."""
        self.term = self.told = self.holder = self.leader_id = None
        self.lost = 0

    def lose(self, now: float, brief_s: float) -> None:
        """Another holder has taken the term. One that was held for longer than `brief_s` ends the row of losses."""
        if self.told is not None:
            self.lost = self.lost + 1 if now - self.told_at < brief_s else 1

    def tell(self, term: int, server: str | None, now: float) -> bool:
        """The term was taken on this server. Returns whether that is known to be another one than the last."""
        self.told_at = now
        changed = self._server is not None and server is not None and server != self._server
        self.told, self._server = term, server or self._server
        return changed

    def is_new(self, incarnation: UUID | None) -> bool:
        """Remember the outbox's incarnation; returns whether its ids may be others than those known so far."""
        before, self._incarnation = self._incarnation, str(incarnation) if incarnation is not None else None
        return self._incarnation is None or self._incarnation != before

    def remark(self, epoch: int, shards: int) -> Remark:
        """What shards are told. `shards`: how many have lanes to fence; 0 outside of exactly-once mode."""
        if self.told is None:
            return Remark(epoch, None, None)
        lanes = max(self.lanes, shards) if shards else 0
        return Remark(epoch, self.told, str(self.holder), self._server, self._incarnation, lanes, shards)

"""Which shards have yet to answer the last remark, and which are stuck. Pure.

*Shards that are stuck.* A shard that does not answer a remark, or is silent while it has records to settle, is
killed; a killed shard's ids have an unknown fate, which is what a remark is for. Its successor is a new process
(P15). In exactly-once mode an answer may take as long as it likes, while the shard gives a sign of life.
"""

from __future__ import annotations

from collections.abc import Iterable

from harvester.relay.commands import Kill
from harvester.relay.ledger import Ledger
from harvester.relay.limits import Settings
from harvester.relay.slices import Slices


class RollCall:
    """See the module's text. One thread only."""

    def __init__(self, settings: Settings) -> None:
        self._answer_timeout_s, self._silence_timeout_s = settings.answer_timeout_s, settings.silence_timeout_s
        self._is_patient = settings.exactly_once
        self.awaited: set[int] = set()
        self._deadline = 0.0

    def begin(self, shards: Iterable[int], now: float) -> None:
        """These were sent a remark, or will be when they are ready; nobody else's answer is awaited."""
        self.awaited = set(shards)
        self._deadline = now + self._answer_timeout_s

    def include(self, shard: int, now: float) -> None:
        """This one was sent the remark as well, now."""
        self.awaited.add(shard)
        self._deadline = now + self._answer_timeout_s

    def forgive(self, lost_s: float) -> None:
        """The supervisor did not run for so long."""
        self._deadline += lost_s

    def stuck(self, slices: Slices, ledger: Ledger, now: float) -> list[Kill]:
        """Those to be killed."""
        kills: list[Kill] = []
        for index, shard in enumerate(slices):
            if not shard.ready:
                continue
            silent_s = now - shard.heard_at
            patient = self._is_patient and silent_s < self._answer_timeout_s
            if index in self.awaited and now >= self._deadline and not patient:
                kills.append(Kill(index, "it did not answer a remark"))
            elif ledger.unsettled_of(index) and silent_s >= self._silence_timeout_s:
                kills.append(Kill(index, f"it was silent for {silent_s:.1f} s"))
        return kills

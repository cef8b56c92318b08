"""What each failing record of a shard went through, and what follows from it. Pure; the shard's lock is around it.

Kept until the record is settled, over remarks and while it waits in the supervisor, within one term.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from harvester.delivery.failures import Failure, Verdict, backoff_s, burns_attempt, judge


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of retries and queues, and what to do with a record that no further attempt would help."""

    max_attempts: int
    retry_backoff_s: float
    retry_backoff_max_s: float
    queue_timeout_s: float
    poison: str = "quarantine"  # or "hold": tried for ever behind its key; or "stop": the harvester ends


@dataclass(slots=True)
class Trial:
    """One record's failures. `attempts` are those for which the record itself was at fault."""

    first_failed_at: datetime
    failures: int = 0
    attempts: int = 0
    origin: bytes | None = None  # its header, which it keeps (P25)


class Attempts:
    """See the module's text."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._trials: dict[int, Trial] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def failed(self, record_id: int, failure: Failure, at: datetime) -> tuple[Verdict, Trial]:
        """An attempt has failed."""
        trial = self._trial(record_id, at)
        trial.failures += 1
        trial.attempts += burns_attempt(failure)
        return judge(failure, trial.attempts, self.policy.max_attempts), trial

    def impossible(self, record_id: int, at: datetime) -> Trial:
        """It can be no record, or the client refused it before it was sent: that attempt was one too many."""
        trial = self._trial(record_id, at)
        trial.attempts = max(1, trial.attempts)
        return trial

    def origin_of(self, record_id: int) -> bytes | None:
        """The header that a record had at its first attempt, if it failed."""
        trial = self._trials.get(record_id)
        return trial.origin if trial is not None else None

    def has_timed_out(self, record_id: int) -> bool:
        """Whether an earlier attempt failed without the record's fault."""
        trial = self._trials.get(record_id)
        return trial is not None and trial.failures > trial.attempts

    def wait_s(self, trial: Trial, jitter: float) -> float:
        """How long to wait before the next attempt; `jitter` in [0, 1) spreads it."""
        return backoff_s(trial.failures, self.policy.retry_backoff_s, self.policy.retry_backoff_max_s, jitter)

    def settled(self, ids: Iterable[int]) -> None:
        """They are published, or gone for good."""
        if self._trials:
            for record_id in ids:
                self._trials.pop(record_id, None)

    def clear(self) -> None:
        """Another term."""
        self._trials.clear()

    def _trial(self, record_id: int, at: datetime) -> Trial:
        trial = self._trials.get(record_id)
        if trial is None:
            trial = self._trials[record_id] = Trial(at)
        return trial

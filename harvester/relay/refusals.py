"""What becomes of records that failed in exactly-once mode: who was at fault, and what follows for it and its key.

The lock of the reception is held around every call, and the open transaction is undone before: all records are queued.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime

from confluent_kafka import KafkaError

from harvester.delivery.failures import NEVER, Failure, Verdict, burns_attempt
from harvester.outbox.purge_session import Poison
from harvester.relay.attempts import Attempts, Policy
from harvester.relay.batches import Batches, Entry
from harvester.relay.frames import Dropped, Parked, Poisoned, Remark
from harvester.relay.outlets import Outlets

# What the client says of a record that was not at fault: its transaction failed.
INNOCENT = frozenset(
    {"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_STATE", "_FATAL", "_FENCED", "_DESTROY", "_INVALID_DIFFERENT_RECORD"}
)

Failed = tuple[Entry, KafkaError | str]  # a text: it can be no record, or the client will not have it


class Refusals:
    """See the module's text."""

    def __init__(self, batches: Batches, policy: Policy, outlets: Outlets) -> None:
        self._batches, self._out = batches, outlets
        self.attempts = Attempts(policy)
        self.errors = self.retried = 0

    def judge(self, failed: Sequence[Failed], under: Remark) -> None:
        """These failed in one transaction.

        What a broker refuses it refuses for a whole batch: one of those records is at fault, and is found by halves.
        Other errors are of the record that they name, or of its partition. Where they name the whole transaction, and
        no record is to blame, nothing gets through at all, and every record keeps its place.
        """
        for entry, reason in failed:
            if isinstance(reason, str):
                self.poison(entry, reason, under)
        errors = [(entry, reason) for entry, reason in failed if isinstance(reason, KafkaError)]
        refused = [(entry, error) for entry, error in errors if error.name() in NEVER]
        others = [(entry, error) for entry, error in errors if error.name() not in NEVER]
        if refused:
            culprit = self._batches.suspect([entry for entry, _ in refused])
            if culprit is not None:
                self.fail(culprit, refused[0][1], under, local=True)
        if len(others) >= self._batches.put_back and not any(burns_attempt(Failure(e.name())) for _, e in others):
            return
        for entry, error in others:
            self.fail(entry, error, under)

    def fail(self, entry: Entry, error: KafkaError, under: Remark, *, local: bool = False) -> None:
        """A queued record is at fault, or its partition is away; `local`: no other record can be meant."""
        if entry not in self._batches:
            return  # taken out with another of its key
        self.errors += 1
        text = f"{error.name()}: {error.str()}"
        failure = Failure(error.name(), local=local)
        verdict, trial = self.attempts.failed(entry.id, failure, datetime.now(UTC))
        if verdict is not Verdict.RETRY:
            self.poison(entry, text, under)
            return
        self.retried += 1
        self._park(entry, text, self.attempts.wait_s(trial, random.random()), trial.attempts, under)

    def poison(self, entry: Entry, text: str, under: Remark) -> None:
        """A queued record that no further attempt would help: do what the policy says."""
        if entry not in self._batches:
            return
        policy = self.attempts.policy
        trial = self.attempts.impossible(entry.id, datetime.now(UTC))
        if policy.poison != "quarantine":
            self._park(entry, text, policy.retry_backoff_max_s, trial.attempts, under, held=True)
            if policy.poison == "stop":
                self._out.send(Poisoned(entry.id, text))
            return
        assert under.term is not None
        assert under.holder is not None
        self._batches.remove(entry)
        self._out.quarantine(Poison(entry.id, text, trial.attempts, trial.first_failed_at, under.term, under.holder))

    def give_up(self, record_id: int) -> None:
        """It could not be moved to quarantine: the term is another's. Whoever leads then sees to it."""
        self._out.send(Dropped(self._batches.give_up(record_id)))

    def _park(
        self, entry: Entry, text: str, wait_s: float, attempts: int, under: Remark, *, held: bool = False
    ) -> None:
        """Give it back to the supervisor until it is time, with what is queued behind it of its key."""
        behind = self._batches.park(entry)
        self._out.send(Parked(under.epoch, entry.id, behind, text, wait_s, attempts, held))

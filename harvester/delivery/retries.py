"""What a failed delivery means, each failing record's history, and when it is retried. Pure.

Theory. Three things can be at fault. The *path*: broker down, leader moving, request timed out. The record is fine, its
fate perhaps unknown; the same producer instance retries it behind its barrier for as long as it takes (P15), and this
uses up no attempts. The *record*: too large, refused, its topic or partition missing, no permission. It is tried
`max_attempts` times and then goes to quarantine: topics and permissions may be about to be created, and a broker
refuses a whole batch, including innocent records, whose next attempts, spread by jitter, travel in other batches. Only
what the client itself refuses before sending is certain: that is quarantined at once. The *producer*: a fatal error
leaves the fate of everything it holds unknown; its process ends, and the producer with it.

`_DESTROY` is of the path, too: librdkafka reports it for what it still holds for a partition of a topic that was
deleted, while the producer lives on. (The records of a producer that is itself destroyed get no report.)

A record's history (`Attempts`) is kept until it is settled, across remarks and while it waits in the supervisor, within
one term.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class RetryVerdict(Enum):
    RETRY = "retry"
    QUARANTINE = "quarantine"
    FATAL = "fatal"


# Names as returned by the client's KafkaError.name(). NEVER: another attempt cannot change the answer.
NEVER = frozenset(
    {
        "MSG_SIZE_TOO_LARGE",
        "INVALID_MSG",
        "INVALID_MSG_SIZE",
        "INVALID_RECORD",
        "TOPIC_EXCEPTION",
        "RECORD_LIST_TOO_LARGE",
        "UNSUPPORTED_FOR_MESSAGE_FORMAT",
        "INVALID_TIMESTAMP",
        "POLICY_VIOLATION",
        "_INVALID_ARG",
        "_BAD_MSG",
    }
)
MAYBE_LATER = frozenset(
    {
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
        "UNKNOWN_TOPIC_OR_PART",
        "UNKNOWN_TOPIC_ID",
        "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "UNSUPPORTED_COMPRESSION_TYPE",
    }
)
# The broker reports these for a batch, and so for every record sent together with the oversized one.
TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
FATE_UNKNOWN = frozenset({"_FATAL", "_FENCED", "_PURGE_INFLIGHT", "_PURGE_QUEUE", "_STATE"})
# In a transaction: it was not this record that made the transaction fail.
INNOCENT = FATE_UNKNOWN | {"_DESTROY", "_INVALID_DIFFERENT_RECORD"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed delivery as reported by the client."""

    name: str
    fatal: bool = False
    local: bool = False  # refused by the client before sending: this very record is at fault
    innocent: bool = False  # another record of the same batch is at fault


def judge(failure: Failure, attempts: int, max_attempts: int) -> RetryVerdict:
    """What to do after the `attempts`-th attempt that failed through the record's own fault."""
    if failure.fatal or failure.name in FATE_UNKNOWN:
        return RetryVerdict.FATAL
    if failure.name in NEVER and failure.local:
        return RetryVerdict.QUARANTINE
    if burns_attempt(failure) and attempts >= max_attempts:
        return RetryVerdict.QUARANTINE
    return RetryVerdict.RETRY


def burns_attempt(failure: Failure) -> bool:
    """Whether this failure counts towards max_attempts: an outage is not the record's fault."""
    return not failure.innocent and (failure.name in NEVER or failure.name in MAYBE_LATER)


def may_arrive(failure: Failure) -> bool:
    """Whether what was sent may still reach the log: neither client nor broker has refused this record."""
    return not (failure.local or failure.innocent or burns_attempt(failure))


def backoff_s(failures: int, first_s: float, longest_s: float, jitter: float) -> float:
    """How long to wait after this many consecutive failures: doubles up to `longest_s`, spread by `jitter` in [0,
    1).
    """
    exponent = min(max(failures - 1, 0), 40)
    return min(longest_s, first_s * 2.0**exponent) * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of retries and queues, and what to do with a record for which no further attempt would help."""

    max_attempts: int
    retry_backoff_s: float
    retry_backoff_max_s: float
    queue_timeout_s: float
    poison: str = "quarantine"  # or "hold": retried forever, blocking its key; or "stop": the harvester ends


@dataclass(slots=True)
class RetryState:
    """One record's failures. `attempts` counts those for which the record itself was at fault."""

    first_failed_at: datetime
    failures: int = 0
    attempts: int = 0
    origin: bytes | None = None  # its header, which it keeps (P25)


class Attempts:
    """The failure history of a shard's records."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.states: dict[int, RetryState] = {}  # by record id

    def failed(self, record_id: int, failure: Failure, at: datetime) -> tuple[RetryVerdict, RetryState]:
        retry = self._trial(record_id, at)
        retry.failures += 1
        retry.attempts += burns_attempt(failure)
        return judge(failure, retry.attempts, self.policy.max_attempts), retry

    def impossible(self, record_id: int, at: datetime) -> RetryState:
        """It is not a valid record, or the client refused it before sending: that attempt was one too many."""
        retry = self._trial(record_id, at)
        retry.attempts = max(1, retry.attempts)
        return retry

    def origin_of(self, record_id: int) -> bytes | None:
        """The header of a record's first attempt, if that failed."""
        retry = self.states.get(record_id)
        return retry.origin if retry is not None else None

    def has_timed_out(self, record_id: int) -> bool:
        """Whether an earlier attempt failed through no fault of the record."""
        retry = self.states.get(record_id)
        return retry is not None and retry.failures > retry.attempts

    def wait_s(self, retry: RetryState, jitter: float) -> float:
        return backoff_s(retry.failures, self.policy.retry_backoff_s, self.policy.retry_backoff_max_s, jitter)

    def settled(self, ids: Iterable[int]) -> None:
        """They are published, or permanently gone."""
        for record_id in ids:
            self.states.pop(record_id, None)

    def _trial(self, record_id: int, at: datetime) -> RetryState:
        retry = self.states.get(record_id)
        if retry is None:
            retry = self.states[record_id] = RetryState(at)
        return retry

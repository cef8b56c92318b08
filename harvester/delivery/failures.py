"""What a failed delivery means, and when to try again. Pure.

Theory. Three things can be wrong. The *path*: broker away, leader moving, request timed out; the record is fine and
its fate perhaps unknown, so it is retried by the same producer instance behind its barrier for as long as it takes
(P15), and its attempts do not burn. The *record*: too large, refused, a topic or partition that is not there, no
permission. It is tried `max_attempts` times and then goes to quarantine with its error: topics and permissions may be
on their way, and what a broker refuses it refuses for a whole batch, innocent records of other keys included; their
next attempts, spread by jitter, travel in other batches. Only what the client itself refuses before sending is
certain: that is quarantined at once. The *producer*: a fatal error of the
idempotent producer leaves the fate of everything it holds unknown; its process ends, and with it the producer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What to do with the record."""

    RETRY = "retry"
    QUARANTINE = "quarantine"
    FATAL = "fatal"


# Names as the client's KafkaError.name() gives them. NEVER: another attempt cannot change the answer.
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
# The broker says it of a batch, so of every record that happened to be sent with the one that is too large.
TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
FATE_UNKNOWN = frozenset({"_FATAL", "_FENCED", "_PURGE_INFLIGHT", "_PURGE_QUEUE", "_DESTROY", "_STATE"})


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed delivery as the client reports it."""

    name: str
    fatal: bool = False
    local: bool = False  # refused by the client before it was sent: this record, and no other, is at fault
    innocent: bool = False  # another record of the same batch is at fault


def judge(failure: Failure, attempts: int, max_attempts: int) -> Verdict:
    """What to do after the `attempts`-th attempt has failed for the record's own fault or otherwise."""
    if failure.fatal or failure.name in FATE_UNKNOWN:
        return Verdict.FATAL
    if failure.name in NEVER and failure.local:
        return Verdict.QUARANTINE
    if burns_attempt(failure) and attempts >= max_attempts:
        return Verdict.QUARANTINE
    return Verdict.RETRY


def burns_attempt(failure: Failure) -> bool:
    """Whether this failure counts against max_attempts: an outage is not the record's fault."""
    return not failure.innocent and (failure.name in NEVER or failure.name in MAYBE_LATER)


def may_arrive(failure: Failure) -> bool:
    """Whether what was sent may still reach the log: neither the client nor the broker has refused this record."""
    return not (failure.local or failure.innocent or burns_attempt(failure))


def backoff_s(failures: int, first_s: float, longest_s: float, jitter: float) -> float:
    """How long to wait after this many failures in a row: doubling, bounded, spread by `jitter` in [0, 1)."""
    exponent = min(max(failures - 1, 0), 40)
    return min(longest_s, first_s * 2.0**exponent) * (0.5 + jitter / 2)

"""The errors that the harvester raises deliberately, and their process exit codes.

Every error carries a `message` (what happened, to which record or server) and, if something can be done, a `hint`. The
command line prints one line per error and exits with `exit_code`; users see no traceback for anything foreseeable.
Errors of a single package are in that package's `errors`.

The codes follow sysexits.h where possible, so that systemd can distinguish "do not restart" (configuration, schema)
from "restart me" (everything else).

    HarvesterError
      ConfigurationError
      OutboxError        DatabaseUnavailable  SchemaError  TermLost  UndecodableRecord  PoisonRecord  OrderNotKept
        RecordRejected   SerializationFailed
        NoTransaction
        LeaseError       LeaseExpired  LeaseFenced  LeaseUnknown  SequenceGap
      BrokerError        BrokerUnavailable
      LeadershipError    ForeignOutbox  ForeignLeader  TermContested
      IdempotenceError   CorruptSeenIds
        InboxError       InboxFenced
      ShardError         CrashLoop
      ClaimCheckError    StoreUnavailable  StoredValueMissing  StoredValueChanged
      WireError  StackError  DeserializationFailed  VerificationFailed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """How a harvester process ends. A test keeps the table in docs/operations.md consistent with this."""

    OK = 0
    FAILED = 1  # the command ran and its answer is no (a failed verdict, a refused record)
    USAGE = 2  # unknown option or argument
    SCHEMA = 65  # the outbox table is missing or has the wrong shape: run `harvester init`
    INPUT = 66  # a topic to be read does not exist
    ENGINE = 67  # Spark is not installed, or there is no suitable Java
    CONNECTOR = 68  # a Spark connector is for another version of Spark
    UNAVAILABLE = 69  # a server could not be reached within the given time
    SOFTWARE = 70  # a bug: please report it
    CRASH_LOOP = 71  # shards died more often than the restart budget allows
    POISON = 72  # a record cannot be published, and poison.policy is "stop": fix or remove it first
    TABLE = 73  # a pipeline table exists with a different schema, or was filled by another job
    CHECKPOINT = 74  # the checkpoint of a job belongs to other topics
    LEADERSHIP = 76  # the group cannot be used (it serves another outbox, or the outbox belongs to another group)
    CONFIGURATION = 78  # the configuration is wrong: fix it, a restart does not help
    FORCED = 130  # a second signal ended it before the drain was done


class HarvesterError(Exception):
    """The base class: catching it catches everything foreseeable."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)  # whatever parameters the constructor has


def _again(kind: type[HarvesterError], args: tuple[Any, ...], state: dict[str, Any]) -> HarvesterError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration: where (dotted path), what, and what would be right."""

    path: str
    message: str
    allowed: str | None = None

    def __str__(self) -> str:
        allowed = f" (allowed: {self.allowed})" if self.allowed else ""
        return f"{self.path}: {self.message}{allowed}"


class ConfigurationError(HarvesterError):
    """The configuration is wrong; `problems` lists all problems, not just the first."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, problems: Sequence[Problem], *, source: str | None = None, hint: str | None = None):
        self.problems = tuple(problems)
        self.source = source
        where = f" in {source}" if source else ""
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__(f"{count} configuration {noun}{where}:{lines}", hint=hint)


class OutboxError(HarvesterError):
    """The database or a table of the outbox cannot be used as asked."""


class DatabaseUnavailable(OutboxError):
    """PostgreSQL cannot be reached, or ended the session. Retried with backoff wherever it is safe."""

    exit_code = ExitCode.UNAVAILABLE


class SchemaError(OutboxError):
    """The outbox, term or quarantine table is missing or has the wrong shape."""

    exit_code = ExitCode.SCHEMA


class TermLost(OutboxError):
    """The term row names another term or holder: this process was deposed."""


class RecordRejected(OutboxError):
    """A stasher refused a record that could never be published; nothing was written."""


class SerializationFailed(RecordRejected):
    """A value could not be serialised; nothing was sent, and the transaction can continue."""


class DeserializationFailed(HarvesterError):
    """The value of a consumed record is not what its deserialiser expects."""


class NoTransaction(OutboxError):
    """A record was to be written outside a transaction, where nothing ties it to the change it announces."""


class LeaseError(OutboxError):
    """A leased stasher wrote nothing; `lease` is the one it presented (`harvester.Lease`), None while requesting one.

    The database refused without an SQL error: the caller's transaction can continue.
    """

    def __init__(self, message: str, *, lease: object = None, hint: str | None = None) -> None:
        self.lease = lease
        super().__init__(message, hint=hint)


class LeaseExpired(LeaseError):
    """The lease has expired, or its row was removed. It stashes nothing any more, not even resends.

    The name's next lease continues from the last number and position.
    """


class LeaseFenced(LeaseError):
    """Another stasher took the lease; only that one may continue."""


class LeaseUnknown(LeaseError):
    """The database never issued a generation this high: it is an older copy, or the generation is made up."""


class SequenceGap(LeaseError):
    """A number skipped others: the database expected `expected`, but `sequence` came.

    Until the stasher goes back to `expected`, everything that follows is refused as well.
    """

    def __init__(self, message: str, *, sequence: int, expected: int, lease: object, hint: str | None = None) -> None:
        self.sequence, self.expected = sequence, expected
        super().__init__(message, lease=lease, hint=hint)


class OrderNotKept(OutboxError):
    """Quarantined records cannot go back without breaking the order of their keys."""

    def __init__(self, blocked: int, chosen: int, reasons: str) -> None:
        self.blocked, self.chosen = blocked, chosen
        super().__init__(
            f"{blocked} of {chosen} records cannot keep the order of their keys ({reasons}); nothing was changed",
            hint="--dry-run gives the reason for each record; --order unknown-ok puts back those whose order is only"
            " unknown, --out-of-order all of them",
        )


class UndecodableRecord(OutboxError):
    """A row cannot be turned into a Kafka record; it is quarantined with this message."""


class PoisonRecord(OutboxError):
    """A record cannot be published, and the policy is to stop rather than continue without it."""

    exit_code = ExitCode.POISON

    def __init__(self, record_id: int, error: str) -> None:
        self.record_id, self.error = record_id, error
        super().__init__(
            f"record {record_id} cannot be published: {error}",
            hint='correct or delete the row, or set poison.policy to "quarantine"; no other record is affected',
        )


class BrokerError(HarvesterError):
    """Kafka refused something, or gave an impossible answer."""


class BrokerUnavailable(BrokerError):
    """No broker answered in time."""

    NO_ANSWER = "check that Kafka is running and that bootstrap.servers is correct"
    """The hint for no answer at all."""

    exit_code = ExitCode.UNAVAILABLE


class LeadershipError(HarvesterError):
    """The election cannot continue."""

    exit_code = ExitCode.LEADERSHIP


class ForeignOutbox(LeadershipError):
    """A member of the same group serves another outbox: `theirs`, not `ours`."""

    def __init__(self, *, group: str, member: str, theirs: str, ours: str) -> None:
        self.group, self.member, self.theirs, self.ours = group, member, theirs, ours
        super().__init__(
            f"group {group!r} is in use: its member {member!r} serves the outbox {theirs}, but this harvester {ours}",
            hint="give each outbox its own leader_group_id and leader_topic",
        )


class ForeignLeader(LeadershipError):
    """The outbox belongs to another leader group, or to the same group in another Kafka cluster."""

    def __init__(self, table: object, *, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours
        super().__init__(
            f"the outbox {table} belongs to {theirs}; this harvester belongs to {ours}",
            hint="set that leader_group_id and cluster; or move the outbox here: stop the other group's harvesters,"
            " then run `harvester move` with this configuration",
        )


class TermContested(LeadershipError):
    """The term alternates between this harvester and another of its group, and the group trusts both."""

    def __init__(self, table: object, *, group: str, holder: str, lost: int) -> None:
        self.holder, self.lost = holder, lost
        super().__init__(
            f"the term of {table} was lost {lost} times in a row, the last time to {holder!r}, although group"
            f" {group!r} trusted this harvester throughout: both were elected",
            hint="check that all harvesters of the group use the same Kafka cluster and the same leader_topic",
        )


class IdempotenceError(HarvesterError):
    """Records written or seen before cannot be recognised."""


class CorruptSeenIds(IdempotenceError):
    """Stored bytes are not a set of seen ids."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the stored ids of a consumer cannot be read: {what}",
            hint="restore the row from a backup; without its ids, repeated records are processed twice",
        )


class InboxError(IdempotenceError):
    """The inbox refused a record; nothing was changed."""


class InboxUnavailable(InboxError):
    """The inbox's database cannot be reached, or ended the session. The transaction may have been committed or not: the
    same record, given again, is found to be new or a repeat.
    """

    exit_code = ExitCode.UNAVAILABLE


class InboxFenced(InboxError):
    """Another owner took the partition; `ours` and `theirs` are the two generations."""

    def __init__(self, topic: str, partition: int, *, ours: int, theirs: int) -> None:
        self.topic, self.partition, self.ours, self.theirs = topic, partition, ours, theirs
        super().__init__(
            f"{topic}[{partition}] is owned by generation {theirs}, but this consumer has {ours}",
            hint="stop consuming the partition; open it again once it is assigned again",
        )


class ClaimCheckError(HarvesterError):
    """A value in a store outside Kafka could not be stored or retrieved."""


class StoreUnavailable(ClaimCheckError):
    """The store cannot be reached, or refuses a request. The relay retries for as long as it takes."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, store: str, reason: str, hint: str | None = None) -> None:
        super().__init__(
            f"the store {store} cannot be used: {reason}",
            hint=hint
            or "check that it exists and that this process may read and write it; `harvester doctor` tests it",
        )


class StoredValueMissing(ClaimCheckError):
    """The store has no object with the name to which a record refers."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place} does not exist: it was deleted, or is in another store",
            hint="make the store's rules keep objects for longer than the topics keep records, and check that `store`"
            " is the one that the relay writes to",
        )


class StoredValueChanged(ClaimCheckError):
    """An object is not the value that was stored, or a record's headers do not name an object."""

    def __init__(self, place: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{place} is not the value that was stored: {reason}",
            hint="find out what else writes to the store besides the relay; the row may still be in the archive",
        )


class ShardError(HarvesterError):
    """A shard process failed."""


class CrashLoop(ShardError):
    """Shards died more often than the restart budget allows."""

    exit_code = ExitCode.CRASH_LOOP


class WireError(HarvesterError):
    """Bytes on a pipe are not a frame: always a bug or a broken peer."""

    exit_code = ExitCode.SOFTWARE


class StackError(HarvesterError):
    """An embedded server could not be started, found or stopped."""

    exit_code = ExitCode.UNAVAILABLE


class VerificationFailed(HarvesterError):
    """`verify` or `demo` found that a guarantee did not hold."""

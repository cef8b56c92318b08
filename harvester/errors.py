"""The tree of errors that the harvester raises on purpose, and the exit codes they end a process with.

Every error carries `message` (what happened, to which record or server) and, where there is one, `hint`
(what to do about it). The command line prints the two as one line each and exits with `exit_code`; nothing
foreseeable reaches a user as a traceback. A branch that only one package grows is in that package's `errors`.

The codes follow sysexits.h where it has a fitting one, so that systemd can tell "do not restart"
(configuration, schema) from "restart me" (everything else).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """How a harvester process ends. The table in docs/operations.md is kept equal to this by a test."""

    OK = 0
    FAILED = 1  # the command ran and its answer is no (a verdict that does not hold, a record refused)
    USAGE = 2  # unknown option or argument
    SCHEMA = 65  # the outbox table is missing or has the wrong shape: run `harvester init`
    INPUT = 66  # a topic that a job of the pipeline is to read does not exist
    ENGINE = 67  # Spark is not installed, or there is no Java that it runs on
    CONNECTOR = 68  # a connector of Spark was made for another version of it
    UNAVAILABLE = 69  # a server could not be reached within the time that was given
    SOFTWARE = 70  # a bug: please report it
    CRASH_LOOP = 71  # shards died more often than the restart budget allows
    POISON = 72  # a record cannot be published, and poison.policy is "stop": fix or remove it first
    TABLE = 73  # a table of the pipeline exists with another schema, or was filled by another job
    CHECKPOINT = 74  # the checkpoint of a job belongs to other topics
    LEADERSHIP = 76  # the group cannot be used (it serves another outbox, or the outbox belongs to another group)
    CONFIGURATION = 78  # the configuration is wrong: fix it, a restart does not help
    FORCED = 130  # a second signal ended it before the drain was done


class HarvesterError(Exception):
    """Base of all; catching it catches everything foreseeable."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: where (dotted path), what, and what would be right."""

    path: str
    message: str
    allowed: str | None = None

    def __str__(self) -> str:
        allowed = f" (allowed: {self.allowed})" if self.allowed else ""
        return f"{self.path}: {self.message}{allowed}"


class ConfigurationError(HarvesterError):
    """The configuration is wrong; `problems` lists everything that is, not just the first."""

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
    """Something about the database or a table of the outbox."""


class DatabaseUnavailable(OutboxError):
    """PostgreSQL cannot be reached, or ended the session. Retried with backoff wherever that is safe."""

    exit_code = ExitCode.UNAVAILABLE


class SchemaError(OutboxError):
    """The outbox, term or quarantine table is missing or does not fit."""

    exit_code = ExitCode.SCHEMA


class TermLost(OutboxError):
    """The term row names another term or holder: this process was deposed."""


class RecordRejected(OutboxError):
    """A record that could never be published was refused before it was written (stasher)."""


class SerializationFailed(RecordRejected):
    """A value could not be turned into what a record holds: nothing was sent, the transaction can go on."""


class NoTransaction(OutboxError):
    """A record was to be written where nothing would tie it to the change that it announces."""


class LeaseError(OutboxError):
    """A leased stasher wrote nothing; `lease` is what it brought (`harvester.Lease`), None while it is asked for one.

    Raised for an answer of the database, not for an error in it: the caller's transaction can go on.
    """

    def __init__(self, message: str, *, lease: object = None, hint: str | None = None) -> None:
        self.lease = lease
        super().__init__(message, hint=hint)


class LeaseExpired(LeaseError):
    """The lease's time is over, or its row was removed. Nothing can be stashed under it, resends neither.

    The name's next lease goes on with the last number and position.
    """


class LeaseFenced(LeaseError):
    """The lease was taken by another stasher, which alone may go on."""


class LeaseUnknown(LeaseError):
    """The database never gave out a generation this high: it is an older copy, or the generation is made up."""


class SequenceGap(LeaseError):
    """A number came before the ones below it: `expected` is the next one for the database, `sequence` what came.

    Until the stasher goes back to `expected`, all that follows is refused as well.
    """

    def __init__(self, message: str, *, sequence: int, expected: int, lease: object, hint: str | None = None) -> None:
        self.sequence, self.expected = sequence, expected
        super().__init__(message, lease=lease, hint=hint)


class OrderNotKept(OutboxError):
    """Records of the quarantine cannot go back without breaking the order of their keys."""

    def __init__(self, blocked: int, chosen: int, reasons: str) -> None:
        self.blocked, self.chosen = blocked, chosen
        super().__init__(
            f"{blocked} of {chosen} records cannot keep the order of their keys ({reasons}); nothing was changed",
            hint="--dry-run tells why, record by record; --out-of-order puts them back all the same",
        )


class UndecodableRecord(OutboxError):
    """A row that cannot be turned into a Kafka record; it goes to quarantine with this message."""


class PoisonRecord(OutboxError):
    """A record that cannot be published, where the policy is to stop rather than to go on without it."""

    exit_code = ExitCode.POISON

    def __init__(self, record_id: int, error: str) -> None:
        self.record_id, self.error = record_id, error
        super().__init__(
            f"record {record_id} cannot be published: {error}",
            hint='correct or delete the row, or set poison.policy to "quarantine"; nothing else was lost',
        )


class BrokerError(HarvesterError):
    """Something about Kafka."""


class BrokerUnavailable(BrokerError):
    """No broker answered in time."""

    exit_code = ExitCode.UNAVAILABLE


class LeadershipError(HarvesterError):
    """The election cannot go on."""

    exit_code = ExitCode.LEADERSHIP


class ForeignOutbox(LeadershipError):
    """A member of the same group serves another outbox; `theirs` and `ours` name the two."""

    def __init__(self, *, group: str, member: str, theirs: str, ours: str) -> None:
        self.group, self.member, self.theirs, self.ours = group, member, theirs, ours
        super().__init__(
            f"group {group!r} is in use: its member {member!r} serves the outbox {theirs}, this one {ours}",
            hint="give each outbox its own leader_group_id and leader_topic",
        )


class ForeignLeader(LeadershipError):
    """The outbox belongs to another leader group, or to the same one of another Kafka cluster."""

    def __init__(self, table: object, *, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours
        super().__init__(
            f"the outbox {table} belongs to {theirs}; this harvester is of {ours}",
            hint="set that leader_group_id and cluster; or move the outbox here: stop the harvesters that it belongs"
            " to, then run `harvester move` with this configuration",
        )


class TermContested(LeadershipError):
    """The term goes to and fro between this harvester and another one of its group, and the group trusts both."""

    def __init__(self, table: object, *, group: str, holder: str, lost: int) -> None:
        self.holder, self.lost = holder, lost
        super().__init__(
            f"the term of {table} was lost {lost} times in a row, the last time to {holder!r}, although group"
            f" {group!r} trusted this harvester all the time: the two are elected side by side",
            hint="see that all harvesters of the group use the same Kafka cluster and the same leader_topic",
        )


class IdempotenceError(HarvesterError):
    """Something about recognising what was written or seen before."""


class CorruptSeenIds(IdempotenceError):
    """Stored bytes are no set of seen ids."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"these are not the stored ids of a consumer: {what}",
            hint="restore the row from a backup; without its ids, records that come twice are taken twice",
        )


class InboxError(IdempotenceError):
    """The inbox cannot take a record; nothing was changed."""


class InboxFenced(InboxError):
    """Another owner took the partition; `ours` and `theirs` are the two generations."""

    def __init__(self, topic: str, partition: int, *, ours: int, theirs: int) -> None:
        self.topic, self.partition, self.ours, self.theirs = topic, partition, ours, theirs
        super().__init__(
            f"{topic}[{partition}] is owned by generation {theirs}, this consumer has {ours}",
            hint="stop consuming it; whoever is assigned it again opens it again",
        )


class ShardError(HarvesterError):
    """Something about a shard process."""


class CrashLoop(ShardError):
    """Shards died more often than the restart budget allows."""

    exit_code = ExitCode.CRASH_LOOP


class WireError(HarvesterError):
    """Bytes on a pipe that are no frame; always a bug or a broken peer."""

    exit_code = ExitCode.SOFTWARE


class StackError(HarvesterError):
    """The embedded servers could not be started, found or stopped."""

    exit_code = ExitCode.UNAVAILABLE


class VerificationFailed(HarvesterError):
    """`verify` or `demo` found that a guarantee did not hold."""

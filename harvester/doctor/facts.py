"""The facts that the doctor collects, the conclusions of its checks (findings), and the report of all findings.

None stands for what could not be read; `unread` has the reasons, by the name of the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

from harvester.outbox import catalog
from harvester.outbox.leader_session import ANYONE, Owner
from harvester.outbox.overview import KeySkew


class Pooling(Enum):
    """Whether there is a pooler between us and the server, according to the pids of two simultaneous sessions."""

    NONE = "none"
    SESSION = "session"  # a pooler that has so far kept a server session for each of ours
    TRANSACTION = "transaction"  # one server session served both of ours


@dataclass(frozen=True, slots=True)
class Clock:
    """Another clock minus ours. The true value is within `offset_s` ± `uncertainty_s` (half a round trip)."""

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This machine and this process. `open_files` is the soft limit, None without one."""

    cores: int
    open_files: int | None
    python: str
    kafka_client: str
    postgres_client: str


@dataclass(frozen=True, slots=True)
class Connections:
    """Sessions of the whole server, of this role and of this database. A limit of -1 means none."""

    used: int
    most: int
    reserved: int
    role_limit: int
    role_used: int
    database_limit: int
    database_used: int


@dataclass(frozen=True, slots=True)
class Vacuum:
    """The outbox as seen by autovacuum. `options`: storage parameters of the table; `idle_s` since the last vacuum."""

    live: float
    dead: int
    options: Mapping[str, str]
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that prevents deleted rows from being removed, or ids from being accounted for.

    `kind`: transaction, writer (has written to the outbox), prepared, slot, standby.
    """

    kind: str
    name: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Index:
    """An index of the outbox."""

    name: str
    valid: bool
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """The state of PostgreSQL at one moment. `settings` as after `RESET`, without what our own session has set."""

    version: int  # as in server_version_num
    settings: Mapping[str, str]
    pooling: Pooling
    clock: Clock
    sees_all: bool  # may see the activity of other roles' sessions
    identity_known: bool  # may identify the server (P9)
    catalog: catalog.Facts
    schema_version: int | None  # None: no term row
    owner: Owner = ANYONE  # according to the term row
    delivery: str | None = None  # of the last term
    progress_topic: str | None = None  # the id of the one that the term row records
    lease: bool = False  # the table of leases exists
    archive: str | None = None  # "missing", "plain" (not partitioned), "denied", "ready"; None if not configured
    notices: bool | None = None  # may insert notices; None if not configured
    connections: Connections | None = None
    vacuum: Vacuum | None = None
    holders: tuple[Holder, ...] | None = None
    indexes: tuple[Index, ...] = ()
    standbys: int = 0
    topics: tuple[str, ...] = ()  # of the rows at the head
    skew: KeySkew | None = None  # None: no row has a key
    unread: Mapping[str, str] = field(default_factory=dict)

    def needed_progress(self, delivery: str) -> str | None:
        """The id of the progress topic without which the next harvester, which delivers so, refuses to run."""
        return self.progress_topic if "exactly-once" in (delivery, self.delivery) else None


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Broker ids; `leader` is -1 while there is none."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """`settings` None: may not be read. `operations` None: the broker did not report our permissions. `id`: Kafka's."""

    name: str
    partitions: tuple[PartitionFacts, ...]
    settings: Mapping[str, str] | None = None
    operations: frozenset[str] | None = None
    id: str | None = None

    @property
    def replication(self) -> int:
        """That of the partition with the fewest."""
        return min((len(partition.replicas) for partition in self.partitions), default=0)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The leader group; `operations` as in TopicFacts."""

    state: str
    members: int
    operations: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka:
    """The state of the cluster at one moment. `topics` contains those requested that exist."""

    brokers: int
    cluster: str | None = None  # its id
    settings: Mapping[str, str] | None  # of one broker
    topics: Mapping[str, TopicFacts]
    group: GroupFacts | None
    operations: frozenset[str] | None  # on the cluster
    unread: Mapping[str, str] = field(default_factory=dict)


class CheckLevel(StrEnum):
    """The severity. A warning costs speed, convenience or a margin; a problem stops the relay or risks records."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not examined: not requested, a server is unavailable, or the role may not see it."""
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`check` is a stable name (`database.version`); `found` is the state, `advice` the remedy."""

    check: str
    level: CheckLevel
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings, in reading order: the machine, the database, Kafka, the clocks."""

    findings: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem. Warnings do not count."""
        return not self.of(CheckLevel.PROBLEM)

    def of(self, level: CheckLevel) -> list[CheckResult]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level is level]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values; a public interface."""
        return {
            "ok": self.ok,
            "counts": {level.value: len(self.of(level)) for level in CheckLevel},
            "findings": [asdict(each) for each in self.findings],
        }


def ok(check: str, found: str) -> CheckResult:
    """Nothing to do."""
    return CheckResult(check, CheckLevel.OK, found)


def skipped(check: str, found: str, advice: str | None = None) -> CheckResult:
    """Not examined."""
    return CheckResult(check, CheckLevel.SKIPPED, found, advice)


def warning(check: str, found: str, advice: str) -> CheckResult:
    """Works, at a cost."""
    return CheckResult(check, CheckLevel.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> CheckResult:
    """Does not work, or records are at risk."""
    return CheckResult(check, CheckLevel.PROBLEM, found, advice)


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def age(seconds: float) -> str:
    """`3.2 h`; for people."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"

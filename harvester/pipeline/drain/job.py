"""The job `drain`: a cluster publishes a backlog, slice by slice, under a term borrowed from the harvesters.

    renew ─▶ select rows, in a snapshot ─▶ set poison rows aside ─▶ send ─▶ purge ─▶ next slice
                                                └─▶ quarantine, select again

Each slice begins at the head of the outbox: previous slices are purged by then, and rows that were committed late are
found. Nothing of a slice is purged before all of it is acknowledged, so a drain that is killed loses nothing, and the
current slice is repeated. *Order*: one task sends the rows of a key, in id order, and no slice begins before the
previous one has ended. Poison rows, which cannot become records, are found before anything of the slice is sent, and
are quarantined as by the relay.

The driver renews the lease while it works. If it is cut off, its tasks stop before the lease ends (`Times`), so that
nothing of ours is on the wire when the next holder takes the term (rule P32). After a failure a task may still be
running somewhere, so the term is not released, and the next holder waits until the lease has expired. A drain that
takes the term from an exactly-once leader fences that leader's lanes, and purges what they have committed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
from pyspark.sql import SparkSession

from harvester import origin
from harvester.config import Config
from harvester.delivery.opening import Deposed, Leadership, Superseded
from harvester.errors import ConfigurationError, DatabaseUnavailable, HarvesterError, PoisonRecord, Problem, TermLost
from harvester.outbox.connection import database_errors
from harvester.outbox.leader_session import TermRow
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome, Rules
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_loan import Borrower, Loan, Patience
from harvester.pipeline.drain import slices as drain_slice
from harvester.pipeline.drain.slices import DrainRules, Stamp, TopicLimits, check, is_doubtful, times, why_poison
from harvester.pipeline.drain.write import SliceRows, SliceWriter, Snapshot, Topics
from harvester.pipeline.errors import PipelineError
from harvester.record import RowVersions
from harvester.relay.at_least_once import RESERVED
from harvester.relay.term import AT_LEAST_ONCE
from harvester.wiring import owner_of, take_over_mode, unaware_s


@dataclass(frozen=True, slots=True)
class _Borrowing:
    """The drain as the `TakeOver` that fences its predecessor's lanes."""

    is_over: Callable[[], bool]

    def pause(self, seconds: float) -> None:
        """Waits between two attempts."""
        time.sleep(seconds)

    def trouble(self, text: str | None) -> None:
        """Not reported: the drain fails if it takes too long."""

    def ids_given_again(self) -> None:
        """Nothing to do: the drain fails, and the next leader begins another incarnation."""


def settle(config: Config, is_over: Callable[[], bool]) -> Callable[[TermRow, int, UUID, UUID], None]:
    """Settles what an exactly-once predecessor left; a Borrower calls the result after taking the term.

    Its arguments are the term row before that, the term, its holder and the incarnation. It raises SchemaError,
    BrokerUnavailable, BrokerError, DatabaseUnavailable, TermLost.
    """
    mode = take_over_mode(config.model_copy(update={"delivery": AT_LEAST_ONCE}), "harvester drain/lanes")

    def settled(row: TermRow, term: int, holder: UUID, incarnation: UUID) -> None:
        mode.check(row)
        try:
            mode.fence(row, Leadership(term, str(holder), incarnation), _Borrowing(is_over))
        except (Superseded, Deposed) as error:
            raise TermLost(f"term {term} of this drain has ended before its predecessor's lanes were fenced") from error

    return settled


_TURN_S = 0.2
_NOTICE_S = 5.0  # a busy leader looks this often whether it is asked


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """`kafka`: options of Kafka's Java client. `slice_records`, `slice_bytes`: the limits of a slice.

    `records`: stop after this many; `leave`: stop when no more than this many are left.
    """

    config: Config
    kafka: Mapping[str, str]
    lease: timedelta = timedelta(seconds=60)
    tasks: int | None = None
    slice_records: int = 500_000
    slice_bytes: int = 1 << 30
    records: int | None = None
    leave: int = 0
    purgers: int = 2


@dataclass(frozen=True, slots=True)
class DrainSliceDone:
    """A finished slice. `left`: approximately how many records are left; `quarantined`: since the previous slice."""

    number: int
    records: int
    took_s: float
    left: int
    quarantined: int


@dataclass(slots=True)
class DrainReport:
    """The results of a drain. `taken`: whether it had the term."""

    records: int = 0
    quarantined: int = 0
    slices: int = 0
    took_s: float = 0.0
    taken: bool = False


def run(
    spark: SparkSession,
    settings: DrainSettings,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[DrainSliceDone], None] = lambda _: None,
    waiting: Callable[[str], None] = lambda _: None,
) -> DrainReport:
    """Drains until nothing is left, or until `stop()`, after which it finishes the current slice.

    `waiting` is called with what the drain waits for. Raises ConfigurationError, DatabaseUnavailable, SchemaError,
    BrokerUnavailable, TermLost; PoisonRecord, depending on poison.policy; PipelineError if a slice was not written.
    Purged rows were always written.
    """
    config = settings.config
    refuse(spark, config)
    durations = times(settings.lease, check(settings.kafka))
    limits = config.limits
    release_s = (limits.drain_interval + config.delivery_timeout).total_seconds() + _NOTICE_S
    patience = Patience(release_s, unaware_s(config))
    borrower = Borrower(
        config.dsn, config.table, config.name, settings.lease, patience, settle(config, stop), owner=owner_of(config)
    )
    with borrower, Snapshot(config.dsn, config.table, borrower.session.place) as snapshot:
        writer = SliceWriter(spark, config, settings.kafka, durations, settings.tasks)
        if config.archive != "off":
            borrower.session.check_archive()
        writer.start(snapshot.shape)
        try:
            loan = borrower.take(waiting, stop)
        except BaseException:
            with suppress(HarvesterError):
                borrower.give_up()
            raise
        if loan is None:
            return DrainReport()
        job = _Drain(settings, durations, borrower, loan, snapshot, writer, waiting)
        try:
            job.perform(stop, progress)
        except BaseException:
            with suppress(HarvesterError):
                job.close()
            raise
        job.close()
        return job.report


def refuse(spark: SparkSession, config: Config) -> None:
    """Raises ConfigurationError for settings that Spark's Kafka sink cannot or must not honour."""
    problems = []
    if not config.record_header:
        problems.append(Problem("record_header", "is empty: records would lack the header that identifies them"))
    if config.record_timestamp != "produce":
        problems.append(Problem("record_timestamp", "cannot be kept: Spark's Kafka sink sets no timestamps", "produce"))
    if config.tracing.enabled:
        problems.append(Problem("tracing.enabled", "cannot be kept: Spark's Kafka sink creates no spans", "false"))
    if config.oversize.policy == "claim-check":
        text = "stores large values, but a drain would quarantine their rows"
        problems.append(Problem("oversize.policy", text, "quarantine; or let `harvester start` publish them"))
    if spark.sparkContext.getConf().get("spark.speculation", "false") == "true":
        problems.append(Problem("--conf spark.speculation", "would let two tasks send the same key at once", "false"))
    if problems:
        raise ConfigurationError(problems, hint="--set and --conf change them for this job only")


class _Drain:
    """A drain under its loan. Only the calling thread uses the borrower; Spark and purges run in other threads."""

    def __init__(
        self,
        settings: DrainSettings,
        durations: drain_slice.Times,
        borrower: Borrower,
        loan: Loan,
        snapshot: Snapshot,
        writer: SliceWriter,
        waiting: Callable[[str], None],
    ) -> None:
        config = settings.config
        own_limit = config.producer_options().get("message.max.bytes")
        self._rules = DrainRules(
            dict.fromkeys((config.leader_topic, config.progress_topic), RESERVED),
            config.record_header,
            origin.SIZE,
            None if own_limit is None else int(own_limit),
        )
        self._settings, self._times, self._borrower, self._loan = settings, durations, borrower, loan
        self._snapshot, self._writer, self._waiting = snapshot, writer, waiting
        self._renew_at = self._asked_at = 0.0  # by the monotonic clock; by the tasks' clock
        self._topics = Topics(config)
        self._purgers = Purgers(
            config.dsn, config.table, Rules(config.archive, config.poison.notice_topic), str(borrower.session.place),
            loan.term, settings.purgers,
        )  # fmt: skip
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="slice")
        self._in_doubt = False  # a task may be running somewhere
        self.report = DrainReport(taken=True)

    def close(self) -> None:
        """Ends all threads, and releases the term unless something may still be on the wire."""
        self._sending.shutdown()
        self._purgers.close()
        if not self._in_doubt:
            self._borrower.release()

    def perform(self, stop: Callable[[], bool], progress: Callable[[DrainSliceDone], None]) -> None:
        """Sends slice after slice, each of which is added to `report`."""
        report, snapshot, most = self.report, self._snapshot, self._settings.slice_records
        began, quarantined = time.monotonic(), 0
        wanted = min(drain_slice.FIRST_RECORDS, most)
        while not stop() and (limit := self._limit(wanted)) > 0:
            slice_began = time.monotonic()
            self._renew()
            chosen = snapshot.choose(limit, self._settings.slice_bytes, self._loan.term, self._loan.holder)
            if chosen is None or len(chosen.ids) + chosen.left <= self._settings.leave:
                break
            topics = self._topics.look([one.topic for one in chosen.shares if one.topic])
            if moved := self._set_aside(chosen, topics):
                quarantined += moved
                report.quarantined += moved
                continue
            self._send(chosen, topics)
            self._await(self._purgers.purge(chosen.ids, self._waiting))
            snapshot.end()
            report.records += len(chosen.ids)
            report.slices += 1
            report.took_s = time.monotonic() - began
            took_s = time.monotonic() - slice_began
            progress(DrainSliceDone(report.slices, len(chosen.ids), took_s, chosen.left, quarantined))
            quarantined = 0
            wanted = drain_slice.next_records(len(chosen.ids), took_s, self._times.slice, most)

    def _limit(self, wanted: int) -> int:
        most = self._settings.records
        return wanted if most is None else min(wanted, most - self.report.records)

    # -- poison rows

    def _set_aside(self, chosen: SliceRows, topics: Mapping[str, TopicLimits]) -> int:
        """Quarantines poison rows, not necessarily all; returns how many. Unless 0, the slice must be selected again.

        Raises PoisonRecord if the policy is not to quarantine them: only harvesters can hold keys.
        """
        looked_up = [(share, topics.get(share.topic or "")) for share in chosen.shares]
        shares = [(share, topic) for share, topic in looked_up if is_doubtful(share, topic, self._rules)]
        low, high = chosen.ids[0], chosen.ids[-1]
        while shares and low <= high and (rows := self._snapshot.doubtful((low, high), shares, self._rules)):
            self._keep()
            judged = [(record.id, why_poison(record, size, topics, self._rules)) for record, size in rows]
            if found := [(record_id, why) for record_id, why in judged if why is not None]:
                return self._quarantine(found)
            low = rows[-1][0].id + 1
        return 0

    def _quarantine(self, found: Sequence[tuple[int, str]]) -> int:
        config, loan = self._settings.config, self._loan
        if config.poison.policy != "quarantine":
            raise PoisonRecord(*found[0])
        self._snapshot.end()
        moved = 0
        for record_id, why in found:
            self._keep()
            attempts = config.limits.max_attempts if why.startswith("_UNKNOWN") else 1
            moved += self._purgers.quarantine(record_id, why, attempts, loan.term, loan.holder)
        return max(moved, 1)  # a row that is gone changes the slice, too

    # -- sending

    def _send(self, chosen: SliceRows, topics: Mapping[str, TopicLimits]) -> None:
        self._renew()
        loan, shape = self._loan, self._snapshot.shape
        stamp = Stamp(self._settings.config.record_header, loan.incarnation, loan.term, random.getrandbits(32))
        deadline_ms = self._times.deadline_ms(self._asked_at)
        limits = [topic.most_bytes for topic in topics.values()]
        extremes = min(limits), max(limits)
        self._in_doubt = True
        try:
            self._await([self._sending.submit(self._writer.write, shape, chosen, stamp, deadline_ms, extremes)])
        except BaseException:
            self._writer.cancel()
            raise
        self._check_limits(topics)
        if self._writer.has_repeated():
            self._waiting(f"a task was repeated: what it sent before may still arrive for {self._times.delivery:.0f} s")
            until = time.monotonic() + self._times.delivery
            while time.monotonic() < until:
                time.sleep(_TURN_S)
                self._keep()
        self._in_doubt = False

    def _check_limits(self, topics: Mapping[str, TopicLimits]) -> None:
        """Raises PipelineError if a size limit was lowered, because records may then be lost (`sink_options`)."""
        now = self._topics.look(topics)
        lowered = [name for name, topic in topics.items() if name not in now or now[name].most_bytes < topic.most_bytes]
        if lowered:
            raise PipelineError(
                f"{', '.join(lowered)}: max.message.bytes was lowered while a slice was sent: records may be missing",
                hint="none of it was purged: start the drain again",
            )

    # -- the lease

    def _await(self, work: Sequence[Future[None]]) -> None:
        pending = set(work)
        while pending:
            done, pending = wait(pending, _TURN_S, FIRST_EXCEPTION)
            for one in done:
                one.result()
            self._keep()

    def _keep(self) -> None:
        """Renews the lease when due, or later if the database is unavailable; tasks obey the last known lease."""
        if time.monotonic() < self._renew_at:
            return
        try:
            self._renew()
        except DatabaseUnavailable:
            self._renew_at = time.monotonic() + 1.0

    def _renew(self) -> None:
        asked_at = time.time()
        self._loan = self._borrower.renew()
        self._asked_at, self._renew_at = asked_at, time.monotonic() + self._times.slice


_CHUNK_RECORDS = 5_000
_ATTEMPTS = 10
_AGAIN_S = 1.0


class Purgers:
    """Sessions, each with a thread, that purge sent rows with the relay's own statement, which also archives them.

    Methods raise DatabaseUnavailable, SchemaError, TermLost.
    """

    def __init__(
        self, dsn: str, table: OutboxTable, rules: Rules, server: str | None, term: int, sessions: int
    ) -> None:
        self._sessions = [PurgeSession(dsn, table, f"harvester drain/{number}", rules) for number in range(sessions)]
        for session in self._sessions:
            session.expect(server, term)
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="purge")

    def close(self) -> None:
        """Waits for running purges, then ends the sessions."""
        self._pool.shutdown()
        for session in self._sessions:
            session.close()

    def purge(self, ids: Sequence[int], waiting: Callable[[str], None]) -> list[Future[None]]:
        """Deletes acknowledged rows; `ids` are ascending. `waiting` is called about rows locked by others."""
        chunks = [ids[at : at + _CHUNK_RECORDS] for at in range(0, len(ids), _CHUNK_RECORDS)]
        count = len(self._sessions)
        return [
            self._pool.submit(_purge, session, chunks[number::count], waiting)
            for number, session in enumerate(self._sessions)
        ]

    def quarantine(self, record_id: int, error: str, attempts: int, term: int, holder: UUID) -> bool:
        """Moves one row to quarantine; False if it was gone."""
        poison = PoisonRow(record_id, error, attempts, datetime.now(UTC), term, str(holder))
        session = self._sessions[0]
        outcome: QuarantineOutcome | None = None

        def move() -> None:
            nonlocal outcome
            outcome = session.quarantine(poison)

        _insist(session, move, f"move record {record_id} to quarantine")
        if outcome is QuarantineOutcome.FENCED:
            raise TermLost(f"term {term} of this drain has ended: another process has taken it")
        return outcome is QuarantineOutcome.MOVED


def _purge(session: PurgeSession, chunks: Sequence[Sequence[int]], waiting: Callable[[str], None]) -> None:
    locked: Sequence[int]

    def delete() -> None:
        nonlocal locked
        try:
            session.delete(RowVersions(locked))
            locked = ()
        except psycopg.errors.LockNotAvailable:
            session.ready()
            locked, _ = session.delete_unlocked(RowVersions(locked))

    for chunk in chunks:
        locked = chunk
        while locked:
            _insist(session, delete, "purge sent records")
            if locked:
                waiting(f"{len(locked)} sent records are locked by another session")


def _insist(session: PurgeSession, action: Callable[[], None], what: str) -> None:
    """Performs the action; if the session was lost, repeats it in a new one, up to _ATTEMPTS times."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with database_errors(what):
                session.ready()
                action()
            return
        except DatabaseUnavailable:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(_AGAIN_S)

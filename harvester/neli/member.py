"""A member of the leader group: carries out the election's decisions, using Kafka's own group membership.

One thread polls the consumer, feeds the machine and performs its commands, so neither a slow query nor a slow event
handler can delay a heartbeat. The group protocol is pinned to *classic*, the assignor is cooperative (a joining standby
does not unseat the leader), membership is dynamic. The rebalance callback that takes partition 0 away blocks until the
relay has drained. Trust is closed there rather than renewed by synchronous commits as in P13: a drain only purges,
which needs no trust, and a synchronous commit to a coordinator that has just become unreachable blocks for as long as
it stays so (docs/adr/0006). On assignment the last few records of the partition are read again, so that a new leader
knows the highest announced term.

*Joining* (`await_dead`). A rebalance waits for every member, including a dead one until its session has expired. Until
then, the leader's own JoinGroup is unanswered, and its commits behind it, for longer than its last commit proves its
place (P39). So a member that finds another standby in the group, which may have died just now, waits a while before it
joins. That costs nothing: no other member can be elected before dead ones are removed.

*Leaving* (`await_stable`, `Leaving`). A broker reads no second request of a connection before it has answered the
first, so a LeaveGroup sent during a rebalance is lost when the connection closes, and nobody leads until the session
times out. A member that leaves first waits for the rebalance to end. Nor does the client always end: a commit lost with
a broken connection may never be answered (librdkafka issue 3740). Such a client is abandoned.

*Strangers*, members of the same group that serve another outbox, are detected before joining, and refused: a standby
would wait forever for a leadership that belongs to another outbox.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from harvester.bounds import PURGED, SILENT, STRANDED, let_go
from harvester.clock import clock_s
from harvester.errors import BrokerUnavailable, ForeignOutbox
from harvester.neli import election as e
from harvester.neli.election import Election, ElectionTiming, step
from harvester.neli.group import GroupListener, Identity, Missing
from harvester.neli.heartbeat import MemberHeartbeat, decode, encode
from harvester.neli.reach import ASKING, STATISTICS_MS, Membership, Pulse, Reaching, Stranded
from harvester.neli.second_proof import Commits
from harvester.neli.topic import cluster_id, ensuring_leader_topic, needs_somebody, refusal
from harvester.telemetry.logging import ClientLog

_RETRY_S = 1.0
_LOOK_S = 0.05
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
_NO_TERM = 1 << 62  # no real term is that high; the next one might not fit into the term row


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """From the configuration; times in seconds."""

    topic: str
    group: str
    consumer_options: Mapping[str, Any] = field(repr=False)  # they hold passwords
    producer_options: Mapping[str, Any] = field(repr=False)
    poll_s: float
    join_wait_s: float  # from the start of the harvester, in case another standby has died
    timing: ElectionTiming
    revoke_within_s: float  # how long the rebalance callback may block
    session_s: float
    foreign_live_s: float  # a heartbeat of another outbox younger than this is from a live member


class KafkaGroup:
    """Membership of a Kafka group. Its thread starts with `start`; `stop` ends it."""

    def __init__(self, settings: MemberSettings, alone_from: float | None = None) -> None:
        """`alone_from`: members that are dead but still in the group died before this moment; default: now."""
        self._settings = settings
        self._state = Election()
        self._member = uuid4()
        self._sent = Asked(settings.timing.heartbeat_timeout_s)  # heartbeats that have not come back yet
        self._commits = Commits(settings.topic, settings.timing)
        self._leader: tuple[UUID, int] | None = None
        self._step_down: tuple[str, float | None] | None = None
        self._ended = threading.Event()
        self._left = threading.Event()  # set once the group is left
        self._thread = threading.Thread(target=self._run, name="neli", daemon=True)
        self._lock = threading.RLock()  # guards the machine: the relay's thread sets the term
        self._identity: Identity
        self._listener: GroupListener
        self._reaching: Reaching
        self._membership = Membership(settings.group, settings.session_s)
        self._pulse = Pulse(settings.topic, settings.group, settings.session_s, settings.timing)
        self._producer: Producer
        self._producer_stranded: Stranded
        self._consumer: Consumer
        self._consumer_stranded: Stranded
        self._admin: AdminClient  # the pulse's; created on first use
        self._leaving: Leaving
        self._ensuring: Future[str | None] | None = None  # ensures that the leader topic exists
        self._dead_until = -math.inf  # while waiting for a member that may be dead
        self._alone_from = clock_s() if alone_from is None else alone_from
        self._joined = False
        self._login: tuple[str, str] | None = None

    # -- the interface

    def start(self, identity: Identity, listener: GroupListener) -> None:
        self._identity, self._listener = identity, listener
        self._reaching = Reaching(listener.trouble)
        self._thread.start()

    def lead(self, leader_id: UUID, term: int) -> None:
        self._leader = (leader_id, term)
        self._feed(e.LeadsUnderTerm(term))

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Give up leadership at the member's next turn."""
        self._step_down = (reason, rejoin_after_s)

    @property
    def highest_term(self) -> int:
        return self._state.highest_term

    def missing(self) -> Missing | None:
        role = self._state.role
        if role is e.Role.LEADER:  # both of its proofs are fresh
            return None
        if role is e.Role.CANDIDATE:
            return Missing("elected, but not yet confirmed by Kafka")
        now = clock_s()
        if now < self._dead_until:
            return Missing(
                f"joins group {self._settings.group} later: one of its members may be dead", self._dead_until - now
            )
        return self._membership.missing(now) or self._pulse.missing(now)

    def cluster(self) -> str | None:
        client = getattr(self, "_producer", None)
        if client is None:
            raise BrokerUnavailable("the id of the Kafka cluster is unknown: the group was left")
        return cluster_id(client, self._settings.topic)

    def log_in(self, consumer_options: Mapping[str, Any], producer_options: Mapping[str, Any], user: str) -> None:
        """Use these options for new connections. Thread-safe."""
        self._settings = replace(self._settings, consumer_options=consumer_options, producer_options=producer_options)
        self._login = (user, consumer_options["sasl.password"])
        for name in ("_producer", "_consumer", "_admin"):
            self._log_in(getattr(self, name, None))

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._left.wait()
            self._thread.join(_CLOSE_S)  # a client that is resolving a host name ends later

    def _log_in(self, client: Any) -> None:
        """With the latest password, if it is newer than the options; a closed client needs none."""
        login = self._login
        if client is not None and login is not None:
            with contextlib.suppress(RuntimeError):
                client.set_sasl_credentials(*login)

    # -- the thread

    def _run(self) -> None:
        try:
            self._connect_producer()
            while not self._ended.is_set():
                if self._join():
                    self._serve()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nobody would fence
            self._listener.fail(error)
        finally:
            self._left.set()
            if hasattr(self, "_producer"):
                let_go(self._producer)
                del self._producer
            if hasattr(self, "_admin"):
                del self._admin

    def _connect_producer(self) -> None:
        stranded = self._producer_stranded = Stranded()
        options = {
            **self._settings.producer_options,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": lambda text: stranded.read(json.loads(text)),
            # An older heartbeat proves nothing; a refusal that is being retried is reported after this time.
            "message.timeout.ms": str(round(self._settings.timing.heartbeat_timeout_s * 1000)),
            "logger": ClientLog(self._listener.client_said),
        }
        self._producer = Producer(options)
        self._log_in(self._producer)

    def _join(self) -> bool:
        settings = self._settings
        self._producer.poll(0)  # unserved reports would fill the memory during a long wait for Kafka
        ensuring = self._ensure_topic()
        while not ensuring.done():
            if self._ended.wait(_LOOK_S):
                return False
        error = ensuring.result()
        if error is not None:
            self._listener.trouble(error)
            self._ended.wait(_RETRY_S)
            return False
        options = {**settings.consumer_options, "logger": ClientLog(self._listener.client_said)}
        look_for_strangers(settings.topic, options, settings.poll_s, self._refuse_stranger, self._ended.is_set)
        until = self._alone_from + settings.join_wait_s
        self._dead_until = until
        await_dead(settings.group, settings.producer_options, until, self._ended, self._listener.client_said)
        self._dead_until = -math.inf
        self._joined = False
        membership = self._membership = Membership(settings.group, settings.session_s)
        stranded = self._consumer_stranded = Stranded()
        options |= {
            "statistics.interval.ms": STATISTICS_MS,
            "on_commit": self._committed,
            "error_cb": self._reaching.heard,
            "stats_cb": lambda text: self._reported(membership, stranded, json.loads(text)),
        }
        self._consumer = Consumer(options)
        self._log_in(self._consumer)
        self._consumer.subscribe(
            [settings.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self._leaving = Leaving(self._consumer, self._listener.client_said)
        return True

    def _ensure_topic(self) -> Future[str | None]:
        settings = self._settings
        return ensuring_leader_topic(
            settings.topic, settings.producer_options,
            lambda text: self._listener.client_said(logging.WARNING, text), self._ended.is_set,
        )  # fmt: skip

    def _refuse_stranger(self, heartbeat: MemberHeartbeat, message: Any) -> None:
        settings = self._settings
        refuse_stranger(heartbeat, message, settings.group, self._identity, settings.foreign_live_s)

    def _serve(self) -> None:
        """Poll until the end, or until the group is to be left for a while."""
        rejoin_after_s: float | None = None
        try:
            while not self._ended.is_set() and rejoin_after_s is None:
                message = self._consumer.poll(self._settings.poll_s)
                if message is not None:
                    self._read(message)
                else:
                    # The client's thread sends group heartbeats, and joins again, when something wakes it up, which
                    # may take half a second. This does.
                    self._consumer.assignment()
                if self._ensuring is not None and self._ensuring.done():
                    self._listener.trouble(self._ensuring.result())
                    self._ensuring = None
                self._producer.poll(0)
                self._look_for_a_leader()
                self._leave_the_stranded()
                asked, self._step_down = self._step_down, None
                if asked is not None:
                    reason, rejoin_after_s = asked
                    self._feed(e.StepDown(reason))
                self._feed(e.Tick(self._listener.marker_alive()))
            await_stable(self._settings.group, self._settings.producer_options, self._consumer.poll)
        finally:
            self._leaving.leave(self._settings.revoke_within_s)
            self._alone_from = clock_s()
            self._membership = Membership(self._settings.group, self._settings.session_s)
            self._feed(e.Revoked())
        if rejoin_after_s is not None:
            self._ended.wait(rejoin_after_s)

    def _read(self, message: Any) -> None:
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                self._listener.trouble(f"leader topic: {error.str()}")
            if error.code() in _GONE and self._ensuring is None:
                self._ensuring = self._ensure_topic()
            return
        if message.partition() != 0:
            return
        self._commits.position = message.offset() + 1
        heartbeat = decode(message.value())
        if heartbeat is None:
            return
        if heartbeat.member == self._member:
            sent_at = self._sent.take(heartbeat.number)
            if sent_at is not None:
                self._listener.trouble(None)
                self._feed(e.HeartbeatReturned(sent_at))
            return
        if heartbeat.outbox != self._identity.outbox:
            self._refuse_stranger(heartbeat, message)
            return
        if heartbeat.term is not None and heartbeat.term > _NO_TERM:
            return
        self._feed(e.ForeignHeartbeat(heartbeat.name, heartbeat.term))

    def _reported(self, membership: Membership, stranded: Stranded, statistics: Mapping[str, Any]) -> None:
        stranded.read(statistics)
        self._reaching.read(statistics)
        membership.read(statistics, clock_s())

    def _look_for_a_leader(self) -> None:
        if self._state.role is not e.Role.OUTSIDE or self._reaching.is_lost:
            self._pulse.forget()
            return
        if not hasattr(self, "_admin"):
            self._admin = AdminClient({**self._settings.producer_options, **ASKING})
            self._log_in(self._admin)
        self._admin.poll(0)  # requests its password or token
        if not self._pulse.look(self._admin):
            _forget(self._admin)
            del self._admin  # it may never find a broker again

    def _leave_the_stranded(self) -> None:
        """Replace clients that will never reach a broker again."""
        if self._producer_stranded.is_so:
            self._listener.client_said(logging.WARNING, f"{STRANDED}: another client sends heartbeats now")
            let_go(self._producer)
            _forget(self._producer)
            self._connect_producer()
        if self._consumer_stranded.is_so and self._step_down is None:
            self._perform(e.Rejoin(STRANDED))

    # -- the machine

    def _feed(self, event: e.Event) -> None:
        with self._lock:
            self._state, commands = step(self._state, event, clock_s(), self._settings.timing)
            for command in commands:
                self._perform(command)

    def _perform(self, command: e.Command) -> None:
        match command:
            case e.SendHeartbeat():
                self._beat()
            case e.CommitOffset():
                self._commits.ask(self._consumer)
            case e.Trust(until):
                self._listener.trust(until)
            case e.Acquire():
                self._leader = None
                self._listener.acquired()
            case e.FenceNow(reason):
                self._leader = None
                self._listener.fenced(reason)
            case e.Rejoin(reason):
                self._listener.client_said(logging.WARNING, f"{reason}: rejoining the group")
                self._step_down = (reason, 0.0)

    def _beat(self) -> None:
        number = self._sent.ask(clock_s())
        leader_id, term = self._leader if self._leader is not None else (None, None)
        heartbeat = MemberHeartbeat(
            self._member, self._identity.name, number, self._identity.outbox, self._identity.outbox_name,
            leader_id, term,
        )  # fmt: skip
        try:
            self._producer.produce(
                self._settings.topic, value=encode(heartbeat), partition=0, on_delivery=self._delivered
            )
        except (BufferError, KafkaException) as error:
            self._listener.trouble(f"leader topic: {error}")
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Any) -> None:
        """A heartbeat that Kafka refused proves nothing, and without heartbeats nobody leads."""
        if error is None or error.code() in PURGED:
            return
        if error.code() == KafkaError._MSG_TIMED_OUT and self._reaching.is_lost:
            return  # the unreachable broker has already been reported
        level = logging.ERROR if needs_somebody(error) else logging.WARNING
        self._listener.trouble(refusal(self._settings.topic, error), level)

    def _committed(self, error: KafkaError | None, partitions: Any) -> None:
        for sent_at, stable_at in self._commits.answered(error, partitions):
            self._feed(e.CommitSucceeded(sent_at, stable_at))

    # -- rebalances

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        if consumer is not self._consumer:
            return  # an abandoned client
        for partition in partitions:
            partition.offset = OFFSET_TAIL_BASE - TAIL_RECORDS
        consumer.incremental_assign(partitions)
        self._listener.trouble(None)
        elected = any(partition.partition == 0 for partition in partitions)
        if not self._joined:
            self._joined = True
            self._listener.client_said(
                logging.INFO, f"joined group {self._settings.group}, {'elected' if elected else 'stands by'}"
            )
        if elected:
            self._sent.clear()
            self._commits.begin()
            self._feed(e.Assigned())

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        if consumer is not self._consumer or not any(partition.partition == 0 for partition in partitions):
            consumer.incremental_unassign(partitions)
            return
        self._feed(e.RevokeBegan())
        self._listener.revoking(self._settings.revoke_within_s)
        self._leader = None
        consumer.incremental_unassign(partitions)
        self._feed(e.Revoked())


_WITHIN_S = 3.0
_REBALANCES_LOOK_S = 0.2
# librdkafka 2.16 aborts the process if a coordinator appears after a request to it has timed out: so none times out.
# The client is abandoned instead.
_NEVER_S = 3_600.0
_MAY_HIDE_A_DEAD_ONE = 2  # members: the leader, and one that may be dead
_CLOSE_S = 10.0  # in addition to the time for a revoke
_REBALANCING = frozenset({ConsumerGroupState.PREPARING_REBALANCING, ConsumerGroupState.COMPLETING_REBALANCING})


def await_dead(
    group: str, options: Mapping[str, Any], until: float, ended: threading.Event, said: Callable[[int, str], None]
) -> None:
    """Before joining, wait while another standby in the group may be dead; does not wait if the group is unknown."""
    admin = AdminClient({**options, **SILENT})
    waits = False
    while not ended.is_set() and clock_s() < until:
        described = _describe(admin, group, time.monotonic() + _WITHIN_S, ended.wait)
        if described is None or len(described.members) < _MAY_HIDE_A_DEAD_ONE:
            return
        if not waits:
            waits = True
            left_s = max(0.0, until - clock_s())
            said(logging.INFO, f"joins group {group} within {left_s:.1f} s: one of its members may be dead")
        ended.wait(_REBALANCES_LOOK_S)


def await_stable(group: str, options: Mapping[str, Any], poll: Callable[[float], object]) -> None:
    """Poll the member until its group is not rebalancing; for at most a few seconds, and not if the group is
    unknown.
    """
    admin = AdminClient({**options, **SILENT})
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        described = _describe(admin, group, deadline, poll)
        if described is None or described.state not in _REBALANCING:
            return


def _describe(admin: AdminClient, group: str, deadline: float, meanwhile: Callable[[float], object]) -> Any | None:
    """The group; None if Kafka does not describe it."""
    answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=_NEVER_S)[group]
    while time.monotonic() < deadline and not answer.done():
        meanwhile(0.02)
    # Raising the future's exception would keep the client alive through the traceback until garbage collection.
    return answer.result() if answer.done() and answer.exception() is None else None


def _forget(client: object) -> None:
    """Drop the last reference on another thread: a client that is resolving a host name ends only after that."""
    threading.Thread(target=lambda last: None, args=(client,), name="neli-forget", daemon=True).start()


class Leaving:
    """The end of one client: leaves its group and closes it, on a thread that exists from the beginning.

    Python 3.12 starts no threads once the process exits, which is when a host that has not called `stop` leaves. `said`
    receives failures, with a log level.
    """

    def __init__(self, consumer: Consumer, said: Callable[[int, str], None]) -> None:
        self._consumer, self._said = consumer, said
        self._begin = threading.Event()
        self._thread = threading.Thread(target=self._close, name="neli-leave", daemon=True)
        self._thread.start()

    def leave(self, revoke_within_s: float) -> None:
        """Returns when that is done, or after the time a revoke may take and a little longer.

        Meanwhile, revoke listeners run on the other thread.
        """
        self._begin.set()
        self._thread.join(revoke_within_s + _CLOSE_S)
        if self._thread.is_alive():
            self._said(logging.WARNING, "the Kafka client does not leave the group: it is abandoned")

    def _close(self) -> None:
        self._begin.wait()
        try:
            self._consumer.unsubscribe()  # otherwise a member without a partition leaves only by session timeout
            self._consumer.close()
        except (KafkaException, RuntimeError) as error:
            self._said(logging.WARNING, f"the group was not left cleanly: {error}")


class Asked:
    """Numbers requests, so that a late answer is credited to the time at which *it* was requested.

    Requests older than `patience_s` are forgotten.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._at: dict[int, float] = {}
        self.number = 0

    def ask(self, now: float) -> int:
        """The number of a request made now."""
        oldest = now - self._patience_s
        self._at = {number: at for number, at in self._at.items() if at > oldest}
        self.number += 1
        self._at[self.number] = now
        return self.number

    def take(self, number: int) -> float | None:
        """When that request was made; None if it never was, is forgotten, or was taken before."""
        return self._at.pop(number, None)

    def clear(self) -> None:
        self._at.clear()


TAIL_RECORDS = 64
OFFSET_TAIL_BASE = -2000  # librdkafka: RD_KAFKA_OFFSET_TAIL(n) is this minus n
_LEADER_S = 1.0
_STRANGERS_LOOK_S = 10.0  # a first connection may be slow; a working one reads the last records instantly


def refuse_stranger(heartbeat: MemberHeartbeat, message: Any, group: str, identity: Identity, live_s: float) -> None:
    """Raise ForeignOutbox if this heartbeat's member is live and serves another outbox."""
    if heartbeat.outbox == identity.outbox:
        return
    if time.time() - message.timestamp()[1] / 1000 < live_s:
        raise ForeignOutbox(group=group, member=heartbeat.name, theirs=heartbeat.outbox_name, ours=identity.outbox_name)


def look_for_strangers(
    topic: str, options: Mapping[str, Any], poll_s: float, refuse: Callable[[MemberHeartbeat, Any], None],
    ended: Callable[[], bool],
) -> None:  # fmt: skip
    """Pass the latest heartbeats in the leader topic to `refuse`; gives up after a moment."""
    # At the end of the partition, the broker would wait for another record (half a second by default).
    reader = Consumer({**options, "enable.partition.eof": "true", "fetch.wait.max.ms": "10"})
    try:
        # A client that does not know the partition's leader yet asks for its end half a second later.
        with contextlib.suppress(KafkaException):
            reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=_LEADER_S)
        reader.assign([TopicPartition(topic, 0, OFFSET_TAIL_BASE - TAIL_RECORDS)])
        deadline = clock_s() + _STRANGERS_LOOK_S
        while clock_s() < deadline and not ended():
            message = reader.poll(poll_s)
            if message is None:
                continue
            if message.error() is not None:
                return  # ended, or nothing readable: the group itself will show it
            heartbeat = decode(message.value())
            if heartbeat is not None:
                refuse(heartbeat, message)
    finally:
        reader.close()

"""A member of the leader group: performs what the election machine decides, with Kafka's own group membership.

One thread of its own polls the consumer, feeds the machine and performs its commands, so neither a slow query nor a
slow event handler can delay a heartbeat. The group protocol is pinned to *classic*, the assignor is cooperative (a
joining standby does not unseat the leader), membership is dynamic. The rebalance callback that takes partition 0 away
blocks until the relay has drained. Nothing is marked or produced from its beginning on, so trust is closed there
rather than renewed by synchronous commits as P13 has it: a drain only purges, which needs no trust, and a synchronous
commit to a coordinator that has just gone away blocks for as long as that stays away (docs/adr/0006).

On assignment the last few records of the partition are read again, so that a new leader knows the highest term that
was announced and notices a member that serves another outbox.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from harvester.clock import clock_s
from harvester.neli import signals as e
from harvester.neli.asked import Asked
from harvester.neli.commits import Commits
from harvester.neli.election import Election, Timing, step
from harvester.neli.group import GroupCallbacks, Identity
from harvester.neli.heartbeat import Heartbeat, decode, encode
from harvester.neli.reaching import Reaching
from harvester.neli.rebalances import await_dead, await_stable, leave
from harvester.neli.strangers import OFFSET_TAIL_BASE, TAIL_RECORDS, look_for_strangers, refuse_stranger
from harvester.neli.topic import cluster_id, ensuring_leader_topic, refusal
from harvester.telemetry.client_log import ClientLog

_RETRY_S = 1.0
_LOOK_S = 0.05
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
_NO_TERM = 1 << 62  # nobody has led that often; the term above it might not fit into the term row


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """From the configuration; times in seconds."""

    topic: str
    group: str
    consumer_options: Mapping[str, Any] = field(repr=False)  # they hold passwords
    producer_options: Mapping[str, Any] = field(repr=False)
    poll_s: float
    join_wait_s: float  # from the start of this process, while another standby may have died
    timing: Timing
    revoke_within_s: float  # how long the rebalance callback may block
    foreign_live_s: float  # a heartbeat of another outbox younger than this is a live member's


class KafkaGroup:
    """See the module's text."""

    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._state = Election()
        self._member = uuid4()
        self._sent = Asked(settings.timing.heartbeat_timeout_s)  # heartbeats that have not come back
        self._commits = Commits(settings.topic, settings.timing)
        self._leader: tuple[UUID, int] | None = None
        self._step_down: tuple[str, float | None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neli", daemon=True)
        self._lock = threading.RLock()  # around the machine: the relay's thread tells it the term
        self._identity: Identity
        self._callbacks: GroupCallbacks
        self._reaching: Reaching
        self._producer: Producer
        self._consumer: Consumer
        self._ensuring: Future[str | None] | None = None  # that the leader topic is there
        self._alone_from = clock_s()  # who is dead has died before
        self._joined = False
        self._login: tuple[str, str] | None = None

    # -- the interface

    def start(self, identity: Identity, callbacks: GroupCallbacks) -> None:
        """Join, without waiting for it."""
        self._identity, self._callbacks = identity, callbacks
        self._reaching = Reaching(self._settings.topic, callbacks.trouble)
        self._thread.start()

    def lead(self, leader_id: UUID, term: int) -> None:
        """The relay leads under this term: heartbeats carry it from now on."""
        self._leader = (leader_id, term)
        self._feed(e.TermTaken(term))

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        """Give leadership up at the member's next turn."""
        self._step_down = (reason, rejoin_after_s)

    @property
    def highest_term(self) -> int:
        """The highest term seen in the leader topic."""
        return self._state.highest_term

    def cluster(self) -> str | None:
        """The id of the Kafka cluster, None when it has none. Raises BrokerUnavailable."""
        return cluster_id(self._producer, self._settings.topic)

    def log_in(self, consumer_options: Mapping[str, Any], producer_options: Mapping[str, Any], user: str) -> None:
        """New connections are made with these options from now on. Safe from any thread."""
        self._settings = replace(self._settings, consumer_options=consumer_options, producer_options=producer_options)
        self._login = (user, consumer_options["sasl.password"])
        for client in (getattr(self, "_producer", None), getattr(self, "_consumer", None)):
            self._log_in(client)

    def stop(self) -> None:
        """Leave the group, and wait until that is done."""
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _log_in(self, client: Any) -> None:
        """With the newest password, if there is one newer than the options; a closed client needs none."""
        login = self._login
        if client is not None and login is not None:
            with contextlib.suppress(RuntimeError):
                client.set_sasl_credentials(*login)

    # -- the thread

    def _run(self) -> None:
        try:
            log = ClientLog(self._callbacks.client_said)
            # A heartbeat that is older proves nothing, and a refusal that is retried is told after that time.
            patience = {"message.timeout.ms": str(round(self._settings.timing.heartbeat_timeout_s * 1000))}
            self._producer = Producer({**self._settings.producer_options, **patience, "logger": log})
            self._log_in(self._producer)
            while not self._ended.is_set():
                if self._join():
                    self._serve()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nobody would fence
            self._callbacks.failed(error)

    def _join(self) -> bool:
        settings = self._settings
        ensuring = self._ensure_topic()
        while not ensuring.done():
            if self._ended.wait(_LOOK_S):
                return False
        error = ensuring.result()
        if error is not None:
            self._callbacks.trouble(error)
            self._ended.wait(_RETRY_S)
            return False
        options = {**settings.consumer_options, "logger": ClientLog(self._callbacks.client_said)}
        look_for_strangers(settings.topic, options, settings.poll_s, self._refuse_stranger, self._ended.is_set)
        until = self._alone_from + settings.join_wait_s
        await_dead(settings.group, settings.producer_options, until, self._ended, self._callbacks.client_said)
        self._joined = False
        self._consumer = Consumer({**options, "on_commit": self._committed, "error_cb": self._reaching.heard})
        self._log_in(self._consumer)
        self._consumer.subscribe(
            [settings.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        return True

    def _ensure_topic(self) -> Future[str | None]:
        settings = self._settings
        return ensuring_leader_topic(
            settings.topic, settings.producer_options, lambda text: self._callbacks.client_said(logging.WARNING, text)
        )

    def _refuse_stranger(self, heartbeat: Heartbeat, message: Any) -> None:
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
                if self._ensuring is not None and self._ensuring.done():
                    self._callbacks.trouble(self._ensuring.result())
                    self._ensuring = None
                self._producer.poll(0)
                self._reaching.look(self._consumer)
                asked, self._step_down = self._step_down, None
                if asked is not None:
                    reason, rejoin_after_s = asked
                    self._feed(e.StepDown(reason))
                self._feed(e.Tick(self._callbacks.marker_alive()))
            await_stable(self._settings.group, self._settings.producer_options, self._consumer.poll)
        finally:
            leave(self._consumer, self._settings.revoke_within_s, self._callbacks.client_said)
            self._alone_from = clock_s()
            self._feed(e.Revoked())
        if rejoin_after_s is not None:
            self._ended.wait(rejoin_after_s)

    def _read(self, message: Any) -> None:
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                self._callbacks.trouble(f"leader topic: {error.str()}")
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
                self._callbacks.trouble(None)
                self._feed(e.HeartbeatReturned(sent_at))
            return
        if heartbeat.outbox != self._identity.outbox:
            self._refuse_stranger(heartbeat, message)
            return
        if heartbeat.term is not None and heartbeat.term > _NO_TERM:
            return
        self._feed(e.ForeignHeartbeat(heartbeat.name, heartbeat.term))

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
                self._callbacks.trust(until)
            case e.Acquire():
                self._leader = None
                self._callbacks.acquired()
            case e.Fence(reason):
                self._leader = None
                self._callbacks.fenced(reason)
            case e.Rejoin(reason):
                self._callbacks.client_said(logging.WARNING, f"{reason}: the group is joined anew")
                self._step_down = (reason, 0.0)

    def _beat(self) -> None:
        number = self._sent.ask(clock_s())
        leader_id, term = self._leader if self._leader is not None else (None, None)
        heartbeat = Heartbeat(
            self._member, self._identity.name, number, self._identity.outbox, self._identity.outbox_name,
            leader_id, term,
        )  # fmt: skip
        try:
            self._producer.produce(
                self._settings.topic, value=encode(heartbeat), partition=0, on_delivery=self._delivered
            )
        except (BufferError, KafkaException) as error:
            self._callbacks.trouble(f"leader topic: {error}")
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Any) -> None:
        """A heartbeat that Kafka refused proves nothing, and without one nobody leads."""
        if error is None or (error.code() == KafkaError._MSG_TIMED_OUT and self._reaching.is_lost):
            return  # that no broker can be reached is said already
        self._callbacks.trouble(refusal(self._settings.topic, error))

    def _committed(self, error: KafkaError | None, partitions: Any) -> None:
        for sent_at, stable_at in self._commits.answered(error, partitions):
            self._feed(e.CommitSucceeded(sent_at, stable_at))

    # -- rebalances

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        if consumer is not self._consumer:
            return  # a client that was left behind
        for partition in partitions:
            partition.offset = OFFSET_TAIL_BASE - TAIL_RECORDS
        consumer.incremental_assign(partitions)
        self._callbacks.trouble(None)
        elected = any(partition.partition == 0 for partition in partitions)
        if not self._joined:
            self._joined = True
            self._callbacks.client_said(
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
        self._callbacks.revoking(self._settings.revoke_within_s)
        self._leader = None
        consumer.incremental_unassign(partitions)
        self._feed(e.Revoked())

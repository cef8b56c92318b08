"""A shard: the process that publishes one part of the keys.

Its threads, all blocking, none polling:

- *main* waits for frames, due retries, and the death of the supervisor (EOF on the pipe, or its pidfd);
- *delivery* serves the producer's reports; in exactly-once mode *transactor* does all work with Kafka
  (`exactly_once`);
- *reach*, without transactions, watches whether the producer will ever reach a broker again;
- *purger* deletes what was acknowledged (`purger`).

Shutdown. On `Stop`, or when the supervisor is gone, nothing more is produced; what is on the wire is awaited and
purged, for at most the delivery timeout and a margin; then the process exits without flushing the producer, so that
nothing leaves it later. A fatal producer error ends the shard in the same way, immediately: a producer ends only with
its process (P15), and the supervisor starts a new one when this one is certainly dead.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from harvester import failpoints
from harvester.bounds import SILENT, STRANDED
from harvester.delivery.lane import Lanes, LaneSettings
from harvester.delivery.retries import Policy
from harvester.failpoints import Failpoints
from harvester.outbox.purge_session import PurgeSession, Rules
from harvester.outbox.tables import OutboxTable
from harvester.relay.at_least_once import Sender
from harvester.relay.core import frames as f
from harvester.relay.exactly_once import Transactor
from harvester.relay.ipc import ShardPipe, Shared, Waker, be_present, in_flight, owe, trust_check, widen
from harvester.relay.purger import Purger
from harvester.relay.put_away import PutAway, PutAwaySettings
from harvester.relay.transaction_intake import TransactionIntake
from harvester.telemetry.logging import ClientLog
from harvester.telemetry.process import calm_memory

if TYPE_CHECKING:
    from harvester.telemetry.tracing import Provider


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Everything a shard is given when it starts; sent to the new process as bytes."""

    index: int
    name: str
    dsn: str = field(repr=False)  # secret: must not appear where a traceback's local variables are printed
    outbox: str
    producer_options: dict[str, Any] = field(repr=False)
    policy: Policy
    rules: Rules
    io_error_backoff_s: float
    linger_at_end_s: float  # how long the shutdown may take: delivery timeout and purge margin
    header: str  # name of the header that tells where a record comes from; "": none
    lanes: LaneSettings | None = field(default=None, repr=False)  # in exactly-once mode
    transaction_records: int = 0
    tracing: bool = False  # continue the traces in rows' headers
    reserved: frozenset[str] = frozenset()  # topics of the harvester's own, to which no record is sent
    dated: bool = False  # a record's timestamp is its row's create_time
    oversize: PutAwaySettings | None = None  # values to be stored


class Producers:
    """Makes this process's producers: logs their client's messages and continues traces."""

    def __init__(self, failpoints: Failpoints, log: Callable[[int, str], None], traces: str | None) -> None:
        """`log` gets a level as in the module logging, and a line; `traces`: the name to trace under, if any."""
        self._failpoints = failpoints
        self.log = ClientLog(log)
        self._tracing: Provider | None = None
        if traces is not None:
            from harvester.telemetry.tracing import make_provider

            self._tracing = make_provider(traces)

    def make(self, options: Mapping[str, Any]) -> Any:
        """Make a producer. Its client logs here, or to a logger among the options."""
        producer = self._failpoints.producer({"logger": self.log, **options})
        if self._tracing is None:
            return producer
        from harvester.telemetry.tracing import TracingProducer

        return TracingProducer(producer, self._tracing, transactional="transactional.id" in options)

    def flush_traces(self) -> None:
        if self._tracing is not None:
            from harvester.telemetry.tracing import flush

            flush(self._tracing)


_SILENT_S = 10.0  # without an acknowledgement, until the producer is suspected
_STRANDED_S = 15.0  # longer than a client waits between two attempts to connect (reconnect.backoff.max.ms)
_ANSWER_S = 5.0
_SOUND_S = 30.0


class ProducerWatch:
    """Detects that a producer will never reach a broker again (P48).

    A producer from which nothing comes back is asked for the brokers, which takes a connection. It is stranded if it
    has had none for a while although another client, with the same options, is told of some. If neither has one, Kafka
    is down. A producer with a connection is kept, even if it gets no answer: what it has sent may still arrive, and
    only for the same producer does the broker recognise a repeat (P36).
    """

    def __init__(self, producer: Any, options: Mapping[str, Any]) -> None:
        self._producer, self._options = producer, options
        self._seen: float | None = None
        self._silent_since = self._alone_since = math.inf
        self.login: tuple[str, str] | None = None  # which replaces that of the options

    def look(self, now: float, acked_at: float, unsettled: int) -> float | None:
        """Look once, which may take seconds; returns when to look again, in seconds. None: it is stranded."""
        if not unsettled or acked_at != self._seen:
            self._seen, self._silent_since, self._alone_since = acked_at, now, math.inf
        if now - self._silent_since < _SILENT_S:
            return _ANSWER_S
        answer = _ask(self._producer)
        if answer != KafkaError._TRANSPORT:
            self._alone_since = math.inf
            return _ANSWER_S if answer else _SOUND_S
        if _ask(self._another()) is not None:
            self._alone_since = math.inf
        elif self._alone_since == math.inf:
            self._alone_since = now
        elif now - self._alone_since >= _STRANDED_S:
            return None
        return _ANSWER_S

    def _another(self) -> Any:
        from confluent_kafka.admin import AdminClient

        made = AdminClient({**self._options, **SILENT})
        if self.login is not None:
            made.set_sasl_credentials(*self.login)
        return made


def _ask(client: Any) -> int | None:
    """None if the client is told of brokers; otherwise an error's code: `_TRANSPORT` if it has no connection."""
    try:
        return None if client.list_topics(timeout=_ANSWER_S).brokers else KafkaError.BROKER_NOT_AVAILABLE
    except KafkaException as error:
        code: int = error.args[0].code()
        return code


_STATS_INTERVAL_S = 1.0
_POLL_S = 0.5
EXIT_FATAL = 3

# With few cores, the supervisor and its mark must be scheduled before the shards that they feed; otherwise each hop of
# a mark would wait for a shard's time slice. A shard that runs a little later finds more to do at once. A transaction
# takes many consecutive hops between shard and broker, so there it costs more than it gains.
_NICE = 5


def main(spec: ShardSpec, inbound: int, outbound: int, shared: Shared, supervisor_fd: int, memory: int) -> int:
    """Entry point of the process, which must exit at once with the returned code, without flushing a client.

    `inbound` and `outbound` are the shard's ends of its pipe pair; `supervisor_fd` becomes readable when the supervisor
    dies, independently of the pipes. Signals to all processes are already ignored: the supervisor decides. The shard is
    present on `memory` for as long as it lives.
    """
    if not be_present(memory):
        return 0  # the supervisor is dead and the elector is leaving the group
    owe(shared, spec.index, owes=True)
    widen(outbound)
    calm_memory()
    if spec.lanes is None:
        os.nice(_NICE)
    shard = Shard(spec, ShardPipe(inbound, outbound), shared, supervisor_fd)
    code = shard.run()
    owe(shared, spec.index, owes=code != 0 or shard.may_owe())
    return code


class Shard:
    """The shard process; its parts use it as `ShardHost`."""

    def __init__(self, spec: ShardSpec, pipe: ShardPipe, shared: Shared, supervisor_fd: int) -> None:
        self.spec, self.index = spec, spec.index
        self._pipe, self._shared, self._supervisor_fd = pipe, shared, supervisor_fd
        self.failpoints = failpoints.load()
        self.trusted = trust_check(shared)
        self.send = pipe.send
        self._waker = Waker()
        self.wake = self._waker.set
        self._ended = threading.Event()
        self._fatal: str | None = None
        self._end_deadline: float | None = None
        self.session = PurgeSession(
            spec.dsn,
            OutboxTable.parse(spec.outbox),
            f"harvester {spec.name}/{spec.index}",
            spec.rules,
            opened=lambda pid, started: pipe.send(f.ShardSession(pid, started)),
            server_changed=lambda reason: pipe.send(f.ShardServerChanged(reason)),
            ids_given_again=lambda reason: pipe.send(f.IdsGivenAgain(reason)),
        )
        self.purger = Purger(self.session, spec.io_error_backoff_s, self)
        self.purge = self.purger.purge if spec.lanes is not None else self.purger.purge_here
        self.quarantine = self.purger.quarantine
        self._producers = Producers(
            self.failpoints,
            lambda level, text: pipe.send(f.Log(level, text)),
            spec.name if spec.tracing else None,
        )
        put_away = PutAway(spec.oversize, self) if spec.oversize is not None else None
        self.records: Sender | TransactionIntake
        self.transactor: Transactor | None = None
        self._lanes: Lanes | None = None
        if spec.lanes is None:
            self._producer = self._producers.make(spec.producer_options)
            self._watch = ProducerWatch(self._producer, spec.producer_options)
            self.records = Sender(self._producer, spec.policy, self, spec.header, spec.reserved, spec.dated, put_away)
        else:
            self._lanes = Lanes(spec.lanes, self._producers.make, self._producers.log)
            self.records = TransactionIntake(spec.transaction_records, spec.policy, self, put_away)
            self.transactor = Transactor(
                self.records, self._lanes, self, self.purger, spec.header, spec.reserved, spec.dated
            )

    @property
    def is_crowded(self) -> bool:
        """Whether at least half of what may be in flight over all shards is."""
        records, limit = in_flight(self._shared)
        return 2 * records >= limit

    def run(self) -> int:
        """Runs the process until its end; returns its exit code."""
        if self.transactor is not None:
            self.transactor.start()
        else:
            threading.Thread(target=self._serve_reports, name="delivery", daemon=True).start()
            threading.Thread(target=self._watch_producer, name="reach", daemon=True).start()
        self.purger.start()
        threading.Thread(target=self._report_ready, name="ready", daemon=True).start()
        poller = select.poll()
        poller.register(self._pipe.read_fd, select.POLLIN)
        poller.register(self._waker.fd, select.POLLIN)
        poller.register(self._supervisor_fd, select.POLLIN)
        next_stats = time.monotonic() + _STATS_INTERVAL_S
        while not self._is_over():
            now = time.monotonic()
            due = self.records.due(now)
            if now >= next_stats:
                next_stats = now + _STATS_INTERVAL_S
                self.records.check_queues(now)
                stats = self.records.stats()
                if stats is not None:
                    self.send(stats)
            timeout_s = min(_POLL_S if self._end_deadline is None else 0.02, max(0.0, next_stats - now))
            if due is not None:
                timeout_s = min(timeout_s, max(0.0, due - now))
            for fd, _ in poller.poll(timeout_s * 1000 + 1):
                if fd == self._waker.fd:
                    self._waker.clear()
                elif fd == self._supervisor_fd or not self._read():
                    poller.unregister(fd)
                    self._end(self.spec.linger_at_end_s)
        self._ended.set()
        self.purger.stop()
        self._producers.flush_traces()
        if self._fatal is not None:
            self.send(f.Log(40, f"ends: {self._fatal}"))
            return EXIT_FATAL
        return 0

    def may_owe(self) -> bool:
        """Whether something it sent is unsettled, or timed out recently and may still arrive."""
        doubted_s = time.monotonic() - self.records.doubted_at
        return self.records.unsettled > 0 or doubted_s < self.spec.linger_at_end_s

    # -- the supervisor

    def _read(self) -> bool:
        try:
            for frame in self._pipe.receive():
                self._obey(frame)
        except EOFError:
            return False
        return True

    def _obey(self, frame: f.Frame) -> None:
        match frame:
            case f.Dispatch():
                self.records.dispatch(frame)
                self.purger.hurry()
            case f.Remark():
                self.session.expect(frame.server, frame.term)
                self.records.remark(frame)
                self.purger.hurry()
            case f.ParkAcknowledged(epoch, record_id):
                self.records.closed(epoch, record_id)
            case f.Login():
                self._log_in(frame)
            case f.Stop(within_s):
                self._end(within_s)
            case _:
                self.send(f.Log(40, f"unexpected frame {type(frame).__name__}"))

    def _log_in(self, login: f.Login) -> None:
        self.session.log_in(login.dsn)
        if login.user:
            if self._lanes is not None:
                self._lanes.log_in(login.user, login.password)
                return
            self._watch.login = login.user, login.password
            self._producer.set_sasl_credentials(login.user, login.password)

    def _report_ready(self) -> None:
        self.purger.connected.wait()
        self.send(f.Ready(os.getpid()))

    # -- the end

    def _end(self, within_s: float) -> None:
        if self._end_deadline is None:
            self._end_deadline = time.monotonic() + within_s
            self._pipe.give_up_after(within_s)
            self.records.stop()

    def die(self, reason: str) -> None:
        """The producer is unusable, or a thread has failed: end the process."""
        self._fatal = reason
        self.wake()

    def _is_over(self) -> bool:
        if self._fatal is not None:
            return True
        if self._end_deadline is None:
            return False
        return time.monotonic() >= self._end_deadline or not self.records.unsettled

    # -- other threads

    def _serve_reports(self) -> None:
        assert isinstance(self.records, Sender)
        hit, poll, collect = self.failpoints.hit, self._producer.poll, self.records.collect
        try:
            while not self._ended.is_set():
                if poll(_POLL_S):
                    hit("shard.reports", index=self.index)
                    collect()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would settle
            self.die(f"a delivery report failed: {error!r}")

    def _watch_producer(self) -> None:
        assert isinstance(self.records, Sender)
        wait_s: float | None = _ANSWER_S
        while not self._ended.wait(wait_s):
            wait_s = self._watch.look(time.monotonic(), self.records.acked_at, self.records.unsettled)
            if wait_s is None:
                self.die(STRANDED)
                return

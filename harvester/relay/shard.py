"""A shard: the process that publishes one part of the keys.

Its threads, all blocking, none polling:

- *main* waits for frames, due retries, and the death of the supervisor (EOF on the pipe, or its pidfd);
- *delivery* serves the producer's reports; in exactly-once mode *transactor* does all work with Kafka
  (`exactly_once`);
- *purger* deletes what was acknowledged (`purger`).

The end. On `Stop`, or when the supervisor is gone, nothing more is produced; what is on the wire is awaited and
purged, for at most the delivery timeout and a margin; then the process exits without flushing the producer, so that
nothing leaves it later. A fatal producer error ends it the same way at once: a producer goes only with its process
(P15), and the supervisor starts a new one when this one is certainly dead.

`ShardSpec` is all that a shard is told at birth; it travels to the new process as bytes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from harvester.delivery.lane import Lanes, LaneSettings
from harvester.delivery.retries import Policy
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome, Rules
from harvester.outbox.tables import OutboxTable
from harvester.relay import failpoints
from harvester.relay.at_least_once import Sender
from harvester.relay.core.frames import (
    Dispatch,
    Frame,
    Log,
    Login,
    ParkAcknowledged,
    Ready,
    Remark,
    ShardServerChanged,
    ShardSession,
    Stop,
    Trouble,
)
from harvester.relay.exactly_once import LaneDatabase, Transactor
from harvester.relay.failpoints import Failpoints
from harvester.relay.ipc import ShardPipe, Shared, Waker, in_flight, trust_check, widen
from harvester.relay.purger import Purger, ShardOutlets
from harvester.relay.transaction_intake import TransactionIntake
from harvester.telemetry.logging import ClientLog
from harvester.telemetry.process import calm_collector

if TYPE_CHECKING:
    from harvester.telemetry.tracing import Provider


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """See the module's text."""

    index: int
    name: str
    parent_pid: int
    dsn: str = field(repr=False)  # secrets: who prints the local variables of a traceback must not print these
    outbox: str
    producer_options: dict[str, Any] = field(repr=False)
    policy: Policy
    rules: Rules
    io_error_backoff_s: float
    linger_at_end_s: float  # how long the end may take: delivery timeout and purge margin
    header: str  # the name of the header that says where a record comes from; "" is none
    lanes: LaneSettings | None = field(default=None, repr=False)  # in exactly-once mode
    transaction_records: int = 0
    tracing: bool = False  # continue traces that the headers of rows carry
    reserved: frozenset[str] = frozenset()  # topics of the harvester's own: no record goes there
    dated: bool = False  # a record's timestamp is its row's create_time


class Producers:
    """See the module's text."""

    def __init__(self, failpoints: Failpoints, log: Callable[[int, str], None], traces: str | None) -> None:
        """`log` gets levels as of the module logging, and lines; `traces`: under which name to trace, if at all."""
        self._failpoints = failpoints
        self.log = ClientLog(log)
        self._tracing = _start_tracing(traces) if traces is not None else None

    def make(self, options: Mapping[str, Any]) -> Any:
        """One more. Its client's lines go to the log, or to a logger among the options."""
        producer = self._failpoints.producer({"logger": self.log, **options})
        if self._tracing is None:
            return producer
        from harvester.telemetry.tracing import TracingProducer

        return TracingProducer(producer, self._tracing, transactional="transactional.id" in options)

    def flush_traces(self) -> None:
        """Those that are not exported yet."""
        if self._tracing is not None:
            from harvester.telemetry.tracing import flush

            flush(self._tracing)


def _start_tracing(name: str) -> Provider:
    from harvester.telemetry.tracing import make_provider

    return make_provider(name)


_STATS_INTERVAL_S = 1.0
_POLL_S = 0.5
EXIT_FATAL = 3

# Where cores are few, the supervisor and its mark must be scheduled before the shards that they feed: each hop of a
# mark would otherwise wait for a shard's time slice. A shard that runs a little later finds more to do at once. A
# transaction is many hops between the shard and the broker, one after the other: there it costs more than it brings.
_NICE = 5


def main(spec: ShardSpec, inbound: Any, outbound: Any, shared: Shared) -> None:
    """Entry of the process. The two connections are the shard's ends of its pipe pair."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides; its end is noticed
    widen(outbound.fileno())
    calm_collector()
    if spec.lanes is None:
        os.nice(_NICE)
    code = _Shard(spec, ShardPipe(inbound.fileno(), outbound.fileno()), shared).run()
    os._exit(code)  # never wait for the producer: what it still holds must not leave after us


class _Shard:
    def __init__(self, spec: ShardSpec, pipe: ShardPipe, shared: Shared) -> None:
        self._spec = spec
        self._pipe, self._shared = pipe, shared
        self._failpoints = failpoints.load()
        self._waker = Waker()
        self._ended = threading.Event()
        self._fatal: str | None = None
        self._end_deadline: float | None = None
        self._session = PurgeSession(
            spec.dsn,
            OutboxTable.parse(spec.outbox),
            f"harvester {spec.name}/{spec.index}",
            spec.rules,
            opened=lambda pid, started: pipe.send(ShardSession(pid, started)),
            server_changed=lambda reason: pipe.send(ShardServerChanged(reason)),
        )
        self._purger = Purger(self._session, spec.io_error_backoff_s, self)
        self._producers = Producers(
            self._failpoints,
            lambda level, text: pipe.send(Log(level, text)),
            spec.name if spec.tracing else None,
        )
        self._sender: Sender | TransactionIntake
        self._transactor: Transactor | None = None
        self._lanes: Lanes | None = None
        if spec.lanes is None:
            self._producer = self._producers.make(spec.producer_options)
            outlets = self._outlets(self._purger.purge)
            self._sender = Sender(
                self._producer, spec.policy, outlets, spec.index, spec.header, spec.reserved, spec.dated
            )
        else:
            self._sender = self._prepare_transactions(spec.lanes)

    def _outlets(self, purge: Callable[[Sequence[int]], None]) -> ShardOutlets:
        return ShardOutlets(
            send=self._pipe.send,
            purge=purge,
            quarantine=self._purger.quarantine,
            wake=self._waker.set,
            fatal=self._die,
            trusted=trust_check(self._shared),
        )

    def _prepare_transactions(self, lanes: LaneSettings) -> TransactionIntake:
        purger, session, spec = self._purger, self._session, self._spec

        def purge(ids: Sequence[int]) -> None:
            purger.purge(ids)
            purger.kick()

        def delete(ids: Sequence[int]) -> bool:
            session.delete(ids)
            return True

        self._lanes = Lanes(lanes, self._producers.make, self._producers.log)
        database = LaneDatabase(lambda: purger.ask(session.term), lambda ids: purger.ask(partial(delete, ids)))
        outlets = self._outlets(purge)
        intake = TransactionIntake(spec.transaction_records, spec.policy, outlets)
        self._transactor = Transactor(
            intake,
            spec.index,
            self._lanes,
            spec.header,
            spec.reserved,
            outlets,
            database,
            self._failpoints,
            spec.dated,
        )
        return intake

    def run(self) -> int:
        """The life of the process; returns its exit code."""
        if self._transactor is not None:
            self._transactor.start()
        else:
            threading.Thread(target=self._serve_reports, name="delivery", daemon=True).start()
        self._purger.start()
        threading.Thread(target=self._report_ready, name="ready", daemon=True).start()
        poller = select.poll()
        poller.register(self._pipe.read_fd, select.POLLIN)
        poller.register(self._waker.fd, select.POLLIN)
        parent_fd = self._watch_parent()
        if parent_fd is not None:
            poller.register(parent_fd, select.POLLIN)
        next_stats = time.monotonic() + _STATS_INTERVAL_S
        while not self._is_over():
            now = time.monotonic()
            due = self._sender.due(now)
            if now >= next_stats:
                next_stats = now + _STATS_INTERVAL_S
                self._sender.check_queues(now)
                stats = self._sender.stats()
                if stats is not None:
                    self._pipe.send(stats)
            timeout_s = min(_POLL_S if self._end_deadline is None else 0.02, max(0.0, next_stats - now))
            if due is not None:
                timeout_s = min(timeout_s, max(0.0, due - now))
            for fd, _ in poller.poll(timeout_s * 1000 + 1):
                if fd == self._waker.fd:
                    self._waker.clear()
                elif fd == parent_fd or not self._read():
                    poller.unregister(fd)
                    self._end(self._spec.linger_at_end_s)
        self._ended.set()
        self._purger.stop()
        self._producers.flush_traces()
        if self._fatal is not None:
            self._pipe.send(Log(40, f"ends: {self._fatal}"))
            return EXIT_FATAL
        return 0

    # -- the supervisor

    def _read(self) -> bool:
        try:
            for frame in self._pipe.receive():
                self._obey(frame)
        except EOFError:
            return False
        return True

    def _obey(self, frame: Frame) -> None:
        match frame:
            case Dispatch(epoch, rows, low_water):
                self._sender.dispatch(epoch, rows, low_water)
                self._purger.hurry()
            case Remark():
                self._session.expect(frame.server, frame.term)
                self._sender.remark(frame)
                self._purger.hurry()
            case ParkAcknowledged(epoch, record_id):
                self._sender.closed(epoch, record_id)
            case Login():
                self._log_in(frame)
            case Stop(within_s):
                self._end(within_s)
            case _:
                self._pipe.send(Log(40, f"unexpected frame {type(frame).__name__}"))

    def _log_in(self, login: Login) -> None:
        self._session.log_in(login.dsn)
        if login.user:
            clients = self._lanes.log_in if self._lanes is not None else self._producer.set_sasl_credentials
            clients(login.user, login.password)

    def _watch_parent(self) -> int | None:
        """A descriptor that becomes readable when the supervisor dies, however its pipe fares."""
        if os.getppid() != self._spec.parent_pid:
            self._end(0)
            return None
        return os.pidfd_open(self._spec.parent_pid)

    def _report_ready(self) -> None:
        self._purger.connected.wait()
        self._pipe.send(Ready(os.getpid()))

    # -- the end

    def _end(self, within_s: float) -> None:
        if self._end_deadline is None:
            self._end_deadline = time.monotonic() + within_s
            self._pipe.give_up_after(within_s)
            self._sender.stop()

    def _die(self, text: str) -> None:
        self._fatal = text
        self._waker.set()

    def _is_over(self) -> bool:
        if self._fatal is not None:
            return True
        if self._end_deadline is None:
            return False
        return time.monotonic() >= self._end_deadline or not self._sender.unsettled

    # -- other threads

    def _serve_reports(self) -> None:
        assert isinstance(self._sender, Sender)
        hit, poll, kick, collect = self._failpoints.hit, self._producer.poll, self._purger.kick, self._sender.collect
        try:
            while not self._ended.is_set():
                if poll(_POLL_S):
                    hit("shard.reports", index=self._spec.index)
                    collect()
                    kick()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would settle
            self._die(f"a delivery report failed: {error!r}")

    # -- the purger

    def purged(self, ids: Sequence[int]) -> None:
        """The DELETE of these rows has committed."""
        self._failpoints.hit("shard.purged", index=self._spec.index, ids=ids)
        self._sender.purged(ids)

    def quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        """What became of a record that cannot be published."""
        self._sender.quarantined(poison, outcome)

    def trouble(self, text: str | None) -> None:
        """What the purger waits for; None when that is over."""
        self._pipe.send(Trouble(text))

    def in_flight(self) -> int:
        """How many records this shard has that are not settled."""
        return self._sender.unsettled

    def is_awaited(self) -> bool:
        """Whether a purge would let something go on: a record behind it, a drain, or the room in flight."""
        records, limit = in_flight(self._shared)
        return self._sender.is_awaited or 2 * records >= limit

    def died(self, error: Exception) -> None:
        """The purger's thread has ended by an error."""
        self._die(f"the purger failed: {error!r}")

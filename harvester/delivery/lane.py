"""A lane: a transactional identity of one shard, as a producer and as a partition of the progress topic.

*When a commit is clear* (P23, P40). An EndTxn request names a producer and its epoch, not a transaction: a request that
arrives late ends whatever transaction the producer has open by then. The broker's remedy (KIP-890, a new epoch after
each transaction) requires version 5 of the request; librdkafka 2.16 sends version 1. So the next transaction begins
only when no EndTxn of an earlier one can be under way.

librdkafka sends EndTxn once, and again only if the request has failed: the connection was closed, the request timed
out, or the broker answered with a retriable error. It calls no callback, and `commit_transaction` returns success. But
it writes each outcome to the debug log, and the resend waits for `retry.backoff.ms`, minus 20 % jitter. So either of
two proofs makes an outcome clear:

- by time: the call returned before the earliest possible resend. One request was sent, and it was answered.
- by testimony: the debug lines (`Witness`) report every EndTxn as answered by the broker, the last one without an
  error. Any local error (`_TRANSPORT`, `_TIMED_OUT`) means that a request may still be under way.

Everything else is *unclear*: the lane is closed and reopened, which raises the epoch, and its progress shows what was
committed. An abort needs more: the client drops records that wait for a resend and gives their sequence numbers to the
next ones, for which the bytes of the first attempt could be mistaken. It is clear only if no connection has broken
since the transaction began.

*Progress comes last* (P46). A transaction's progress record is produced once all its records are acknowledged, so that
progress that becomes readable names no record that is missing from its topic, however the transaction ends. The first
record of a transaction, which makes the partition known to the coordinator, names what earlier ones of the lane
committed.
"""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition, libversion

from harvester.bounds import SILENT, read_bounds
from harvester.delivery.progress import VERSIONS, EncodedProgress, Progress, decode, most_ids
from harvester.delivery.progress_topic import check_recorded, find_progress_topic, largest_record_bytes, why_refused
from harvester.delivery.retries import INNOCENT
from harvester.errors import BrokerUnavailable

_INIT_S = 0.5  # one attempt; it is repeated
_END_S = 5.0  # for the coordinator to answer a commit or an abort
_LEAVE_S = 0.5  # for answers to a closed lane's last requests
_REPORT_S = 5.0  # for the report of a record that has timed out
_READ_BACK_RECORDS = 64  # the last committed progress record is usually this close to the end

# librdkafka's defaults, and the smallest fraction of the backoff after jitter.
_BACKOFF_MS, _BACKOFF_MAX_MS, _LEAST_SHARE, _DELIVERY_MS = "100", "1000", 0.8, "300000"
_RECORD_BYTES = "1000000"
_WITNESSED = "eos,broker"  # of the client's debug contexts: EndTxn, and connections
_INFERRED = ("IMPLICITACK", "DUPSEQ")  # lines of the context eos
_TELLS_INFERRED = libversion()[1] < 0x02_11_00_00  # the lines above are known for versions up to 2.16
_ENDED = re.compile(r"EndTxn returned (\S+)")
_OVER = re.compile(r"in state (?!UP)")  # connections that can no longer, or not yet, carry a request
_NO_RECORDS = re.compile(r"\[thrd:(TxnCoordinator|[^]]*/bootstrap)\]")
_NOT_ADDED = re.compile(r'Failed to add partition "(.*)" \[\d+\] to transaction: (.*)')
_SKIPPED = KafkaError(KafkaError.OPERATION_NOT_ATTEMPTED).str()  # because of another partition
_STILL_ENDING = KafkaError(KafkaError.CONCURRENT_TRANSACTIONS).str()
_ENDS_ONCE = (
    "Kafka is still ending the last transaction of {}, which takes until each of its partitions has a leader and"
    " min.insync.replicas replicas in sync; kafka-transactions.sh describe lists them"
)
NOT_ALLOWED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
_SEVERITIES = {"0": 50, "1": 50, "2": 50, "3": 40, "4": 30}  # syslog's to the module logging's; others: INFO


class TransactionOutcome(Enum):
    """The outcome of a transaction, or of a step of it."""

    DONE = "done"  # it certainly took effect
    AGAIN = "again"  # not yet; the same call may be repeated (of `init` alone)
    REFUSED = "refused"  # the transaction can only be aborted
    UNCLEAR = "unclear"  # unknown, or the producer is unusable: reopen the lane


def judge(error: KafkaError) -> TransactionOutcome:
    if error.txn_requires_abort() and not error.fatal():
        return TransactionOutcome.REFUSED
    return TransactionOutcome.AGAIN if error.retriable() and not error.fatal() else TransactionOutcome.UNCLEAR


def is_clear(took_s: float, answers: Sequence[str], resend_s: float) -> bool:
    """Whether no EndTxn is under way after a call that succeeded; see the module docstring.

    `answers`: the outcome of each EndTxn since the call began; `resend_s`: the earliest time of a resend.
    """
    if any(answer.startswith("_") for answer in answers):
        return False
    return took_s < resend_s or (bool(answers) and answers[-1] == "NO_ERROR")


def earliest_resend_s(options: Mapping[str, Any]) -> float:
    """How soon a producer with these options resends a failed request."""
    backoff_ms = float(options.get("retry.backoff.ms", _BACKOFF_MS))
    return min(_LEAST_SHARE * backoff_ms, float(options.get("retry.backoff.max.ms", _BACKOFF_MAX_MS))) / 1000


def answer_s(options: Mapping[str, Any]) -> float:
    """The longest time until a producer with these options has reported on a record."""
    given = options.get("delivery.timeout.ms", options.get("message.timeout.ms", _DELIVERY_MS))
    return float(given) / 1000 + _REPORT_S


class Witness:
    """The client's logger: interprets lines about EndTxn requests and connections, and passes others on.

    The client logs from within `poll` and `flush`, possibly while a fatal error is raised but not yet reported. In that
    state hardly any Python code works, so lines are only stored there, and interpreted later.
    """

    def __init__(self, options: Mapping[str, Any], log: Any = None) -> None:
        """`options` are the producer's, as set by the user; `log` has the method `log`, or is None."""
        self._log = log
        severity = str(options.get("log_level", "6"))
        self._least = logging.DEBUG if options.get("debug") else _SEVERITIES.get(severity, logging.INFO)
        self._lines: list[tuple[Any, ...]] = []
        self.answers: list[str] = []  # to EndTxn requests since `ask`
        self.broken = False  # whether a connection that may have carried records broke since `watch`
        self.inferred = False  # whether a delivery was inferred since `watch`
        self.not_added: dict[str, str] = {}  # topics that the coordinator has refused since `watch`, and why

    def log(self, *line: Any) -> None:
        """Takes a level, a format, and its arguments: the line's facility, the client's name, and the text."""
        self._lines.append(line)

    def read(self) -> None:
        """Interpret the lines received so far."""
        lines, self._lines = self._lines, []
        for line in lines:
            level, _, facility, _, text = line
            if facility == "ENDTXN":
                self.answers += _ENDED.findall(text)
            elif facility == "FAIL" and not _NO_RECORDS.match(text) and not _OVER.search(text):
                self.broken = True
            elif facility in _INFERRED:
                self.inferred = True
            elif facility == "ADDPARTS":
                self.not_added.update(said for said in _NOT_ADDED.findall(text) if said[1] != _SKIPPED)
            if self._log is not None and level >= self._least:
                self._log.log(*line)

    def watch(self) -> None:
        self.broken = self.inferred = False
        self.not_added = {}

    def ask(self) -> None:
        self.answers = []


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """`options` are those of the consumer and the admin client; `producer` those of a transactional producer."""

    group: str
    topic: str
    options: Mapping[str, Any]
    producer: Mapping[str, Any]

    def transactional_id(self, number: int) -> str:
        """The transactional id of this lane; it includes the group, since these ids are cluster-wide."""
        return f"{self.group}.{number}"


class Lane:
    """An open lane. One thread only, except for `produce`'s callbacks, which run inside its calls."""

    def __init__(self, number: int, topic: str, producer: Any, witness: Witness, options: Mapping[str, Any]) -> None:
        """`options` are the producer's, as set by the user."""
        self.number, self.answer_s, self._resend_s = number, answer_s(options), earliest_resend_s(options)
        self._topic, self._producer, self._witness = topic, producer, witness
        self.error = ""  # of the last call that failed
        self.room = 0  # how many ids a progress record may name; see `Lanes.room`
        self.refused: KafkaError | None = None  # the error of the open transaction's progress record
        self.begun = self.noted = False  # whether a transaction is open, and whether `note` was called for it
        self.produce = producer.produce

    @property
    def not_added(self) -> Mapping[str, str]:
        """Topics that the coordinator has not made part of the last transaction, and why; that refuses all of it."""
        return self._witness.not_added

    def init(self) -> TransactionOutcome:
        """Fence the predecessor."""
        return self._call(lambda: self._producer.init_transactions(_INIT_S))

    def begin(self) -> TransactionOutcome:
        self.refused, self.noted = None, False
        self._witness.watch()
        outcome = self._call(self._producer.begin_transaction)
        self.begun = outcome is TransactionOutcome.DONE
        return outcome

    def note(self, progress: EncodedProgress) -> TransactionOutcome:
        """Send a progress record of earlier transactions alone: it makes the partition known to the coordinator."""
        outcome = self._call(lambda: self._note(progress))
        self.noted = outcome is TransactionOutcome.DONE
        return outcome

    def _note(self, progress: EncodedProgress) -> None:
        value, versions = progress
        headers = [(VERSIONS, versions)] if versions else []
        key = str(self.number).encode()
        try:
            self._producer.produce(self._topic, value, key, self.number, self._noted, None, 0, headers)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._STATE:  # a record has failed
                raise KafkaException(KafkaError(KafkaError._STATE, error.args[0].str(), False, False, True)) from error
            if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                self.refused = error.args[0]
                raise KafkaException(KafkaError(self.refused.code(), self.refused.str(), False, False, True)) from error
            raise

    def _noted(self, error: KafkaError | None, _message: Any) -> None:
        """The record's delivery report. If it fails only because its transaction does, it is not at fault."""
        if error is not None and error.name() not in INNOCENT:
            self.refused = error

    def commit(self, progress: EncodedProgress) -> TransactionOutcome:
        """Conclude the transaction, and commit it."""
        outcome = self.conclude(progress)
        return self.commit_concluded() if outcome is TransactionOutcome.DONE else outcome

    def conclude(self, progress: EncodedProgress) -> TransactionOutcome:
        """Send what is left; once all of it is acknowledged, produce this progress record."""
        return self._sent(lambda: self._conclude(progress))

    def _conclude(self, progress: EncodedProgress) -> None:
        self._arrive()
        self._note(progress)

    def commit_concluded(self) -> TransactionOutcome:
        """Commit once the progress record is acknowledged."""
        outcome = self._sent(self._arrive)
        if outcome is TransactionOutcome.DONE:
            return self._ended(lambda: self._producer.commit_transaction(_END_S))
        return outcome

    def _sent(self, action: Callable[[], None]) -> TransactionOutcome:
        outcome = self._call(action)
        return TransactionOutcome.UNCLEAR if outcome is TransactionOutcome.AGAIN else outcome

    def _arrive(self) -> None:
        self._left(self.answer_s)
        self._producer.poll(0)  # for log lines about what has arrived
        self._witness.read()
        if self._witness.inferred:
            raise KafkaException(KafkaError(KafkaError._STATE, "a delivery was only inferred"))

    def abort(self) -> TransactionOutcome:
        outcome = self._ended(lambda: self._producer.abort_transaction(_END_S))
        return TransactionOutcome.UNCLEAR if self._witness.broken or self._witness.inferred else outcome

    def flush(self, timeout_s: float) -> bool:
        """Send what is left; False if some of it has no answer yet."""
        return self._call(lambda: self._left(timeout_s)) is TransactionOutcome.DONE

    def _left(self, timeout_s: float) -> None:
        if self._producer.flush(timeout_s):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "some records have no answer yet"))

    def poll(self, timeout_s: float) -> TransactionOutcome:
        """Serve the client's events; this is where a fatal error is raised."""
        return self._call(lambda: self._producer.poll(timeout_s))

    def close(self) -> None:
        """End the producer; its pending records are dropped, and the next `init` ends what is open in Kafka.

        If a client is destroyed just as it sends the first AddPartitionsToTxn of a transaction, the process ends: the
        client counts the request after its failure (an assertion in rdkafka_txnmgr.c, seen with 2.16). Once all records
        are acknowledged, no such request is due. An abort instead would not help: it keeps the epoch, which late bytes
        still carry.
        """
        self.begun = False
        self.flush(_LEAVE_S)
        self._call(self._drop)  # a fenced producer raises again
        # `close` would wait for an answer; the client is destroyed with its last reference.
        del self._producer, self.produce

    def _drop(self) -> None:
        self._producer.purge()
        self._producer.poll(0)

    def log_in(self, user: str, password: str) -> None:
        """Use these credentials from now on; thread-safe."""
        if (producer := getattr(self, "_producer", None)) is not None:
            producer.set_sasl_credentials(user, password)

    def _ended(self, end: Callable[[], None]) -> TransactionOutcome:
        """Commit or abort; DONE only if the outcome is clear."""
        self.begun = False
        self._witness.ask()
        began = time.monotonic()
        outcome = self._call(end)
        took_s = time.monotonic() - began
        if self.poll(0) is not TransactionOutcome.DONE:  # which also serves the client's log lines
            return TransactionOutcome.UNCLEAR
        if outcome is TransactionOutcome.DONE:
            return outcome if is_clear(took_s, self._witness.answers, self._resend_s) else TransactionOutcome.UNCLEAR
        return TransactionOutcome.UNCLEAR if outcome is TransactionOutcome.AGAIN else outcome

    def _call(self, action: Callable[[], Any]) -> TransactionOutcome:
        try:
            return self._tried(action)
        finally:
            self._witness.read()

    def _tried(self, action: Callable[[], Any]) -> TransactionOutcome:
        try:
            action()
        except KafkaException as error:
            return self._judged(error)
        except SystemError as error:
            # The client raises a fatal error after its callback; if a callback runs meanwhile, it ends with this error.
            behind = error.__cause__
            if not isinstance(behind, KafkaException):
                raise
            return self._judged(behind)
        except BufferError:
            return TransactionOutcome.REFUSED
        return TransactionOutcome.DONE

    def _judged(self, error: KafkaException) -> TransactionOutcome:
        self.error = error.args[0].str()
        return judge(error.args[0])


class Lanes:
    """Opens lanes and reads their progress. One thread only, except for `log_in`."""

    def __init__(self, settings: LaneSettings, make_producer: Callable[[dict[str, Any]], Any], log: Any = None) -> None:
        """`log` is the logger for the producers' lines, if wanted; it has the method `log`."""
        self._settings, self._make_producer, self._log = settings, make_producer, log
        self._room: int | None = None  # see `room`
        self._opened: tuple[weakref.ref[Lane], ...] = ()  # replaced as a whole, since other threads call `log_in`

    def log_in(self, user: str, password: str) -> None:
        """Use these credentials from now on, also on open lanes. Thread-safe."""
        given = {"sasl.username": user, "sasl.password": password}
        settings = self._settings
        self._settings = replace(
            settings, options={**settings.options, **given}, producer={**settings.producer, **given}
        )
        for lane in filter(None, [reference() for reference in self._opened]):
            lane.log_in(user, password)

    def open(self, number: int) -> Lane:
        """A lane with its own producer; `init` has not been called yet."""
        given = self._settings.producer
        witness = Witness(given, self._log)
        options = {
            **given,
            "transactional.id": self._settings.transactional_id(number),
            "debug": ",".join(filter(None, (given.get("debug"), _WITNESSED))),
            "delivery.report.only.error": _TELLS_INFERRED,
            "logger": witness,
            "error_cb": lambda _error: None,  # what matters fails a call, or is logged
        }
        lane = Lane(number, self._settings.topic, self._make_producer(options), witness, given)
        self._opened = (*(each for each in self._opened if each() is not None), weakref.ref(lane))
        return lane

    def room(self) -> int:
        """How many ids a progress record may name, as limited by topic and client. Determined once.

        Raises BrokerUnavailable.
        """
        if self._room is None:
            settings = self._settings
            sizes = [int(settings.producer.get("message.max.bytes", _RECORD_BYTES))]
            of_topic = largest_record_bytes(settings.topic, settings.options)
            self._room = most_ids(min([*sizes, of_topic] if of_topic is not None else sizes))
        return self._room

    def explain(self, lane: Lane) -> str:
        """Why the lane's last transaction was refused, and what to do about it."""
        topic, not_added = self._settings.topic, lane.not_added
        refused = lane.refused or (NOT_ALLOWED if not_added.get(topic) == NOT_ALLOWED.str() else None)
        if refused is None:
            if _STILL_ENDING in lane.error:
                name = self._settings.transactional_id(lane.number)
                return f"{_STILL_ENDING} ({_ENDS_ONCE.format(name)})"
            return "; ".join([lane.error, *(f"topic {name}: {why}" for name, why in not_added.items())])
        self._room = None  # the limit may have been lowered
        return why_refused(topic, lane.number, refused, self._settings.options)

    def check_topic(self, recorded: str | None) -> None:
        """Raises SchemaError if the progress topic is not this one (`check_recorded`), or BrokerError."""
        if recorded is not None:
            check_recorded(find_progress_topic(self._settings.topic, self._settings.options), recorded)

    def progress(self, number: int, timeout_s: float) -> Progress | None:
        """The content of the lane's last committed record; None if there is none. To be called after fencing the lane.

        Raises WireError if it cannot be read, BrokerUnavailable if the log's end was not reached in time: while a
        transaction before it is open, ids that it commits may be hidden.
        """
        deadline = time.monotonic() + timeout_s
        low, end = self._edges(number, timeout_s)
        if low == end:
            return None
        back = _READ_BACK_RECORDS
        reading = {"isolation.level": "read_committed", "enable.partition.eof": True}
        consumer = Consumer({**self._consumer_options(), **reading})
        try:
            while True:
                start = max(low, end - back)
                last = self._last(consumer, number, start, end, deadline)
                if last is not None or start == low:
                    return decode(*last) if last is not None else None
                back *= 16
        finally:
            consumer.close()

    def _edges(self, number: int, timeout_s: float) -> tuple[int, int]:
        """The first offset, and the end including uncommitted records."""
        asking = Consumer({**self._consumer_options(), "isolation.level": "read_uncommitted"})
        try:
            return read_bounds(asking, self._settings.topic, number, timeout_s)
        except KafkaException as error:
            where = f"{self._settings.topic}/{number}"
            raise BrokerUnavailable(f"the ends of {where} could not be read: {error}") from error
        finally:
            asking.close()

    def _consumer_options(self) -> dict[str, Any]:
        return {
            **self._settings.options,
            **SILENT,
            "group.id": self._settings.group,  # required by the client; nothing joins or commits
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }

    def _last(self, consumer: Consumer, number: int, start: int, end: int, deadline: float) -> EncodedProgress | None:
        """The last committed record from `start` on; reads up to `end`."""
        consumer.assign([TopicPartition(self._settings.topic, number, start)])
        last: EncodedProgress | None = None
        while time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is None:
                value, headers = message.value(), dict(message.headers() or ())
                versions = headers.get(VERSIONS)
                known = versions if isinstance(versions, bytes) else b""
                last = EncodedProgress(value, known) if value is not None else None
                reached = (message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                reached = message.offset() or 0
            else:
                raise BrokerUnavailable(f"the progress of lane {number} could not be read: {error.str()}")
            if reached >= end:
                return last
        raise BrokerUnavailable(
            f"the end of {self._settings.topic}/{number}, {end}, was not reached in time:"
            " a transaction before it is still open in Kafka",
            hint="if this persists, `kafka-transactions.sh find-hanging` shows it, and `abort` ends it",
        )

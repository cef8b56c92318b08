"""Dead letters: records that no handler accepted, and the topic that holds them.

Value and headers are the record's own. An additional header, the last of its name, states in JSON where the record
comes from and why it is here. The key consists of the record's place and a digest of it, not of its own key: so the
topic can be compacted, holds each record once however often it was given up, and loses settled ones, which are marked
by a record without a value. The digest distinguishes it from a record with the same place in a topic that was deleted
and recreated.

Operations on a single dead letter are pure; those on the topic are thin.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.bounds import SILENT, answer, existing_topics, let_go, passes
from harvester.clock import clock_s
from harvester.coordination.errors import UnknownTopic
from harvester.coordination.topic import failed, refuses
from harvester.delivery.progress_topic import durable
from harvester.errors import BrokerError, BrokerUnavailable
from harvester.origin import HEADER as ORIGIN
from harvester.origin import decode as decode_origin

HEADER = "harvester-dead-letter"
FORMER_ORIGIN = "harvester-origin"
_LONGEST_ERROR = 2000
_DIGITS = 16  # of the digest in a key
_NOT_ABOUT = ("key", "value", "headers")
Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """`timestamp_ms`: the record's own; `failed_at_ms`: of the last try; both since the UNIX epoch."""

    group: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    error: str
    attempts: int
    client: str
    timestamp_ms: int | None
    failed_at_ms: int

    @property
    def place(self) -> str:
        """Topic, partition and offset in one word, which identifies a dead letter in commands and output."""
        return f"{self.topic}/{self.partition}/{self.offset}"

    @property
    def letter_key(self) -> bytes:
        """Its key in the dead-letter topic: the same for the same record, whenever it is given up."""
        content = ascii((self.timestamp_ms, self.key, self.value, self.headers)).encode()
        return f"{self.group}/{self.place}/{sha256(content).hexdigest()[:_DIGITS]}".encode()

    def encode(self) -> tuple[bytes, bytes, Headers]:
        """Key, value and headers in the dead-letter topic."""
        about = {name: value for name, value in asdict(self).items() if name not in _NOT_ABOUT}
        about["key_base64"] = None if self.key is None else base64.b64encode(self.key).decode()
        about["tombstone"] = self.value is None
        own: Headers = [*self.headers, (HEADER, json.dumps(about).encode())]
        return self.letter_key, self.value or b"", own

    def redriven(self) -> Headers:
        """Its headers for going back to its topic.

        The header by which an inbox recognises a record is removed, whatever its name: the id may count as seen since
        the record was given up, and then nobody would process it.
        """
        return [
            (FORMER_ORIGIN if name == ORIGIN or decode_origin(value) is not None else name, value)
            for name, value in self.headers
        ]


def dead_letter(
    record: Any, *, group: str, client: str, error: BaseException, attempts: int, now_ms: int
) -> DeadLetter:
    """Create the dead letter of a consumed message."""
    kind, timestamp_ms = record.timestamp()
    text = f"{type(error).__name__}: {error}"
    return DeadLetter(
        group=group, topic=record.topic(), partition=record.partition(), offset=record.offset(),
        key=_bytes(record.key()), value=_bytes(record.value()), headers=list(record.headers() or ()),
        error=text[:_LONGEST_ERROR], attempts=attempts, client=client,
        timestamp_ms=timestamp_ms if kind else None, failed_at_ms=now_ms,
    )  # fmt: skip


def decode(value: bytes | None, headers: Sequence[tuple[str, bytes | None]] | None) -> DeadLetter | None:
    """The dead letter in a record of the topic; None for a settled one, and for a record from elsewhere."""
    given = list(headers or ())
    at = max((number for number, (name, _) in enumerate(given) if name == HEADER), default=None)
    if value is None or at is None:
        return None
    try:
        about = json.loads(given.pop(at)[1] or b"")
        key = about.pop("key_base64")
        tombstone = about.pop("tombstone")
        return DeadLetter(
            **about,
            key=None if key is None else base64.b64decode(key, validate=True),
            value=None if tombstone else value,
            headers=given,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


# -- the topic

_TIMEOUT_S = 10.0
_TURN_S = 0.1
_SILENCE_S = 30.0
_DELIVERY_MS = 30_000
_FETCHED = 1000
_LARGEST_BYTES = 16 * 1024 * 1024  # with the added header, a record may exceed the limit of its own topic
_NO_ANSWER = frozenset({
    KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._MSG_TIMED_OUT,
})  # fmt: skip
_REDRIVEN = 2_000  # per transaction; the topic is read before each one
_WRITING = {
    "acks": "all", "enable.idempotence": True, "linger.ms": 0, "delivery.timeout.ms": _DELIVERY_MS,
    "allow.auto.create.topics": False, "message.max.bytes": _LARGEST_BYTES,
    "partitioner": "murmur2_random",  # the same everywhere: a record is settled in its own partition
}  # fmt: skip


def ensure_dead_letter_topic(name: str, options: Mapping[str, Any]) -> None:
    """Create the topic if it is missing; an existing one may have any settings. Raises BrokerError."""
    admin = AdminClient({**options, **SILENT})
    try:
        metadata = admin.list_topics(timeout=_TIMEOUT_S)
        if name in metadata.topics:
            return
        replicas, kept = durable(len(metadata.brokers))
        config = {**kept, "cleanup.policy": "compact", "max.message.bytes": str(_LARGEST_BYTES)}
        answer(admin.create_topics([NewTopic(name, 1, replicas, config=config)])[name], _TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another consumer was faster
            raise failed(name, options, error, kind="dead-letter topic") from error


class DeadLetterWriter:
    """Writes records into the dead-letter topic. For several threads at once."""

    def __init__(self, topic: str, options: Mapping[str, Any]) -> None:
        self._topic, self._options = topic, {**options, **_WRITING}
        self._producer = Producer(self._options)
        self._lock = threading.Lock()  # guards its replacement

    def send(self, letter: DeadLetter) -> None:
        """Returns when the letter has arrived. Raises BrokerUnavailable, which may be temporary, or BrokerError."""
        producer = getattr(self, "_producer", None)
        if producer is None:
            raise BrokerUnavailable(f"{letter.place} was not written as a dead letter: the consumer is closed")
        answers: list[tuple[KafkaError | None, bool]] = []
        try:
            _produce(producer, self._topic, letter, lambda error, sent: answers.append((error, _is_written(sent))))
            while not answers:
                producer.poll(_TURN_S)
        except KafkaException as error:
            answers.append((error.args[0], False))
        problem, is_written = answers[0]
        if problem is not None:
            if problem.code() == KafkaError._MSG_TIMED_OUT:
                self._replace(producer)
            raise _failed(self._topic, problem)
        if not is_written:
            raise _inferred(self._topic)

    def _replace(self, failed: Producer) -> None:
        """The client may never find a broker again (P48)."""
        with self._lock:
            if getattr(self, "_producer", None) is failed:
                self._producer = Producer(self._options)

    def close(self) -> None:
        """Wait a while for what another thread is still sending."""
        with self._lock:
            producer = self.__dict__.pop("_producer", None)
        if producer is not None:
            producer.flush(_TIMEOUT_S)
            let_go(producer)


class DeadLetterTopic:
    """The dead-letter topic, for people. Raises BrokerError and BrokerUnavailable; UnknownTopic."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self._options = name, {**options, **SILENT}

    def read(self, wanted: Callable[[DeadLetter], bool] = lambda _: True) -> list[DeadLetter]:
        """The unsettled letters up to the current end, ordered by their place, so by key order."""
        found: dict[bytes, DeadLetter] = {}
        with _Reading(self.name, self._options) as reading:
            for message in reading.messages():
                key, letter = message.key(), decode(message.value(), message.headers())
                found.pop(key, None)
                if letter is not None and wanted(letter):
                    found[key] = letter
        return sorted(found.values(), key=lambda each: (each.topic, each.partition, each.offset))

    def redrive(self, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """Put them back at the end of their original partitions; returns those that still existed.

        In transactions, so that a record goes back and is settled, or neither. Any simultaneous redrive from this topic
        is fenced. Each transaction has its own producer: the client may send the end of one again, late, and that would
        end the next transaction of the same producer (P40).
        """
        asked = {letter.letter_key for letter in letters}
        back: list[DeadLetter] = []
        while some := self._move(asked):
            back += some
            asked -= {letter.letter_key for letter in some}  # one that failed again since is another letter
            if len(some) < _REDRIVEN:
                break
        return back

    def _move(self, asked: Collection[bytes]) -> list[DeadLetter]:
        """The next requested letters that still exist, in a transaction."""
        producer = Producer({**self._options, **_WRITING, "transactional.id": f"harvester-dead-{self.name}"})
        try:
            producer.init_transactions(_TIMEOUT_S * 3)
            left = self.read(lambda each: each.letter_key in asked)
            some = left[:_REDRIVEN]
            if some:
                _refuse_homeless(producer, left)
                self._commit(producer, some)
        except KafkaException as error:
            raise _failed(self.name, error.args[0]) from error
        return some

    def _commit(self, producer: Producer, letters: Sequence[DeadLetter]) -> None:
        inferred: list[str] = []  # topics; other failures show at the commit

        def note(error: KafkaError | None, sent: Any) -> None:
            if error is None and not _is_written(sent):
                inferred.append(sent.topic())

        producer.begin_transaction()
        try:
            for letter in letters:
                _offer(producer, letter.topic, partition=letter.partition, key=letter.key, value=letter.value,
                       headers=letter.redriven(), on_delivery=note)  # fmt: skip
                _offer(producer, self.name, key=letter.letter_key, value=None, on_delivery=note)
            producer.flush()  # limited by the delivery timeout
            if inferred:
                raise _inferred(inferred[0])
            # Longer than a delivery: a commit that is given up while waiting for one cannot be aborted.
            producer.commit_transaction(_DELIVERY_MS / 1000 + _TIMEOUT_S)
        except (KafkaException, BrokerError):
            with contextlib.suppress(KafkaException):  # the first error says more
                producer.abort_transaction(_TIMEOUT_S)  # otherwise readers of the topic would wait for its timeout
            raise

    def discard(self, letters: Sequence[DeadLetter]) -> None:
        """Settle them permanently."""
        problems: list[BrokerError] = []

        def note(error: KafkaError | None, sent: Any) -> None:
            if error is not None:
                problems.append(_failed(self.name, error))
            elif not _is_written(sent):
                problems.append(_inferred(self.name))

        producer = Producer({**self._options, **_WRITING})
        try:
            for letter in letters:
                _offer(producer, self.name, key=letter.letter_key, value=None, on_delivery=note)
            producer.flush()  # limited by the delivery timeout
        except KafkaException as error:
            raise _failed(self.name, error.args[0]) from error
        finally:
            let_go(producer)
            del producer
        if problems:
            raise problems[0]


def _refuse_homeless(client: Any, letters: Iterable[DeadLetter]) -> None:
    topics = client.list_topics(timeout=_TIMEOUT_S).topics
    gone = sorted({
        f"{each.topic}[{each.partition}]"
        for each in letters
        if each.topic not in topics
        or (topics[each.topic].error is None and each.partition not in topics[each.topic].partitions)
    })  # fmt: skip
    if gone:
        raise BrokerError(
            f"records cannot go back to {', '.join(gone)}, which no longer exists",
            hint="recreate it, or exclude them: `harvester dead discard` settles them permanently",
        )


class _Reading:
    """All messages of a topic, up to its end."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._client = Consumer({
            **options, "group.id": "harvester-dead",  # required by the client; nothing joins
            "enable.auto.commit": False, "auto.offset.reset": "error", "allow.auto.create.topics": False,
            "isolation.level": "read_committed", "enable.partition.eof": True,
        })  # fmt: skip

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def messages(self) -> Iterable[Any]:
        try:
            topics = existing_topics(self._client, [self._name], _TIMEOUT_S)
            if self._name not in topics:
                raise UnknownTopic(self._name, [], option="--dead-letter-topic")
            places = [TopicPartition(self._name, each, OFFSET_BEGINNING) for each in topics[self._name].partitions]
            self._client.assign(places)
            left = {place.partition for place in places}
            deadline = clock_s() + _SILENCE_S
            while left:
                if clock_s() > deadline:
                    raise BrokerUnavailable(f"the dead-letter topic {self._name!r} could not be read to its end")
                for message in self._client.consume(_FETCHED, _TURN_S):
                    deadline = clock_s() + _SILENCE_S
                    error = message.error()
                    if error is None:
                        yield message
                    elif error.code() == KafkaError._PARTITION_EOF:
                        left.discard(message.partition())
                    elif not passes(error):
                        raise _failed(self._name, error)
        except KafkaException as error:
            raise _failed(self._name, error.args[0]) from error


def _produce(producer: Producer, topic: str, letter: DeadLetter, on_delivery: Callable[[Any, Any], Any]) -> None:
    key, value, headers = letter.encode()
    _offer(producer, topic, key=key, value=value, headers=headers, on_delivery=on_delivery)


def _offer(producer: Producer, topic: str, **given: Any) -> None:
    """Produce, waiting for room."""
    while True:
        try:
            return producer.produce(topic, **given)
        except BufferError:
            producer.poll(_TURN_S)


def _is_written(sent: Any) -> bool:
    """Whether the broker has returned the record's offset. Without one, the client only infers that it was written
    (P45).
    """
    return sent.offset() is not None


def _inferred(name: str) -> BrokerUnavailable:
    text = f"the topic {name!r} accepted a later record, but the broker did not return the offset of an earlier one"
    return BrokerUnavailable(text, hint="try again")


def _failed(name: str, problem: KafkaError) -> BrokerError:
    text = f"the dead-letter topic {name!r} cannot be used: {problem.str()}"
    if refuses(problem):
        return BrokerError(text, hint="check its name and its settings (max.message.bytes, message.timestamp.type)")
    if passes(problem):
        is_silent = problem.code() in _NO_ANSWER
        return BrokerUnavailable(text, hint=BrokerUnavailable.NO_ANSWER if is_silent else "try again")
    return BrokerError(text, hint="this user needs to describe, read and write it, and to create it if it is missing")

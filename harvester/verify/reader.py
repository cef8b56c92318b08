"""Reads topics from their first record to the end they had at the start, into a compact `History` of each key.

The end is recognised by what arrives, a record at it or the client's end-of-partition event past it, never by counting
offsets: transaction markers and aborted records leave holes, even at the very end.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, TopicPartition

from harvester.bounds import existing_topics, read_bounds
from harvester.claim_check import ClaimChecks, StoreSettings
from harvester.errors import BrokerError, BrokerUnavailable
from harvester.origin import HEADER, decode, find
from harvester.verify.load import COMMITTED, ROLLED_BACK, parse
from harvester.verify.sequences import Sequences
from harvester.verify.verdict import MAX_FINDINGS, Delivery

Partition = tuple[str, int]  # topic, number
Isolation = Literal["read_committed", "read_uncommitted"]
_BATCH_RECORDS = 5_000
_POLL_S = 0.05
_silent = logging.getLogger("harvester.verify.kafka")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


class _KeyLog:
    """One key's records in log order; `offsets` and `places` are parallel to `numbers`."""

    __slots__ = ("numbers", "offsets", "place", "places")

    def __init__(self, place: int) -> None:
        self.numbers = array("q")
        self.offsets = array("q")
        self.place = place
        self.places: array[int] | None = None  # only created if the key is found in a second partition

    def add(self, number: int, offset: int, place: int) -> None:
        if place != self.place and self.places is None:
            self.places = array("q", [self.place]) * len(self.numbers)
        if self.places is not None:
            self.places.append(place)
        self.numbers.append(number)
        self.offsets.append(offset)


@dataclass(frozen=True, slots=True)
class LogTimes:
    """`rate_per_s`: records between the first and the last timestamp of the log. Latencies: from the insertion of the
    row to the timestamp of its record, for first deliveries in order whose transaction did not intentionally stay open.
    None if there are no data. Timestamps are in milliseconds, so that is the resolution.
    """

    rate_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None


class History:
    """Filled with `add` for each record of a partition in offset order; places are numbered by `place`.

    `sequences` is filled in parallel, with the records that carry an origin.
    """

    def __init__(self) -> None:
        self.records = 0
        self.foreign_records = 0
        self.foreign: list[str] = []
        self.sequences = Sequences()
        self._places: list[Partition] = []
        self._keys: dict[bytes, _KeyLog] = {}
        self._latencies_us = array("q")
        self._first_ms: int | None = None
        self._last_ms: int | None = None

    def place(self, topic: str, partition: int) -> int:
        """The number of a partition; called once for each."""
        self._places.append((topic, partition))
        return len(self._places) - 1

    def add(self, place: int, offset: int, key: bytes | None, value: bytes | None, timestamp_ms: int) -> None:
        """Add one record. `timestamp_ms` is negative if the log has none."""
        self.records += 1
        pumped = parse(value)
        if pumped is None or key is None or pumped.kind == ROLLED_BACK:
            self.foreign_records += 1
            if len(self.foreign) < MAX_FINDINGS:
                why = "rolled back by the pump" if pumped and pumped.kind == ROLLED_BACK else "not from the pump"
                self.foreign.append(f"{self._position(place, offset)}: {why}")
            return
        log = self._keys.get(key)
        if log is None:
            log = self._keys[key] = _KeyLog(place)
        first = not log.numbers or pumped.seq > log.numbers[-1]
        log.add(pumped.seq, offset, place)
        if timestamp_ms < 0:
            return
        if self._first_ms is None or timestamp_ms < self._first_ms:
            self._first_ms = timestamp_ms
        if self._last_ms is None or timestamp_ms > self._last_ms:
            self._last_ms = timestamp_ms
        if first and pumped.kind == COMMITTED:
            self._latencies_us.append(timestamp_ms * 1000 - pumped.created_us)

    def deliveries(self) -> Iterator[Delivery]:
        """(key, number) of every pumped record, key by key, in log order within a key."""
        for key, log in self._keys.items():
            name = _text(key)
            for number in log.numbers:
                yield name, number

    def scattered(self) -> list[str]:
        """Keys that are in more than one partition."""
        return [_text(key) for key, log in self._keys.items() if log.places is not None]

    def where(self, key: str, seq: int, limit: int = 5) -> list[str]:
        """Positions (`topic[partition]@offset`) of one record in the log, for inspection."""
        log = self._keys.get(key.encode())
        if log is None:
            return []
        indexes = [index for index, number in enumerate(log.numbers) if number == seq][:limit]
        return [self._position(log.places[at] if log.places else log.place, log.offsets[at]) for at in indexes]

    def timing(self) -> LogTimes:
        """Rate and latencies."""
        rate = None
        counted = sum(len(log.numbers) for log in self._keys.values())
        if self._first_ms is not None and self._last_ms is not None and self._last_ms > self._first_ms:
            rate = counted * 1000 / (self._last_ms - self._first_ms)
        ordered = sorted(self._latencies_us)
        return LogTimes(rate_per_s=rate, p50_ms=percentile_ms(ordered, 0.50), p99_ms=percentile_ms(ordered, 0.99))

    def _position(self, place: int, offset: int) -> str:
        topic, partition = self._places[place]
        return f"{topic}[{partition}]@{offset}"


def percentile_ms(ordered_us: list[int], share: float) -> float | None:
    """The smallest value not exceeded by `share` of the values (nearest rank); None if there are none."""
    if not ordered_us:
        return None
    rank = max(1, -(-len(ordered_us) * round(share * 1000) // 1000))
    return round(ordered_us[rank - 1] / 1000, 1)


def _text(key: bytes) -> str:
    return key.decode(errors="replace")


def read(
    options: Mapping[str, Any],
    topics: Sequence[str],
    *,
    isolation: Isolation = "read_committed",
    timeout_s: float = 30.0,
    header: str = HEADER,
    claim_check: StoreSettings | None = None,
    on_progress: Callable[[int], None] = lambda records: None,
) -> History:
    """Read `topics` to their end. `options` are the client's (bootstrap.servers, security).

    `header` names the header with a record's origin; empty: there is none. `claim_check`: the store for values too
    large for Kafka, which are read as well; raises ClaimCheckError for a missing or changed one.

    A topic that does not exist counts as empty: nothing was delivered to it. `timeout_s` limits how long nothing may
    arrive; `on_progress` receives the number of records read. Raises BrokerUnavailable; BrokerError for what waiting
    does not solve, and if an open transaction hides records from a read_committed reader for that long.
    """
    checks = None if claim_check is None else ClaimChecks(claim_check)
    reader = _Reader(options, isolation, timeout_s, header, checks, on_progress)
    try:
        return reader.read(list(dict.fromkeys(topics)))
    except KafkaException as error:
        raise reader.unavailable(f"reading {', '.join(topics)} failed: {_reader_text(error)}") from error
    finally:
        reader.close()


class _Reader:
    def __init__(
        self,
        options: Mapping[str, Any],
        isolation: Isolation,
        timeout_s: float,
        header: str,
        claim_checks: ClaimChecks | None,
        on_progress: Callable[[int], None],
    ) -> None:
        self._header, self._claim_checks = header, claim_checks
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._complaint = ""
        self._history = History()
        self._options = {
            **options,
            "error_cb": self._note,
            "group.id": "harvester-verify",  # required by the client; nothing joins or commits
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "allow.auto.create.topics": False,
        }
        self._consumer = Consumer(
            {
                **self._options,
                "enable.partition.eof": True,
                "isolation.level": isolation,
                "auto.offset.reset": "error",
                "queued.min.messages": 200_000,
                "queued.max.messages.kbytes": 131_072,
                "fetch.max.bytes": 16_777_216,
                "max.partition.fetch.bytes": 8_388_608,
                "fetch.wait.max.ms": 50,
            },
            logger=_silent,
        )

    def close(self) -> None:
        self._consumer.close()

    def unavailable(self, what: str) -> BrokerUnavailable:
        """An error explained by the client's last complaint."""
        reason = f" ({self._complaint})" if self._complaint and self._complaint not in what else ""
        return BrokerUnavailable(f"{what}{reason}", hint=BrokerUnavailable.NO_ANSWER)

    def read(self, topics: list[str]) -> History:
        bounds = self._bounds(topics)
        left = {place: end for place, (_, end) in bounds.items()}
        numbers = {place: self._history.place(*place) for place in left}
        # Offsets, not OFFSET_BEGINNING: looking that up costs the client half a second.
        self._consumer.assign([TopicPartition(*place, first) for place, (first, _) in bounds.items()])
        deadline = time.monotonic() + self._timeout_s
        while left:
            messages = self._consumer.consume(_BATCH_RECORDS, _POLL_S)
            if messages:
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise self._silence(left)
            for message in messages:
                place = (message.topic() or "", _number(message.partition()))
                end = left.get(place)
                if end is None:
                    continue  # past the end of a partition that is done
                offset, error = _number(message.offset()), message.error()
                if error is None:
                    if offset < end:
                        kind, at_ms = message.timestamp()
                        timestamp_ms = -1 if kind == TIMESTAMP_NOT_AVAILABLE else at_ms
                        value, checks = message.value(), self._claim_checks
                        if checks is not None:
                            value = checks.value(value, message.headers())
                        self._history.add(numbers[place], offset, message.key(), value, timestamp_ms)
                        origin = decode(find(message.headers(), self._header)) if self._header else None
                        if origin is not None:
                            self._history.sequences.add(origin, timestamp_ms)
                    if offset >= end - 1:
                        del left[place]
                elif error.code() == KafkaError._PARTITION_EOF:
                    if offset >= end:  # otherwise an open transaction hides the rest, for now
                        del left[place]
                elif error.fatal() or not error.retriable():
                    raise BrokerError(f"reading {_name(place)} failed: {error.str()}")
            self._on_progress(self._history.records)
        return self._history

    def _bounds(self, topics: list[str]) -> dict[Partition, tuple[int, int]]:
        """The first offset and the end of each partition that is not empty; only of existing topics."""
        # A read_committed client gets the end of what it may read; the true end is needed here.
        asking = Consumer({**self._options, "isolation.level": "read_uncommitted"}, logger=_silent)
        try:
            found = {}
            for topic, known in existing_topics(asking, topics, self._timeout_s).items():
                for partition in known.partitions if known.error is None else ():
                    low, high = self._watermarks(asking, (topic, partition))
                    if high > low:
                        found[topic, partition] = (low, high)
            return found
        except KafkaException as error:
            asking.poll(0)  # serves error callbacks: to the caller, a wrong password looks like silence
            raise self.unavailable(f"Kafka did not return the ends of its topics: {_reader_text(error)}") from error
        finally:
            asking.close()

    def _watermarks(self, consumer: Consumer, place: Partition) -> tuple[int, int]:
        return read_bounds(consumer, *place, self._timeout_s)

    def _silence(self, left: Mapping[Partition, int]) -> BrokerError:
        """Why nothing arrives any more."""
        for place, end in sorted(left.items()):
            readable = self._watermarks(self._consumer, place)[1]
            if readable < end:
                return BrokerError(
                    f"an open transaction hides what follows {_name(place)}@{readable} ({self._timeout_s:g} s waited)",
                    hint="wait until its producer or its timeout ends it, or read with --isolation read_uncommitted",
                )
        waiting = ", ".join(_name(place) for place in sorted(left)[:3])
        return self.unavailable(f"nothing arrived within {self._timeout_s:g} s; {waiting} not read to the end")

    def _note(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._complaint:  # it follows the one with the reason
            self._complaint = error.str()


def _name(place: Partition) -> str:
    return f"{place[0]}[{place[1]}]"


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _reader_text(error: KafkaException) -> str:
    inner = error.args[0] if error.args else error
    return inner.str() if isinstance(inner, KafkaError) else str(inner)

"""What the reader has found in the log: per key its numbers in log order, compact enough for millions of records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from harvester.verify.sequences import Sequences
from harvester.verify.verdict import MAX_FINDINGS, Delivery
from harvester.verify.wire import COMMITTED, ROLLED_BACK, parse

Place = tuple[str, int]  # topic, partition


class _KeyLog:
    """One key's records in the order of the log; `offsets` and `places` stand beside `numbers`."""

    __slots__ = ("numbers", "offsets", "place", "places")

    def __init__(self, place: int) -> None:
        self.numbers = array("q")
        self.offsets = array("q")
        self.place = place
        self.places: array[int] | None = None  # only made when the key is found in a second partition

    def add(self, number: int, offset: int, place: int) -> None:
        if place != self.place and self.places is None:
            self.places = array("q", [self.place]) * len(self.numbers)
        if self.places is not None:
            self.places.append(place)
        self.numbers.append(number)
        self.offsets.append(offset)


@dataclass(frozen=True, slots=True)
class Timing:
    """`rate_per_s`: records between the first and the last timestamp of the log. Latencies: from the insert of the
    row to the timestamp of its record, of first deliveries in order whose transaction did not stay open on purpose.
    None where there is nothing to tell it from. Timestamps are in milliseconds, so that is the resolution."""

    rate_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None


class History:
    """Filled with `add` for each record of a partition in offset order; places are numbered by `place`.

    `sequences` is filled beside it, with the records that carry an origin.
    """

    def __init__(self) -> None:
        self.records = 0
        self.foreign_records = 0
        self.foreign: list[str] = []
        self.sequences = Sequences()
        self._places: list[Place] = []
        self._keys: dict[bytes, _KeyLog] = {}
        self._latencies_us = array("q")
        self._first_ms: int | None = None
        self._last_ms: int | None = None

    def place(self, topic: str, partition: int) -> int:
        """The number of a partition; asked once for each."""
        self._places.append((topic, partition))
        return len(self._places) - 1

    def add(self, place: int, offset: int, key: bytes | None, value: bytes | None, timestamp_ms: int) -> None:
        """Take one record. `timestamp_ms` is negative where the log has none."""
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
        """Keys that stand in more than one partition."""
        return [_text(key) for key, log in self._keys.items() if log.places is not None]

    def where(self, key: str, seq: int, limit: int = 5) -> list[str]:
        """Positions (`topic[partition]@offset`) of one record in the log, for whoever has to look at it."""
        log = self._keys.get(key.encode())
        if log is None:
            return []
        indexes = [index for index, number in enumerate(log.numbers) if number == seq][:limit]
        return [self._position(log.places[at] if log.places else log.place, log.offsets[at]) for at in indexes]

    def timing(self) -> Timing:
        """Rate and latencies."""
        rate = None
        counted = sum(len(log.numbers) for log in self._keys.values())
        if self._first_ms is not None and self._last_ms is not None and self._last_ms > self._first_ms:
            rate = counted * 1000 / (self._last_ms - self._first_ms)
        ordered = sorted(self._latencies_us)
        return Timing(rate_per_s=rate, p50_ms=percentile_ms(ordered, 0.50), p99_ms=percentile_ms(ordered, 0.99))

    def _position(self, place: int, offset: int) -> str:
        topic, partition = self._places[place]
        return f"{topic}[{partition}]@{offset}"


def percentile_ms(ordered_us: list[int], share: float) -> float | None:
    """The smallest value that `share` of the values do not exceed (nearest rank); None when there are none."""
    if not ordered_us:
        return None
    rank = max(1, -(-len(ordered_us) * round(share * 1000) // 1000))
    return round(ordered_us[rank - 1] / 1000, 1)


def _text(key: bytes) -> str:
    return key.decode(errors="replace")

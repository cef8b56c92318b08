"""The decisions of a bulk drain: how long what may take, how large a slice is, which rows can be no record. Pure.

Times are shares of the lease. A slice is made so large that it takes a quarter of it. Its tasks send for as long as
what they sent has still time to arrive: until the end of the lease, less the time for which a record may wait for room
(`block`), that for which it may wait for its acknowledgement (`delivery`), and a second for clocks. When the lease ends
nothing is on its way any more, whatever became of the driver (rule P32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from harvester.delivery.decode import Broken, Decoded
from harvester.errors import ConfigurationError, Problem

LEAST_LEASE = timedelta(seconds=6)
FIRST_RECORDS = 5_000
_FEWEST_RECORDS = 1_000
_GROWTH = 4
_CLOCKS_S = 1.0
_FETCH_BYTES, _FETCH_RECORDS = 8 << 20, 5_000
_BATCH_BYTES = 61  # of a record batch with nothing in it (Kafka, "Record Batch")


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. See the module's text."""

    lease: float
    delivery: float
    block: float

    @property
    def slice(self) -> float:
        """What a slice should take."""
        return self.lease / 4

    @property
    def sending(self) -> float:
        """For how long tasks may send, from a renewal on."""
        return self.lease - self.delivery - self.block - _CLOCKS_S

    def deadline_ms(self, asked_at: float) -> int:
        """When tasks stop, in milliseconds since the epoch, where the lease was renewed by a question at that time.

        It lasts from the answer on, which came later: so no clock needs to agree with the database's.
        """
        return int((asked_at + self.sending) * 1000)


def times(lease: timedelta, delivery_ms: int | None = None) -> Times:
    """`delivery_ms`: a delivery timeout of the user's own. Raises ConfigurationError."""
    whole = lease.total_seconds()
    delivery = whole * 0.4 if delivery_ms is None else delivery_ms / 1000
    found = Times(whole, delivery, whole * 0.1)
    if lease < LEAST_LEASE:
        raise ConfigurationError([Problem("--lease", "is too short", f"{LEAST_LEASE.total_seconds():.0f}s or more")])
    if found.sending < found.slice:
        most = whole - found.block - _CLOCKS_S - found.slice
        raise ConfigurationError(
            [Problem("--kafka delivery.timeout.ms", "is too long for the lease", f"at most {most * 1000:.0f}")]
        )
    return found


def next_records(records: int, took_s: float, target_s: float, most: int) -> int:
    """How many records the next slice should have, after one of so many that took so long."""
    wanted = int(records / max(took_s, 0.001) * target_s)
    return min(max(wanted, _FEWEST_RECORDS), max(records, _FEWEST_RECORDS) * _GROWTH, most)


def fetch_records(largest_bytes: int) -> int:
    """How many rows a task asks for at a time: each may be as large as the largest, and all have to fit in memory."""
    return max(1, min(_FETCH_RECORDS, _FETCH_BYTES // max(largest_bytes, 1)))


@dataclass(frozen=True, slots=True)
class Topic:
    """What Kafka says of a topic. `most_bytes`: of a batch of records."""

    partitions: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A topic's rows in a slice. `largest_bytes` is an estimate from above; `partitions`: lowest and highest."""

    topic: str | None
    records: int
    bytes: int
    largest_bytes: int
    partitions: tuple[int, int] | None
    headers: tuple[int, int]  # fewest and most of a row
    odd: bool  # a row's header arrays do not fit each other


@dataclass(frozen=True, slots=True)
class Rules:
    """What else makes a row no record. `reserved`: topics, and why. `header`: the name of the harvester's own."""

    reserved: Mapping[str, str]
    header: str
    header_bytes: int
    own_limit: int | None = None  # what the relay's own client is limited to, where that is configured


def is_doubtful(share: Share, topic: Topic | None, rules: Rules) -> bool:
    """Whether each row of this share has to be looked at; where not, all of them can be sent."""
    if topic is None or share.topic in rules.reserved or share.odd:
        return True
    if share.partitions is not None and (share.partitions[0] < 0 or share.partitions[1] >= topic.partitions):
        return True
    return share.largest_bytes > limit_bytes(topic, rules)


def limit_bytes(topic: Topic, rules: Rules) -> int:
    """The largest batch that a record of this topic may be."""
    return topic.most_bytes if rules.own_limit is None else min(topic.most_bytes, rules.own_limit)


def why_poison(record: Decoded, value_bytes: int | None, topics: Mapping[str, Topic], rules: Rules) -> str | None:
    """Why this row can be no record, as the relay would say it; None: it can. A topic not in `topics` is not there."""
    if isinstance(record, Broken):
        return record.reason
    if record.topic in rules.reserved:
        return rules.reserved[record.topic]
    topic = topics.get(record.topic)
    if topic is None:
        return f"_UNKNOWN_TOPIC: there is no topic {record.topic}, and the broker does not make it"
    if record.partition >= topic.partitions:
        return f"_UNKNOWN_PARTITION: {record.topic} has {topic.partitions} partitions, none is {record.partition}"
    key_bytes = None if record.key is None else len(record.key)
    names = [(len(name.encode()), len(value)) for name, value in record.headers]
    names.append((len(rules.header.encode()), rules.header_bytes))
    size, limit = batch_bytes(key_bytes, value_bytes, names), limit_bytes(topic, rules)
    return f"MSG_SIZE_TOO_LARGE: {size} bytes, {record.topic} takes {limit}" if size > limit else None


def batch_bytes(key: int | None, value: int | None, headers: Sequence[tuple[int, int]]) -> int:
    """The size of a batch with one record of these lengths, not compressed (Kafka, "Record")."""
    body = 3 + _field(key) + _field(value) + _varint(len(headers))
    body += sum(_varint(name) + name + _field(size) for name, size in headers)
    return _BATCH_BYTES + _varint(body) + body


def _field(size: int | None) -> int:
    return 1 if size is None else _varint(size) + size


def _varint(number: int) -> int:
    """Bytes of a length: the sign takes a bit of it."""
    return max(1, -(-(number.bit_length() + 1) // 7))

"""The decisions of a drain: time limits, slice sizes, which rows can be sent, the records, the producers' options.

*Times* are fractions of the lease. A slice is sized to take a quarter of it. Its tasks may send until the end of the
lease, less the time for which a record may wait for room in its producer (`block`), the time for which it may wait for
its acknowledgement (`delivery`), and a second for clocks. So nothing is on the wire any more when the lease ends,
whatever happened to the driver (rule P32).

*The header.* Each record gets the harvester's header. Its lane is the number of the task, and its sequence the row's
number within the task, so that a repeated task gives each row the same numbers. Values that differ between slices are
text or binary: Spark does not build such constants into the code that it generates, which is therefore compiled only
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.delivery.decode import Broken, Decoded
from harvester.errors import ConfigurationError, Problem
from harvester.pipeline.schemas import HEADERS, struct

LEAST_LEASE = timedelta(seconds=6)
FIRST_RECORDS = 5_000
_FEWEST_RECORDS = 1_000
_GROWTH = 4
_CLOCKS_S = 1.0
_FETCH_BYTES, _FETCH_RECORDS = 8 << 20, 5_000
_BATCH_BYTES = 61  # of an empty record batch (Kafka, "Record Batch")


@dataclass(frozen=True, slots=True)
class Times:
    """Time limits in seconds. When the `lease` ends, nothing of ours may be on the wire any more (rule P32)."""

    lease: float
    delivery: float
    block: float

    @property
    def slice(self) -> float:
        """The target duration of a slice."""
        return self.lease / 4

    @property
    def sending(self) -> float:
        """How long tasks may send after a renewal."""
        return self.lease - self.delivery - self.block - _CLOCKS_S

    def deadline_ms(self, asked_at: float) -> int:
        """When tasks stop sending, in milliseconds since the epoch, if the renewal was requested at `asked_at`.

        The lease counts from the database's answer, which came later, so no clock must agree with the database's.
        """
        return int((asked_at + self.sending) * 1000)


def times(lease: timedelta, delivery_ms: int | None = None) -> Times:
    """The limits for a lease. `delivery_ms`: the user's delivery timeout. Raises ConfigurationError."""
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
    """The number of records for the next slice, after one of `records` that took `took_s`."""
    wanted = int(records / max(took_s, 0.001) * target_s)
    return min(max(wanted, _FEWEST_RECORDS), max(records, _FEWEST_RECORDS) * _GROWTH, most)


def fetch_records(largest_bytes: int) -> int:
    """How many rows a task fetches at a time, so that they fit in memory even if all are as large as the largest."""
    return max(1, min(_FETCH_RECORDS, _FETCH_BYTES // max(largest_bytes, 1)))


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """A topic's number of partitions, and its limit for a batch of records (`max.message.bytes`)."""

    partitions: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A topic's rows in a slice. Bytes are upper estimates; `partitions`: lowest and highest, None if none is set."""

    topic: str | None
    records: int
    bytes: int
    largest_bytes: int
    partitions: tuple[int, int] | None
    headers: tuple[int, int]  # the fewest and the most of a row
    odd: bool  # a row's header arrays do not match, or contain NULL


@dataclass(frozen=True, slots=True)
class DrainRules:
    """Rules by which rows are poison. `reserved`: topic → why. `header`: the name of the harvester's header."""

    reserved: Mapping[str, str]
    header: str
    header_bytes: int
    own_limit: int | None = None  # of the relay's client, if configured


def is_doubtful(share: Share, topic: TopicLimits | None, rules: DrainRules) -> bool:
    """Whether the rows of this share must be inspected one by one; otherwise all of them can be sent."""
    if topic is None or share.topic in rules.reserved or share.odd:
        return True
    if share.partitions is not None and (share.partitions[0] < 0 or share.partitions[1] >= topic.partitions):
        return True
    return share.largest_bytes > limit_bytes(topic, rules)


def limit_bytes(topic: TopicLimits, rules: DrainRules) -> int:
    """The largest size of a batch with one record of this topic."""
    return topic.most_bytes if rules.own_limit is None else min(topic.most_bytes, rules.own_limit)


def why_poison(
    record: Decoded, value_bytes: int | None, topics: Mapping[str, TopicLimits], rules: DrainRules
) -> str | None:
    """Why this row is poison, in the relay's terms; None if it is not. Topics that are not in `topics` do not exist."""
    if isinstance(record, Broken):
        return record.reason
    if record.topic in rules.reserved:
        return rules.reserved[record.topic]
    topic = topics.get(record.topic)
    if topic is None:
        return f"_UNKNOWN_TOPIC: there is no topic {record.topic}, and the broker does not create it"
    if record.partition >= topic.partitions:
        return f"_UNKNOWN_PARTITION: {record.topic} has {topic.partitions} partitions, but no {record.partition}"
    key_bytes = None if record.key is None else len(record.key)
    names = [(len(name.encode()), len(value)) for name, value in record.headers]
    names.append((len(rules.header.encode()), rules.header_bytes))
    size, limit = batch_bytes(key_bytes, value_bytes, names), limit_bytes(topic, rules)
    return f"MSG_SIZE_TOO_LARGE: {size} bytes, {record.topic} accepts {limit}" if size > limit else None


def batch_bytes(key: int | None, value: int | None, headers: Sequence[tuple[int, int]]) -> int:
    """The uncompressed size of a batch with one record of these lengths (Kafka, "Record")."""
    body = 3 + _field(key) + _field(value) + _varint(len(headers))
    body += sum(_varint(name) + name + _field(size) for name, size in headers)
    return _BATCH_BYTES + _varint(body) + body


def _field(size: int | None) -> int:
    return 1 if size is None else _varint(size) + size


def _varint(number: int) -> int:
    """The number of bytes that encode a length, including a sign bit."""
    return max(1, -(-(number.bit_length() + 1) // 7))


SINK = struct("topic string, partition int, key binary, value binary, headers headers")
LATE = "too little time is left in the lease of this slice to send another record"

_LANE_AT, _LANE_BYTES = 26, 4  # in the header
_ROW_BITS = 33  # of monotonically_increasing_id: the row's number; the higher bits are the task's


@dataclass(frozen=True, slots=True)
class Stamp:
    """The origin of a slice's records. `header`: the header's name. `producer`: a different number for each slice."""

    header: str
    incarnation: UUID
    term: int
    producer: int


def sink_rows(rows: DataFrame, stamp: Stamp, headers: tuple[int, int], deadline_ms: int) -> DataFrame:
    """Columns id, key, value, topic, partition, created_us and name_n, value_n of each header → SINK, row for row.

    `headers`: the fewest and the most of a row. Keeps rows in their order and partition. A row that is evaluated after
    the deadline, by that machine's clock, fails its task. Raises AnalysisException in ANSI mode, which forbids casting
    a number to its bytes.
    """
    fewest, most = headers
    pairs = [_header(F.col(f"name_{number}"), F.col(f"value_{number}")) for number in range(1, most + 1)]
    # Headers that not every row has: one exists if its name, which is never NULL, is not.
    pairs[fewest:] = [
        F.when(F.col(f"name_{number}").isNotNull(), pair) for number, pair in enumerate(pairs[fewest:], fewest + 1)
    ]
    listed = F.array(*pairs, _header(F.lit(stamp.header), _origin(stamp)))
    return rows.select(
        _in_time(F.col("topic"), deadline_ms).alias("topic"),
        "partition",
        "key",
        "value",
        (listed if fewest == most else F.array_compact(listed)).cast(HEADERS).alias("headers"),
    ).to(SINK)


def _header(name: Column, value: Column) -> Column:
    return F.struct(name.alias("key"), value.alias("value"))


def _origin(stamp: Stamp) -> Column:
    """The value that `harvester.origin.encode` returns."""
    head = origin.head(stamp.incarnation, stamp.term, 0, stamp.producer)
    sequence = F.monotonically_increasing_id().bitwiseAND(F.lit((1 << _ROW_BITS) - 1)) + F.lit(1).cast("bigint")
    return F.concat(
        F.lit(head[:_LANE_AT]),
        F.spark_partition_id().cast("binary"),
        F.lit(head[_LANE_AT + _LANE_BYTES :]),
        F.col("id").cast("binary"),
        sequence.cast("binary"),
        F.col("created_us").cast("binary"),
    )


def _in_time(value: Column, deadline_ms: int) -> Column:
    # Not current_timestamp, which is constant in a query. Times of 13 digits compare correctly as text.
    now = F.java_method(F.lit("java.lang.System"), F.lit("currentTimeMillis"))
    return F.when(now < F.lit(f"{deadline_ms:013d}"), value).otherwise(F.raise_error(F.lit(LATE)))


_ORDER = "it protects the order of each key, and prevents loss"
_REFUSED = {
    "acks": f"always all: {_ORDER}",
    "enable.idempotence": f"always true: {_ORDER}",
    "retries": f"always unlimited: {_ORDER}",
    "transactional.id": "Spark's sink has no transactions",
    "partitioner.class": "always Kafka's own: any other would move keys to other partitions",
    "partitioner.ignore.keys": "always false: it would move keys to other partitions",
    "max.block.ms": "it is derived from --lease",
    "compression.type": "batches of unpredictable size may be split, and then lost (KAFKA-19479)",
}
_IN_FLIGHT = "max.in.flight.requests.per.connection"
# Large batches, even if they take longer to fill: nobody waits for a single record of a backlog.
_DEFAULTS = {"linger.ms": "20", "batch.size": "131072", "buffer.memory": str(64 << 20), _IN_FLIGHT: "5"}
_BATCH, _DELIVERY, _REQUEST, _LARGEST = "batch.size", "delivery.timeout.ms", "request.timeout.ms", "max.request.size"
_LARGEST_DEFAULT = 1 << 20
_MARGIN_BYTES = 4096
_SHARE_OF_LIMIT = 3, 4


def check(given: Mapping[str, str]) -> int | None:
    """The user's delivery timeout in milliseconds, if given. Raises ConfigurationError for refused options."""
    problems = [Problem(f"--kafka {name}", f"cannot be set: {why}") for name, why in _REFUSED.items() if name in given]
    if not _is_number(given.get(_IN_FLIGHT, "5"), 1, 5):
        problems.append(Problem(f"--kafka {_IN_FLIGHT}", f"is out of range: {_ORDER}", "1 to 5"))
    for name in (_DELIVERY, _BATCH):
        if not _is_number(given.get(name, "1"), 1, 2**31 - 1):
            problems.append(Problem(f"--kafka {name}", "is not a whole number above 0"))
    if problems:
        raise ConfigurationError(problems)
    return int(given[_DELIVERY]) if _DELIVERY in given else None


def sink_options(given: Mapping[str, str], times: Times, limits: tuple[int, int]) -> dict[str, str]:
    """Options for Spark's Kafka sink. `limits`: the lowest and highest `max.message.bytes` of the slice's topics.

    A batch of several records must never be refused as too large. The client would split it, and `flush`, with which
    Spark's sink waits for acknowledgements, does not wait for the parts (KAFKA-19479, in Spark 4.0): the task would end
    as if all had been sent. So no batch is larger than the lowest limit permits.
    """
    delivery_ms = int(times.delivery * 1000)
    part, whole = _SHARE_OF_LIMIT
    lowest, highest = limits
    options = {
        **_DEFAULTS,
        _LARGEST: str(max(_LARGEST_DEFAULT, highest + _MARGIN_BYTES)),
        _REQUEST: str(min(30_000, delivery_ms // 2)),
        **given,
        _BATCH: str(min(int(given.get(_BATCH, _DEFAULTS[_BATCH])), lowest * part // whole)),
        _DELIVERY: str(delivery_ms),
        "max.block.ms": str(int(times.block * 1000)),
        "acks": "all",
        "enable.idempotence": "true",
        "retries": str(2**31 - 1),
    }
    return {f"kafka.{name}": value for name, value in options.items()}


def _is_number(text: str, low: int, high: int) -> bool:
    return text.isascii() and text.isdigit() and low <= int(text) <= high

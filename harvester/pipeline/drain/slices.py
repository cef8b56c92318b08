"""The decisions of a drain: time limits, the size of a slice, which rows can be sent, how, and the producers' options.

Times are shares of the lease. A slice is made so large that it takes a quarter of it. Its tasks send for as long as
what they sent has still time to arrive: until the end of the lease, less the time for which a record may wait for
room (`block`), that for which it may wait for its acknowledgement (`delivery`), and a second for clocks. When the
lease ends nothing is on its way any more, whatever became of the driver (rule P32).

Each record gets the header that says where it comes from. Its lane is the number of the task, and its sequence that
of the row within the task, so that a task that runs again gives each row the same numbers. Everything that differs
from slice to slice is text or binary: Spark builds such constants not into the code that it generates, which so is
compiled once, and stays warm.
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
_BATCH_BYTES = 61  # of a record batch with nothing in it (Kafka, "Record Batch")


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. `lease`: until it ends nothing of ours may be on its way any more (rule P32)."""

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
class TopicLimits:
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
class DrainRules:
    """What else makes a row no record. `reserved`: topics, and why. `header`: the name of the harvester's own."""

    reserved: Mapping[str, str]
    header: str
    header_bytes: int
    own_limit: int | None = None  # what the relay's own client is limited to, where that is configured


def is_doubtful(share: Share, topic: TopicLimits | None, rules: DrainRules) -> bool:
    """Whether each row of this share has to be looked at; where not, all of them can be sent."""
    if topic is None or share.topic in rules.reserved or share.odd:
        return True
    if share.partitions is not None and (share.partitions[0] < 0 or share.partitions[1] >= topic.partitions):
        return True
    return share.largest_bytes > limit_bytes(topic, rules)


def limit_bytes(topic: TopicLimits, rules: DrainRules) -> int:
    """The largest batch that a record of this topic may be."""
    return topic.most_bytes if rules.own_limit is None else min(topic.most_bytes, rules.own_limit)


def why_poison(
    record: Decoded, value_bytes: int | None, topics: Mapping[str, TopicLimits], rules: DrainRules
) -> str | None:
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


SINK = struct("topic string, partition int, key binary, value binary, headers headers")
LATE = "the lease of this slice does not last long enough for another record"

_LANE_AT, _LANE_BYTES = 26, 4  # in the header
_ROW_BITS = 33  # of monotonically_increasing_id, the number of the row; the others are that of the task


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose records these are. `header`: its name. `producer`: a number that is another one for each slice."""

    header: str
    incarnation: UUID
    term: int
    producer: int


def sink_rows(rows: DataFrame, stamp: Stamp, headers: tuple[int, int], deadline_ms: int) -> DataFrame:
    """Columns id, key, value, topic, partition, created_us and name_n, value_n of each header → SINK, row for row.

    `headers`: the fewest and the most that a row has. Rows stay in their order and partition. After the deadline, by
    the clock of the machine that evaluates it, a row fails its task. Raises AnalysisException under ANSI rules, which
    forbid to read a number as its bytes.
    """
    fewest, most = headers
    pairs = [_header(F.col(f"name_{number}"), F.col(f"value_{number}")) for number in range(1, most + 1)]
    # Those that not every row has are told by their name, which is never NULL where there is one.
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
    """The value that `harvester.origin.encode` gives."""
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
    # Not current_timestamp, which is the query's; times of 13 digits are in their order as texts, too.
    now = F.java_method(F.lit("java.lang.System"), F.lit("currentTimeMillis"))
    return F.when(now < F.lit(f"{deadline_ms:013d}"), value).otherwise(F.raise_error(F.lit(LATE)))


_ORDER = "it guards the order of each key, and that nothing is lost"
_REFUSED = {
    "acks": f"always all: {_ORDER}",
    "enable.idempotence": f"always true: {_ORDER}",
    "retries": f"never few: {_ORDER}",
    "transactional.id": "Spark's sink has no transactions",
    "partitioner.class": "always Kafka's own: another would move keys to other partitions",
    "partitioner.ignore.keys": "always false: it would move keys to other partitions",
    "max.block.ms": "it follows from --lease",
    "compression.type": "batches whose size is not known beforehand may be split, and then lost (KAFKA-19479)",
}
_IN_FLIGHT = "max.in.flight.requests.per.connection"
# Large batches and a little patience: nobody waits for a single record of a backlog.
_DEFAULTS = {"linger.ms": "20", "batch.size": "131072", "buffer.memory": str(64 << 20), _IN_FLIGHT: "5"}
_BATCH, _DELIVERY, _REQUEST, _LARGEST = "batch.size", "delivery.timeout.ms", "request.timeout.ms", "max.request.size"
_LARGEST_DEFAULT = 1 << 20
_MARGIN_BYTES = 4096
_SHARE_OF_LIMIT = 3, 4


def check(given: Mapping[str, str]) -> int | None:
    """The user's own delivery timeout in milliseconds; ConfigurationError for options that are not the user's."""
    problems = [Problem(f"--kafka {name}", f"cannot be set: {why}") for name, why in _REFUSED.items() if name in given]
    if not _is_number(given.get(_IN_FLIGHT, "5"), 1, 5):
        problems.append(Problem(f"--kafka {_IN_FLIGHT}", f"is out of range: {_ORDER}", "1 to 5"))
    for name in (_DELIVERY, _BATCH):
        if not _is_number(given.get(name, "1"), 1, 2**31 - 1):
            problems.append(Problem(f"--kafka {name}", "is no whole number above 0"))
    if problems:
        raise ConfigurationError(problems)
    return int(given[_DELIVERY]) if _DELIVERY in given else None


def sink_options(given: Mapping[str, str], times: Times, limits: tuple[int, int]) -> dict[str, str]:
    """For Spark's Kafka sink; `limits`: the lowest and the highest of `max.message.bytes` of the slice's topics.

    A batch of several records may never be refused as too large. The client would split it, and `flush`, by which
    Spark's sink waits for acknowledgements, does not wait for the halves (KAFKA-19479, in Spark 4.0): the task would
    end as if all had been sent. So no batch is larger than the smallest limit allows.
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

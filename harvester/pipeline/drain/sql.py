"""The SQL of a bulk drain: selects the rows of a slice, finds those to be inspected, and reads a task's part. Pure.

One transaction selects the slice and exports its snapshot to the sessions that read it, so that all of them, including
those that repeat a read, see the same rows. Otherwise, of two rows of a key, one session might see the second while the
first was not yet visible to another.

A task reads one *bucket*, the rows of its keys, in id order. To do so, each task scans the ids of the whole slice
(0.2 µs a row), which costs less than shuffling the rows, and needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.sql.queries import file_of
from harvester.outbox.tables import OutboxTable, as_bytes, literal
from harvester.pipeline.drain.slices import DrainRules as PoisonRules
from harvester.pipeline.drain.slices import Share, TopicLimits, limit_bytes

BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
# Forces reading by primary key: the planner's statistics of an outbox are outdated. There are no timeouts, because a
# slice may take long, and a session is idle while producers wait for room.
SETTINGS = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off;"
    " SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
)
_SMALL_ARRAY_BYTES = 200  # a larger one may be compressed, and its stored size misleading
_MARGIN_BYTES, _HEADER_BYTES = 300, 12  # the overhead of a record, and of each header


def same_snapshot(snapshot: str) -> str:
    """Executed at the start of a session, so that it sees the same rows as the one that exported this snapshot."""
    return (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;"
        f" SET TRANSACTION SNAPSHOT {literal(snapshot)}; {SETTINGS}"
    )


def standing(table: OutboxTable, shape: OutboxShape) -> str:
    """Selects the term, its holder, and the file of the outbox's sequence, which changes if ids start again."""
    file = "NULL::bigint" if shape.sequence is None else file_of(shape.sequence)
    return f"SELECT term, holder, {file} FROM {table.term}"


def choose(table: OutboxTable, shape: OutboxShape, limit: int) -> str:
    """Selects the first `limit` rows, by topic: the fields of Share, whether a lower bound is not 1, and the ids."""
    return (
        "SELECT x.topic, count(*), sum(x.bytes)::bigint, max(x.bytes), min(x.place), max(x.place), min(x.headers),"
        " max(x.headers), bool_or(x.odd), bool_or(x.shifted), array_agg(x.id)"
        f" FROM (SELECT o.id::bigint AS id, o.kafka_topic AS topic, {_place(shape)} AS place, {_bytes()} AS bytes,"
        f" coalesce(cardinality(o.kafka_header_keys), 0) AS headers, {_ODD} AS odd, {_SHIFTED} AS shifted"
        f" FROM {columns.published(table, shape)} o ORDER BY o.id LIMIT {limit:d}) x GROUP BY x.topic"
    )


def doubtful(
    table: OutboxTable,
    shape: OutboxShape,
    ids: tuple[int, int],
    shares: Iterable[tuple[Share, TopicLimits | None]],
    rules: PoisonRules,
    limit: int,
) -> str:
    """Copies the rows of these shares within `ids` that may be poison, in the format of `harvester.delivery.decode`.

    In place of each value is its number of bytes.
    """
    conditions = [_condition(shape, share, topic, rules) for share, topic in shares]
    partition = f"coalesce({_place(shape)}::bigint, '-9223372036854775808'::bigint)"
    return (
        f"COPY (SELECT '0'::xid, o.id::bigint, o.kafka_key, coalesce(o.create_time, 'epoch'), {partition},"
        " o.kafka_topic, o.kafka_header_keys, o.kafka_header_values, octet_length(o.kafka_value)::text"
        f" FROM {columns.published(table, shape)} o WHERE o.id BETWEEN {ids[0]:d} AND {ids[1]:d}"
        f" AND ({' OR '.join(conditions)})"
        f" ORDER BY o.id LIMIT {limit:d}) TO STDOUT (FORMAT BINARY)"
    )


def read(
    table: OutboxTable, shape: OutboxShape, ids: tuple[int, int], headers: int, tasks: int, *, shifted: bool = False
) -> str:
    """A named subquery for the rows within `ids`, with the columns of `slices.sink_rows` and `bucket`."""
    names, values = "o.kafka_header_keys", "o.kafka_header_values"
    if shifted:  # the lower bound of an array's slice is 1
        names, values = f"({names}[:])", f"({values}[:])"
    pairs = "".join(
        f", {names}[{number}] AS name_{number}, convert_to({values}[{number}], 'UTF8') AS value_{number}"
        for number in range(1, headers + 1)
    )
    return (
        f"(SELECT o.id::bigint AS id, {as_bytes('o.kafka_key', shape.key_type)} AS key,"
        f" {as_bytes('o.kafka_value', shape.value_type)} AS value, o.kafka_topic::text AS topic,"
        f" {_place(shape)} AS partition, {_CREATED_US} AS created_us{pairs}, {_bucket(shape, tasks)} AS bucket"
        f" FROM {columns.published(table, shape)} o WHERE o.id BETWEEN {ids[0]:d} AND {ids[1]:d}) rows"
    )


# Servers before 14 calculate in double precision, which is exact to the microsecond until the year 2255.
_CREATED_US = "CASE WHEN isfinite(o.create_time) THEN (extract(epoch FROM o.create_time) * 1000000)::bigint ELSE 0 END"
_ODD = (
    "CASE WHEN array_ndims(o.kafka_header_keys) > 1 OR array_ndims(o.kafka_header_values) > 1 THEN true"
    " ELSE coalesce(cardinality(o.kafka_header_keys), 0) <> coalesce(cardinality(o.kafka_header_values), 0)"
    " OR array_position(o.kafka_header_keys, NULL) IS NOT NULL"
    " OR array_position(o.kafka_header_values, NULL) IS NOT NULL END"
)
_SHIFTED = (
    "coalesce(array_lower(o.kafka_header_keys, 1), 1) <> 1 OR coalesce(array_lower(o.kafka_header_values, 1), 1) <> 1"
)


def _condition(shape: OutboxShape, share: Share, topic: TopicLimits | None, rules: PoisonRules) -> str:
    if share.topic is None:
        return "o.kafka_topic IS NULL"
    same = f"o.kafka_topic = {literal(share.topic)}"
    if topic is None or share.topic in rules.reserved:
        return same
    place, limit = _place(shape), limit_bytes(topic, rules)
    return f"({same} AND ({_bytes()} > {limit:d} OR {place} < 0 OR {place} >= {topic.partitions:d} OR {_ODD}))"


def _place(shape: OutboxShape) -> str:
    return "o.kafka_partition" if shape.has_partition else "NULL::int"


def _bytes() -> str:
    """An upper estimate of a record's size."""

    def array(column: str) -> str:
        # An array's exact length requires reading it; for small ones, the stored size is good enough.
        return (
            f"CASE WHEN pg_column_size({column}) <= {_SMALL_ARRAY_BYTES} THEN pg_column_size({column})"
            f" ELSE octet_length(array_to_string({column}, '', '')) END"
        )

    return (
        "(coalesce(octet_length(o.kafka_key), 0)::bigint + coalesce(octet_length(o.kafka_value), 0)"
        f" + coalesce({array('o.kafka_header_keys')}, 0) + coalesce({array('o.kafka_header_values')}, 0)"
        f" + {_MARGIN_BYTES} + {_HEADER_BYTES} * coalesce(cardinality(o.kafka_header_keys), 0))"
    )


def _bucket(shape: OutboxShape, tasks: int) -> str:
    """The same bucket for equal keys, across topics; rows without a key are distributed by id."""
    key = "o.kafka_key" if shape.key_type == "text" else "encode(o.kafka_key, 'hex')"
    hashed = f'hashtext({key}::text COLLATE "C")::bigint & 2147483647'
    return f"coalesce({hashed}, o.id & 2147483647) % {tasks:d}"

"""Finds hot keys, and computes the load of each number of shards, with the relay's own hash.

A key is never in two shards, so the hottest key limits what any number of shards can carry. Records are counted once,
by bucket of their key's hash; the load of every number of shards that divides the number of buckets follows from these
counts. The hash is Kafka's, `harvester.delivery.partitioner.murmur2` byte for byte, with which the relay chooses a
shard and producers choose a partition. Spark's own `hash` is a different one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.schemas import MARKED

_M = 0x5BD1E995
_SEED = 0x9747B28C
_WORD = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


def murmur2(key: Column) -> Column:
    """Binary → bigint, 0 to 2³¹ - 1; NULL for NULL. Products stay below 2⁶³: in ANSI mode an overflow is an error."""
    size = F.length(key)
    words = F.floor(size / F.lit(4)).cast("int")
    # sequence(0, -1) would count down.
    places = F.when(words > 0, F.sequence(F.lit(0), words - 1)).otherwise(F.array().cast("array<int>"))
    tail = _number(F.substring(key, words * 4 + 1, F.lit(3)), 3)

    def mixed(h: Column, place: Column) -> Column:
        k = _times(_number(F.substring(key, place * 4 + 1, F.lit(4)), 4))
        return _times(h).bitwiseXOR(_times(_shifted(k, 24)))

    def finished(h: Column) -> Column:
        whole = F.when(size % 4 == 0, h).otherwise(_times(h.bitwiseXOR(tail)))
        return _shifted(_times(_shifted(whole, 13)), 15).bitwiseAND(F.lit(_POSITIVE).cast("bigint"))

    start = F.lit(_SEED).cast("bigint").bitwiseXOR(size.cast("bigint"))
    return F.when(key.isNotNull(), F.aggregate(places, start, mixed, finished))


def _times(number: Column) -> Column:
    return (number * F.lit(_M).cast("bigint")).bitwiseAND(F.lit(_WORD).cast("bigint"))


def _shifted(number: Column, bits: int) -> Column:
    return number.bitwiseXOR(F.shiftright(number, bits))


def _number(raw: Column, most: int) -> Column:
    """Up to `most` bytes as a little-endian number; 0 if there are none."""
    digits = F.hex(raw)
    turned = F.concat(*(F.substring(digits, 2 * place + 1, 2) for place in reversed(range(most))))
    return F.coalesce(F.conv(F.concat(F.lit("0"), turned), 16, 10).cast("bigint"), F.lit(0))


BUCKETS = 480
HOT = 20
SHARDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_ENOUGH = 0.75  # of what the best number of shards would carry


def places(marked: DataFrame) -> DataFrame:
    """MARKED → (topic, key, partition, records, ids): what is in the range; `ids`: first deliveries."""
    assert {"key", "first"} <= set(MARKED.names)
    counts = F.count(F.lit(1)).alias("records"), F.count_if("first").alias("ids")
    return marked.where("inside").groupBy("topic", "key", "partition").agg(*counts)


def hot_keys(places: DataFrame) -> DataFrame:
    """`places` → (key, bucket, records, keys): a row for each of the hottest keys, and one for each bucket.

    `bucket` is NULL in the rows of keys, `key` in those of buckets; both are in the row of records without a key.
    """
    keyed = places.groupBy("key").agg(F.sum("records").alias("records"))
    named = keyed.where(F.col("key").isNotNull())
    top = named.orderBy(F.desc("records"), "key").limit(HOT)
    hottest = top.select("key", F.lit(None).cast("bigint").alias("bucket"), "records", F.lit(1).alias("keys"))
    buckets = (
        keyed.groupBy((murmur2(F.col("key")) % F.lit(BUCKETS)).alias("bucket"))
        .agg(F.sum("records").alias("records"), F.count("key").alias("keys"))
        .select(F.lit(None).cast("binary").alias("key"), "bucket", "records", "keys")
    )
    return hottest.unionByName(buckets)


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """With this many shards: the busiest one's share of all records, and their joint capacity in units of one shard."""

    shards: int
    busiest: float
    carried: float


@dataclass(frozen=True, slots=True)
class Skew:
    """`hottest`: the share of the hottest key. `most`: its bound for the capacity of any number of shards."""

    records: int
    keys: int
    keyless: int
    hottest: float
    most: float
    loads: tuple[ShardLoad, ...]
    advised: int


def skew(buckets: Mapping[int, int], keys: int, keyless: int, hottest: int) -> Skew:
    """The loads and the advised number of shards. `buckets`: records by bucket; `keyless`: records without a key.

    `hottest`: the records of the hottest key. Advises the smallest of SHARDS with three quarters of the best capacity.
    """
    total = sum(buckets.values()) + keyless
    share = hottest / total if total else 0.0
    loads = tuple(_load(buckets, keyless, total, shards) for shards in SHARDS)
    best = max(load.carried for load in loads)
    advised = next(load.shards for load in loads if load.carried >= _ENOUGH * best)
    return Skew(total, keys, keyless, share, 1 / share if share else float(SHARDS[-1]), loads, advised)


def _load(buckets: Mapping[int, int], keyless: int, total: int, shards: int) -> ShardLoad:
    held = [keyless / shards] * shards  # these are distributed by id
    for bucket, records in buckets.items():
        held[bucket % shards] += records
    busiest = max(held) / total if total else 1 / shards
    return ShardLoad(shards, busiest, 1 / busiest)

"""Kafka's hash of a key as an expression of Spark SQL: `harvester.delivery.partitioner.murmur2`, byte for byte.

By it the relay chooses a shard, and producers a partition. Spark's own `hash` is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

if TYPE_CHECKING:
    from pyspark.sql import Column

_M = 0x5BD1E995
_SEED = 0x9747B28C
_WORD = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


def murmur2(key: Column) -> Column:
    """Binary → bigint, 0 to 2³¹ - 1; NULL for NULL. Products stay below 2⁶³, which ANSI rules would refuse."""
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
    """Up to so many bytes as a number, the lowest first; 0 for none."""
    digits = F.hex(raw)
    turned = F.concat(*(F.substring(digits, 2 * place + 1, 2) for place in reversed(range(most))))
    return F.coalesce(F.conv(F.concat(F.lit("0"), turned), 16, 10).cast("bigint"), F.lit(0))

"""Records as Arrow record batches, for Polars, DuckDB and pandas: the extra `[arrow]`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from harvester.errors import ConfigurationError, Problem

try:
    import pyarrow as pa
except ImportError:
    problem = Problem("consume_arrow", "needs pyarrow, which is not installed")
    raise ConfigurationError([problem], hint="pip install 'outbox-harvester[arrow]'") from None

_HEADER = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
SCHEMA = pa.schema([
    pa.field("topic", pa.string(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("timestamp", pa.timestamp("ms", "UTC")),
    pa.field("key", pa.binary()),
    pa.field("value", pa.large_binary()),  # those of a batch may exceed 2 GB
    pa.field("headers", pa.list_(_HEADER), nullable=False),
])  # fmt: skip


def record_batch(records: Sequence[Any]) -> pa.RecordBatch:
    """One row per record, in order; headers as in Spark, a list of structs."""
    columns = (
        [record.topic() for record in records],
        [record.partition() for record in records],
        [record.offset() for record in records],
        [at_ms if kind else None for kind, at_ms in (record.timestamp() for record in records)],
        [record.key() for record in records],
        [record.value() for record in records],
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=False)]
    return pa.RecordBatch.from_arrays([*arrays, _headers(records)], schema=SCHEMA)


def _headers(records: Sequence[Any]) -> pa.Array:
    headers = [record.headers() or () for record in records]
    every = list(chain.from_iterable(headers))
    columns = [[name for name, _ in every], [value for _, value in every]]
    structs = pa.StructArray.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _HEADER, strict=True)], fields=list(_HEADER)
    )
    ends = pa.array(accumulate(map(len, headers), initial=0), pa.int32())
    return pa.ListArray.from_arrays(ends, structs, type=SCHEMA.field("headers").type)


def places(batch: pa.RecordBatch) -> dict[tuple[str, int], list[int]]:
    """The offsets of its records, by topic and partition, in order."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for topic, partition, offset in zip(*(batch.column(name).to_pylist() for name in SCHEMA.names[:3]), strict=True):
        found[topic, partition].append(offset)
    return found

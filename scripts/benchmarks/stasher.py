"""`stasher`: the cost of numbering records under a lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from harvester import LeasedStasher, OutboxRecord, Stasher
from scripts.benchmarks._backlog import settle
from scripts.benchmarks._place import fresh
from scripts.benchmarks._scenario import Bench, Samples, Scenario

BLOCK = 100  # records of one kind before it is the other one's turn
_SHARE = 0.05
_RECORD = OutboxRecord("orders", "customer-42", "x" * 200, (("source", "bench"),))
Writer = Stasher | LeasedStasher


def stasher(bench: Bench, samples: Samples) -> None:
    """Plain and leased records in turn, each with its own commit; below, those of a block in one transaction.

    There is no commit to hide behind then; and in the batch a block shares one step of the lease.
    """
    blocks = max(2, bench.share(_SHARE) // BLOCK)
    for number in bench.each_round():
        for write, under in ((_each, ""), (_together, "together"), (_batch, "batch")):
            with fresh(bench) as place, place.connect() as connection:
                samples.add_all(_measure(connection, write, blocks, partial(settle, place)), under)
        bench.say(f"round {number}: leased ÷ plain {samples.median('leased_over_plain'):.3f}")


def _measure(
    connection: psycopg.Connection[Any],
    write: Callable[[psycopg.Connection[Any], Writer], None],
    blocks: int,
    settled: Callable[[], None],
) -> dict[str, float]:
    """Microseconds a record, and the ratio of the two sums of time."""
    plain = Stasher()
    writers: dict[str, Writer] = {"plain": plain, "leased": plain.leased(plain.lease(connection, "bench"))}
    for writer in writers.values():
        write(connection, writer)  # statements are prepared, columns are known
    settled()
    took_s = dict.fromkeys(writers, 0.0)
    for block in range(blocks):
        for kind in sorted(writers, reverse=bool(block % 2)):
            began = time.perf_counter()
            write(connection, writers[kind])
            took_s[kind] += time.perf_counter() - began
    figures = {f"{kind}_us": spent_s * 1e6 / (blocks * BLOCK) for kind, spent_s in took_s.items()}
    return {"leased_over_plain": took_s["leased"] / took_s["plain"], **figures}


def _each(connection: psycopg.Connection[Any], writer: Writer) -> None:
    for _ in range(BLOCK):
        writer.stash(connection, _RECORD)


def _together(connection: psycopg.Connection[Any], writer: Writer) -> None:
    with connection.transaction():
        _each(connection, writer)


def _batch(connection: psycopg.Connection[Any], writer: Writer) -> None:
    writer.stash_many(connection, [_RECORD] * BLOCK)


SCENARIOS = {
    "stasher": Scenario(
        stasher, "a record under a lease ÷ one without: committed each, in one transaction, in a batch"
    ),
}

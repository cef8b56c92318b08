"""Plans a load from a seed, and defines the form of its records.

The plan determines how many records each key gets in total; which writer performs which transaction, and so which of
two concurrent ones commits first, is left to chance.

The form of a pumped record: key `k-000123`, value `<number>:<microseconds>:<kind>:` padded with `.`. The number counts
the key's records from 1. The microseconds are the server's clock since the UNIX epoch, read when the row was inserted,
while holding the key's lock. The kind states how the transaction was going to end, so that a published row of a
rolled-back transaction is recognised although its number is used again later.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from harvester.config.fields import is_topic
from harvester.errors import ConfigurationError, Problem

MIN_VALUE_BYTES = 40  # 18 digits of number, 16 of time, one of kind, three colons
PREFIX_BYTES = 48  # enough of a value to parse it

COMMITTED = "c"
LATE = "l"  # its transaction stayed open after the insert: unsuitable for latencies
ROLLED_BACK = "r"
_KINDS = {b"c": COMMITTED, b"l": LATE, b"r": ROLLED_BACK}


class Pumped(NamedTuple):
    """The parsed beginning of a value."""

    seq: int
    created_us: int
    kind: str


def key_name(index: int) -> str:
    """The key with this index, from 0."""
    return f"k-{index:06d}"


def parse(value: bytes | None) -> Pumped | None:
    """Parse a value, or any prefix of it of PREFIX_BYTES; None if it is not one of ours."""
    if value is None:
        return None
    parts = value[:PREFIX_BYTES].split(b":", 3)
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    kind = _KINDS.get(parts[2])
    return Pumped(int(parts[0]), int(parts[1]), kind) if kind else None


class Ending(StrEnum):
    """How a transaction ends."""

    COMMIT = "commit"
    LATE = "late"  # stays open until a larger id has been committed by another transaction
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Load:
    """What to write. `records` counts committed ones; rolled-back ones are additional.

    `rate_per_s` (of committed records) None means as fast as possible. `skew` is the exponent of a Zipf distribution
    over the keys, 0 is uniform. `late` and `rollbacks` are fractions of the transactions. Key i goes to topic i mod
    len(topics). `value_bytes` is the size of every value.
    """

    records: int
    topics: tuple[str, ...]
    keys: int = 1000
    rate_per_s: float | None = None
    value_bytes: int = 200
    rows_per_transaction: int = 1
    writers: int = 4
    skew: float = 0.0
    late: float = 0.0
    rollbacks: float = 0.0
    headers: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigurationError with all problems."""
        rules = (
            (self.records >= 0, "records", "0 or more"),
            (bool(self.topics) and all(map(is_topic, self.topics)), "topic", "names of 1 to 249 of A-Z a-z 0-9 . _ -"),
            (1 <= self.keys <= 10_000_000, "keys", "1 to 10,000,000"),
            (self.rate_per_s is None or self.rate_per_s > 0, "rate", "above 0 (omit it for no limit)"),
            (self.value_bytes >= MIN_VALUE_BYTES, "size", f"{MIN_VALUE_BYTES} bytes or more"),
            (1 <= self.rows_per_transaction <= 100_000, "rows-per-transaction", "1 to 100,000"),
            (1 <= self.writers <= 100, "writers", "1 to 100"),
            (0 <= self.skew <= 10, "skew", "0 to 10"),
            (0 <= self.late <= 1, "late", "a fraction from 0 to 1"),
            (0 <= self.rollbacks < 1, "rollbacks", "a fraction from 0 up to, but not including, 1"),
            (self.late + self.rollbacks <= 1, "late", "not more than 1 together with rollbacks"),
            (self.late == 0 or self.writers > 1, "writers", "2 or more with late commits: one must overtake"),
            (0 <= self.headers <= 100, "headers", "0 to 100"),
        )
        problems = [
            Problem(f"--{name}", f"{getattr(self, _FIELDS.get(name, name))!r} cannot be used", allowed)
            for good, name, allowed in rules
            if not good
        ]
        if problems:
            raise ConfigurationError(problems, hint="see --help for the options")


_FIELDS = {
    "topic": "topics",
    "rate": "rate_per_s",
    "size": "value_bytes",
    "rows-per-transaction": "rows_per_transaction",
}


@dataclass(frozen=True, slots=True)
class PlannedTransaction:
    """One transaction: the keys of its rows in order (a key may be repeated), and `first`, the number of committed
    records planned before it, which determines its time at a given rate.
    """

    keys: tuple[int, ...]
    ending: Ending
    first: int


def plan(load: Load) -> Iterator[PlannedTransaction]:
    """The transactions of a load in order; those that commit have `load.records` rows in total."""
    rng = random.Random(load.seed)
    weights = list(itertools.accumulate((rank + 1) ** -load.skew for rank in range(load.keys))) if load.skew else None
    population = range(load.keys)
    planned = 0
    while planned < load.records:
        ending = _ending(load, rng.random())
        size = min(load.rows_per_transaction, load.records - planned)
        keys = tuple(rng.choices(population, cum_weights=weights, k=size))
        yield PlannedTransaction(keys=keys, ending=ending, first=planned)
        if ending is not Ending.ROLLBACK:
            planned += size


def due_s(load: Load, transaction: PlannedTransaction) -> float:
    """When a transaction should begin, in seconds after the start of the load."""
    return transaction.first / load.rate_per_s if load.rate_per_s else 0.0


def _ending(load: Load, draw: float) -> Ending:
    if draw < load.rollbacks:
        return Ending.ROLLBACK
    return Ending.LATE if draw < load.rollbacks + load.late else Ending.COMMIT

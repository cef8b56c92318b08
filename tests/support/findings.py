"""What a log says about a fault beyond lost and order: who is repeated, how often, and when it flowed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .consuming import Published
from .hooks import sender


def repeats_by_key(log: Iterable[Published]) -> Counter[str]:
    """How many records of each key are repeats of one that stands before them."""
    seen: set[tuple[bytes | None, bytes | None]] = set()
    found: Counter[str] = Counter()
    for record in log:
        if (record.key, record.value) in seen:
            found[(record.key or b"").decode()] += 1
        seen.add((record.key, record.value))
    return found


def repeats_by_record(log: Iterable[Published]) -> Counter[tuple[str, str]]:
    """The same for each (key, value)."""
    found = Counter(((record.key or b"").decode(), (record.value or b"").decode()) for record in log)
    return Counter({record: count - 1 for record, count in found.items() if count > 1})


def first_after(log: Iterable[Published], at_s: float) -> float:
    """Seconds from this moment of the wall clock to the next record handed to a producer."""
    return min(record.created_ms for record in log if record.created_ms >= at_s * 1000) / 1000 - at_s


def ends(log: Sequence[Published]) -> dict[int, int]:
    """For each partition the offset at which what comes later begins."""
    found: dict[int, int] = {}
    for record in log:
        found[record.partition] = max(found.get(record.partition, 0), record.offset + 1)
    return found


def sent_by(log: Iterable[Published], pids: Iterable[int], since: dict[int, int]) -> list[Published]:
    """Records that these processes signed, at or behind these offsets."""
    family = set(pids)
    return [
        record for record in log if sender(record.headers) in family and record.offset >= since.get(record.partition, 0)
    ]
